"""A reward process as the pool sees it: how it is started, what it works on, how it ends."""

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.function import RewardFunction
from hybridrl.reward.processes.child import CELL, IDLE, Cell
from hybridrl.reward.processes.messages import Channel, Message, Ready, decode, pickled
from hybridrl.reward.signature import Form
from hybridrl.utils.plain_results import MalformedMessage
from hybridrl.utils.supervisor import descendants

_GRACE_S = 1.0  # what a process that works on nothing may take beyond the limit to say so
_END_LIMIT_S = 10.0  # for its supervisor to end everything that it started


@dataclass
class RewardJob:
    """One call of the reward function: for one sample, or for a batch in one call.

    Attributes:
        number: unique in the pool.
        value: the sample, or the list of samples.
        name: how messages refer to the sample.
        count: samples of a batch; None for a single sample.
        future: gets the job's result: an `Outcome`, or a list of them for a batch.
        abandoned: nobody waits for the result any more.
        lost: processes that stopped or ended while they held it, and not because of it.
    """

    number: int
    value: Any
    name: str
    count: int | None = None
    future: Future[Any] = field(default_factory=Future)
    abandoned: bool = False
    lost: int = 0


class ChildProcess:
    """One process; only the pool's thread uses it.

    Attributes:
        ready: what it said when it had loaded the function; None before.
        broken: it sent something that is no message; why.
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
                start_new_session=True,
                env=environment,
            )
        finally:
            theirs.close()
            os.close(life_theirs)
            os.close(memory_fd)
        self.channel = Channel(ours)
        self.started = time.monotonic()
        self.ready: Ready | None = None
        self.broken: str | None = None
        self.working_on: dict[int, RewardJob] = {}
        self._label = function.label
        self._sent = 0.0
        _processes.add(self)
        self.channel.send(pickled(function, self._label))
        self.channel.send(pickled(timeout_s, self._label))

    @property
    def gone(self) -> bool:
        """Its end of the connection is closed, or of no use any more."""
        return self.channel.closed or self.broken is not None

    @property
    def form(self) -> Form | None:
        """How it calls the function; None until it has loaded it."""
        return self.ready.how.form if self.ready is not None else None

    @property
    def label(self) -> str:
        """The function's name and file."""
        return self.ready.label if self.ready is not None else self._label

    @property
    def is_async(self) -> bool:
        return self.ready is not None and self.ready.is_async

    @property
    def accepts(self) -> bool:
        """Whether it can be sent a job now; an async function takes any number at once."""
        return self.ready is not None and not self.gone and (self.is_async or not self.working_on)

    def send(self, jobs: Sequence[RewardJob]) -> list[tuple[RewardJob, RewardError]]:
        """Ask for the scores of these samples, or of one batch; returns those that cannot be sent, and why."""
        assert self.ready is not None
        calls, refused = [], []
        for job in jobs:
            try:
                calls.append((job.number, pickled(self.ready.how.reduced(job.value), self.label)))
                self.working_on[job.number] = job
            except RewardError as error:
                refused.append((job, error))
        if calls:
            self._sent = time.monotonic()
            self.channel.send(pickled(("samples" if jobs[0].count is None else "batch", calls), self.label))
        return refused

    def receive(self) -> list[Message]:
        """The messages that have arrived."""
        try:
            return [decode(data) for data in self.channel.read()]
        except MalformedMessage as error:
            self.broken = str(error)
            return []

    def deadline(self, timeout_s: float) -> float:
        """When what it works on exceeds the limit."""
        number, since = self.cell.read()
        if number != IDLE:
            return since + timeout_s
        # Between two samples, or async ones waiting, which are reported at the limit.
        return max(since, self._sent) + timeout_s + _GRACE_S

    def current(self) -> tuple[RewardJob | None, float]:
        """The job that it computes, and since when; None where it computes none of those that it has to answer."""
        number, since = self.cell.read()
        return self.working_on.get(number), since

    @property
    def computes(self) -> bool:
        """Whether it is in a call of the function, be it for a sample that was answered before."""
        return self.cell.read()[0] != IDLE

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it (SIGSTOP)."""
        try:
            with open(f"/proc/{self.ready.pid if self.ready else self._process.pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except OSError:
            return False

    def death(self) -> str:
        """How it ended."""
        if self.broken is not None:
            return f"sent what is no result ({self.broken[:200]}) and was ended"
        code = self._wait()
        if code is None:
            return "closed its connection and was ended"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"

    def end(self) -> None:
        """End it and all that it started."""
        self.channel.close()
        self._close_life()  # which tells its supervisor
        if self._wait() is None:  # it is stopped, or cannot keep up
            for pid in descendants(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()

    def leave(self) -> None:
        """Close what a process that was forked from the run has inherited: a reward process ends with the run."""
        self.channel.close()
        self._close_life()

    def _close_life(self) -> None:
        life, self._life = self._life, -1
        if life >= 0:
            os.close(life)

    def _wait(self) -> int | None:
        """The exit code of its supervisor, which ends as the process did; None if that takes too long."""
        try:
            return self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return None


_processes: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _leave_all() -> None:
    for process in list(_processes):
        process.leave()


os.register_at_fork(after_in_child=_leave_all)


def _shared_memory() -> int:
    """A file descriptor of memory that two processes can map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hybridrl-reward")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, CELL.size)
    return descriptor
