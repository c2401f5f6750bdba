"""A server that runs programs in the local sandbox and speaks SandboxFusion's HTTP API.

    HYBRIDRL_SANDBOX_TOKEN=... python -m hybridrl.sandbox.server --host 0.0.0.0 --port 8080

`POST /run_code` takes `code`, `language`, `stdin`, `run_timeout`, `compile_timeout`, `memory_limit_MB`, `files` (base64
by path) and `fetch_files`, and answers `{status, message, run_result, compile_result, files}`. `GET /health` says how
many programs run and wait.
"""

import argparse
import base64
import binascii
import hmac
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.notify import notify
from hybridrl.sandbox.languages import LANGUAGES, runnable
from hybridrl.sandbox.local import EXPOSURE, LocalSandbox, check_paths
from hybridrl.sandbox.program import Ended, Limits, Program, SandboxError
from hybridrl.sandbox.remote import TOKEN_VARIABLE
from hybridrl.utils.cores import available_cores

_IDLE_S = 60.0  # a connection that sends nothing for so long is closed
_STATUS = {"": "Finished", "time": "TimeLimitExceeded", "output": "OutputLimitExceeded"}
_KNOWN = ("code", "language", "stdin", "run_timeout", "compile_timeout", "memory_limit_MB", "files", "fetch_files")


@dataclass(frozen=True)
class ServerLimits:
    """What the server accepts.

    Attributes:
        concurrent: programs that run at once.
        queue: requests that wait for that; more get HTTP 429.
        body_mb: size of a request.
        time_s: the largest `run_timeout` and `compile_timeout`.
        program: limits of a program besides its time; its memory is the largest `memory_limit_MB`.
        allow_unisolated: see `LocalSandbox`.
    """

    concurrent: int
    queue: int = 1024
    body_mb: int = 64
    time_s: float = 120.0
    program: Limits = field(default_factory=Limits)
    allow_unisolated: bool | None = None


