"""Pending calls, and how the controller waits for their answers.

A call of a method on n ranks is n Ray tasks with two outputs each: the method's result, and a small `Answer` that is
never put into the object store. The controller waits for the answers. The first rank that fails ends the wait, even if
others hang in a collective. The reported failure is the cause and not a symptom (`_pick`), and the group's processes
are ended.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from hybridrl.errors import WorkerError, WorkerTimeoutError
from hybridrl.protocol import DataProto, DataProtoFuture
from hybridrl.single_controller.base.decorator import PendingOutputs
from hybridrl.single_controller.base.failures import RemoteFailure, is_collective_error
from hybridrl.single_controller.base.padding import CollectUnpadded
from hybridrl.single_controller.ray import postmortem

if TYPE_CHECKING:
    from hybridrl.single_controller.ray.worker_group import RayWorkerGroup

# After a symptom (a broken collective, a death) the cause may still arrive. On a busy machine Ray takes seconds to
# notice that a process is gone.
GRACE_COLLECTIVE_S = 30.0
GRACE_DEATH_S = 1.0
# A failure of another call is raised in place of this one if this one does not end by itself.
GRACE_FOREIGN_S = 10.0

CONSTRUCTOR = "__init__"


class _InFlight:
    """Pending answers of all groups. Threads add, read and remove them concurrently.

    A rank may hang because of a failure in another group, so every wait checks these as well.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Any, GroupCall] = {}

    def add(self, call: GroupCall) -> None:
        """Record all answers of a call."""
        with self._lock:
            self._calls.update(call.owners())

    def remove(self, answers: Iterable[Any]) -> None:
        """Remove some answers. Answers that were already removed are ignored."""
        with self._lock:
            for answer in answers:
                self._calls.pop(answer, None)

    def snapshot(self) -> dict[Any, GroupCall]:
        """Return a copy of every answer with its call."""
        with self._lock:
            return dict(self._calls)


_IN_FLIGHT = _InFlight()


