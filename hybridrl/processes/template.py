"""A process that has loaded code once, and is forked for each job: a job starts in milliseconds, whatever it imports.

The run's end is a `Template`, and the process calls `serve_forks`. Each job has a process and a supervisor of its own,
so one that blocks, ends its process or has to be ended takes no other with it. Where the template dies, another one is
started, and the jobs that run then go on.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping

from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.processes.child import Child
from hybridrl.processes.frame_stream import FrameStream
from hybridrl.processes.frames import FrameConnection, MalformedMessage

_LOOK_S = 0.5
_END_S = 5.0
_LARGEST_ANSWER = 2**16
_MOST_LOSSES = 3  # in a row, without a job that answered in between
_READY, _FAILED = b"ready", b"failed "


def serve_forks(connection: int, load: Callable[[bytes], Callable[[int, int], None]]) -> None:
    """In the template: load the code, and fork a process for each job, until the run ends.

    Args:
        connection: the descriptor of the socket to the run.
        load: takes the setup of `Template`, and returns the function that a job's process calls with the descriptors
            of its socket to the run and of its pipe (see `start.Child`). It raises what the run is told.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run decides when jobs end
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # processes that have ended go by themselves
    control = FrameConnection(connection)
    try:
        setup = bytes(control.receive())
    except EOFError:  # the run has ended
        return
    try:
        run = load(setup)
    except Exception as error:
        control.send(_FAILED + str(error).encode()[: _LARGEST_ANSWER - len(_FAILED)])
        return
    control.send(_READY)
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control.socket, 1, 2)
        except ConnectionResetError:
            return
        if not data:
            return
        job_connection, life = descriptors
        if os.fork() == 0:
            control.close()
            try:
                run(job_connection, life)
            finally:
                os._exit(0)
        os.close(job_connection)
        os.close(life)


class Template:
    """The process that is forked for each job.

    Args:
        module: its `main(CONNECTION, LIFE)` calls `serve_forks`.
        setup: what it loads.
        kind: of the jobs, in the plural, for messages.
        defaults: environment variables; see `start.Child`.
        error: the class of the errors that are raised.
        watch: takes the id of the process that starts, and returns what says why nobody should wait for it any longer;
            None: go on.

    Raises:
        UserError: its code cannot be loaded.
    """

    def __init__(
        self,
        module: str,
        setup: bytes,
        kind: str,
        defaults: Mapping[str, str],
        error: type[UserError],
        watch: Callable[[int], Callable[[], str | None]],
    ) -> None:
        self._module, self._setup, self._defaults = module, setup, defaults
        self._kind, self._error, self._watch = kind, error, watch
        self._lock = threading.Lock()
        self._losses = 0
        self._closed = False
        if fault := self._start():
            raise error(fault.removeprefix(_FAILED.decode()))

    @property
    def pid(self) -> int:
        """The id of the process that is forked now."""
        return self._child.pid

    def _start(self) -> str:
        """Start the process; returns why it does not run, which begins with `_FAILED` where its code says so."""
        self._child = Child(self._module, defaults=self._defaults)
        control = FrameConnection(self._child.connection)
        why_given_up = self._watch(self._child.pid)
        try:
            control.send(self._setup)
            while not control.arrives_within(_LOOK_S):
                if (why := why_given_up()) is not None:
                    raise TimeoutError(why)
            control.socket.settimeout(_END_S)  # for the rest of a message that has begun
            answer = bytes(control.receive(_LARGEST_ANSWER))
        except EOFError:
            answer = f"the process of {self._kind} ended while it started".encode()
        except (OSError, MalformedMessage) as error:
            answer = f"the process of {self._kind} does not start: {error}".encode()
        control.socket.settimeout(None)
        if answer == _READY:
            return ""
        self._child.end(_END_S)
        return answer.decode(errors="replace")

    @contextlib.asynccontextmanager
    async def job(self) -> AsyncIterator[FrameStream]:
        """Fork a process; yields the connection to it. It ends with the context, and all that it started with it.

        Raises:
            UserError: the process that starts jobs dies again and again.
        """
        ours, theirs = socket.socketpair()
        life_theirs, life = os.pipe()
        try:
            try:
                await self._fork(theirs.fileno(), life_theirs)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
                os.close(life_theirs)
            stream = await FrameStream.open(ours)
            try:
                yield stream
            finally:
                stream.close()
        finally:
            os.close(life)

    def note_answer(self) -> None:
        """Note that a job has answered, so that the process works."""
        self._losses = 0

    async def _fork(self, connection: int, life: int) -> None:
        """Have a process forked that has these descriptors, by another template where this one has died."""
        while True:
            child = self._child
            with contextlib.suppress(OSError):
                if not child.has_ended:
                    socket.send_fds(child.connection, [b"f"], [connection, life])
                    return
            await asyncio.to_thread(self._start_again, child)

    def _start_again(self, child: Child) -> None:
        """Start another process in place of one that has ended.

        Raises:
            UserError: it does not start, or ended too often.
        """
        with self._lock:
            if self._closed:
                raise self._error(f"the process that starts {self._kind} was closed with the run")
            if self._child is not child:  # another job has started it
                return
            status, fault = self._child.end(_END_S), "it died"
            while fault:
                self._losses += 1
                if self._losses > _MOST_LOSSES or fault.startswith(_FAILED.decode()):
                    raise self._error(
                        f"the process that starts {self._kind} ended {self._losses} times without one of them that "
                        f"answered in between; the last time: {fault.removeprefix(_FAILED.decode())} (status {status})"
                    )
                notify(
                    f"the process that starts {self._kind} ended with status {status}, and another one starts",
                    "warning",
                )
                fault = self._start()
                status = self._child.process.poll() or 0

    def close(self) -> None:
        """End the process. Jobs end with their contexts."""
        with self._lock:
            self._closed = True
            self._child.end(_END_S)
