"""A process of the reward pool: loads the reward function, scores what it is sent, reports.

Run as `main` in a process of its own; imports neither torch nor numpy.

Messages are pickled tuples. From the pool: `("samples", [(number, pickled Sample), ...])` and
`("batch", [(number, pickled list of Samples)])`. To the pool: `("ready", form, is_async, label)` or
`("failed", message)` once, then `("results", [(number, kind, payload, seconds), ...])`, where kind is `score`, `bad`
(payload: what was wrong), `raised` (payload: traceback) or `timeout`. An async function works on new samples while
others wait.

The cell, 16 bytes of memory shared with the pool, holds the number being worked on and since when, so that the pool can
find a hung call and name it.
"""

from __future__ import annotations

import contextvars
import fcntl
import mmap
import os
import pickle
import select
import signal
import struct
import threading
import time
import traceback
from collections.abc import Coroutine, Generator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.function import BadScore, LoadedFunction, RewardFunction, Sample, check_score, check_scores, load

CELL = struct.Struct("<qd")
IDLE = -1
_FLUSH_S = 0.002  # results are sent together if they come faster than this

Result = tuple[int, str, Any, float]


def main(connection_fd: int, life_fd: int, cell_fd: int) -> None:
    """Serve until the pool closes the connection."""
    end_with_parent(life_fd)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C goes to every process of the terminal, but the run saves its state first. A handler, not SIG_IGN:
        # programs that the reward function starts would inherit that.
        signal.signal(number, lambda *_: None)
    # Inherited as ignored from some programs, it would hide how the programs end that the reward function starts.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection = Connection(connection_fd)
    cell = Cell(mmap.mmap(cell_fd, CELL.size))
    function: RewardFunction = pickle.loads(connection.recv_bytes())
    timeout_s: float = pickle.loads(connection.recv_bytes())
    try:
        loaded = load(function)
    except RewardError as error:
        _send(connection, ("failed", str(error)))
        return
    _send(connection, ("ready", loaded.form, loaded.is_async, loaded.label))
    serve(connection, cell, loaded, timeout_s)


def serve(connection: Connection, cell: Cell, function: LoadedFunction, timeout_s: float) -> None:
    """Answer requests until the connection ends."""
    loop = EventLoop(cell, timeout_s) if function.is_async else None
    if loop is not None and function.form == "sample":
        loop.serve(function, connection)
        return
    while True:
        try:
            kind, calls = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):  # the run has ended, in order or not
            return
        outbox = Outbox(connection)
        for number, payload in calls:
            value = pickle.loads(payload)
            if kind == "batch":
                outbox.add(_score_batch(function, number, value, cell, loop))
            else:
                outbox.add(_score_one(function, number, value, cell))
        outbox.flush()


def _score_one(function: LoadedFunction, number: int, sample: Sample, cell: Cell) -> Result:
    start = cell.begin(number)
    try:
        kind, payload = _checked(function(sample))
    except BaseException as error:  # sys.exit() in a reward function is an error of that function, too
        kind, payload = "raised", _trace(error)
    cell.end()
    return number, kind, payload, time.monotonic() - start


def _score_batch(
    function: LoadedFunction, number: int, samples: Sequence[Sample], cell: Cell, loop: EventLoop | None
) -> Result:
    start = cell.begin(number)
    kind: str
    payload: Any
    try:
        value = function.batch(samples)
        value = loop.wait(value) if loop is not None else value
        kind, payload = "score", check_scores(value, len(samples))
    except BadScore as error:
        kind, payload = "bad", str(error)
    except BaseException as error:
        kind, payload = "raised", _trace(error)
    cell.end()
    return number, kind, payload, time.monotonic() - start


def _checked(value: Any) -> tuple[str, Any]:
    try:
        return "score", check_score(value)
    except BadScore as error:
        return "bad", str(error)


def _trace(error: BaseException) -> str:
    """The traceback from the user's function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, LoadedFunction.__module__):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__)).rstrip()


def _send(connection: Connection, message: tuple[Any, ...]) -> None:
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


class Cell:
    """What this process is doing, written here and read by the pool."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.end()

    def begin(self, number: int) -> float:
        """Now working on this sample; returns the time."""
        now = time.monotonic()
        # The time first: the pool must never see a new number with an old time.
        CELL.pack_into(self._memory, 0, IDLE, now)
        CELL.pack_into(self._memory, 0, number, now)
        return now

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
    """Collects results and sends them in few messages."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._results: list[Result] = []
        self._last = time.monotonic()

    def add(self, result: Result) -> None:
        """Send it now, or with the next ones."""
        self._results.append(result)
        if time.monotonic() - self._last > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send what was added."""
        if self._results:
            _send(self._connection, ("results", self._results))
        self._results = []
        self._last = time.monotonic()


class EventLoop:
    """Runs the samples of an async function at the same time.

    A sample that waits too long is cancelled here. One that blocks the loop is found by the pool: the cell holds the
    sample's number during every step of every task of the sample.
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

    def wait(self, awaitable: Any) -> Any:
        """The result of one awaitable."""

        async def outer() -> Any:
            return await awaitable

        return self._loop.run_until_complete(outer())

    def serve(self, function: LoadedFunction, connection: Connection) -> None:
        """Score samples as they arrive, each within the time limit, until the connection ends."""
        outbox = Outbox(connection)
        tasks: set[Any] = set()

        async def one(number: int, sample: Sample) -> None:
            self._number.set(number)
            outbox.add(await self._score_one(function, number, sample))
            self._loop.call_later(_FLUSH_S, outbox.flush)

        def receive() -> None:
            try:
                _, calls = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):  # the run has ended, in order or not
                self._loop.stop()
                return
            for number, payload in calls:
                task = self._loop.create_task(one(number, pickle.loads(payload)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        self._loop.add_reader(connection.fileno(), receive)
        self._loop.run_forever()

    async def _score_one(self, function: LoadedFunction, number: int, sample: Sample) -> Result:
        start = time.monotonic()
        kind: str
        payload: Any
        limit = self._asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                kind, payload = _checked(await _Steps(function(sample), number, self._cell))
        except BaseException as error:
            if limit.expired():
                kind, payload = "timeout", None
            else:
                kind, payload = "raised", _trace(error)
        return number, kind, payload, time.monotonic() - start

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


def end_with_parent(life_fd: int) -> None:
    """Have this process and all that it started killed when the other end of a pipe closes, that is when the parent
    dies.

    On Linux the kernel does it, whatever this process is busy with. Elsewhere a thread does, which a C function that
    keeps the interpreter lock can hold up.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([life_fd], [], [], 0)[0]:  # it died before the kernel was asked
            os.killpg(os.getpgrp(), signal.SIGKILL)
        return

    def wait() -> None:
        os.read(life_fd, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
