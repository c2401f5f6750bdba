"""A control group for a program: the memory of all its processes, with shared memory and files in memory.

Both versions of control groups, where this process may make a group that limits memory.
"""

import contextlib
import functools
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from hybridrl.utils.control_groups import MEMORY_FILES, PROC, groups_of

_NAME = "hybridrl-sandbox"
_END_S, _PAUSE_S, _JOIN_S = 2.0, 0.005, 30.0
#: counts kills of the whole machine
_MACHINE = ("/proc/vmstat", "oom_kill")


@contextlib.contextmanager
def memory_group(megabytes: int, proc: Path = PROC) -> Iterator[Path | None]:
    """The folder of a group whose processes have so much memory together; None where this process may make none.

    The jail joins it before it starts anything. What is left in it at the end is killed.

    Args:
        proc: the folder in /proc of this process.
    """
    group = next(
        filter(None, (make_group(parent, version, megabytes * 2**20) for parent, version in group_parents(proc))), None
    )
    try:
        yield group
    finally:
        if group is not None:
            _remove(group)


def shortage_counters(group: Path | None, proc: Path = PROC) -> list[tuple[str, str]]:
    """(file, line) of counters that tell that a program lacked memory or processes, and not by its own limit.

    The kernel counts a kill in the group of the process that it killed. Version 2 counts it in the groups around, too,
    where other programs count as well: of those, the file with the suffix `.local` is read, or none.

    Args:
        group: the program's own; None: it is in the group of this process.
        proc: the folder in /proc of this process.
    """
    counters = []
    if (memory := groups_of("memory", proc)) is not None:
        events = (group or memory.folders[0]) / MEMORY_FILES[memory.version].events
        local = events.with_name(f"{events.name}.local")
        counters.append((str(local if local.exists() else events), "oom_kill"))
    if group is None:
        counters.append(_MACHINE)
    pids = groups_of("pids", proc)
    # Older kernels count a process that was refused in the group that asked for it, newer ones in that of the limit.
    around = () if pids is None else pids.folders if pids.version == 1 or group is None else (group, *pids.folders)
    return counters + [(str(folder / "pids.events"), "max") for folder in around]


def make_group(parent: Path, version: int, size: int) -> Path | None:
    """A group with a limit of so many bytes; None where it cannot be made."""
    group, files = parent / f"{_NAME}-{os.getpid()}-{uuid.uuid4().hex[:12]}", MEMORY_FILES[version]
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        (group / files.limit).write_text(str(size))
    except OSError:
        _remove(group)
        return None
    with contextlib.suppress(OSError):  # a kernel that does not count swap has no such file
        (group / files.swap).write_text(str(0 if version == 2 else size))
    return group


@functools.cache
def group_parents(proc: Path) -> tuple[tuple[Path, int], ...]:
    """Folders in which this process makes groups that programs can join, with the version of their hierarchy.

    Groups of processes that have ended are removed.
    """
    groups = groups_of("memory", proc)
    if groups is None:
        return ()
    folders = groups.folders[:1]
    if groups.version == 2:  # no group with groups that limit memory has processes of its own: it is one around
        folders = tuple(folder for folder in groups.folders if _gives_memory(folder))
    usable = []
    for folder in folders:
        for leftover in folder.glob(f"{_NAME}-*"):
            if not Path("/proc", leftover.name.split("-")[2]).exists():
                with contextlib.suppress(OSError):
                    leftover.rmdir()
        if (group := make_group(folder, groups.version, 2**30)) is not None:
            if _can_be_joined(group):
                usable.append((folder, groups.version))
            _remove(group)
    return tuple(usable)


def _gives_memory(folder: Path) -> bool:
    """Whether groups in a group of version 2 can limit memory."""
    with contextlib.suppress(OSError):
        return "memory" in (folder / "cgroup.subtree_control").read_text().split()
    return False


def _can_be_joined(group: Path) -> bool:
    """Whether a process of this one may enter a group. Version 2 asks for rights in the group around both, too."""
    join = ["/bin/sh", "-c", 'echo 0 > "$1"', "sh", str(group / "cgroup.procs")]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ran = subprocess.run(join, stdin=subprocess.DEVNULL, capture_output=True, timeout=_JOIN_S, check=False)
        return ran.returncode == 0
    return False


def _remove(group: Path) -> None:
    """Kill what is left in a group, and remove it."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, (group / "cgroup.procs").read_text().split()):
                if pid > 0:  # 0 is a process that cannot be seen from here, and for kill() the own process group
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
