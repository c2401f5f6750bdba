"""A server that runs programs in the local sandbox and speaks SandboxFusion's HTTP API.

    HYBRIDRL_SANDBOX_TOKEN=... python -m hybridrl.sandbox.server --host 0.0.0.0 --port 8080

`POST /run_code` takes `code`, `language`, `stdin`, `run_timeout`, `compile_timeout`, `memory_limit_MB`, `files` (base64
by path) and `fetch_files`, and answers `{status, message, run_result, compile_result, files}`. `GET /health` says how
many programs run and wait.
"""

import argparse
import asyncio
import base64
import binascii
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.notify import notify
from hybridrl.sandbox.languages import LANGUAGES, runnable
from hybridrl.sandbox.local import EXPOSURE, LocalSandbox, check_paths
from hybridrl.sandbox.program import Ended, Limits, Program, SandboxError
from hybridrl.sandbox.remote_sandbox import TOKEN_VARIABLE
from hybridrl.utils.cores import available_cores
from hybridrl.utils.http_server import (
    HttpRefusal,
    HttpServer,
    JsonApp,
    ServingLimits,
    TokenGuard,
    listening_socket,
)

_POLL_S = 0.05
_STATUS = {"": "Finished", "time": "TimeLimitExceeded", "output": "OutputLimitExceeded"}
_FIELDS = ("code", "language", "stdin", "run_timeout", "compile_timeout", "memory_limit_MB", "files", "fetch_files")


@dataclass(frozen=True)
class ServerLimits:
    """Limits on the requests that the server accepts.

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


class SandboxService:
    """The service behind the server's requests.

    Args:
        limits: what it accepts.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.sandbox = LocalSandbox(limits.program, limits.concurrent, allow_unisolated=limits.allow_unisolated)
        self.admitted = 0
        self._threads = ThreadPoolExecutor(limits.concurrent, thread_name_prefix="programs")
        self._places = asyncio.Semaphore(limits.concurrent)
        self._running: dict[Future[Ended], list[int]] = {}  # with the number of the thread, once it has begun

    def app(self, token: str | None) -> TokenGuard:
        """The application; requests that run programs have to bring the token, where there is one."""
        health = ("GET", "/health"), ("GET", "/v1/ping")
        routes = JsonApp({("POST", "/run_code"): self._run_code, **dict.fromkeys(health, self._health)})
        open_paths = [path for _, path in health]
        return TokenGuard(routes, token, self.limits.body_mb * 2**20, "--max-body-mb", open_paths)

    async def _health(self, _: Any) -> tuple[int, Mapping[str, Any]]:
        return HTTPStatus.OK, {"status": "ok", "taken": self.admitted, "languages": list(LANGUAGES)}

    async def _run_code(self, body: Any) -> tuple[int, Mapping[str, Any]]:
        program, limits = _read(body, self.limits)
        if self.admitted >= self.limits.concurrent + self.limits.queue:
            raise HttpRefusal(HTTPStatus.TOO_MANY_REQUESTS, f"{self.admitted} programs run or wait; send it later")
        self.admitted += 1
        try:
            async with self._places:
                return HTTPStatus.OK, await self._ended(program, limits)
        finally:
            self.admitted -= 1

    async def _ended(self, program: Program, limits: Limits) -> Mapping[str, Any]:
        """Run a program; it is ended where nobody waits for it any more."""
        thread: list[int] = []

        def run() -> Ended:
            thread.append(threading.get_native_id())
            return self.sandbox.run(program, limits)

        running = self._threads.submit(run)
        self._running[running] = thread
        try:
            return _answer_of(await asyncio.shield(asyncio.wrap_future(running)))
        except SandboxError as error:
            return {"status": "SandboxError", "message": str(error), "run_result": None, "compile_result": None}
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.shield(_end_programs(running, thread))
            raise
        finally:
            if running.done():
                del self._running[running]

    async def close(self) -> None:
        """End all programs, and let no further one begin."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(_end_programs(running, thread) for running, thread in self._running.items()))


async def _end_programs(running: "Future[Ended]", thread: Sequence[int]) -> None:
    """End what a thread has started, until its program is over: it may start one more, after a compiler.

    Each jail ends all that is in it when it gets SIGTERM.
    """
    while not running.done():
        with contextlib.suppress(OSError, IndexError):
            started = Path(f"/proc/self/task/{thread[0]}/children").read_text().split()
            for pid in map(int, started):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(_POLL_S)


def _read(body: Any, limits: ServerLimits) -> tuple[Program, Limits]:
    """The program of a request.

    Raises:
        HttpRefusal: the request asks for something that is not served; nothing of it is ignored.
    """

    def refuse(message: str) -> HttpRefusal:
        return HttpRefusal(HTTPStatus.UNPROCESSABLE_ENTITY, message)

    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        raise refuse("the body is an object with 'code', text")
    if unknown := [name for name in body if name not in _FIELDS and body[name] not in (None, {}, [])]:
        raise refuse(f"unknown fields: {', '.join(unknown)}; allowed are {', '.join(_FIELDS)}")
    language = body.get("language")
    if language not in LANGUAGES:
        raise refuse(f"unknown language {language!r}; choose from {', '.join(LANGUAGES)}")
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
            f"error: --host {args.host} can be reached by others, and no token is set: set {TOKEN_VARIABLE}, or give "
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
        listener = listening_socket(args.host, args.port)
        service = SandboxService(limits)
        if reason := service.sandbox.check(runnable()):
            notify(
                f"the kernel gives no namespaces ({reason}), and programs run without isolation, as "
                f"--allow-unisolated or the environment allows: {EXPOSURE}. Run the server as root, or allow user "
                "namespaces",
                "warning",
            )
        asyncio.run(_serve(service, listener, args.host, token or None, args.max_connections))
    except (OSError, RewardError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(
    service: SandboxService, listener: socket.socket, host: str, token: str | None, max_connections: int
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    server = HttpServer(service.app(token), listener, ServingLimits(max_connections))
    await server.serve_until_ended(f"sandbox: http://{host}:{listener.getsockname()[1]}/run_code")
    await service.close()


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
    parser.add_argument("--max-connections", type=int, default=1024, help="of clients at once; more get 503 (1024)")
    parser.add_argument("--max-queue", type=int, default=1024, help="requests that may wait; more get 429 (1024)")
    parser.add_argument("--max-body-mb", type=int, default=64, help="size of a request (64)")
    parser.add_argument("--max-time-s", type=float, default=120.0, help="largest run_timeout (120)")
    parser.add_argument("--max-memory-mb", type=int, default=1024, help="largest memory_limit_MB (1024)")
    defaults = Limits()
    parser.add_argument("--max-processes", type=int, default=defaults.processes, help="of a program (32)")
    parser.add_argument("--max-files-mb", type=int, default=defaults.files_mb, help="that a program writes (64)")
    parser.add_argument("--max-output-kb", type=int, default=defaults.output_kb, help="that a program prints (256)")
    args = parser.parse_args(argv)
    for name in (name for name in vars(args) if name.startswith("max_")):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give a number above 0")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
