"""How many processor cores this process has. Imported by processes that must stay light."""

import os


def available_cores() -> int:
    """Cores that this process may use: the affinity mask, cut by the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no control group of version 2: the mask stands alone
    return max(1, cores)
