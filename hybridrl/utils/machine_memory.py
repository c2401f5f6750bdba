"""Main memory of this machine, or of the container that this process runs in."""

import psutil

from hybridrl.utils.control_groups import memory_limits


def machine_memory() -> tuple[int, int]:
    """Return (available, total) in bytes, both within the limits of this process's control groups.

    Available memory is what processes can take without swapping. It includes the page cache, which Linux gives back on
    demand: files that were read are no use of memory. So total - available agrees with the `used` of `free`, but for
    shared memory, which counts as used.
    """
    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    for limit, used in memory_limits():
        if limit < memory.total:
            available = min(available, max(0, limit - used))
            total = min(total, limit)
    return available, total
