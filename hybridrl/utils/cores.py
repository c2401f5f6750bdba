"""The number of processor cores available to this process. Processes that must stay light import this module."""

import os

from hybridrl.utils.control_groups import cpu_quota


def available_cores() -> int:
    """Return the number of cores that this process may use: the affinity mask, limited by its cgroups' CPU quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, round(quota)))