class GroupCall:
    """One method call on some ranks of a group.

    Args:
        ranks: the called ranks, in the order of `results` and `answers`.
        results: references to the method's results.
        answers: references to the `Answer`s.
    """

    def __init__(
        self, group: RayWorkerGroup, method: str, ranks: Sequence[int], results: list[Any], answers: list[Any]
    ) -> None:
        self.group = group
        self.method = method
        self.ranks = ranks
        self.results = results
        self.answers = answers
        self.ended = False
        self._holder: Any = None

    def watch(self, holder: Any = None) -> None:
        """Let waits for other calls notice a failure of this call, if the caller does not wait for it at once.

        Args:
            holder: the object that the caller will get the outputs from. Once it is gone, the next call reports a
                failure. Without a holder the next call always does.
        """
        try:
            self._holder = weakref.ref(holder)
        except TypeError:  # None, or an output of a user's collect_fn without weak references
            self._holder = None
        if not self.ended:
            _IN_FLIGHT.add(self)

    def is_dropped(self) -> bool:
        """Whether no object is left that could read the outputs."""
        return self._holder is None or self._holder() is None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every rank has answered.

        Raises:
            WorkerError: a rank failed.
            WorkerTimeoutError: some rank did not answer within `timeout_s` (the group's by default).
        """
        if self.ended:
            return
        timeout_s = self.group.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        pending = dict(zip(self.answers, self.ranks, strict=True))
        owners = {**_IN_FLIGHT.snapshot(), **self.owners()}
        others = {answer: None for answer, call in owners.items() if call is not self}
        broken_others: list[Any] = []
        broken_until = deadline
        spans: dict[int, tuple[float, float]] = {}
        while pending:
            done = _answered([*pending, *others], max(0.0, min(deadline, broken_until) - time.monotonic()))
            if not done and broken_others and broken_until < deadline:
                _fail(broken_others, [*pending], owners)
            if not done:
                self._time_out([*pending], timeout_s)
            for answered, (answer, failed) in zip(done, _outcomes(done), strict=True):
                if answered in pending:
                    rank = pending.pop(answered)
                    if failed:
                        _fail([answered, *broken_others], [*pending, *others], owners)
                    if self.method != CONSTRUCTOR:
                        spans[rank] = (answer.started, answer.seconds)
                    continue
                del others[answered]
                if not failed:
                    _IN_FLIGHT.remove([answered])
                    continue
                if not broken_others:
                    broken_until = time.monotonic() + GRACE_FOREIGN_S
                broken_others.append(answered)
        self._end(spans)

    def owners(self) -> dict[Any, GroupCall]:
        """Map each of the answers to this call."""
        return dict.fromkeys(self.answers, self)

    def _end(self, spans: dict[int, tuple[float, float]]) -> None:
        self.ended = True
        _IN_FLIGHT.remove(self.answers)
        self.group.add_spans(self.method, spans)

    def rank_of(self, answer: Any) -> int:
        """Return the rank that an answer comes from."""
        return self.ranks[self.answers.index(answer)]

    def _time_out(self, pending: list[Any], timeout_s: float) -> NoReturn:
        missing = [self.rank_of(answer) for answer in pending]
        answered = [rank for rank in self.ranks if rank not in missing]
        error = WorkerTimeoutError(
            f"{self.group.role}.{self.method}: no answer from ranks {missing} within {timeout_s:g} s "
            f"({'ranks ' + str(answered) + ' answered' if answered else 'no rank answered'}).\n"
            + "\n".join(self.group.describe_rank(rank) for rank in missing)
            + "\nRaise timeout_s of the worker group if the method may take that long. The group's workers are ended."
            + postmortem.stacks_of([self.group.info(rank) for rank in missing]),
            role=self.group.role,
            rank=missing[0],
            method=self.method,
        )
        error.missing = tuple(missing)
        _end_groups(error, self.group)
        raise error


def _answered(answers: list[Any], timeout_s: float) -> list[Any]:
    """Wait for one answer, and return all that are there by then: a wait for each would be quadratic in ranks."""
    done, others = ray.wait(answers, num_returns=1, timeout=timeout_s)
    if done and others:
        done += ray.wait(others, num_returns=len(others), timeout=0)[0]
    return done


def _outcomes(answers: list[Any]) -> list[tuple[Any, bool]]:
    """Return what each of these answers holds, and whether it is a failure."""
    try:
        return [(answer, False) for answer in ray.get(answers)]
    except RayError:
        return [_outcome(answer) for answer in answers]


def _outcome(answer: Any) -> tuple[Any, bool]:
    try:
        return ray.get(answer), False
    except RayError as error:
        return error, True


def forget(group: RayWorkerGroup) -> None:
    """Stop watching the calls of a group whose workers have ended."""
    calls = _IN_FLIGHT.snapshot()
    _IN_FLIGHT.remove([answer for answer, call in calls.items() if call.group.shares_workers(group)])


def check_in_flight(group: RayWorkerGroup) -> None:
    """Raise the failure of a call on `group` whose future is no longer held. Remove such calls that succeeded."""
    calls = _IN_FLIGHT.snapshot()
    dropped = [answer for answer, call in calls.items() if call.group.shares_workers(group) and call.is_dropped()]
    if not dropped:
        return
    done, _ = ray.wait(dropped, num_returns=len(dropped), timeout=0)
    for answer in done:
        try:
            ray.get(answer)
        except RayError:
            _fail([answer], [], calls[answer].owners())
    _IN_FLIGHT.remove(done)


# --- failures -------------------------------------------------------------------------------------------------------


class _Failure:
    """One rank's failed answer, and whether it is a cause or a symptom."""

    def __init__(self, call: GroupCall, rank: int, error: BaseException) -> None:
        self.call = call
        self.rank = rank
        cause = error.cause if isinstance(error, RayTaskError) else error
        self.remote = cause if isinstance(cause, RemoteFailure) else None
        self.error = cause
        if self.remote is not None:
            self.kind = 2 if is_collective_error(self.remote.summary) else 0
        elif isinstance(cause, RayActorError):
            self.kind = 1
        else:
            self.kind = 0

    @property
    def summary(self) -> str:
        if self.remote is not None:
            return f"{self.remote.role} rank {self.remote.rank}: {self.remote.summary.splitlines()[-1][:300]}"
        return f"{self.call.group.role} rank {self.rank}: {str(self.error).splitlines()[0]}"


def _fail(failed: list[Any], others: list[Any], owners: dict[Any, GroupCall]) -> NoReturn:
    """Raise the cause of failed answers. `others` are answers that may still contain it.

    All failures are part of the error, and the groups that they come from end with it, so none is reported twice.
    """
    owners[failed[0]].group.raise_if_ended()
    failures = [_judge(answer, owners) for answer in failed]
    grace = {0: 0.0, 1: GRACE_DEATH_S, 2: GRACE_COLLECTIVE_S}
    until = time.monotonic() + grace[failures[0].kind]
    others = list(others)
    while others:
        best = min(failure.kind for failure in failures)
        remaining = 0.0 if best == 0 else until - time.monotonic()
        done, others = ray.wait(others, num_returns=1, timeout=max(0.0, remaining))
        if not done:
            break
        try:
            ray.get(done[0])
        except RayError:
            failures.append(_judge(done[0], owners))
            if failures[-1].kind == 1:
                until = min(until, time.monotonic() + GRACE_DEATH_S)
    cause = min(failures, key=lambda failure: failure.kind)
    error = _to_error(cause, [failure for failure in failures if failure is not cause])
    _end_groups(error, *{failure.call.group for failure in failures})
    raise error from (cause.remote.original() if cause.remote is not None else None)


def _judge(answer: Any, owners: dict[Any, GroupCall]) -> _Failure:
    call = owners[answer]
    try:
        ray.get(answer)
    except RayError as error:
        return _Failure(call, call.rank_of(answer), error)
    raise AssertionError("an answer that failed cannot have come back good")


def _to_error(cause: _Failure, also: list[_Failure]) -> WorkerError:
    notes = ""
    others = list(dict.fromkeys(failure.summary for failure in also))
    others = [other for other in others if other != cause.summary]
    if others:
        notes = "\nOther failures that came with it:\n" + "\n".join(f"  {other}" for other in others)
    if cause.remote is not None:
        return cause.remote.to_error(notes)
    group = cause.call.group
    if isinstance(cause.error, RayActorError):
        return postmortem.died(group, cause.rank, cause.call.method, cause.error, notes)
    return WorkerError(
        f"{group.role} rank {cause.rank} in {cause.call.method}: {cause.error}{notes}",
        role=group.role,
        rank=cause.rank,
        method=cause.call.method,
    )


def _end_groups(error: WorkerError, *groups: RayWorkerGroup) -> None:
    for group in groups:
        group.end_with(error)


# --- what a call returns when the caller does not wait ---------------------------------------------------------------


class RayPendingOutputs(PendingOutputs):
    """References to a call's results, in rank order. `ray.get` accepts it as a list; `get()` also reports failures."""

    def __init__(self, call: GroupCall, indices: Sequence[int] | None = None, single: bool = False) -> None:
        self.call = call
        self.single = single
        self.indices = range(len(call.results)) if indices is None else indices
        super().__init__(call.results[index] for index in self.indices)

    def select(self, indices: Sequence[int]) -> RayPendingOutputs:
        """Return the outputs of some of the ranks."""
        return RayPendingOutputs(self.call, [self.indices[index] for index in indices])

    def concat(self) -> DataProtoFuture:
        """Concatenate the outputs, each a `DataProto`, to one future `DataProto`."""
        return RayDataProtoFuture(self.call, list(self.indices))

    def get(self) -> Any:
        """Wait for all ranks and return their values. For a call on rank 0 alone, return its value."""
        self.call.wait()
        return ray.get(self[0]) if self.single else ray.get(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class RayDataProtoFuture(DataProtoFuture):
    """The concatenated output of a call that may still be running.

    `get()` on the controller waits and reports failures like any call of the group. If the future is passed to another
    group's method, each of that group's ranks reads the rows of its shard directly from the workers that made them.
    """

    def __init__(self, call: GroupCall, indices: list[int]) -> None:
        super().__init__(collect_fn=DataProto.concat, futures=[call.results[index] for index in indices])
        self.call = call
        self.answers = [call.answers[index] for index in indices]

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the batch.

        Raises:
            WorkerError: a rank failed.
            WorkerTimeoutError: `timeout` seconds (by default the group's `timeout_s`) passed.
        """
        self.call.wait(timeout)
        return super().get()

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Return one future shard for each of `chunks` consumers."""
        return [RayShardFuture(self.collect_fn, self.futures, self.answers, index, chunks) for index in range(chunks)]

    def __reduce__(self) -> tuple[Any, ...]:
        return DataProtoFuture, (self.collect_fn, self.futures, self.dispatch_fn)


class RayShardFuture(DataProtoFuture):
    """Shard `index` of `chunks` of a future batch. It reads the numbers of rows from the answers, and then only the
    parts it needs."""

    def __init__(
        self, collect_fn: Callable[[list[Any]], Any], futures: list[Any], answers: list[Any], index: int, chunks: int
    ) -> None:
        super().__init__(collect_fn=collect_fn, futures=futures)
        self.answers = answers
        self.index = index
        self.chunks = chunks

    def get(self, timeout: float | None = None) -> DataProto:
        """Wait for the shard's rows.

        Raises:
            TypeError: the method that makes the batch did not return a `DataProto`.
            ValueError: the batch's rows do not divide evenly.
        """
        counts = [answer.rows for answer in ray.get(self.answers, timeout=timeout)]
        if min(counts) < 0:
            raise TypeError(
                f"part {counts.index(-1)} of a future batch is no DataProto: the method must return one on every rank. "
                "Call get() on a future of something else and pass the result"
            )
        total = sum(counts)
        if isinstance(self.collect_fn, CollectUnpadded):
            padding = self.collect_fn.padding
            total -= padding.added * (total // padding.rows)
        if total % self.chunks:
            raise ValueError(
                f"a future batch of {total} rows cannot be split over {self.chunks} ranks: padding needs the rows. "
                "Call get() on it first and pass the batch"
            )
        start = total // self.chunks * self.index
        stop = start + total // self.chunks
        parts, first = [], 0
        for future, count in zip(self.futures, counts, strict=True):
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high or total == 0:
                part = ray.get(future, timeout=timeout)
                parts.append(part if (low, high) == (0, count) else part.slice(low, high))
            first += count
        return DataProto.concat(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayShardFuture, (self.collect_fn, self.futures, self.answers, self.index, self.chunks)
