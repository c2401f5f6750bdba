"""A reward process as the pool sees it: how it is started, what it works on, how it ends."""

import contextlib
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.function import Form, RewardFunction
from hybridrl.reward.processes.child import CELL, IDLE, Cell

_GRACE_S = 1.0  # what an async sample may take beyond its limit to be cancelled


@dataclass
class Job:
    """One call of the reward function: for one sample, or for a batch in one call.

    Attributes:
        number: unique in the pool.
        payload: the pickled sample, or list of samples.
        name: how messages refer to the sample.
        count: samples of a batch; None for a single sample.
        future: gets the job's result: an `Outcome`, or a list of them for a batch.
        abandoned: nobody waits for the result any more.
    """

    number: int
    payload: bytes
    name: str
    count: int | None = None
    future: Future[Any] = field(default_factory=Future)
    abandoned: bool = False


class ChildProcess:
    """One process; only the pool's thread uses it.

    Attributes:
        ready: it has loaded the function; `form`, `is_async` and `label` are known.
        gone: its end of the connection is closed.
        working_on: jobs that were sent and not answered, by number.
    """

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        life_theirs, self._life = os.pipe()  # nothing is ever written: it closes when this process ends
        memory_fd = _shared_memory()
        self.cell = Cell(mmap.mmap(memory_fd, CELL.size))
        fds = (theirs.fileno(), life_theirs, memory_fd)
        code = f"import sys; sys.path[:] = {sys.path!r}; from hybridrl.reward.processes.child import main; main{fds!r}"
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a group of its own, so that programs it started can be ended with it
                env=environment,
            )
        finally:
            theirs.close()
            os.close(life_theirs)
            os.close(memory_fd)
        self.connection = Connection(ours.detach())
        self.started = time.monotonic()
        self.ready = self.gone = False
        self.form: Form = "sample"
        self.is_async, self.label = False, function.label
        self.working_on: dict[int, Job] = {}
        self._sent = 0.0
        self._post(function)
        self._post(timeout_s)

    @property
    def accepts(self) -> bool:
        """Whether it can be sent a job now; an async function takes any number at once."""
        return self.ready and not self.gone and (self.is_async or not self.working_on)

    def send(self, jobs: Sequence[Job]) -> None:
        """Ask for the scores of these samples, or of one batch."""
        self.working_on |= {job.number: job for job in jobs}
        self._sent = time.monotonic()
        kind = "samples" if jobs[0].count is None else "batch"
        self._post((kind, [(job.number, job.payload) for job in jobs]))

    def _post(self, message: Any) -> None:
        data = pickled(message, self.label)
        try:
            self.connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            self.gone = True

    def receive(self) -> tuple[Any, ...] | None:
        """The next message; None if the process has ended."""
        try:
            message: tuple[Any, ...] = pickle.loads(self.connection.recv_bytes())
            return message
        except (EOFError, OSError):  # OSError: it died in the middle of a message
            self.gone = True
            return None

    def deadline(self, timeout_s: float) -> float:
        """When what it works on exceeds the limit."""
        number, since = self.cell.read()
        if number != IDLE:
            return since + timeout_s
        # Between two samples, or async ones waiting, which cancel themselves at the limit.
        return max(since, self._sent) + timeout_s + _GRACE_S

    def current(self) -> tuple[list[Job], float]:
        """The jobs that it may be stuck in, and since when: the one it computes, or all where it computes none."""
        number, since = self.cell.read()
        one = self.working_on.get(number)
        return ([one] if one is not None else list(self.working_on.values())), since

    def death(self) -> str:
        """How it ended."""
        code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"

    def end(self) -> None:
        """End it and all that it started."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):  # it has ended and nothing that it started is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._life)


def pickled(value: Any, label: str) -> bytes:
    """A value as it travels to a process.

    Args:
        label: the reward function, for the message.

    Raises:
        RewardError: it cannot be pickled.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RewardError(
            f"{label} runs in a process of its own, and its arguments cannot be sent there ({error}). Data sources, "
            "ground truths, extra_info and reward_kwargs must be plain values: numbers, text, lists, dicts."
        ) from error


def _shared_memory() -> int:
    """A file descriptor of memory that two processes can map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hybridrl-reward")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, CELL.size)
    return descriptor
