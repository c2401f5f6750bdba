"""Cutting batches: mini-batches depend on the batch alone, and spreading over ranks loses and doubles nothing."""

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with
from transformers import Qwen2Config

from hybridrl.config import ModelConfig
from hybridrl.models.work import Work, work_of
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.batching import (
    balanced_order,
    epochs_of_mini_batches,
    join_generated,
    repeat_for_sampling,
    sequence_work,
    split_rows,
    spread_over_ranks,
    trim,
)
from hybridrl.trainer.ppo.correction import probe_prompts


def batch_of(prompts: int, n: int, seed: int, prompt_width: int = 5, width: int = 9) -> DataProto:
    rng = np.random.default_rng(seed)
    rows = prompts * n
    lengths = rng.integers(1, width + 1, rows)
    prompt_lengths = np.repeat(rng.integers(1, prompt_width + 1, prompts), n)
    response_mask = torch.from_numpy((np.arange(width)[None] < lengths[:, None]).astype(np.int64))
    prompt_mask = torch.from_numpy(
        (np.arange(prompt_width)[None] >= prompt_width - prompt_lengths[:, None]).astype(np.int64)
    )
    ids = torch.from_numpy(rng.integers(0, 50, (rows, prompt_width + width)))
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :prompt_width],
            "responses": ids[:, prompt_width:],
            "input_ids": ids,
            "attention_mask": torch.cat([prompt_mask, response_mask], 1),
            "response_mask": response_mask,
            "key": torch.arange(rows),
        },
        non_tensors={
            "uid": np.repeat([f"u{i}" for i in rng.permutation(prompts)], n).astype(object),
        },
    )


@settings(max_examples=40)
@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_update_batches_hold_every_row_once_whatever_the_ranks(prompts, n, per_mini, ranks, seed, shuffle) -> None:
    batch = batch_of(prompts, n, seed)
    uids = batch.non_tensor_batch["uid"]
    epochs = list(epochs_of_mini_batches(uids, per_mini, epochs=2, shuffle=shuffle, seed=seed))
    for mini_batches in epochs:
        assert sorted(np.concatenate(mini_batches).tolist()) == list(range(prompts * n))
        for rows in mini_batches[:-1]:
            assert len(set(uids[rows])) == per_mini and len(rows) == per_mini * n
        spread, planned = spread_over_ranks(batch, mini_batches, ranks)
        per_rank = sum(mini.rows for mini in planned)
        assert len(spread) == per_rank * ranks and len(planned) == len(mini_batches)
        start = 0
        for rows, mini in zip(mini_batches, planned, strict=True):
            keys, tokens = [], 0
            for rank in range(ranks):
                part = spread[rank * per_rank + start : rank * per_rank + start + mini.rows]
                real = part.batch["response_mask"].sum(1) > 0
                keys += part.batch["key"][real].tolist()
                tokens += int(part.batch["response_mask"].sum())
            assert sorted(keys) == sorted(rows.tolist())
            assert (mini.tokens, mini.sequences) == (tokens, len(rows))
            start += mini.rows


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
def test_pairs_stay_side_by_side_on_every_rank(pairs, ranks, seed) -> None:
    """Also those that fill up a rank: copies of a whole pair, without response tokens."""
    batch = batch_of(pairs, 2, seed)
    spread, (planned,) = spread_over_ranks(batch, [np.arange(2 * pairs)], ranks, rows_together=2)
    first, second = (spread.batch["key"].view(-1, 2)[:, side] for side in range(2))
    assert torch.all(first % 2 == 0) and torch.all(second == first + 1)
    trained = (spread.batch["response_mask"].sum(1) > 0).view(-1, 2)
    assert torch.equal(trained[:, 0], trained[:, 1])
    assert sorted(first[trained[:, 0]].tolist()) == list(range(0, 2 * pairs, 2))
    assert len(spread) == planned.rows * ranks and planned.rows % 2 == 0 and planned.sequences == 2 * pairs


def test_shuffled_epochs_differ_and_repeat_by_seed() -> None:
    uids = batch_of(16, 2, 0).non_tensor_batch["uid"]
    first, second = (list(epochs_of_mini_batches(uids, 4, 2, True, 5)) for _ in range(2))
    as_lists = [[rows.tolist() for rows in epoch] for epoch in first]
    assert as_lists == [[rows.tolist() for rows in epoch] for epoch in second]
    assert as_lists[0] != as_lists[1]


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
def test_balancing_permutes_and_can_be_undone(pairs, ranks, seed) -> None:
    batch = batch_of(pairs * ranks, 1, seed)
    order = balanced_order(batch, ranks)
    assert sorted(order.tolist()) == list(range(len(batch)))
    back = batch.select_idxs(order).select_idxs(torch.argsort(order))
    assert back.batch["key"].tolist() == batch.batch["key"].tolist()


