"""The thread that sends samples to reward processes, in chunks sized by how long samples take, and enforces limits.

A sample that exceeds the time limit is ended together with its process, and the rest of that process's work goes to
another process.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.notify import notify
from hybridrl.processes.untrusted_results import Result
from hybridrl.reward.function import RewardFunction
from hybridrl.reward.processes.messages import Failed, JobResults, Message, Ready
from hybridrl.reward.processes.outcome import Outcome, ScoreError, without_score
from hybridrl.reward.processes.reward_process import RewardJob, RewardProcess
from hybridrl.scored import Reason, Unscored

logger = logging.getLogger(__name__)

_CHUNK_S = 0.01  # seconds of work sent to a process at a time
_POLL_S = 1.0
_LOST_LIMIT = 3  # processes that may end or stop with a sample they were not computing


class Dispatcher:
    """Owns the processes of a pool. Its public methods may be called from any thread.

    Args:
        function: what the processes run.
        num_workers: number of processes.
        timeout_s: seconds that one call may take.
        tolerates: a sample that the function fails for with such a reason gets an outcome that says so, in place of an
            error.
    """

    def __init__(
        self, function: RewardFunction, num_workers: int, timeout_s: float, tolerates: Collection[Reason] = ()
    ) -> None:
        self.function = function
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.tolerates = frozenset(tolerates)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="reward-pool", daemon=True)
        self._lock = threading.Lock()  # guards the next eight
        self._loop: asyncio.AbstractEventLoop | None = None  # while the thread waits in it
        self._failed = False
        self._new: list[RewardJob] = []
        self._ready: Ready | None = None
        self._waiting: list[Future[Ready]] = []  # for a process that has loaded the function
        self._end_reason = RewardError("the reward pool was closed")
        self._keep = False
        self._stopping = False
        self._abandoned = False  # whether jobs were, since the thread last looked
        # used by the thread only
        self._woken = asyncio.Event()
        self._arrived: list[tuple[RewardProcess, Message]] = []
        self._processes: list[RewardProcess] = []
        self._pending: deque[RewardJob] = deque()
        self._mean_s: float | None = None  # running mean of a sample's seconds; None: none was answered yet
        self._unanswered = 0  # samples that exceeded the time limit before the first was answered

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether the thread ended by an error of its own."""
        return self._failed

    def keep_processes(self) -> None:
        """Start all processes now, and replace those that end, whether or not there is something to score."""
        with self._lock:
            self._keep = True
            self._wake()

    def when_loaded(self) -> Future[Ready]:
        """Return the future message of a process that has loaded the function.

        It raises `RewardError` where the function cannot be loaded.
        """
        future: Future[Ready] = Future()
        with self._lock:
            if self._ready is not None:
                future.set_result(self._ready)
            elif self._stopping:
                future.set_exception(self._end_reason)
            else:
                self._waiting.append(future)
                self._keep = True
                self._wake()
        return future

    def add(self, jobs: Sequence[RewardJob]) -> None:
        """Score these; jobs whose future is done are skipped."""
        waiting = [job for job in jobs if not job.future.done()]
        with self._lock:
            if not self._stopping:
                self._new += waiting
                self._wake()
                return
        for job in waiting:
            self._finish(job, self._end_reason)

    def give_up(self, jobs: Sequence[RewardJob]) -> None:
        """Forget these jobs; a process that works on nothing else is ended."""
        with self._lock:
            for job in jobs:
                job.abandoned = True
            self._abandoned = True
            self._wake()

    def stop(self) -> None:
        """End the thread and all processes; what is not scored yet fails."""
        with self._lock:
            self._stopping = True
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        """Have the thread look at what changed. The lock is held."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    # ------------------------------------------------------------------ the thread

    async def _serve(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
        try:
            while not self._stopping:
                await self._step()
        except Exception as error:
            logger.exception("the reward pool failed")
            notify(f"the reward pool failed: {error!r}", "error")
            self._end_reason, self._failed = RewardError(f"the reward pool failed: {error!r}"), True
        with self._lock:
            self._loop, self._stopping = None, True
            self._pending.extend(self._new)
        self._tell_loaded(self._end_reason)
        self._fail_all(self._end_reason)

    async def _step(self) -> None:
        with self._lock:
            self._pending.extend(self._new)
            self._new = []
            needs_processes = self._keep or bool(self._pending)
            abandoned, self._abandoned = self._abandoned, False
        if abandoned:
            self._pending = deque(job for job in self._pending if not job.abandoned)
        self._end_abandoned()
        try:
            while needs_processes and len(self._processes) < self.num_workers:
                process = RewardProcess(self.function, self.timeout_s, self._take_in)
                self._processes.append(process)
                await process.connect()
            self._send()
            if not await self._receive(self._patience()):
                self._check_starting()
                self._end_hung()
            self._check_dead()
        except _LoadError as error:
            self._could_not_load(error.reason)

    def _could_not_load(self, error: RewardError) -> None:
        with self._lock:
            self._keep = False
        self._tell_loaded(error)
        self._fail_all(error)

    def _tell_loaded(self, result: Ready | RewardError) -> None:
        """Hand the process's message, or the error, to those who wait for it."""
        with self._lock:
            self._ready = result if isinstance(result, Ready) else self._ready
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(result, Ready):
                future.set_result(result)
            else:
                future.set_exception(result)

    def _fail_all(self, error: RewardError) -> None:
        """Every job fails, and every process is ended."""
        for process in list(self._processes):
            self._pending.extend(self._end(process))
        while self._pending:
            self._finish(self._pending.popleft(), error)

    def _end_abandoned(self) -> None:
        """End processes that work on nothing that somebody waits for."""
        for process in list(self._processes):
            if process.working_on and all(job.abandoned for job in process.working_on.values()):
                self._end(process)

    def _send(self) -> None:
        free = sorted(
            (process for process in self._processes if process.accepts), key=lambda process: len(process.working_on)
        )
        for number, process in enumerate(free):
            if process.form == "batch":
                self._refuse_single(process.label)
            if self._pending:
                for job, error in process.send(self._next_chunk(process, len(free) - number)):
                    self._finish(job, error)

    def _refuse_single(self, label: str) -> None:
        error = RewardError(
            f"{label} takes a whole batch, so it cannot score single samples as they finish: give it the parameters of "
            "a function of one sample, or score whole batches."
        )
        for job in [job for job in self._pending if job.count is None]:
            self._pending.remove(job)
            self._finish(job, error)

    def _next_chunk(self, process: RewardProcess, free: int) -> list[RewardJob]:
        """About `_CHUNK_S` of work, and never so much that other processes have nothing left to do.

        Args:
            free: processes that can be sent something now, this one included.
        """
        if process.form == "batch":
            return [self._pending.popleft()]
        if process.is_async:
            size = math.ceil(len(self._pending) / free)
        elif self._mean_s is None:
            size = 1
        else:
            fair = math.ceil(len(self._pending) / (2 * len(self._processes)))
            size = min(fair, int(_CHUNK_S / max(self._mean_s, 1e-6)))
        chunk: list[RewardJob] = []
        while self._pending and len(chunk) < max(1, size):
            job = self._pending.popleft()
            if not (job.abandoned or job.future.cancelled()):
                chunk.append(job)
        return chunk

    def _take_in(self, process: RewardProcess, message: Message | None) -> None:
        """Note a message that has arrived, or the end of a process's messages, for the next step."""
        if message is not None:
            self._arrived.append((process, message))
        self._woken.set()

    async def _receive(self, patience: float) -> bool:
        """Take in what has arrived; False if no process sent anything within `patience` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._woken.wait()
        self._woken.clear()
        arrived, self._arrived = self._arrived, []
        for process, message in arrived:
            if process.broken is not None or process not in self._processes:
                continue
            if isinstance(message, Failed):
                raise _LoadError(RewardError(message.message))
            if isinstance(message, Ready):
                process.ready = message
                self._tell_loaded(message)
                continue
            for answer in message:
                self._take(process, answer)
        return bool(arrived) or any(process.gone for process in self._processes)

    def _take(self, process: RewardProcess, answer: JobResults) -> None:
        job = process.working_on.get(answer.number)
        if job is None or len(answer.results) not in (1, job.count or 1):
            process.broken = process.broken or f"results of job {answer.number}, which it has not to answer"
        if job is None or process.broken is not None:
            return
        del process.working_on[job.number]
        self._finish(job, self._result_of(job, answer, process.label))

    def _result_of(self, job: RewardJob, answer: JobResults, label: str) -> Any:
        """An `Outcome`, a list of them, or the error."""
        results, seconds = answer.results, answer.seconds / (job.count or 1)
        if results[0].kind == "timeout":
            return self._timed_out(job, seconds)
        if job.count is None:
            if results[0].kind == "score":
                self._mean_s = seconds if self._mean_s is None else 0.9 * self._mean_s + 0.1 * seconds
            return self._outcome(job, results[0], seconds, label)
        if len(results) < job.count:  # the call failed as a whole
            outcome = self._outcome(job, results[0], seconds, label)
            return outcome if isinstance(outcome, ScoreError) else [outcome] * job.count
        outcomes = [self._outcome(job, result, seconds, label) for result in results]
        failed = next((outcome for outcome in outcomes if isinstance(outcome, ScoreError)), None)
        if failed is not None and failed.reason not in self.tolerates:
            return failed
        return [_tolerated(outcome) if isinstance(outcome, ScoreError) else outcome for outcome in outcomes]

    def _outcome(self, job: RewardJob, result: Result, seconds: float, label: str) -> Outcome | ScoreError:
        if result.kind == "raised":
            return ScoreError(f"{label} raised an exception for {job.name}:\n{result.text}")
        if result.kind == "missing":
            return without_score(Unscored(Reason(result.reason), result.text), seconds)
        if result.kind != "score":
            return ScoreError(f"{label} {result.text}. It was called for {job.name}.")
        return Outcome(result.score or 0.0, result.extra, seconds, applies=result.score is not None)

    def _timed_out(self, job: RewardJob, seconds: float) -> Outcome | RewardError:
        if job.count is not None:
            return RewardError(
                f"{self.function.label} took more than reward.timeout_s={self.timeout_s:g} seconds for one call with "
                f"{job.count} responses and was ended. Raise reward.timeout_s if it needs the time."
            )
        if self._mean_s is None:
            self._unanswered += 1
            if self._unanswered > 2 * self.num_workers:
                return RewardError(
                    f"{self.function.label} answered none of the first {self._unanswered} samples within "
                    f"reward.timeout_s={self.timeout_s:g} seconds, the last of them {job.name}: it hangs. Fix it, or "
                    "raise reward.timeout_s if it needs the time."
                )
        message = f"reward of {job.name} took more than reward.timeout_s={self.timeout_s:g} seconds"
        notify(f"{message}. Raise the limit if the function needs the time.", "warning")
        return without_score(Unscored(Reason.TIMEOUT, message), seconds, timed_out=True)

    # ------------------------------------------------------------------ limits and ends

    def _patience(self) -> float:
        """Seconds until the next time limit can be exceeded."""
        now = time.monotonic()
        seconds = [process.deadline() - now for process in self._processes if process.working_on]
        return min(_POLL_S, max(0.005, min(seconds, default=_POLL_S)))

    def _end_hung(self) -> None:
        now = time.monotonic()
        for process in [process for process in self._processes if process.working_on and process.deadline() <= now]:
            stopped = process.stopped
            hung, since = process.current()
            blames_none = stopped and hung is not None and hung.lost_processes < _LOST_LIMIT
            if hung is not None and not blames_none:
                del process.working_on[hung.number]
                self._finish(hung, self._timed_out(hung, now - since))
            # One that computes a sample that was answered before is an async function that went on at its time limit.
            is_lost = stopped or (hung is None and not process.computes)
            end = "was stopped by a signal" if stopped else "stopped answering"
            self._put_back(self._end(process), f"{process.label}: its process {end}" if is_lost else None)

    def _check_dead(self) -> None:
        """A process that ended by itself: killed for memory, crashed in a C extension, `os._exit()` in the function."""
        for process in [process for process in self._processes if process.gone]:
            if process.ready is None:
                raise self._never_started(process)
            computed, _ = process.current()
            message = f"{process.label}: its process {process.death()}"
            if computed is not None:
                del process.working_on[computed.number]
                name = computed.name if computed.count is None else f"{computed.count} responses"
                self._finish(computed, ScoreError(f"{message} while it scored {name}.", Reason.INFRA))
                self._put_back(self._end(process))
            else:
                self._put_back(self._end(process), message)

    def _put_back(self, jobs: Sequence[RewardJob], fate: str | None = None) -> None:
        """Have other processes score these.

        Args:
            jobs: those that a process which ended had not answered.
            fate: what became of it, where none of them is to blame. After `_LOST_LIMIT` such ends a sample fails.
        """
        if fate is not None:
            notify(f"{fate} while it computed no sample; another takes its place", "warning")
            for job in jobs:
                job.lost_processes += 1
        failed = [job for job in jobs if fate is not None and job.lost_processes >= _LOST_LIMIT]
        for job in failed:
            message = f"{fate} with {job.name} waiting in it, which happened {job.lost_processes} times."
            self._finish(job, ScoreError(message, Reason.INFRA))
        again = [job for job in jobs if job not in failed]
        self._pending.extendleft(sorted(again, key=lambda job: job.number, reverse=True))

    def _check_starting(self) -> None:
        for process in [process for process in self._processes if process.ready is None]:
            if process.gone:
                raise self._never_started(process)
            if (why := process.start.why_given_up()) is not None:
                raise _LoadError(
                    RewardError(
                        f"{self.function.label}: not imported after {process.start.waited_s:.0f} seconds: {why}. What "
                        "does the file do on import?"
                    )
                )

    def _never_started(self, process: RewardProcess) -> "_LoadError":
        reason = f"{self.function.label}: its process {process.death()} while it loaded the function."
        self._end(process)
        return _LoadError(RewardError(reason))

    def _finish(self, job: RewardJob, result: Any) -> None:
        """Hand a job's result, or its error, to whoever waits for it."""
        if job.future.done() or not job.future.set_running_or_notify_cancel():
            return
        if isinstance(result, ScoreError) and result.reason in self.tolerates:
            outcome = _tolerated(result)
            result = outcome if job.count is None else [outcome] * job.count
        if isinstance(result, RewardError):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)

    def _end(self, process: RewardProcess) -> list[RewardJob]:
        """End a process; returns the jobs that it had not answered."""
        process.end()
        self._processes.remove(process)
        unanswered, process.working_on = list(process.working_on.values()), {}
        return unanswered


class _LoadError(Exception):
    """The function cannot be loaded."""

    def __init__(self, reason: RewardError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _tolerated(error: ScoreError) -> Outcome:
    return without_score(Unscored(error.reason, str(error)), 0.0, error=str(error))
