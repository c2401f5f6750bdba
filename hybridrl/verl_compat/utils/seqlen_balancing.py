"""`verl.utils.seqlen_balancing`."""

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

__all__ = [
    "calculate_workload",
    "ceildiv",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "rearrange_micro_batches",
    "roundup_divisible",
    "get_group_balanced_partitions",
    "greedy_partition",
    "prepare_dynamic_batch",
    "restore_dynamic_batch",
]
