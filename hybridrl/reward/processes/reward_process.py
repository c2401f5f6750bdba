"""A reward process as the pool sees it: how it is started, what it works on, how it ends."""

import asyncio
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.processes.child import Child, ending
from hybridrl.processes.frame_stream import FrameStream
from hybridrl.processes.frames import LARGEST, MalformedMessage
from hybridrl.reward.function import RewardFunction
from hybridrl.reward.processes.messages import Message, Ready, decode, pickled
from hybridrl.reward.processes.reward_child import CELL, IDLE, Cell
from hybridrl.reward.signature import Form
from hybridrl.utils.movement import watch_of

_GRACE_S = 1.0  # what a process that works on nothing may take beyond the limit to say so
_MODULE = "hybridrl.reward.processes.reward_child"
#: A process scores a sample at a time, and as many processes as cores run.
_VARIABLES = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


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
        lost_processes: those that stopped or ended while they held it, and not because of it.
    """

    number: int
    value: Any
    name: str
    count: int | None = None
    future: Future[Any] = field(default_factory=Future)
    abandoned: bool = False
    lost_processes: int = 0


class RewardProcess:
    """One process; only the pool's thread uses it.

    Args:
        function: what it runs.
        timeout_s: seconds that one call may take.
        arrived: called with this object for each message, and with None at the end of the messages.

    Attributes:
        ready: its first message, when it has loaded the function; None before.
        closed: its end of the connection is closed.
        broken: why a message of it is none.
        working_on: jobs that were sent and not answered, by number.
    """

    def __init__(
        self,
        function: RewardFunction,
        timeout_s: float,
        arrived: "Callable[[RewardProcess, Message | None], None]",
    ) -> None:
        memory_fd = _shared_memory()
        self.cell = Cell(mmap.mmap(memory_fd, CELL.size))
        try:
            self.child = Child(_MODULE, [memory_fd], defaults=_VARIABLES)
        finally:
            os.close(memory_fd)
        self.start = watch_of(f"{function.label} to be imported", self.child.pid)
        self.ready: Ready | None = None
        self.closed = False
        self.broken: str | None = None
        self.working_on: dict[int, RewardJob] = {}
        self._function, self._timeout_s, self._arrived = function, timeout_s, arrived
        self._sent = 0.0
        self._stream: FrameStream | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Send the function, and take messages from here on."""
        self._stream = await FrameStream.open(self.child.connection)
        self._stream.send(pickled(self._function, self._function.label))
        self._stream.send(pickled(self._timeout_s, self._function.label))
        self._reading = asyncio.create_task(self._read(self._stream))

    async def _read(self, stream: FrameStream) -> None:
        try:
            while True:
                self._arrived(self, decode(await stream.receive(LARGEST)))
        except EOFError:
            pass
        except MalformedMessage as error:
            self.broken = str(error)
        finally:
            self.closed = True
            self._arrived(self, None)

    @property
    def gone(self) -> bool:
        """Its end of the connection is closed, or of no use any more."""
        return self.closed or self.broken is not None

    @property
    def form(self) -> Form | None:
        """The form in which it calls the function; None until it has loaded it."""
        return self.ready.how.form if self.ready is not None else None

    @property
    def label(self) -> str:
        """The function's name and file."""
        return self.ready.label if self.ready is not None else self._function.label

    @property
    def is_async(self) -> bool:
        return self.ready is not None and self.ready.is_async

    @property
    def accepts(self) -> bool:
        """Whether it can be sent a job now; an async function takes any number at once."""
        return self.ready is not None and not self.gone and (self.is_async or not self.working_on)

    def send(self, jobs: Sequence[RewardJob]) -> list[tuple[RewardJob, RewardError]]:
        """Ask for the scores of these samples, or of one batch; returns those that cannot be sent, and why."""
        assert self.ready is not None and self._stream is not None
        calls, refused = [], []
        for job in jobs:
            try:
                calls.append((job.number, pickled(self.ready.how.reduced(job.value), self.label)))
                self.working_on[job.number] = job
            except RewardError as error:
                refused.append((job, error))
        if calls:
            self._sent = time.monotonic()
            self._stream.send(pickled(("samples" if jobs[0].count is None else "batch", calls), self.label))
        return refused

    def deadline(self) -> float:
        """When what it works on exceeds the limit."""
        number, since = self.cell.read()
        if number != IDLE:
            return since + self._timeout_s
        # Between two samples, or async ones waiting, which are reported at the limit.
        return max(since, self._sent) + self._timeout_s + _GRACE_S

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
            with open(f"/proc/{self.ready.pid if self.ready else self.child.pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except OSError:
            return False

    def death(self) -> str:
        """Say how it ended, for messages."""
        if self.broken is not None:
            return f"sent what is no result ({self.broken[:200]}) and was ended"
        return ending(self.child.wait())

    def end(self) -> None:
        """End it and all that it started."""
        if self._reading is not None:
            self._reading.cancel()
        if self._stream is not None:
            self._stream.close()
        self.child.end()


def _shared_memory() -> int:
    """A file descriptor of memory that two processes can map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hybridrl-reward")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, CELL.size)
    return descriptor
