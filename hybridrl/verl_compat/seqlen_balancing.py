"""The functions of verl's `utils.seqlen_balancing` that no program here calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.utils.seqlen_balancing import get_reverse_idx, get_seqlen_balanced_partitions, rearrange_micro_batches


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
