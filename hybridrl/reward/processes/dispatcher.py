"""The thread that sends samples to reward processes, in chunks sized by how long samples take, and enforces limits.

A sample that exceeds the time limit is ended together with its process, and the rest of that process's work goes to
another process.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.notify import notify
from hybridrl.reward.function import RewardFunction
from hybridrl.reward.processes.handle import ChildProcess, RewardJob
from hybridrl.reward.processes.messages import Failed, JobResults, Ready, ready_channels
from hybridrl.reward.processes.outcome import Outcome, ScoreError, without_score
from hybridrl.scored import Reason, Unscored
from hybridrl.utils.plain_results import Result

logger = logging.getLogger(__name__)

_CHUNK_S = 0.01  # seconds of work sent to a process at a time
_START_LIMIT_S = 120.0  # for starting a process and importing the user's file
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
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._changed = threading.Condition()  # guards the next six
        self._new: list[RewardJob] = []
        self._ready: Ready | None = None
        self._load_errors: list[RewardError] = []
        self._end_reason = RewardError("the reward pool was closed")
        self._keep = False
        self._stopping = False
        self._abandoned = False  # whether jobs were, since the thread last looked
        # used by the thread only
        self._children: list[ChildProcess] = []
        self._pending: deque[RewardJob] = deque()
        self._mean_s: float | None = None  # running mean of a sample's seconds; None: none was answered yet
        self._unanswered = 0  # samples that exceeded the time limit before the first was answered

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether the thread ended by an error of its own."""
        return self._wake_write < 0

    def keep_processes(self) -> None:
        """Start all processes now, and replace those that end, whether or not there is something to score."""
        with self._changed:
            self._keep = True
            self._wake()

    def wait_loaded(self) -> Ready:
        """Wait until a process has loaded the function; returns what it said.

        Raises:
            RewardError: it cannot be loaded.
        """
        with self._changed:
            seen = len(self._load_errors)
            self._keep = True
            self._wake()
            while self._ready is None:
                if len(self._load_errors) > seen:
                    raise self._load_errors[-1]
                if self._stopping:
                    raise self._end_reason
                self._changed.wait()
            return self._ready

    def add(self, jobs: Sequence[RewardJob]) -> None:
        """Score these; jobs whose future is done are skipped."""
        with self._changed:
            waiting = [job for job in jobs if not job.future.done()]
            if not self._stopping:
                self._new += waiting
                self._wake()
                return
        for job in waiting:
            self._finish(job, self._end_reason)

    def give_up(self, jobs: Sequence[RewardJob]) -> None:
        """Forget these jobs; a process that works on nothing else is ended."""
        with self._changed:
            for job in jobs:
                job.abandoned = True
            self._abandoned = True
            self._wake()

    def stop(self) -> None:
        """End the thread and all processes; what is not scored yet fails."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        """Have the thread look at what changed. The lock is held."""
        if self._wake_write >= 0:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes it as well
                os.write(self._wake_write, b".")

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
        except Exception as error:
            logger.exception("the reward pool failed")
            notify(f"the reward pool failed: {error!r}", "error")
            self._end_reason = RewardError(f"the reward pool failed: {error!r}")
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._pending.extend(self._new)
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1
        self._fail_all(self._end_reason)

    def _step(self) -> None:
        with self._changed:
            self._pending.extend(self._new)
            self._new = []
            wanted = self._keep or bool(self._pending)
            abandoned, self._abandoned = self._abandoned, False
        if abandoned:
            self._pending = deque(job for job in self._pending if not job.abandoned)
        self._end_abandoned()
        try:
            while wanted and len(self._children) < self.num_workers:
                self._children.append(ChildProcess(self.function, self.timeout_s))
            self._send()
            if not self._receive(self._patience()):
                self._check_starting()
                self._end_hung()
            self._check_dead()
        except _LoadError as error:
            self._could_not_load(error.reason)

    def _could_not_load(self, error: RewardError) -> None:
        with self._changed:
            self._keep = False
            self._load_errors.append(error)
            self._changed.notify_all()
        self._fail_all(error)

    def _fail_all(self, error: RewardError) -> None:
        """Every job fails, and every process is ended."""
        for child in list(self._children):
            self._pending.extend(self._end(child))
        while self._pending:
            self._finish(self._pending.popleft(), error)

    def _end_abandoned(self) -> None:
        """End processes that work on nothing that somebody waits for."""
        for child in list(self._children):
            if child.working_on and all(job.abandoned for job in child.working_on.values()):
                self._end(child)

    def _send(self) -> None:
        free = sorted((child for child in self._children if child.accepts), key=lambda child: len(child.working_on))
        for number, child in enumerate(free):
            if child.form == "batch":
                self._refuse_single(child.label)
            if self._pending:
                for job, error in child.send(self._next_chunk(child, len(free) - number)):
                    self._finish(job, error)

    def _refuse_single(self, label: str) -> None:
        error = RewardError(
            f"{label} takes a whole batch, so it cannot score single samples as they finish: give it the parameters of "
            "a function of one sample, or score whole batches."
        )
        for job in [job for job in self._pending if job.count is None]:
            self._pending.remove(job)
            self._finish(job, error)

    def _next_chunk(self, child: ChildProcess, free: int) -> list[RewardJob]:
        """About `_CHUNK_S` of work, and never so much that other processes have nothing left to do.

        Args:
            free: processes that can be sent something now, this one included.
        """
        if child.form == "batch":
            return [self._pending.popleft()]
        if child.is_async:
            size = math.ceil(len(self._pending) / free)
        elif self._mean_s is None:
            size = 1
        else:
            fair = math.ceil(len(self._pending) / (2 * len(self._children)))
            size = min(fair, int(_CHUNK_S / max(self._mean_s, 1e-6)))
        chunk: list[RewardJob] = []
        while self._pending and len(chunk) < max(1, size):
            job = self._pending.popleft()
            if not (job.abandoned or job.future.cancelled()):
                chunk.append(job)
        return chunk

    def _receive(self, patience: float) -> bool:
        """Take in what has arrived; False if no process sent anything within `patience` seconds."""
        by_channel = {child.channel: child for child in self._children if not child.gone}
        told, woken = ready_channels(list(by_channel), self._wake_read, patience)
        if woken:
            os.read(self._wake_read, 65536)
        for channel in told:
            child = by_channel[channel]
            for message in child.receive():
                if isinstance(message, Failed):
                    raise _LoadError(RewardError(message.message))
                if isinstance(message, Ready):
                    self._loaded(child, message)
                    continue
                for answer in message:
                    self._take(child, answer)
                if child.broken is not None:
                    break
        return bool(told)

    def _loaded(self, child: ChildProcess, message: Ready) -> None:
        child.ready = message
        with self._changed:
            self._ready = message
            self._changed.notify_all()

    def _take(self, child: ChildProcess, answer: JobResults) -> None:
        job = child.working_on.get(answer.number)
        if job is None or len(answer.results) not in (1, job.count or 1):
            child.broken = child.broken or f"results of job {answer.number}, which it has not to answer"
        if job is None or child.broken is not None:
            return
        del child.working_on[job.number]
        self._finish(job, self._result_of(job, answer, child.label))

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
        failed = next((one for one in outcomes if isinstance(one, ScoreError)), None)
        if failed is not None and failed.reason not in self.tolerates:
            return failed
        return [_tolerated(one) if isinstance(one, ScoreError) else one for one in outcomes]

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
        what = f"reward of {job.name} took more than reward.timeout_s={self.timeout_s:g} seconds"
        notify(f"{what}. Raise the limit if the function needs the time.", "warning")
        return without_score(Unscored(Reason.TIMEOUT, what), seconds, timed_out=True)

    # ------------------------------------------------------------------ limits and ends

    def _patience(self) -> float:
        """Seconds until the next time limit can be exceeded."""
        now = time.monotonic()
        left = [child.deadline(self.timeout_s) - now for child in self._children if child.working_on]
        return min(_POLL_S, max(0.005, min(left, default=_POLL_S)))

    def _end_hung(self) -> None:
        now = time.monotonic()
        for child in [c for c in self._children if c.working_on and c.deadline(self.timeout_s) <= now]:
            stopped = child.stopped
            hung, since = child.current()
            blames_none = stopped and hung is not None and hung.lost < _LOST_LIMIT
            if hung is not None and not blames_none:
                del child.working_on[hung.number]
                self._finish(hung, self._timed_out(hung, now - since))
            # One that computes a sample that was answered before is an async function that went on at its time limit.
            counted = stopped or (hung is None and not child.computes)
            what = "was stopped by a signal" if stopped else "stopped answering"
            self._put_back(self._end(child), f"{child.label}: its process {what}" if counted else None)

    def _check_dead(self) -> None:
        """A process that ended by itself: killed for memory, crashed in a C extension, `os._exit()` in the function."""
        for child in [c for c in self._children if c.gone]:
            if child.ready is None:
                raise self._never_started(child)
            computed, _ = child.current()
            what = f"{child.label}: its process {child.death()}"
            if computed is not None:
                del child.working_on[computed.number]
                name = computed.name if computed.count is None else f"{computed.count} responses"
                self._finish(computed, ScoreError(f"{what} while it scored {name}.", Reason.INFRA))
                self._put_back(self._end(child))
            else:
                self._put_back(self._end(child), what)

    def _put_back(self, jobs: Sequence[RewardJob], lost: str | None = None) -> None:
        """Have other processes score these.

        Args:
            jobs: what a process that ended had not answered.
            lost: what became of it, where none of them is to blame. After `_LOST_LIMIT` such ends a sample fails.
        """
        if lost is not None:
            notify(f"{lost} while it computed no sample; another takes its place", "warning")
            for job in jobs:
                job.lost += 1
        failed = [job for job in jobs if lost is not None and job.lost >= _LOST_LIMIT]
        for job in failed:
            what = f"{lost} with {job.name} waiting in it, which happened {job.lost} times."
            self._finish(job, ScoreError(what, Reason.INFRA))
        kept = [job for job in jobs if job not in failed]
        self._pending.extendleft(sorted(kept, key=lambda job: job.number, reverse=True))

    def _check_starting(self) -> None:
        for child in [c for c in self._children if c.ready is None]:
            if child.gone:
                raise self._never_started(child)
            if time.monotonic() - child.started > _START_LIMIT_S:
                raise _LoadError(
                    RewardError(
                        f"{self.function.label}: not imported after {_START_LIMIT_S:g} seconds. What does the file do "
                        "on import?"
                    )
                )

    def _never_started(self, child: ChildProcess) -> "_LoadError":
        reason = f"{self.function.label}: its process {child.death()} while it loaded the function."
        self._end(child)
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

    def _end(self, child: ChildProcess) -> list[RewardJob]:
        """End a process; returns what it had not answered."""
        child.end()
        self._children.remove(child)
        left, child.working_on = list(child.working_on.values()), {}
        return left


class _LoadError(Exception):
    """The function cannot be loaded."""

    def __init__(self, reason: RewardError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _tolerated(error: ScoreError) -> Outcome:
    return without_score(Unscored(error.reason, str(error)), 0.0, error=str(error))
