"""Control groups (cgroups, versions 1 and 2) that limit the memory of all processes of a program together.

Shared memory and files in memory count as well. They are used where this process may make a group that limits memory.
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
    """Yield the folder of a group whose processes share this limit of memory; None where this process may make none.

    The jail joins the group before it starts anything. Processes that are still in it at the end are killed.

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
    """Return (file, line) of each counter that rises when a limit other than its own ends or refuses a program.

    Such limits are those of memory and of processes. The kernel counts a kill in the group of the process that it
    killed. Version 2 also counts it in the parent groups, where other programs count as well: of a parent, only the
    file with the suffix `.local` is read, if there is one.

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
    """Make a group with a limit of `size` bytes and return its folder; None where it cannot be made."""
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
    """Return the folders in which this process can make groups, with the version of their hierarchy.

    A program can join these groups. Groups that are left of processes that have ended are removed.
    """
    groups = groups_of("memory", proc)
    if groups is None:
        return ()
    folders = groups.folders[:1]
    if groups.version == 2:  # a group whose children limit memory has no processes of its own: search the parents
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
    """Return whether the children of a group of version 2 can limit memory."""
    with contextlib.suppress(OSError):
        return "memory" in (folder / "cgroup.subtree_control").read_text().split()
    return False


def _can_be_joined(group: Path) -> bool:
    """Return whether a child process may join a group. Version 2 needs rights in the common parent as well."""
    join = ["/bin/sh", "-c", 'echo 0 > "$1"', "sh", str(group / "cgroup.procs")]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        joining = subprocess.run(join, stdin=subprocess.DEVNULL, capture_output=True, timeout=_JOIN_S, check=False)
        return joining.returncode == 0
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
                if pid > 0:  # 0 stands for a process outside this namespace, and means this process group to kill()
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
