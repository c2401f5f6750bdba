"""Groups from generation batches to steps: which are dropped, which are taken, and which wait."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with
from scored_batches import generated, given_sampler

from hybridrl.errors import UserError
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.ready_rows import SURPLUS_FILE, ReadyRows

FILTER = "algorithm.filter_groups"


def uids_of(batch: DataProto) -> list[str]:
    return list(dict.fromkeys(batch.non_tensor_batch["uid"].tolist()))


def filtering(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("filter_groups/")}


def test_lots_fill_a_step_and_the_rest_waits_for_the_next() -> None:
    sampler = given_sampler(
        [
            generated(["a", "b", "c"], [[0, 0], [0, 1], [1, 1]]),
            generated(["d", "e", "f"], [[1, 0], [0, 2], [3, 0]], prompt_width=5, width=6),
            generated(["g", "h", "i"], [[0, 1], [1, 0], [5, 5]], prompt_width=2, width=3),
        ],
        prompts=3,
        lot=3,
    )
    first = sampler.next()
    assert uids_of(first.batch) == ["b", "d", "e"] and len(first.batch) == 6
    assert filtering(first.metrics) == {
        "filter_groups/generation_batches": 2.0,
        "filter_groups/generated": 6.0,
        "filter_groups/discarded": 2.0,
        "filter_groups/carried_over": 0.0,
        "filter_groups/surplus": 1.0,
        "filter_groups/generated_score/mean": pytest.approx(9 / 12),
        "filter_groups/discarded_score/mean": 0.5,
    }
    second = sampler.next()
    assert uids_of(second.batch) == ["f", "g", "h"]
    assert second.metrics["filter_groups/carried_over"] == 1.0 and second.metrics["filter_groups/surplus"] == 0.0
    # Rows of different widths lie as they were: same tokens, same scores.
    tensors = second.batch.batch
    ids, attention = tensors["input_ids"], tensors["attention_mask"].bool()
    assert ids[0][attention[0]].tolist() == [2, *[14] * int(tensors["response_mask"][0].sum())]
    assert tensors["token_level_scores"].sum(1).tolist() == [3, 0, 0, 1, 1, 0]


GROUPS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(GROUPS, min_size=1, max_size=5), st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_groups_of_any_size_in_any_order(batches, prompts, enable, random) -> None:
    """Against dicts of lists: every differing group is taken once, whole, in the order of the prompts."""
    expected: dict[str, list[tuple[int, float]]] = {}
    number, made = 0, []
    for index, groups in enumerate(batches):
        rows = [(f"{index}-{group}", score) for group, scores in enumerate(groups) for score in scores]
        random.shuffle(rows)
        uids, scores = zip(*rows, strict=True)
        batch = generated(list(uids), [[score] for score in scores])
        batch.non_tensor_batch["key"] = np.arange(number, number + len(rows)).astype(object)
        of_uid: dict[str, list[tuple[int, float]]] = {}
        for place, (uid, score) in enumerate(rows):
            of_uid.setdefault(uid, []).append((number + place, score))
        number += len(rows)
        made.append(batch)
        expected |= {
            uid: scored for uid, scored in of_uid.items() if not enable or len({score for _, score in scored}) > 1
        }
    sampler = given_sampler(made, prompts, enable=enable, in_data=10**6)
    taken = 0
    while taken + prompts <= len(expected):
        sampled = sampler.next()
        now = list(expected)[taken : taken + prompts]
        taken += prompts
        rows_of_step = sorted(row for uid in now for row, _ in expected[uid])
        assert sampled.batch.non_tensor_batch["key"].tolist() == rows_of_step  # rows stay in their order
        assert uids_of(sampled.batch) == now
        sampler.release()
        drawn = sum(len(uids_of(batch)) for batch in sampler.loader.drawn) if not enable else None
        if drawn is not None:
            assert sampled.metrics.get("filter_groups/surplus", 0.0) == drawn - taken
    sampler.close()


def test_rows_of_one_sample_count_by_their_sum() -> None:
    """Two samples of two rows each: a scores 1 and 1 in all, b scores 1 and 2."""
    batch = generated(["a", "b"], [[1, 0, 0, 1], [1, 0, 1, 1]])
    batch.non_tensor_batch["sample"] = np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=object)
    sampled = given_sampler([batch], prompts=1).next()
    assert uids_of(sampled.batch) == ["b"] and sampled.metrics["filter_groups/discarded"] == 1.0


def test_a_surplus_goes_through_the_checkpoint(tmp_path: Path) -> None:
    sampler = given_sampler([generated(["a", "b"], [[0, 1], [2, 0]])], prompts=1)
    sampler.next()
    sampler.release()
    state = sampler.save(tmp_path)
    for saved in (state, {name: value for name, value in state.items() if name != "ledger"}):  # of an earlier version
        other = given_sampler([], prompts=1)
        other.load(tmp_path, saved)
        sampled = other.next()
        assert uids_of(sampled.batch) == ["b"]
        assert sampled.batch.batch["token_level_scores"].sum(1).tolist() == [2, 0]
        assert sampled.metrics["filter_groups/carried_over"] == 1.0
        assert sampled.metrics["filter_groups/generated"] == 0.0


def test_saved_groups_may_have_lost_samples(tmp_path: Path) -> None:
    """Samples that `reward.on_error=drop` removes can leave every waiting group smaller than `rollout.n`."""
    ready = ReadyRows(2, 99)
    ready.add(0, generated(["a", "b"], [[1], [3]]))
    ready.save(tmp_path)
    other = ReadyRows(2, 99)
    other.load(tmp_path)
    other.add(2, generated(["c"], [[1, 0]]))
    assert other.uids == ["a", "b", "c"]
    of_three = ReadyRows(3, 99)
    with raises_with(UserError, "rollout.n=2"):
        of_three.load(tmp_path)
    # The file of an earlier version does not say how many samples there were.
    generated(["a", "b"], [[1], [3]]).save_to_disk(tmp_path / SURPLUS_FILE)
    of_three.load(tmp_path)
    assert of_three.uids == ["a", "b"]
    generated(["a"], [[1, 2, 3]]).save_to_disk(tmp_path / SURPLUS_FILE)
    with raises_with(UserError, "rollout.n=3"):
        ready.load(tmp_path)


def test_fields_that_a_step_adds_do_not_return_with_its_groups() -> None:
    """A step that is abandoned before its update gives its groups back."""
    batches = [generated(["a", "b"], [[0, 1], [1, 0]])]
    sampler = given_sampler(batches, prompts=2, enable=False)
    sampled = sampler.next()
    assert not filtering(sampled.metrics)
    sampled.batch.batch["advantages"] = sampled.batch.batch["token_level_scores"]
    sampler.give_back()
    again = sampler.next()
    assert uids_of(again.batch) == ["a", "b"] and "advantages" not in again.batch.batch.keys()
    assert sampler.step == 1


def test_another_metric_and_its_absence() -> None:
    batch = generated(["a", "b"], [[1, 2], [0, 2]])  # `acc` is true for both samples of a
    assert uids_of(given_sampler([batch], 1, f"{FILTER}.metric=acc").next().batch) == ["b"]
    with raises_with(UserError, "metric=accuracy", "acc"):
        given_sampler([batch], 1, f"{FILTER}.metric=accuracy").next()


def test_generation_does_not_go_on_for_ever() -> None:
    def batches() -> Iterator[DataProto]:
        for epoch in range(100):
            yield generated([f"{epoch}-a", f"{epoch}-b", f"{epoch}-c"], [[0, 0], [1, 1], [2, 2]])

    with raises_with(UserError, "max_num_gen_batches=2", 0, "data.train_batch_size=1"):
        given_sampler(batches(), 1, f"{FILTER}.max_num_gen_batches=2").next()
    with pytest.raises(UserError, match="last 9 prompts"):
        given_sampler(batches(), 1).next()
