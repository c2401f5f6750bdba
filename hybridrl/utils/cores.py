"""The number of processor cores available to this process. Processes that must stay light import this module."""

import os


def available_cores() -> int:
    """Return the number of cores that this process may use: the affinity mask, limited by its cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no cgroup v2, so only the mask counts
    return max(1, cores)
