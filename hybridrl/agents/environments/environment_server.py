"""A server of environments as a process of its own: it starts on demand, and again where it has died."""

import contextlib
import http.client
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

from hybridrl.agents.environments.install import own_variables
from hybridrl.errors import RolloutError
from hybridrl.notify import notify
from hybridrl.utils import http_server
from hybridrl.utils.movement import watch_of

_LAUNCHER = Path(__file__).with_name("server_launcher.py")
_END_S = 5.0
_ASK_S = 2.0


class EnvironmentServer:
    """An ASGI application on a port of this machine, behind a token. It ends with this process.

    Attributes:
        headers: what each of its clients has to send.

    Args:
        python: of the server's environment.
        app: `MODULE:NAME`.
        folder: the folder that it runs in, from which MODULE can be imported.
        start_timeout_s: seconds until it must answer; None: it has time as long as something moves.
        variables: further environment variables.
    """

    def __init__(
        self,
        python: Path,
        app: str,
        folder: Path,
        start_timeout_s: float | None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._python, self._app, self._folder = python, app, folder
        self._variables = dict(variables)
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._ended = False
        self._token = secrets.token_urlsafe(32)
        self.headers = {"Authorization": f"Bearer {self._token}"}

    def port(self) -> int:
        """The port of the running server, which is started if it does not run.

        Raises:
            RolloutError: it does not start; its own output says why.
        """
        with self._lock:
            if self._ended:
                raise RolloutError(f"the server {self._app} was ended with the run")
            if self.process is not None and not _listens(self._port):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(_END_S)  # a process that ends closes its sockets first
            if self.process is not None and self.process.poll() is not None:
                notify(
                    f"the server {self._app} ended with status {self.process.returncode}; it starts again", "warning"
                )
                self.process = None
            if self.process is None:
                self._start()
            return self._port

    def stop(self) -> None:
        """End it."""
        with self._lock:
            self._ended = True
            if self.process is None:
                return
            self.process.terminate()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _start(self) -> None:
        with tempfile.TemporaryFile() as log:  # the server keeps it open
            self._started(log)

    def _started(self, log: IO[bytes]) -> None:
        with http_server.listening_socket("127.0.0.1", 0) as listening:
            self._port = listening.getsockname()[1]
            words = self._app, str(listening.fileno()), http_server.__file__
            command = [str(self._python), str(_LAUNCHER), *words]
            self.process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=own_variables() | self._variables,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[listening.fileno()],
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; below it is asked why
            self.process.stdin.write(f"{self._token}\n".encode())  # nobody sees it in the list of processes
            self.process.stdin.flush()
        watch = watch_of(f"the server {self._app}", self.process.pid, self._start_timeout_s)
        while not _answers(self._port, _ASK_S):
            late = watch.why_given_up()
            if late or self.process.poll() is not None:
                self.process.kill()
                self.process.wait()
                self.process = None
                log.seek(0)
                output = log.read().decode(errors="replace").strip()[-2000:]
                why = f"did not answer in {watch.waited_s:.0f} s: {late}" if late else "ended"
                raise RolloutError(f"the server {self._app} {why}; it wrote: {output or 'nothing'}")
            time.sleep(0.1)


def _listens(port: int) -> bool:
    """False where nobody has the port open; a server that is too busy to accept has."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def _answers(port: int, timeout_s: float) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