class _Refused(Exception):
    """A request that is not served."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class SandboxServer(ThreadingHTTPServer):
    """The server; it listens once it is made.

    Args:
        address: host and port; port 0 takes a free one, see `server_port`.
        limits: what it accepts.
        token: that requests have to bring; None: none.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], limits: ServerLimits, token: str | None) -> None:
        self.limits = limits
        self.token = token
        self.sandbox = LocalSandbox(limits.program, limits.concurrent, allow_unisolated=limits.allow_unisolated)
        self._lock = threading.Lock()
        self._taken = 0
        super().__init__(address, _Handler)

    def admit(self, change: int) -> None:
        """Count a request that begins (1) or has ended (-1).

        Raises:
            _Refused: too many wait already.
        """
        with self._lock:
            if change > 0 and self._taken >= self.limits.concurrent + self.limits.queue:
                raise _Refused(HTTPStatus.TOO_MANY_REQUESTS, f"{self._taken} programs run or wait; send it later")
            self._taken += change

    @property
    def taken(self) -> int:
        """Requests that run or wait."""
        return self._taken


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_GET(self) -> None:
        if self.path.split("?")[0] not in ("/health", "/v1/ping"):
            self._answer(HTTPStatus.NOT_FOUND, {"detail": "there are POST /run_code and GET /health"})
            return
        self._answer(HTTPStatus.OK, {"status": "ok", "taken": self.server.taken, "languages": list(LANGUAGES)})

    def do_POST(self) -> None:
        try:
            self._check_token()
            body = self._body()
            if self.path.split("?")[0] != "/run_code":
                raise _Refused(HTTPStatus.NOT_FOUND, "there are POST /run_code and GET /health")
            program, limits = _read(body, self.server.limits)
            self.server.admit(1)
        except _Refused as error:
            self.close_connection = True  # the body may be unread
            self._answer(error.status, {"detail": str(error)})
            return
        try:
            answer = _answer_of(self.server.sandbox.run(program, limits))
        except SandboxError as error:
            answer = {"status": "SandboxError", "message": str(error), "run_result": None, "compile_result": None}
        finally:
            self.server.admit(-1)
        self._answer(HTTPStatus.OK, answer)

    def _check_token(self) -> None:
        token = self.server.token
        given = self.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise _Refused(HTTPStatus.UNAUTHORIZED, "send the header Authorization: Bearer TOKEN")

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "send Content-Length")
        if int(length) > self.server.limits.body_mb * 2**20:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {self.server.limits.body_mb} MB")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from None

    def _answer(self, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if self.close_connection:
                self.send_header("Connection", "close")
            if status is HTTPStatus.TOO_MANY_REQUESTS:
                self.send_header("Retry-After", "1")
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # nobody waits any more
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: programs and inputs may be private."""


def _read(body: Any, limits: ServerLimits) -> tuple[Program, Limits]:
    """The program of a request.

    Raises:
        _Refused: the request asks for something that is not served; nothing of it is ignored.
    """

    def refuse(what: str) -> _Refused:
        return _Refused(HTTPStatus.UNPROCESSABLE_ENTITY, what)

    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        raise refuse("the body is an object with 'code', text")
    if unknown := [name for name in body if name not in _KNOWN and body[name] not in (None, {}, [])]:
        raise refuse(f"unknown fields: {', '.join(unknown)}; known are {', '.join(_KNOWN)}")
    language = body.get("language")
    if language not in LANGUAGES:
        raise refuse(f"language {language!r}: there are {', '.join(LANGUAGES)}")
    times = {}
    for name in ("run_timeout", "compile_timeout"):
        value = body[name] if body.get(name) is not None else 10.0
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= limits.time_s:
            raise refuse(f"{name} {value!r}: a number above 0 and at most {limits.time_s:g}")
        times[name] = float(value)
    memory = body.get("memory_limit_MB")
    memory = limits.program.memory_mb if memory in (None, -1) else memory
    if not isinstance(memory, int) or isinstance(memory, bool) or not 0 < memory <= limits.program.memory_mb:
        raise refuse(f"memory_limit_MB {memory!r}: from 1 to {limits.program.memory_mb}, or -1")
    stdin, files, fetch = body.get("stdin") or "", body.get("files") or {}, body.get("fetch_files") or []
    if not isinstance(stdin, str) or not isinstance(files, dict) or not isinstance(fetch, list):
        raise refuse("stdin is text, files an object and fetch_files a list")
    try:
        written = {path: base64.b64decode(text, validate=True) for path, text in files.items() if text is not None}
        check_paths([*written, *map(str, fetch)])
    except (TypeError, ValueError, binascii.Error, SandboxError) as error:
        raise refuse(f"files: base64 by relative path: {error}") from None
    program = Program(
        body["code"], language, stdin.encode("utf-8", "replace"), written, tuple(map(str, fetch)),
        compile_s=times["compile_timeout"],
    )  # fmt: skip
    seconds = times["run_timeout"]
    return program, replace(limits.program, wall_s=seconds, cpu_s=max(1, round(seconds + 0.5)), memory_mb=memory)


def _answer_of(ended: Ended) -> dict[str, Any]:
    """The answer to a request whose program has ended."""
    compiled = ended.compiled
    ran = None if compiled is not None and not compiled.succeeded else ended
    fine = ended.succeeded and (compiled is None or compiled.succeeded)
    return {
        "status": "Success" if fine else "Failed",
        "message": "",
        "compile_result": None if compiled is None else _result(compiled),
        "run_result": None if ran is None else _result(ran),
        "executor_pod_name": None,
        "files": {path: base64.b64encode(data).decode() for path, data in ended.files.items()},
    }


def _result(ended: Ended) -> dict[str, Any]:
    return {
        "status": _STATUS[ended.ended],
        "execution_time": ended.seconds,
        "return_code": None if ended.ended else ended.code,
        "stdout": ended.output,
        "stderr": ended.errors,
    }


def main(argv: Sequence[str] | None = None, command: str = "python -m hybridrl.sandbox.server") -> int:
    """Serve until SIGTERM or Ctrl-C.

    Returns:
        The exit status.
    """
    args = _arguments(argv, command)
    token = os.environ.get(TOKEN_VARIABLE) if args.token_file is None else args.token_file.read_text().strip()
    if not token and args.host not in ("127.0.0.1", "::1", "localhost") and not args.no_token:
        print(
            f"error: --host {args.host} is reached by others, and there is no token: set {TOKEN_VARIABLE}, or give "
            "--token-file FILE, or --no-token in a network that you trust",
            file=sys.stderr,
        )
        return 2
    program = Limits(
        memory_mb=args.max_memory_mb,
        processes=args.max_processes,
        files_mb=args.max_files_mb,
        output_kb=args.max_output_kb,
    )
    limits = ServerLimits(
        args.max_concurrent, args.max_queue, args.max_body_mb, args.max_time_s, program, args.allow_unisolated or None
    )
    try:
        with SandboxServer((args.host, args.port), limits, token or None) as server:
            if reason := server.sandbox.check(runnable()):
                notify(
                    f"the kernel gives no namespaces ({reason}), and programs run without isolation, as "
                    f"--allow-unisolated or the environment allows: {EXPOSURE}. Run the server as root, or allow user "
                    "namespaces",
                    "warning",
                )
            signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
            print(f"sandbox: http://{args.host}:{server.server_port}/run_code", flush=True)
            server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        pass
    except (OSError, RewardError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments(argv: Sequence[str] | None, command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=command, description="Run programs in a sandbox, for others, over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="0: a free one, which is printed (8080)")
    parser.add_argument("--token-file", type=Path, help=f"file with the token of requests; else {TOKEN_VARIABLE}")
    parser.add_argument("--no-token", action="store_true", help="serve others without a token")
    cores = available_cores()
    parser.add_argument(
        "--allow-unisolated", action="store_true", help="run programs also where the kernel gives no namespaces"
    )
    parser.add_argument("--max-concurrent", type=int, default=cores, help=f"programs at once (cores: {cores})")
    parser.add_argument("--max-queue", type=int, default=1024, help="requests that may wait; more get 429 (1024)")
    parser.add_argument("--max-body-mb", type=int, default=64, help="size of a request (64)")
    parser.add_argument("--max-time-s", type=float, default=120.0, help="largest run_timeout (120)")
    parser.add_argument("--max-memory-mb", type=int, default=1024, help="largest memory_limit_MB (1024)")
    usual = Limits()
    parser.add_argument("--max-processes", type=int, default=usual.processes, help="of a program (32)")
    parser.add_argument("--max-files-mb", type=int, default=usual.files_mb, help="that a program writes (64)")
    parser.add_argument("--max-output-kb", type=int, default=usual.output_kb, help="that a program prints (256)")
    args = parser.parse_args(argv)
    for name in (name for name in vars(args) if name.startswith("max_")):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give a number above 0")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
