"""A process of the reward pool: loads the reward function, scores what it is sent, reports.

Run as `main` in a process of its own; imports neither torch nor numpy.

The pool sends, pickled, the function, the time limit, and then `(kind, [(number, pickled value), ...])`: kind `samples`
with one `Sample` each, or `batch` with one list of them. `messages` has the form of the answers. An async function
works on new samples while others wait.

The cell, 16 bytes of memory shared with the pool, holds the number being worked on and since when, so that the pool can
find a hung call and name it.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import mmap
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import Coroutine, Generator, Iterator, Sequence
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.processes.forked import default_in_children
from hybridrl.processes.frames import FrameConnection
from hybridrl.processes.supervisor import split_off
from hybridrl.processes.untrusted_results import Result
from hybridrl.reward.function import LoadedFunction, RewardFunction, load
from hybridrl.reward.processes.messages import Failed, JobResults, Message, Ready, encode
from hybridrl.reward.results import BadScore, Score, check_score, check_scores
from hybridrl.reward.signature import RewardCall, Sample
from hybridrl.scored import Unscored, UnscoredError
from hybridrl.utils import clock

CELL = struct.Struct("<qd")
IDLE = -1
_LONGEST_WAIT_S = 3600.0  # for what has limits of its own, such as a sandbox
_POLL_S = 0.05
_FLUSH_S = 0.002  # answers are sent together if they come faster than this


class PoolConnection(FrameConnection):
    """The connection to the pool."""

    def report(self, message: Message) -> None:
        """Send a message."""
        self.send(encode(message))

    def next_request(self) -> Any:
        """Return the next object that the pool sent.

        Raises:
            EOFError: the pool is gone.
        """
        return pickle.loads(self.receive())


def main(connection_fd: int, life_fd: int, cell_fd: int) -> None:
    """Serve until the pool closes the connection."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        # Ctrl-C and a hangup go to every process of the terminal, but the run saves its state first. A handler, not
        # SIG_IGN: programs that the reward function starts would inherit that.
        signal.signal(number, lambda *_: None)
    # Inherited as ignored from some programs, it would hide how the programs end that the reward function starts.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the run blocks SIGHUP for what it starts
    split_off(life_fd, close=(connection_fd, cell_fd))
    default_in_children(signals)  # what the reward function forks must end by SIGTERM: multiprocessing relies on it
    connection = PoolConnection(connection_fd)
    os.register_at_fork(after_in_child=connection.close)
    cell = Cell(mmap.mmap(cell_fd, CELL.size))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the run has ended before this started
        function: RewardFunction = connection.next_request()
        timeout_s: float = connection.next_request()
        try:
            loaded = load(function)
        except RewardError as error:
            connection.report(Failed(str(error)))
            return
        connection.report(Ready(loaded.how, loaded.is_async, loaded.label, os.getpid()))
        serve(connection, cell, loaded, timeout_s)


def serve(connection: PoolConnection, cell: Cell, function: LoadedFunction, timeout_s: float) -> None:
    """Answer requests until the connection ends."""
    loop = EventLoop(cell, timeout_s) if function.is_async else None
    if loop is not None and function.form == "sample":
        loop.serve(function, connection)
        return
    while True:
        try:
            kind, calls = connection.next_request()
        except EOFError:  # the run has ended, in order or not
            return
        outbox = Outbox(connection)
        for number, payload in calls:
            value = pickle.loads(payload)
            if kind == "batch":
                outbox.add(_score_batch(function, number, value, cell, loop))
            else:
                outbox.add(_score_one(function, number, value, cell))
        outbox.flush()


def _score_one(function: LoadedFunction, number: int, sample: Sample, cell: Cell) -> JobResults:
    start = cell.begin(number)
    try:
        with _only_this_process(), cell.measured(number):
            result = _checked(_settled(function(sample)), function.how)
    except BaseException as error:  # sys.exit() in a reward function is an error of that function, too
        result = _raised(error)
    _stop_timers()
    cell.end()
    return JobResults(number, [result], time.monotonic() - start)


