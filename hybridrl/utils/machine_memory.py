"""Main memory of this machine, or of the container that this process runs in."""

from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def machine_memory() -> tuple[int, int]:
    """Return (available, total) in bytes, both within the limits of this process's control groups.

    Available memory is what processes can take without swapping. It includes the page cache, which Linux gives back on
    demand: files that were read are no use of memory. So total - available agrees with the `used` of `free`, but for
    shared memory, which counts as used.
    """
    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    for group in _control_groups():
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is None or used is None or limit >= memory.total:  # "max": this group has no limit
            continue
        available = min(available, max(0, limit - used + _reclaimable(group)))
        total = min(total, limit)
    return available, total


def _control_groups() -> list[Path]:
    """Return the folders of this process's control group (version 2) and of those around it."""
    try:
        lines = _OWN_GROUP.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    group = _CGROUPS / own
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(_CGROUPS)]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _reclaimable(group: Path) -> int:
    """Return the bytes of the page cache and of kernel caches that a group gives back on demand."""
    try:
        fields = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return sum(int(fields.get(name, 0)) for name in ("inactive_file", "active_file", "slab_reclaimable"))
    except (OSError, ValueError):
        return 0
