"""Carries failures from a worker to the controller, and distinguishes a cause from its symptoms on other ranks."""

from __future__ import annotations

import os
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import UserError, WorkerError, WorkerUserError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(eq=False)
class RemoteFailure(Exception):
    """An exception that is sent from a worker to the controller, with the place where it happened.

    It holds plain text and a pickled copy of the original, so it arrives even if the original cannot be unpickled
    there. It takes positional arguments only, because exceptions are pickled with those.
    """

    role: str
    rank: int
    world_size: int
    node: str
    pid: int
    method: str
    summary: str
    traceback_text: str
    pickled: bytes | None
    is_user_error: bool

    @classmethod
    def capture(
        cls, error: BaseException, role: str, rank: int, world_size: int, node: str, pid: int, method: str
    ) -> RemoteFailure:
        """Wrap the exception that is being handled in a worker."""
        text = _user_traceback(error)
        summary = "".join(traceback.format_exception_only(error)).strip()
        is_user_error = isinstance(error, UserError)
        if is_user_error:
            summary = str(error)
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # any class may refuse to be pickled; its text is sent instead
            pickled = None
        return cls(role, rank, world_size, node, pid, method, summary, text, pickled, is_user_error)

    def original(self) -> BaseException | None:
        """Return the worker's exception object, or None if its class cannot be rebuilt in this process."""
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # e.g. its module cannot be imported here; the text is available
            return None
        return error if isinstance(error, BaseException) else None

    @property
    def place(self) -> str:
        """Describe the worker that failed and the place, for a message."""
        return f"{self.role} rank {self.rank} of {self.world_size} in {self.method} (node {self.node}, pid {self.pid})"

    def __str__(self) -> str:
        return f"{self.place}: {self.summary}\n{self.traceback_text}"

    def to_error(self, notes: str = "") -> WorkerError:
        """Return the exception for the user. `notes` are appended to its message."""
        fields: dict[str, Any] = {
            "role": self.role,
            "rank": self.rank,
            "method": self.method,
            "node": self.node,
            "pid": self.pid,
            "remote_traceback": self.traceback_text,
        }
        notes = f"\n{notes}" if notes else ""
        if self.is_user_error:
            return WorkerUserError(f"{self.summary}\n(reported by {self.place}){notes}", **fields)
        return WorkerError(
            f"{self.place} failed: {self.summary}\n\nTraceback on that worker:\n{self.traceback_text.rstrip()}{notes}",
            **fields,
        )


def _user_traceback(error: BaseException) -> str:
    """Return the traceback from the user's method on. The frames above it always belong to the worker group and
    Ray."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _is_machinery(filename: str) -> bool:
    folder, name = os.path.split(filename)
    return folder.startswith(_PACKAGE) or (
        name == "tracing_helper.py" and os.path.basename(os.path.dirname(folder)) == "util"
    )


# Texts of errors that a rank reports because a peer is gone. They are symptoms, never causes.
_COLLECTIVE_MARKS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket timeout",
    "gloo",
    "nccl",
    "processgroup",
    "process group",
    "connectfullmesh",
    "watchdog",
    "timed out waiting",
    "tcpstore",
    "store->get",
    "distbackenderror",
    "diststoreerror",
    "distnetworkerror",
    "heartbeat",
)


def is_collective_error(summary: str) -> bool:
    """Return whether the text is that of a collective that failed because of another rank.

    The check uses the text of the error's last line, because `torch.distributed` often raises plain RuntimeErrors.
    """
    lowered = summary.lower()
    is_runtime = "error" in lowered.split(":", 1)[0]
    return is_runtime and any(mark in lowered for mark in _COLLECTIVE_MARKS)