def _score_batch(
    function: LoadedFunction, number: int, samples: Sequence[Sample], cell: Cell, loop: EventLoop | None
) -> JobResults:
    start = cell.begin(number)
    try:
        with _only_this_process(), cell.measured(number):
            value = function.batch(samples)
            value = loop.wait(value) if loop is not None else _settled(value)
        results = [
            Result("bad", text=str(score)) if isinstance(score, BadScore) else _result(score)
            for score in check_scores(value, len(samples), function.how.may_abstain)
        ]
    except BadScore as error:
        results = [Result("bad", text=str(error))]
    except BaseException as error:
        results = [_raised(error)]
    _stop_timers()
    cell.end()
    return JobResults(number, results, time.monotonic() - start)


def _settled(value: Any) -> Any:
    """A result, waited for where a function that is not async itself returned an awaitable, as decorators do."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def outer() -> Any:
        return await value

    return asyncio.run(outer())


def _stop_timers() -> None:
    """Stop those of the function that has returned: they must not end the next call."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)


@contextlib.contextmanager
def _only_this_process() -> Iterator[None]:
    """A process that is forked within this context, and leaves it, ends as a program of its own would.

    It would otherwise answer in the place of its parent.
    """
    pid, status = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == pid:
            raise
        code = error.code if isinstance(error, SystemExit) else 1
        status = code if isinstance(code, int) else int(code is not None)
        if not isinstance(error, SystemExit):
            traceback.print_exc()
    finally:
        if os.getpid() != pid:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status & 0xFF)


def _checked(value: Any, how: RewardCall) -> Result:
    try:
        return _result(check_score(value, how.may_abstain))
    except BadScore as error:
        return Result("bad", text=str(error))


def _result(score: Score | Unscored) -> Result:
    if isinstance(score, Unscored):
        return Result("missing", text=score.detail, reason=score.reason.value)
    return Result("score", *score)


def _raised(error: BaseException) -> Result:
    """The traceback from the user's function on; an `UnscoredError` is a score that is missing."""
    if isinstance(error, UnscoredError):
        return _result(error.unscored)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, LoadedFunction.__module__):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
    return Result("raised", text="".join(lines).rstrip())


class Cell:
    """The work of this process, written here and read by the pool."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.end()

    def begin(self, number: int, seconds: float = 0.0) -> float:
        """Now working on this sample, for which so many seconds are over; returns the time."""
        now = time.monotonic()
        # The time first: the pool must never see a new number with an old time.
        CELL.pack_into(self._memory, 0, IDLE, now - seconds)
        CELL.pack_into(self._memory, 0, number, now - seconds)
        return now

    @contextlib.contextmanager
    def measured(self, number: int) -> Iterator[None]:
        """While the sample waits in `clock.stopped()`, its time does not pass for the pool."""

        def note(stopped: bool) -> None:
            self.begin(number, -_LONGEST_WAIT_S if stopped else measured.seconds)

        measured = clock.Clock(note)
        with clock.running(measured):
            yield

    def end(self) -> None:
        """Working on nothing."""
        CELL.pack_into(self._memory, 0, IDLE, time.monotonic())

    def read(self) -> tuple[int, float]:
        """The number (`IDLE` for none) and since when (`time.monotonic`)."""
        while True:
            first, second = CELL.unpack_from(self._memory), CELL.unpack_from(self._memory)
            if first == second:
                return first


class Outbox:
    """Collects answers and sends them in few messages."""

    def __init__(self, connection: PoolConnection) -> None:
        self._connection = connection
        self._answers: list[JobResults] = []
        self._last = time.monotonic()

    def add(self, answer: JobResults) -> None:
        """Send it now, or with the next ones."""
        self._answers.append(answer)
        if time.monotonic() - self._last > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send what was added. That the run has ended is noticed on receiving."""
        if self._answers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._connection.report(self._answers)
        self._answers = []
        self._last = time.monotonic()


