"""Splits sequences of unequal length into parts of equal work.

The partitioner is the largest differencing method of Karmarkar and Karp (1982) for k parts, with or without the
constraint that all parts have the same number of sequences.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.utils.distributed import all_reduce_max

# A transformer layer's work on L tokens is about proportional to 24576 L + L^2: the linear maps (6 H = 24576 for a 7B
# model with hidden size 4096) and the attention.
LINEAR_WORK = 24576


def calculate_workload(seqlen_list: torch.Tensor) -> torch.Tensor:
    """Return the work of a forward and backward pass over sequences of these lengths, in arbitrary units:
    `24576 L + L^2`."""
    return LINEAR_WORK * seqlen_list + seqlen_list**2


def ceildiv(a: int, b: int) -> int:
    """Return `a / b` rounded up."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """Return the smallest multiple of `b` that is at least `a`."""
    return ceildiv(a, b) * b


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Split the indices into `k_partitions` parts with nearly equal sums.

    Args:
        equal_size: whether every part has the same number of indices.

    Raises:
        ValueError: `equal_size` is set and the number of sequences is not a multiple of `k_partitions`.
    """
    order = sorted(range(len(seqlen_list)), key=lambda index: (seqlen_list[index], index))
    if k_partitions == 1:
        return [order]
    if equal_size:
        if len(order) % k_partitions:
            raise ValueError(f"{len(order)} sequences cannot be split into {k_partitions} parts of equal size")
        # Tuples of k sequences of similar size: merging keeps the counts of a tuple's parts equal.
        starts = [order[i : i + k_partitions] for i in range(0, len(order), k_partitions)]
    else:
        starts = [[index] for index in order]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, start in enumerate(starts):
        places = [(int(seqlen_list[index]), [index]) for index in start]
        places += [(0, []) for _ in range(k_partitions - len(places))]
        places.sort(key=lambda place: -place[0])
        heapq.heappush(heap, (places[-1][0] - places[0][0], number, places))
    number = len(heap)
    while len(heap) > 1:
        # Merge the two with the largest spread, the fullest part of one with the emptiest part of the other.
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, fuller + emptier) for (a, fuller), (b, emptier) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda place: -place[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [indices for _, indices in heap[0][2]] if heap else [[] for _ in range(k_partitions)]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Run `karmarkar_karp`, with each part's indices in ascending order and no empty part.

    Raises:
        ValueError: there are fewer sequences than parts, or `equal_size` is set and their number is not a multiple of
            `k_partitions`.
    """
    if len(seqlen_list) < k_partitions:
        raise ValueError(f"{len(seqlen_list)} sequences cannot fill {k_partitions} parts")
    parts = [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
    # Sequences of length 0 can leave a part empty: move one from the largest part to it.
    for part in parts:
        if not part:
            largest = max(parts, key=len)
            part.append(largest.pop(largest.index(min(largest, key=lambda index: seqlen_list[index]))))
    return parts


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Measure how uneven the token counts of the parts are, in the given order and after partitioning.

    Returns:
        `<prefix>/min, max, minmax_diff` of consecutive equal chunks, `<prefix>/balanced_min, balanced_max` of the
        partitions, `<prefix>/mean`: tokens per part.
    """
    parts = len(partitions)
    chunk = ceildiv(len(seqlen_list), parts)
    before = [sum(seqlen_list[start : start + chunk]) for start in range(0, len(seqlen_list), chunk)]
    after = [sum(seqlen_list[index] for index in part) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(seqlen_list) / parts,
    }


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """Split a batch into micro-batches of about `max_token_len` real tokens and nearly equal work.

    Args:
        batch: a TensorDict with `attention_mask [B, S]`.
        dp_group: the ranks that take the same number of micro-batches, if `same_micro_num_in_dp`.
        num_batches_divided_by: the number of micro-batches is a multiple of this.
        min_num_micro_batch: the minimum number of micro-batches.
        use_dynamic_bsz_balance: whether to order the micro-batches by work, with the smallest at both ends.
        force_group_size: the number of consecutive rows that stay together.

    Returns:
        The micro-batches and, for each, its rows in the batch.

    Raises:
        ValueError: a sequence is longer than `max_token_len`, or the rows do not divide into groups.
    """
    lengths = batch["attention_mask"].sum(dim=1)
    longest = int(lengths.max())
    if longest > max_token_len:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit max_token_len={max_token_len}; raise it to at least {longest}"
        )
    if len(lengths) % force_group_size:
        raise ValueError(f"{len(lengths)} rows do not divide into groups of force_group_size={force_group_size}")
    work = calculate_workload(lengths.long()).view(-1, force_group_size).sum(1).tolist()
    count = max(ceildiv(int(lengths.sum()), max_token_len), min_num_micro_batch or 1)
    if same_micro_num_in_dp and dp_group is not None:
        count = all_reduce_max(count, dp_group)
    if num_batches_divided_by is not None:
        count = roundup_divisible(count, num_batches_divided_by)
    parts = get_seqlen_balanced_partitions(work, min(count, len(work)), equal_size=False)
    if use_dynamic_bsz_balance:
        parts.sort(key=lambda part: -sum(work[group] for group in part))
        parts = parts[::2][::-1] + parts[1::2]
    size = force_group_size
    rows = [[row for group in part for row in range(group * size, (group + 1) * size)] for part in parts]
    return [batch[torch.tensor(part)] for part in rows], rows


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation."""
    inverse = [0] * len(idx_map)
    for place, index in enumerate(idx_map):
        inverse[index] = place
    return inverse


def greedy_partition(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Indices in `k_partitions` parts: each sequence in turn goes to the part with the least sum so far.

    With `equal_size`, a part that is full takes no more.

    Raises:
        ValueError: `equal_size` and the number of sequences is no multiple of `k_partitions`.
    """
    if equal_size and len(seqlen_list) % k_partitions:
        raise ValueError(f"{len(seqlen_list)} sequences cannot be split into {k_partitions} parts of equal size")
    limit = len(seqlen_list) // k_partitions if equal_size else len(seqlen_list)
    parts: list[list[int]] = [[] for _ in range(k_partitions)]
    sums = [0] * k_partitions
    for index, length in enumerate(seqlen_list):
        place = min((p for p in range(k_partitions) if len(parts[p]) < limit), key=lambda p: sums[p])
        parts[place].append(index)
        sums[place] += int(length)
    return parts


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Any], k_partitions: int
) -> list[list[int]]:
    """Indices in `k_partitions` parts with nearly equal sums and equally many groups; those with one uid stay together.

    Raises:
        ValueError: the number of groups is no multiple of `k_partitions`.
    """
    groups: dict[Any, list[int]] = {}
    for index, uid in enumerate(uid_list):
        groups.setdefault(uid, []).append(index)
    members = list(groups.values())
    work = [sum(int(seqlen_list[index]) for index in group) for group in members]
    parts = get_seqlen_balanced_partitions(work, k_partitions, equal_size=True)
    return [[index for group in part for index in members[group]] for part in parts]


def prepare_dynamic_batch(
    data: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Any], list[list[int]]]:
    """`rearrange_micro_batches` for a `DataProto`, whose non-tensor fields follow their rows.

    Returns:
        One `DataProto` a micro-batch, and each one's rows.
    """
    _, rows = rearrange_micro_batches(
        data.batch.select("attention_mask"),
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
    )
    return [data.select_idxs(part) for part in rows], rows


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: Sequence[Sequence[int]]) -> torch.Tensor:
    """Put results that were concatenated in the order of the micro-batches back into the batch's order.

    Raises:
        ValueError: there is not one result per row.
    """
    indices = [index for part in batch_idx_list for index in part]
    if len(indices) != data.shape[0]:
        raise ValueError(f"{data.shape[0]} results for the {len(indices)} rows of the micro-batches")
    return data[torch.tensor(get_reverse_idx(indices), dtype=torch.int64)]
