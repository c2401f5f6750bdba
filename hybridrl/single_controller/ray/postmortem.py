"""Diagnostics of a worker that died or does not answer: its log, the kernel's counters, its threads' stacks."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import ray

from hybridrl.errors import WorkerDiedError

if TYPE_CHECKING:
    from ray.exceptions import RayActorError

    from hybridrl.single_controller.ray.worker_group import RayWorkerGroup
    from hybridrl.single_controller.ray.worker_host import WorkerInfo

_TAIL_LINES, _TAIL_BYTES = 25, 1 << 18
#: a process on a busy machine takes a while to handle a signal
_STACK_LIMIT_S, _STACK_POLL_S = 5.0, 0.3
# Ray's message for a process that it did not end itself.
_RAY_SAYS_NOTHING = "connection error code 2"
_LESS_MEMORY = "use fewer workers per node, smaller batches, or offloading"
_CRASH_MARKS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "Fatal Python error")


def oom_kills() -> int | None:
    """Return the number of processes that this machine's kernel has killed for lack of memory since it started; None if
    it is unknown."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except OSError:
        pass  # not Linux, or hidden
    return None


def died(group: RayWorkerGroup, rank: int, method: str, error: RayActorError, notes: str) -> WorkerDiedError:
    """Return the error for a rank whose process ended."""
    info = group.info(rank)
    pid = info.pid if info is not None else _number_after("pid: ", str(error))
    node = info.node if info is not None else "unknown"
    tail = log_tail(pid) if pid and _is_here(info) else ""
    memory = _lack_of_memory(str(error), group.oom_kills_at_start if _is_here(info) else None)
    lines = [
        f"{group.role} rank {rank} of {group.world_size} died in {method} (node {node}, pid {pid or 'unknown'}): "
        f"{memory or likely_cause(str(error), tail)}"
    ]
    if tail:
        lines += ["Last lines of its log:", *(f"  {line}" for line in tail.splitlines())]
    elif pid:
        lines.append(f"Its output is in worker-*-{pid}.err in Ray's log folder on that node.")
    if _RAY_SAYS_NOTHING not in str(error):
        lines.append(f"Ray says: {_flat(str(error))}")
    failure = WorkerDiedError(
        "\n".join(lines) + (f"\n{notes}" if notes else ""),
        role=group.role,
        rank=rank,
        method=method,
        node=node,
        pid=pid or 0,
    )
    failure.out_of_memory = memory is not None
    return failure


def _lack_of_memory(ray_text: str, oom_kills_before: int | None) -> str | None:
    """Return who killed the process for lack of memory, or None if nobody is known to have done so."""
    lowered = ray_text.lower()
    if "running low on memory" in lowered or "oomkilled" in lowered or "memory monitor" in lowered:
        return f"Ray killed it because the node ran out of memory; {_LESS_MEMORY}"
    now = oom_kills()
    if oom_kills_before is not None and now is not None and now > oom_kills_before:
        return (
            "it was killed (SIGKILL), most likely by the kernel, which has killed a process of this machine since the "
            f"workers started because memory ran out; {_LESS_MEMORY}"
        )
    return None


def likely_cause(ray_text: str, tail: str) -> str:
    lowered = ray_text.lower()
    for mark in _CRASH_MARKS:
        if mark in tail:
            return f"it crashed ({mark}), most likely in native code; the stack is below"
    if "node died" in lowered or "node was terminated" in lowered:
        return "its node went away: the machine, or Ray's own process on it (the raylet), ended or does not answer"
    if "exit()" in lowered or "intended" in lowered or "ray.kill" in lowered:
        return "it was ended on purpose (ray.kill, exit, or another failure of the same group)"
    return (
        "it was killed from outside (SIGKILL), by the out-of-memory killer or by a user, or it crashed without a word"
    )


def stacks_of(infos: list[WorkerInfo | None]) -> str:
    """Return the Python stacks of hanging workers on this machine; an empty text if there are none."""
    here = [info for info in infos if info is not None and _is_here(info)]
    before = {info.pid: _log_size(info.pid) for info in here}
    for info in here:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(info.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _STACK_LIMIT_S
    while time.monotonic() < deadline and any(_log_size(info.pid) == before[info.pid] for info in here):
        time.sleep(_STACK_POLL_S)
    if here:
        time.sleep(_STACK_POLL_S)  # the last worker may still be writing
    texts = []
    for info in here:
        text = _log_since(info.pid, before[info.pid])
        if text:
            texts.append(f"\nRank {info.rank} is at:\n" + "\n".join(f"  {line}" for line in text.splitlines()[:60]))
    return "".join(texts)


def log_tail(pid: int) -> str:
    """Return the last lines that a worker on this machine wrote to stderr, or what they say of its crash."""
    with contextlib.suppress(OSError):
        for path in _log_files(pid):
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
            lines = [line for line in text.splitlines() if line.strip() and not line.startswith(":")]
            return "\n".join(end_or_crash(lines))
    return ""


def end_or_crash(lines: list[str]) -> list[str]:
    """The last lines; if the report of a crash is longer, its first line and the stack of the thread that crashed."""
    end = lines[-_TAIL_LINES:]
    crash = next((i for i, line in enumerate(lines) if any(mark in line for mark in _CRASH_MARKS)), None)
    if crash is None or any(mark in line for line in end for mark in _CRASH_MARKS):
        return end
    stack = next((i for i in range(crash, len(lines)) if lines[i].startswith("Current thread")), crash + 1)
    return [lines[crash], *lines[stack : stack + _TAIL_LINES - 1]]


def _log_files(pid: int) -> list[str]:
    if not ray.is_initialized():
        return []
    folder = _logs_folder()
    return glob.glob(os.path.join(folder, f"worker-*-{pid}.err"))


def _logs_folder() -> str:
    node = ray._private.worker.global_worker.node  # Ray has no public way to its log folder
    return "" if node is None else str(node.get_logs_dir_path())


def _log_size(pid: int) -> int:
    return sum(os.path.getsize(path) for path in _log_files(pid))


def _log_since(pid: int, start: int) -> str:
    for path in _log_files(pid):
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(32768).decode(errors="replace")
    return ""


def _is_here(info: WorkerInfo | None) -> bool:
    return info is None or info.node_id == ray.get_runtime_context().get_node_id()


def _number_after(mark: str, text: str) -> int | None:
    match = re.search(re.escape(mark) + r"(\d+)", text)
    return int(match.group(1)) if match else None


def _flat(text: str) -> str:
    return " ".join(text.split())
