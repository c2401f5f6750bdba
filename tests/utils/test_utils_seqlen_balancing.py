"""Partitions are complete, even and nearly as good as the best; micro-batches come back in order."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.protocol import DataProto
from hybridrl.utils.seqlen_balancing import (
    calculate_workload,
    ceildiv,
    get_group_balanced_partitions,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
    log_seqlen_unbalance,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
    roundup_divisible,
)

LENGTHS = st.lists(st.integers(0, 500), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 6))
def test_partitions_hold_every_index_once(lengths: list[int], parts: int) -> None:
    for split in (karmarkar_karp, greedy_partition):
        assert sorted(i for part in split(lengths, parts, False) for i in part) == list(range(len(lengths)))
    if len(lengths) >= parts:
        balanced = get_seqlen_balanced_partitions(lengths, parts, equal_size=False)
        assert all(balanced) and all(part == sorted(part) for part in balanced)
        # No worse than handing out the longest first and within a sequence of the mean.
        loads = [sum(lengths[i] for i in part) for part in balanced]
        assert max(loads) - min(loads) <= max(lengths)


@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_equal_sizes(parts: int, each: int, random) -> None:  # type: ignore[no-untyped-def]
    lengths = [random.randint(1, 300) for _ in range(parts * each)]
    for split in (karmarkar_karp, greedy_partition, get_seqlen_balanced_partitions):
        result = split(lengths, parts, equal_size=True)
        assert [len(part) for part in result] == [each] * parts
        assert sorted(i for part in result for i in part) == list(range(len(lengths)))


def test_close_to_the_best_of_all_partitions() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        lengths = generator.integers(1, 100, 9).tolist()
        best = min(
            max(sum(length for length, place in zip(lengths, places, strict=True) if place == p) for p in range(3))
            for places in itertools.product(range(3), repeat=9)
        )
        got = max(sum(lengths[i] for i in part) for part in get_seqlen_balanced_partitions(lengths, 3, False))
        assert got <= best * 1.12


def test_impossible_splits_are_refused() -> None:
    with raises_with(ValueError, "2 sequences", "3 parts"):
        get_seqlen_balanced_partitions([1, 2], 3, False)
    for split in (karmarkar_karp, greedy_partition):
        with raises_with(ValueError, "5 sequences", "2 parts"):
            split([1] * 5, 2, True)


def test_groups_stay_together() -> None:
    uids = ["a", "b", "a", "c", "d", "b"]
    parts = get_group_balanced_partitions([5, 1, 5, 9, 3, 1], uids, 2)
    assert sorted(i for part in parts for i in part) == list(range(6))
    for uid in "abcd":
        assert sum(any(uids[i] == uid for i in part) for part in parts) == 1
    assert sorted(sum([5, 1, 5, 9, 3, 1][i] for i in part) for part in parts) == [12, 12]


def test_unbalance_report() -> None:
    report = log_seqlen_unbalance([8, 6, 1, 1], [[0], [1, 2, 3]], "global_seqlen")
    assert report == {
        "global_seqlen/min": 2,
        "global_seqlen/max": 14,
        "global_seqlen/minmax_diff": 12,
        "global_seqlen/balanced_min": 8,
        "global_seqlen/balanced_max": 8,
        "global_seqlen/mean": 8,
    }


def test_arithmetic() -> None:
    assert (ceildiv(7, 3), ceildiv(6, 3), roundup_divisible(7, 3), roundup_divisible(6, 3)) == (3, 2, 9, 6)
    assert calculate_workload(torch.tensor([0, 10])).tolist() == [0, 245860]
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=24), st.integers(20, 60), st.booleans())
def test_micro_batches_come_back_in_order(lengths: list[int], budget: int, balance: bool) -> None:
    mask = (torch.arange(20) < torch.tensor(lengths)[:, None]).long()
    names = np.array([f"row {i}" for i in range(len(lengths))], dtype=object)
    data = DataProto.from_dict({"attention_mask": mask, "rows": torch.arange(len(lengths))}, {"name": names})
    parts, rows = prepare_dynamic_batch(data, budget, use_dynamic_bsz_balance=balance, num_batches_divided_by=2)
    assert len(parts) == min(len(lengths), roundup_divisible(ceildiv(sum(lengths), budget), 2))
    together = torch.cat([part.batch["rows"] for part in parts])
    assert torch.equal(restore_dynamic_batch(together, rows), torch.arange(len(lengths)))
    for part in parts:
        assert [f"row {i}" for i in part.batch["rows"].tolist()] == part.non_tensor_batch["name"].tolist()


def test_pairs_stay_together_and_long_rows_are_refused() -> None:
    mask = (torch.arange(10) < torch.tensor([[3], [4], [9], [9], [1], [2]])).long()
    batch = DataProto.from_dict({"attention_mask": mask}).batch
    _, rows = rearrange_micro_batches(batch, 14, force_group_size=2, min_num_micro_batch=2)
    assert all(set(part) in ({0, 1, 4, 5}, {2, 3}) for part in rows)
    with raises_with(ValueError, "9 tokens", "max_token_len=8"):
        rearrange_micro_batches(batch, 8)
    with raises_with(ValueError, "5 results", "6 rows"):
        restore_dynamic_batch(torch.zeros(5), rows)