@settings(max_examples=40)
@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_families_stay_together_where_sizes_allow(prompts, n, ranks, seed) -> None:
    rng = np.random.default_rng(seed)
    families = rng.permutation(np.repeat(np.arange(prompts), n))
    families = np.append(families, np.full(-len(families) % ranks, families[0]))  # copies that fill up a shard
    parts = split_rows(rng.integers(1, 50, len(families)).tolist(), ranks, families)
    assert sorted(row for part in parts for row in part) == list(range(len(families)))
    assert {len(part) for part in parts} == {len(families) // ranks}
    apart = sum(len({families[row] for row in part}) for part in parts) - prompts  # how often a family is cut
    assert apart == 0 if prompts % ranks == 0 else apart < ranks


def test_families_are_balanced_as_wholes() -> None:
    families = np.repeat(np.arange(4), 2)
    work = [10, 10, 1, 1, 10, 10, 1, 1]
    parts = split_rows(work, 2, families)
    assert [sum(work[row] for row in part) for part in parts] == [22, 22]
    spread, _ = spread_over_ranks(batch_of(4, 2, 0), [np.arange(8)], 2, families=families)
    for shard in spread.batch["key"].chunk(2):
        assert len({int(key) // 2 for key in shard}) == 2


def test_balancing_evens_out_the_work() -> None:
    batch = batch_of(32, 1, 3, width=200)
    lengths = batch.batch["attention_mask"].sum(1)
    order = balanced_order(batch, 2)
    halves = [int(lengths[half].sum()) for half in order.chunk(2)]
    assert abs(halves[0] - halves[1]) <= 0.05 * sum(halves)


def lengths_of(*lengths: int) -> DataProto:
    """One row for each length, all of it a response after one token."""
    attention = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    rows = torch.arange(len(lengths))
    return DataProto.from_dict(tensors={"attention_mask": attention, "response_mask": attention[:, 1:], "key": rows})


def test_the_models_own_ratio_of_attention_decides(tmp_path: Path) -> None:
    """The longest row is beside rows with few tokens where attention is most of the work, as in a narrow model."""
    batch = lengths_of(100, 700, 1000, 1400, 1500, 2000)
    for size, expected in ((32, [0, 2, 5]), (4096, [0, 3, 5])):
        config = Qwen2Config(hidden_size=size, intermediate_size=3 * size, num_hidden_layers=2, num_attention_heads=8)
        config.save_pretrained(tmp_path / str(size))
        work = sequence_work(ModelConfig(path=str(tmp_path / str(size))))
        assert work == work_of(config)
        spread, _ = spread_over_ranks(batch, [np.arange(6)], 2, work=work)
        for order in (balanced_order(batch, 2, work=work).tolist(), spread.batch["key"].tolist()):
            assert expected in (sorted(order[:3]), sorted(order[3:]))
    big = Work(per_token=10**13, per_pair={0: 1})  # sums stay within 64 bits
    spread, _ = spread_over_ranks(batch, [np.arange(6)], 2, work=big)
    assert sorted(spread.batch["key"].tolist()) == [*range(6)]


def test_work_that_is_not_known() -> None:
    """Of a model whose configuration is not here, that of 7B parameters; of one without attention, its tokens."""
    assert sequence_work(ModelConfig(path="/nowhere/model")) is None
    batch = lengths_of(100, 700, 1000, 1400, 1500, 2000)
    same = Work(per_token=24576, per_pair={0: 2})
    assert torch.equal(balanced_order(batch, 2), balanced_order(batch, 2, work=same))


def test_trim_cuts_only_what_no_row_uses() -> None:
    batch = batch_of(4, 2, 1, width=12)
    batch.batch["response_mask"][:, 7:] = 0
    batch.batch["attention_mask"][:, 5 + 7 :] = 0
    longest = int(batch.batch["response_mask"].sum(1).max())
    trimmed = trim(batch)
    assert trimmed.batch["responses"].shape[1] == longest and trimmed.batch["input_ids"].shape[1] == 5 + longest
    assert trimmed.batch["prompts"].shape[1] == 5
    assert (trimmed.batch["responses"] == batch.batch["responses"][:, :longest]).all()
    assert int(trimmed.batch["attention_mask"].sum()) == int(batch.batch["attention_mask"].sum())


def test_trim_keeps_the_tail_of_a_trajectory_with_tool_tokens() -> None:
    """Tool tokens are attended to and not trained on: the mask's sum is less than the length."""
    batch = batch_of(2, 1, 1, width=12)
    masks, attention = batch.batch["response_mask"], batch.batch["attention_mask"]
    masks[:], attention[:, 5:] = 0, 0
    attention[0, 5 : 5 + 10] = 1  # 10 tokens: 2 of the policy, 6 of a tool, 2 of the policy
    masks[0, [0, 1, 8, 9]] = 1
    attention[1, 5 : 5 + 3] = masks[1, :3] = 1
    trimmed = trim(batch)
    assert trimmed.batch["responses"].shape[1] == 10 and trimmed.batch["attention_mask"].shape[1] == 15
    assert trimmed.batch["response_mask"].sum(1).tolist() == [4, 3]
    assert torch.equal(trimmed.batch["input_ids"], batch.batch["input_ids"][:, :15])


def test_joined_batches_of_other_widths_keep_every_token() -> None:
    first, second = batch_of(2, 1, 1, prompt_width=5, width=9), batch_of(3, 1, 2, prompt_width=3, width=12)
    joined = join_generated([first, second], pad_token_id=77)
    tokens = joined.batch["input_ids"][joined.batch["attention_mask"].bool()]
    assert torch.equal(
        tokens, torch.cat([p.batch["input_ids"][p.batch["attention_mask"].bool()] for p in (first, second)])
    )
    assert joined.batch["input_ids"].shape == (5, 5 + 12) and joined.batch["key"].tolist() == [0, 1, 0, 1, 2]
    assert (joined.batch["prompts"][2:, :2] == 77).all() and (joined.batch["responses"][:2, 9:] == 77).all()
    trained = [part.batch["responses"][part.batch["response_mask"].bool()] for part in (first, second)]
    assert torch.equal(joined.batch["responses"][joined.batch["response_mask"].bool()], torch.cat(trained))


def test_a_users_column_as_wide_as_a_response_is_never_cut() -> None:
    """A feature of 12 numbers per row is not a response, though responses have 12 columns."""
    batch = batch_of(3, 1, 1, width=12)
    batch.batch["attention_mask"][:, 5 + 7 :] = 0
    batch.batch["response_mask"][:, 7:] = 0
    batch.batch["feature_of_a_user"] = torch.ones(3, 12)
    with raises_with(ValueError, "'feature_of_a_user'", "register_field"):
        trim(batch)


def test_prompts_of_a_probe_keep_the_positions_of_vision_models() -> None:
    batch = batch_of(2, 2, 1, prompt_width=5, width=9)
    positions = torch.arange(4 * 3 * 14).view(4, 3, 14)  # [B, k, S]
    batch.batch["position_ids"] = positions
    batch.non_tensor_batch["sample"] = np.array([0, 1, 0, 1], dtype=object)
    prompts = probe_prompts(batch, {"uid", "sample"})
    assert torch.equal(prompts.batch["position_ids"], positions[:, :, :5])
    assert torch.equal(prompts.batch["input_ids"], batch.batch["prompts"])
    assert torch.equal(prompts.batch["attention_mask"], batch.batch["attention_mask"][:, :5])


def test_a_probe_asks_once_for_a_sample_in_several_rows_and_without_what_was_answered() -> None:
    batch = batch_of(2, 2, 1)
    batch.non_tensor_batch["sample"] = np.array([0, 0, 0, 1], dtype=object)
    batch.batch["position_ids"] = torch.arange(14).expand(4, 14)
    batch.non_tensor_batch |= {name: np.array([1, 2, 3, 4], dtype=object) for name in ("ground_truth", "session_log")}
    prompts = probe_prompts(batch, {"uid", "sample", "ground_truth"})
    assert prompts.non_tensor_batch.keys() == {"uid", "sample", "ground_truth"}
    assert prompts.non_tensor_batch["ground_truth"].tolist() == [1, 3, 4]
    assert torch.equal(prompts.batch["input_ids"], batch.batch["prompts"][[0, 2, 3]])


def test_repeated_prompts_number_their_samples() -> None:
    prompts = DataProto.from_dict(
        tensors={"key": torch.arange(3)}, non_tensors={"uid": np.array(["a", "b", "c"], dtype=object)}
    )
    batch = repeat_for_sampling(prompts, 2)
    assert batch.batch["key"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.non_tensor_batch["sample"].tolist() == [0, 1, 0, 1, 0, 1]
