"""The control groups that this process is in, of version 1 and 2, and their files of memory and processor time.

`/proc/self/cgroup` names a group per hierarchy, and `/proc/self/mountinfo` says where a hierarchy is mounted and from
which of its groups on: in a container, the mount often begins at the container's own group. Light: imported by the
processes of reward functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")


@dataclass(frozen=True)
class ControlGroups:
    """The groups of one controller that this process is in.

    Attributes:
        version: of the hierarchy: 1 or 2.
        folders: of the process's own group and of those around it, as far as they can be seen, the innermost first.
    """

    version: int
    folders: tuple[Path, ...]


@dataclass(frozen=True)
class MemoryFiles:
    """The files of a group that limit and count memory.

    Attributes:
        limit, used: bytes.
        swap: bounds swap, or memory and swap together.
        reclaimable: lines of `memory.stat` that count what is given back on demand, of the group and those in it.
        events: counts processes that were killed for want of memory in the line `oom_kill`.
    """

    limit: str
    used: str
    swap: str
    reclaimable: tuple[str, ...]
    events: str


MEMORY_FILES: Mapping[int, MemoryFiles] = {
    1: MemoryFiles(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.memsw.limit_in_bytes",
        ("total_inactive_file", "total_active_file"),
        "memory.oom_control",
    ),
    2: MemoryFiles(
        "memory.max",
        "memory.current",
        "memory.swap.max",
        ("inactive_file", "active_file", "slab_reclaimable"),
        "memory.events",
    ),
}


def groups_of(controller: str, proc: Path = PROC) -> ControlGroups | None:
    """The groups of a controller, such as `memory`, `cpu` or `pids`; None where they cannot be seen.

    A controller belongs to one hierarchy: to that of version 1 which names it, otherwise to the one of version 2.

    Args:
        proc: the folder of a process in /proc.
    """
    try:
        lines = (proc / "cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        mounts = (proc / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    paths = {kinds: path for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    kinds = next((kinds for kinds in paths if controller in kinds.split(",")), "")
    if kinds not in paths:
        return None
    own, version = PurePosixPath(paths[kinds]), 1 if kinds else 2
    visible = [mount for mount in map(_mount_of, mounts) if mount is not None and mount.shows(controller, version)]
    for mount in visible:
        inner = own.relative_to(mount.begin) if own.is_relative_to(mount.begin) else None
        if inner is not None and ".." not in inner.parts and (mount.folder / inner).is_dir():
            around = (mount.folder / inner, *(mount.folder / inner).parents)
            return ControlGroups(version, tuple(folder for folder in around if folder.is_relative_to(mount.folder)))
    # A container has a mount of its own group, and the path is the one on the host.
    if ".." not in own.parts and (folders := [mount.folder for mount in visible if mount.folder.is_dir()]):
        return ControlGroups(version, tuple(folders[:1]))
    return None


@dataclass(frozen=True)
class _Mount:
    """A mount of control groups: the group that it begins at, its folder, and its controllers (None: version 2)."""

    begin: PurePosixPath
    folder: Path
    controllers: frozenset[str] | None

    def shows(self, controller: str, version: int) -> bool:
        """Whether it shows the hierarchy of a controller."""
        if self.controllers is None:
            return version == 2
        return version == 1 and controller in self.controllers


def _mount_of(line: str) -> _Mount | None:
    """The mount of a line of mountinfo; None where it is one of something else."""
    before, _, after = line.partition(" - ")
    words, kinds = before.split(" "), after.split(" ")
    if len(words) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
        return None
    controllers = frozenset(kinds[2].split(",")) if kinds[0] == "cgroup" else None
    return _Mount(PurePosixPath(_plain(words[3])), Path(_plain(words[4])), controllers)


def _plain(text: str) -> str:
    """A path without the escapes of mountinfo."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def number_in(path: Path) -> int | None:
    """The number that a file holds; None where there is none, such as the word `max`."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def memory_limits(proc: Path = PROC) -> list[tuple[int, int]]:
    """(limit, in use) in bytes, of each group that limits this process's memory.

    What the kernel gives back on demand is not in use.
    """
    groups = groups_of("memory", proc)
    if groups is None:
        return []
    files, limits = MEMORY_FILES[groups.version], []
    for folder in groups.folders:
        limit, used = number_in(folder / files.limit), number_in(folder / files.used)
        if limit is not None and used is not None:  # "max", or the root: this group has no limit
            limits.append((limit, max(0, used - _reclaimable(folder / "memory.stat", files.reclaimable))))
    return limits


def _reclaimable(stat: Path, names: tuple[str, ...]) -> int:
    try:
        fields = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
        return sum(int(fields.get(name, 0)) for name in names)
    except (OSError, ValueError):
        return 0


def cpu_quota(proc: Path = PROC) -> float | None:
    """Cores' worth of processor time that the groups of this process grant it; None: there is no such limit."""
    groups = groups_of("cpu", proc)
    quotas = [] if groups is None else [_quota(folder, groups.version) for folder in groups.folders]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path, version: int) -> float | None:
    """The quota of one group."""
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else None  # version 1 has -1 for none
    except (OSError, ValueError, ZeroDivisionError):
        return None
