"""Cutting into micro-batches: complete, within the limits, little padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import PROMPT, RESPONSE, make_batch, make_engine, make_fields
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with
from transformers import AutoModelForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from hybridrl.engine.fsdp.forward import SelectingHead, response_logits
from hybridrl.engine.microbatch import PREFERRED_CELLS, WORTHWHILE_PADDING, BatchPlan
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.models.work import Work
from hybridrl.protocol import DataProto


def fields_of(prompts: list[int], responses: list[int]) -> dict[str, torch.Tensor]:
    rows, start, width = len(prompts), max(prompts), max([1, *responses])
    attention = torch.zeros(rows, start + width, dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        attention[row, start - prompt : start + response] = 1
    ids = torch.arange(attention.numel()).view_as(attention)
    return {"input_ids": ids, "attention_mask": attention, "response_mask": attention[:, start:]}


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=30),
    st.none() | st.integers(1, 8),
    st.none() | st.integers(20, 200),
    st.booleans(),
)
def test_groups_are_complete_and_within_limits(
    rows: list[tuple[int, int]], size: int | None, budget: int | None, packed: bool
) -> None:
    fields = fields_of([p for p, _ in rows], [r for _, r in rows])
    plan = BatchPlan(fields, MicroBatching(size=size, max_tokens=budget), packed)
    used = sorted(row for group in plan.groups for row in group)
    assert used == [row for row, (_, response) in enumerate(rows) if response]
    ids, attention = fields["input_ids"], fields["attention_mask"]
    start = ids.shape[1] - fields["response_mask"].shape[1]
    for group in plan.groups:
        layout = plan.layout(group)
        tokens = layout.input_ids.numel()
        assert len(group) <= (size or len(group))
        assert budget is None or tokens <= budget or len(group) == 1
        real = sum(sum(rows[row]) for row in group)
        if packed:
            assert tokens == real and layout.lengths == [sum(rows[row]) for row in group]
        else:
            limit = max(PREFERRED_CELLS["cpu"], layout.input_ids.shape[1])
            assert tokens - real <= WORTHWHILE_PADDING["cpu"] and tokens <= limit
        # The token after a selected position, in the row it belongs to, is the label.
        flat_ids, flat_positions = layout.input_ids.flatten(), layout.position_ids.flatten()
        assert torch.equal(flat_ids[layout.selected + 1], layout.labels)
        assert (flat_positions[layout.selected + 1] == flat_positions[layout.selected] + 1).all()
        expected = torch.cat([ids[row, start:][fields["response_mask"][row].bool()] for row in group])
        assert torch.equal(layout.labels, expected)
        assert torch.equal(plan.token_positions(group) % plan.response_width, (expected % ids.shape[1]) - start)
        kept = torch.cat([ids[row][attention[row].bool()] for row in group])
        assert set(kept.tolist()) <= set(flat_ids.tolist())


ROWS_OF_LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 200)), min_size=1, max_size=40)


@given(ROWS_OF_LENGTHS, st.none() | st.integers(1, 8), st.none() | st.integers(20, 500), st.integers(0, 12))
def test_packed_rows_are_cut_into_as_many_micro_batches_as_the_ranks_agree_on(
    rows: list[tuple[int, int]], size: int | None, budget: int | None, further: int
) -> None:
    fields = fields_of([p for p, _ in rows], [r for _, r in rows])
    work = Work(per_token=50, per_pair={0: 1, 16: 2})
    plan = BatchPlan(fields, MicroBatching(size=size, max_tokens=budget), packed=True, work=work)
    at_least = len(plan.groups)
    plan.balance(at_least + further)  # what another rank needs
    assert at_least <= len(plan.groups) <= min(at_least + further, len(rows))
    assert sorted(row for group in plan.groups for row in group) == list(range(len(rows)))
    for group in plan.groups:
        assert group and len(group) <= (size or len(group))
        assert budget is None or len(group) == 1 or sum(sum(rows[row]) for row in group) <= budget
    works = [sum(work.of(sum(rows[row])) for row in group) for group in plan.groups]
    assert works == sorted(works, reverse=True)  # in step with other ranks, the longest first
    if size is None and budget is None:
        assert len(plan.groups) == min(1 + further, len(rows))
        # Karmarkar and Karp differ by less than the largest sequence.
        assert max(works) - min(works) <= max(work.of(sum(row)) for row in rows)
    outputs = [torch.arange(1.0, 1 + len(plan.token_positions(group))) for group in plan.groups]
    placed = plan.scatter(outputs)
    for group, values in zip(plan.groups, outputs, strict=True):
        got = torch.cat([placed[row][fields["response_mask"][row].bool()] for row in group])
        assert torch.equal(got, values)


def test_attention_counts_in_the_balance() -> None:
    """One long sequence is as much work as many short ones, though they have twice its tokens."""
    fields = fields_of([1] * 9, [999, *[249] * 8])
    quadratic = BatchPlan(fields, MicroBatching(), packed=True, work=Work(per_token=1, per_pair={0: 1}))
    linear = BatchPlan(fields, MicroBatching(), packed=True, work=Work(per_token=1))
    quadratic.balance(2)
    linear.balance(2)
    assert sorted(map(len, quadratic.groups)) == [1, 8]
    assert sorted(map(len, linear.groups)) == [3, 6]


def test_limits_are_positive() -> None:
    with raises_with(ValueError, "MicroBatching(max_tokens=0)"):
        MicroBatching(max_tokens=0)


def irregular_positions(fields: dict[str, torch.Tensor]) -> torch.Tensor:
    """Positions that begin at 3, skip two and restart in every row."""
    ranks = (fields["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return torch.where(ranks > 6, ranks - 7, torch.where(ranks > 2, ranks + 5, ranks + 3))


def test_positions_of_the_batch_reach_the_model(micro_model: Path) -> None:
    """Positions that skip and restart, against a plain forward pass of each row with them."""
    fields = make_fields()
    fields["position_ids"] = irregular_positions(fields)
    plain = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32)
    engine = make_engine(micro_model)
    got = engine.infer(make_batch(fields), MicroBatching(size=5))["log_probs"]
    counted = engine.infer(make_batch({k: v for k, v in fields.items() if k != "position_ids"}), MicroBatching(size=5))
    assert (got - counted["log_probs"]).abs().max() > 3e-4  # the model does look at positions
    for row in range(len(got)):
        real = fields["attention_mask"][row].bool()
        ids, positions = fields["input_ids"][row][real][None], fields["position_ids"][row][real][None]
        with torch.no_grad():
            logits = plain(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits[0]
        of_tokens = torch.zeros(fields["input_ids"].shape[1])
        of_tokens[real.nonzero()[1:, 0]] = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        expected = of_tokens[PROMPT:] * fields["response_mask"][row]
        torch.testing.assert_close(got[row], expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_several_positions_per_token_stay_with_their_token(packed: bool) -> None:
    """[B, k, S] as vision models take them: [k, b, W] or [k, 1, L] in a layout, at the same tokens."""
    fields = make_fields()
    ids = fields["input_ids"]
    fields["position_ids"] = torch.stack([ids * 10, ids * 10 + 1, ids * 10 + 2], dim=1)
    plan = BatchPlan(fields, MicroBatching(size=4), packed)
    for rows in plan.groups:
        layout = plan.layout(rows)
        assert layout.position_ids.shape == (3, *layout.input_ids.shape)
        real = torch.ones_like(layout.input_ids) if layout.attention_mask is None else layout.attention_mask
        assert int(real.sum()) == sum(plan.lengths[row] for row in rows)
        for kind in range(3):
            assert torch.equal(layout.position_ids[kind][real.bool()], layout.input_ids[real.bool()] * 10 + kind)
        assert plan.slice_tensors(rows, plan.response_columns(rows), torch.device("cpu"))["position_ids"].ndim == 3


def test_a_vision_language_model_reads_its_positions() -> None:
    """A tiny Qwen2-VL: its layout against each row by itself, with three positions per token."""
    fields = make_fields()
    generator = torch.Generator().manual_seed(1)
    fields["position_ids"] = torch.randint(0, 30, (len(fields["input_ids"]), 3, PROMPT + RESPONSE), generator=generator)
    torch.manual_seed(0)
    text = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision)).eval()
    plan = BatchPlan(fields, MicroBatching(size=5), packed=False)
    head = SelectingHead(model)
    for rows in plan.groups:
        layout = plan.layout(rows)
        with torch.no_grad():
            logits = iter(response_logits(model, head, layout, takes_boundaries=False))
            for row in rows:
                real = fields["attention_mask"][row].bool()
                ids, positions = fields["input_ids"][row][real][None], fields["position_ids"][row][:, real][:, None]
                whole = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits[0]
                for column in fields["response_mask"][row].nonzero()[:, 0]:
                    expected = whole[int(real[: PROMPT + column].sum()) - 1]
                    torch.testing.assert_close(next(logits), expected, atol=2e-5, rtol=1e-4)


def test_a_jagged_batch_computes_like_a_padded_one(micro_model: Path) -> None:
    fields, jagged = make_fields(), {}
    for name, tensor in fields.items():
        rows = []
        for row, attention in zip(tensor, fields["attention_mask"].bool(), strict=True):
            ends = {PROMPT: attention[:PROMPT], RESPONSE: attention[PROMPT:], PROMPT + RESPONSE: attention}
            rows.append(row[ends[len(row)]])
        jagged[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    engine, wanted = make_engine(micro_model), ("log_probs", "entropy")
    expected = engine.infer(make_batch(fields), MicroBatching(size=5), outputs=wanted)
    got = engine.infer(DataProto.from_dict(jagged), MicroBatching(size=5), outputs=wanted)
    for name, tensor in expected.items():
        width = got[name].shape[1]  # of the longest response; make_fields has further columns of padding
        assert torch.equal(got[name], tensor[:, :width]) and not tensor[:, width:].any()


@pytest.mark.parametrize("shape", [(12, 5), (12, 24, 3), (24,)])
def test_positions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with raises_with(ValueError, "position_ids"):
        BatchPlan({**make_fields(), "position_ids": torch.zeros(shape)}, MicroBatching(), packed=False)
