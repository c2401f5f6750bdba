"""A control group for a program: the memory of all its processes, with shared memory and files in memory.

Both versions of control groups, where this process may make a group that limits memory.
"""

import contextlib
import functools
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NAME = "hybridrl-sandbox"
_END_S, _PAUSE_S = 2.0, 0.005


@contextlib.contextmanager
def memory_group(megabytes: int) -> Iterator[Path | None]:
    """The folder of a group whose processes have so much memory together; None where this process may make none.

    The jail joins it before it starts anything. What is left in it at the end is killed.
    """
    group = _made(megabytes * 2**20)
    try:
        yield group
    finally:
        if group is not None:
            _remove(group)


def _made(size: int) -> Path | None:
    for parent in _parents():
        group = parent / f"{_NAME}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            limit = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
            (group / limit).write_text(str(size))
        except OSError:
            _remove(group)
            continue
        for name, value in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", size)):
            with contextlib.suppress(OSError):  # a kernel that does not count swap has no such file
                (group / name).write_text(str(value))
        return group
    return None


@functools.cache
def _parents() -> tuple[Path, ...]:
    """Folders in which this process may be able to make groups. Those of processes that have ended are removed."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if "memory" in kinds.split(","):
                found.append(Path(f"{_ROOT}/{kinds}{path}"))
            elif not kinds:
                own = Path(f"{_ROOT}{path}")
                # Version 2: no group of an inner folder has processes of its own, so it is often one above.
                for folder in (own, *own.parents[: len(own.parts) - len(_ROOT.parts)]):
                    with contextlib.suppress(OSError):
                        if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                            found.append(folder)
    for folder in found:
        for left in folder.glob(f"{_NAME}-*"):
            if not Path("/proc", left.name.split("-")[2]).exists():
                with contextlib.suppress(OSError):
                    left.rmdir()
    return tuple(found)


def _remove(group: Path) -> None:
    """Kill what is left in a group, and remove it."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        with contextlib.suppress(OSError, ValueError):
            for pid in (group / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(_PAUSE_S)
