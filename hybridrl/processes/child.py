"""Starts programs of the library in processes of their own, and ends them with everything that they started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import IO

from hybridrl.processes.supervisor import descendants

END_S = 10.0  # for a process to end everything that it started


class Child:
    """A process that runs `main(CONNECTION, LIFE, *DESCRIPTORS)` of a module of ours; all arguments are descriptors.

    CONNECTION is a socket to this process. LIFE is a pipe on which nothing arrives: it is closed when this process
    ends, even by SIGKILL, or wants the child to end. The child watches it with `supervisor.split_off`, where it runs a
    user's code, or with `end_with_run`. It has this process's `sys.path`, and a session of its own, so that Ctrl-C does
    not reach it.

    Args:
        module: its name.
        descriptors: further descriptors that the child inherits.
        variables: environment variables that it gets in place of this process's.
        defaults: environment variables that it gets where this process has none.
        output: where it writes; None: where this process does.

    Attributes:
        process: the process, or its supervisor.
        connection: this process's end of the socket.
    """

    def __init__(
        self,
        module: str,
        descriptors: Sequence[int] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
        defaults: Mapping[str, str] = MappingProxyType({}),
        output: IO[bytes] | int | None = None,
    ) -> None:
        self.connection, theirs = socket.socketpair()
        life, self._life = os.pipe()
        passed = (theirs.fileno(), life, *descriptors)
        code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main{passed!r}"
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env={**defaults, **os.environ, **variables},
                start_new_session=True,
            )
        except BaseException:
            self.connection.close()
            os.close(self._life)
            raise
        finally:
            theirs.close()
            os.close(life)
        _children.add(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code, negative for a signal; None if it does not end within this time (None: `END_S`)."""
        try:
            return self.process.wait(END_S if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self, seconds: float | None = None) -> int:
        """End it and all that it started, which may take some seconds; returns its exit code."""
        self.leave()
        code = self.wait(seconds)
        if code is None:  # it, or its supervisor, is stopped or cannot keep up
            for pid in descendants(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            code = self.process.wait()
        return code

    def leave(self) -> None:
        """Close what this process, or one that was forked from it, holds of the child, which ends with the last one."""
        _children.discard(self)
        self.connection.close()
        life, self._life = self._life, -1
        if life >= 0:
            os.close(life)


#: those that this process has not left; a run may forget one, which lives on until it ends
_children: set[Child] = set()


def _leave_all() -> None:
    for child in list(_children):
        child.leave()


os.register_at_fork(after_in_child=_leave_all)


def ending(code: int | None) -> str:
    """Return how a process ended, for messages, from its exit code; None: it closed its connection and lives."""
    if code is None:
        return "closed its connection and was ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


def end_with_run(life: int, before: Callable[[], object] = lambda: None) -> None:
    """In a child: kill the process group of this process when the run ends, or ends it, whatever it does then.

    Args:
        life: the pipe; see `Child`.
        before: called before that.
    """
    os.set_inheritable(life, False)

    def watch() -> None:
        while os.read(life, 1):
            pass
        with contextlib.suppress(Exception):
            before()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="hybridrl-end-with-run", daemon=True).start()
