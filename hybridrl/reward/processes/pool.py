"""Processes that run the reward function, each sample under a time limit.

The processes are programs of their own (nothing of the trainer is imported or copied into them), load the function from
its file, and end with this process, however it ends. Samples travel in chunks sized by how long samples take; a sample
that exceeds the limit is ended with its process, and what else that process had to do goes to another.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.function import RewardFunction, Sample
from hybridrl.reward.processes.child import CELL, IDLE, Cell, Result

logger = logging.getLogger(__name__)

_CHUNK_S = 0.01  # seconds of work sent to a process at a time
_START_LIMIT_S = 120.0  # for starting a process and importing the user's file
_POLL_S = 1.0
_GRACE_S = 1.0  # what an async sample may take beyond its limit to be cancelled


@dataclass(frozen=True)
class Outcome:
    """The score of one sample.

    Attributes:
        score: the number; 0 after a time-out.
        extra: the whole dict, where the function returned one.
        seconds: how long it took.
        timed_out: it exceeded the time limit.
    """

    score: float
    extra: dict[str, Any] | None
    seconds: float
    timed_out: bool = False


class RewardPool:
    """A pool of processes for one reward function.

    Args:
        function: which one.
        num_workers: processes; None: one a core that this process may use, at most 8.
        timeout_s: seconds that one call may take: a sample's, or the whole batch's where the function takes a batch.

    Safe to use from several threads; their calls take turns.
    """

    def __init__(self, function: RewardFunction, num_workers: int | None = None, timeout_s: float = 30.0) -> None:
        self.function = function
        self.num_workers = num_workers or min(8, usable_cores())
        self.timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._mean_s: float | None = (
            None  # running mean of the seconds that a sample takes; None: none was answered yet
        )
        self._unanswered = 0  # samples that exceeded the time limit before the first was answered
        self._lock = threading.Lock()

    def start(self, wait_for_one: bool = False) -> None:
        """Start the processes that are missing; with ``wait_for_one`` return when the first has loaded the function.

        Raises:
            RewardError: the function cannot be loaded (only with ``wait_for_one``; otherwise the first ``run``
                raises).
        """
        with self._lock:
            self._start_missing()
            while wait_for_one and not any(worker.ready for worker in self._workers):
                self._receive({}, _POLL_S)
                self._check_starting()

    @property
    def form(self) -> str:
        """``sample`` or ``batch``: how the function is called."""
        self.start(wait_for_one=True)
        return next(worker.form for worker in self._workers if worker.ready)

    def run(self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format) -> list[Outcome]:
        """Score samples; the i-th outcome belongs to the i-th sample.

        Args:
            samples: what to score.
            describe: names the i-th sample in messages.

        Raises:
            RewardError: the function raises, returns what is no finite number, ends its process, or hangs: the batched
                form once, the other on the very first samples that it is given, twice in every process.
        """
        if not samples:
            return []
        form = self.form
        with self._lock:
            try:
                if form == "batch":
                    return self._run_batch(samples)
                return self._run_samples(samples, describe)
            except BaseException:
                # What still works on this call would answer into the next one.
                for worker in [w for w in self._workers if w.busy]:
                    self._end(worker)
                raise

    def close(self) -> None:
        """End all processes. A later ``run`` starts new ones."""
        with self._lock:
            for worker in list(self._workers):
                self._end(worker)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One sample at a time

    def _run_samples(self, samples: Sequence[Sample], describe: Callable[[int], str]) -> list[Outcome]:
        pending = deque(range(len(samples)))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(samples):
            self._start_missing()
            for worker in self._workers:
                if worker.ready and not worker.busy and pending:
                    worker.send_samples(samples, self._take(pending, worker))
            if not self._receive(outcomes, self._patience(), describe):
                self._check_starting()
                self._end_hung(outcomes, pending, describe)
            self._check_dead(pending, describe)
        return [outcomes[number] for number in range(len(samples))]

    def _take(self, pending: deque[int], worker: _Worker) -> list[int]:
        """The next chunk: about ``_CHUNK_S`` of work, and never so much that others have nothing left to do."""
        if worker.is_async:
            size = math.ceil(len(pending) / sum(1 for w in self._workers if not w.busy))
        elif self._mean_s is None:
            size = 1
        else:
            fair = math.ceil(len(pending) / (2 * len(self._workers)))
            size = min(fair, int(_CHUNK_S / max(self._mean_s, 1e-6)))
        return [pending.popleft() for _ in range(min(len(pending), max(1, size)))]

    def _receive(
        self, outcomes: dict[int, Outcome], patience: float, describe: Callable[[int], str] = "sample {}".format
    ) -> bool:
        """Take in what has arrived; False if nothing did within ``patience`` seconds."""
        by_connection = {worker.connection: worker for worker in self._workers if not worker.gone}
        arrived = wait(list(by_connection), patience) if by_connection else []
        for connection in arrived:
            worker = by_connection[connection]  # type: ignore[index]
            message = worker.receive()
            if message is None:
                continue
            if message[0] == "failed":
                self._end(worker)
                raise RewardError(message[1])
            if message[0] == "ready":
                _, worker.form, worker.is_async, worker.label = message
                worker.ready = True
                continue
            for result in message[1]:
                number = result[0]
                outcomes[number] = self._outcome(result, worker, describe(number) if result[1] != "score" else "")
                worker.working_on.discard(number)
            if message[2]:
                worker.busy = False
        return bool(arrived)

    def _outcome(self, result: Result, worker: _Worker, sample: str) -> Outcome:
        _, kind, payload, seconds = result
        if kind == "timeout":
            return self._timed_out(sample, seconds)
        if kind != "score":
            raise _refusal(worker.label, kind, payload, sample)
        self._mean_s = seconds if self._mean_s is None else 0.9 * self._mean_s + 0.1 * seconds
        return Outcome(payload[0], payload[1], seconds)

    def _timed_out(self, sample: str, seconds: float) -> Outcome:
        if self._mean_s is None:
            self._unanswered += 1
            if self._unanswered > 2 * self.num_workers:
                raise RewardError(
                    f"{self.function.label} answered none of the first {self._unanswered} samples within "
                    f"reward.timeout_s={self.timeout_s:g} seconds, the last of them {sample}: it hangs. Mend it, or "
                    "raise reward.timeout_s if it needs the time."
                )
        logger.warning(
            "reward of %s took more than reward.timeout_s=%g seconds: it scores 0. Raise the limit if the function "
            "needs the time.",
            sample,
            self.timeout_s,
        )
        return Outcome(0.0, None, seconds, timed_out=True)

    def _patience(self) -> float:
        """Seconds until the next time limit can be exceeded."""
        now = time.monotonic()
        left = [worker.deadline(self.timeout_s) - now for worker in self._workers if worker.busy]
        return min(_POLL_S, max(0.005, min(left, default=_POLL_S)))

    def _end_hung(self, outcomes: dict[int, Outcome], pending: deque[int], describe: Callable[[int], str]) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if w.busy and w.deadline(self.timeout_s) <= now]:
            number, since = worker.cell.read()
            hung = {number} if number != IDLE else set(worker.working_on)
            for culprit in hung & worker.working_on:
                outcomes[culprit] = self._timed_out(describe(culprit), now - since)
            pending.extendleft(sorted(worker.working_on - hung, reverse=True))
            self._end(worker)

    def _check_dead(self, pending: deque[int], describe: Callable[[int], str]) -> None:
        """A process that ended by itself: killed for memory, crashed in a C extension, os._exit() in the function."""
        for worker in [w for w in self._workers if w.gone]:
            if not worker.ready:
                raise self._never_started(worker)
            number, _ = worker.cell.read()
            if worker.busy:
                sample = describe(number) if number in worker.working_on else "a sample"
                raise RewardError(f"{worker.label}: its process {worker.death()} while it scored {sample}.")
            self._end(worker)

    # The whole batch in one call

    def _run_batch(self, samples: Sequence[Sample]) -> list[Outcome]:
        worker = next(w for w in self._workers if w.ready)
        deadline = time.monotonic() + self.timeout_s
        worker.send(("batch", list(samples)))
        while worker.busy:
            arrived = wait([worker.connection], max(0.0, deadline - time.monotonic()))
            message = worker.receive() if arrived else None
            if worker.gone:
                raise RewardError(
                    f"{worker.label}: its process {worker.death()} while it scored {len(samples)} responses."
                )
            if message is None:
                raise RewardError(
                    f"{worker.label} took more than reward.timeout_s={self.timeout_s:g} seconds for one call with "
                    f"{len(samples)} "
                    "responses and was ended. Raise reward.timeout_s if it needs the time."
                )
            for _, kind, payload, seconds in message[1]:
                if kind != "score":
                    raise _refusal(worker.label, kind, payload, f"a batch of {len(samples)} responses")
                scores = payload
                each = seconds / len(samples)
            worker.busy = not message[2]
        return [Outcome(score, extra, each) for score, extra in scores]

    # Processes

    def _start_missing(self) -> None:
        while len(self._workers) < self.num_workers:
            self._workers.append(_Worker(self.function, self.timeout_s))

    def _check_starting(self) -> None:
        for worker in [w for w in self._workers if not w.ready]:
            if worker.gone:
                raise self._never_started(worker)
            if time.monotonic() - worker.started > _START_LIMIT_S:
                raise RewardError(
                    f"{self.function.label}: not imported after {_START_LIMIT_S:g} seconds. What does the file do on "
                    "import?"
                )

    def _never_started(self, worker: _Worker) -> RewardError:
        self._end(worker)
        return RewardError(f"{self.function.label}: its process {worker.death()} while it loaded the function.")

    def _end(self, worker: _Worker) -> None:
        worker.end()
        self._workers.remove(worker)


class _Worker:
    """One process, seen from here."""

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
        self.ready = self.busy = self.gone = False
        self.form, self.is_async, self.label = "sample", False, function.label
        self.working_on: set[int] = set()
        self._sent = 0.0
        try:
            self._post(function)
            self._post(timeout_s)
        except RewardError:
            self.end()
            raise

    def send_samples(self, samples: Sequence[Sample], numbers: Sequence[int]) -> None:
        """Ask for the scores of some samples."""
        self.working_on = set(numbers)
        self.send(("samples", [(number, samples[number]) for number in numbers]))

    def send(self, request: tuple[Any, ...]) -> None:
        """Ask for something."""
        self.busy = True
        self._sent = time.monotonic()
        self._post(request)

    def _post(self, message: Any) -> None:
        try:
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardError(
                f"{self.label} runs in a process of its own, and what it is called with cannot be sent there "
                f"({error}). Data "
                "sources, ground truths, extra_info and reward_kwargs must be plain values: numbers, text, lists, "
                "dicts."
            ) from error
        try:
            self.connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            self.gone = True

    def receive(self) -> tuple[Any, ...] | None:
        """The next message; None if the process has ended."""
        try:
            return pickle.loads(self.connection.recv_bytes())
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


def _refusal(label: str, kind: str, payload: str, sample: str) -> RewardError:
    if kind == "raised":
        return RewardError(f"{label} raised an exception for {sample}:\n{payload}")
    return RewardError(f"{label} {payload}. It was called for {sample}.")


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shared_memory() -> int:
    """A file descriptor of memory that two processes can map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hybridrl-reward")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, CELL.size)
    return descriptor
