"""`verl.utils.seqlen_balancing`."""

from hybridrl.utils.seqlen_balancing import (
    calculate_workload,
    ceildiv,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    log_seqlen_unbalance,
    rearrange_micro_batches,
    roundup_divisible,
)
from hybridrl.verl_compat.seqlen_balancing import (
    get_group_balanced_partitions,
    greedy_partition,
    prepare_dynamic_batch,
    restore_dynamic_batch,
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