class EventLoop:
    """Runs the samples of an async function at the same time.

    A sample that waits too long is cancelled here, and reported whether or not it lets itself be cancelled. One that
    blocks the loop is found by the pool: the cell holds the sample's number during every step of every task of the
    sample.
    """

    def __init__(self, cell: Cell, timeout_s: float) -> None:
        import asyncio  # only async functions need it, and it is the slowest import here

        self._asyncio = asyncio
        self._cell = cell
        self._timeout_s = timeout_s
        self._number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=IDLE)
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(self._task)
        os.register_at_fork(after_in_child=self._forget)
        self._tasks: set[Any] = set()  # the loop itself does not keep tasks alive

    def _forget(self) -> None:
        """Leave the loop to the parent: its selector is shared, and a forked process gets a loop of its own."""
        if sys.version_info < (3, 12):  # which does this itself
            self._asyncio.set_event_loop_policy(None)

    def wait(self, awaitable: Any) -> Any:
        """The result of one awaitable."""

        async def outer() -> Any:
            return await awaitable

        return self._loop.run_until_complete(outer())

    def serve(self, function: LoadedFunction, connection: PoolConnection) -> None:
        """Score samples as they arrive, each within the time limit, until the connection ends."""
        outbox = Outbox(connection)

        async def score(number: int, sample: Sample) -> None:
            self._number.set(number)
            start = time.monotonic()
            result = await self._score_one(function, sample)
            outbox.add(JobResults(number, [result], time.monotonic() - start))
            self._loop.call_later(_FLUSH_S, outbox.flush)

        def receive() -> None:
            try:
                _, calls = connection.next_request()
            except EOFError:  # the run has ended, in order or not
                self._loop.stop()
                return
            for number, payload in calls:
                self._start(score(number, pickle.loads(payload)))

        self._loop.add_reader(connection.fileno(), receive)
        self._loop.run_forever()

    async def _score_one(self, function: LoadedFunction, sample: Sample) -> Result:
        async def attempt() -> Result:
            try:
                with _only_this_process():
                    return _checked(await function(sample), function.how)
            except self._asyncio.CancelledError:
                raise
            except BaseException as error:
                return _raised(error)

        with clock.running(clock.Clock()) as measured:
            task = self._start(attempt())
        remaining_s = self._timeout_s
        while remaining_s > 0 and not (await self._asyncio.wait([task], timeout=remaining_s))[0]:
            remaining_s = self._timeout_s - measured.seconds
            remaining_s = max(remaining_s, _POLL_S) if measured.is_stopped else remaining_s
        if not task.done():
            task.cancel()  # nothing waits for it: it may catch that, and go on
            return Result("timeout")
        if task.cancelled():
            return Result("raised", text="asyncio.CancelledError")
        result: Result = task.result()
        return result

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _task(self, loop: Any, coroutine: Any, **kwargs: Any) -> Any:
        """Every task that a sample starts is watched under the sample's number."""

        async def watched() -> Any:
            number = self._number.get()
            return await (coroutine if number == IDLE else _Steps(coroutine, number, self._cell))

        return self._asyncio.Task(watched(), loop=loop, **kwargs)


class _Steps:
    """An awaitable that runs a coroutine and writes its sample into the cell during each step."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, cell: Cell) -> None:
        self._coroutine = coroutine
        self._number = number
        self._cell = cell

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        resume: Any = None
        failure: BaseException | None = None
        while True:
            self._cell.begin(self._number)
            try:
                waiting_for = steps.send(resume) if failure is None else steps.throw(failure)
            except StopIteration as finished:
                return finished.value
            finally:
                self._cell.end()
            resume, failure = None, None
            try:
                resume = yield waiting_for
            except BaseException as error:  # a cancellation or a failed wait, which belongs to the coroutine
                failure = error
