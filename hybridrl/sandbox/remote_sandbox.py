"""Programs run by a server that speaks SandboxFusion's HTTP API, such as `hybridrl.sandbox.server`."""

import base64
import binascii
import hashlib
import math
import os
import signal
import urllib.parse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.sandbox.program import Ended, Limits, Program, Sandbox, SandboxError
from hybridrl.sandbox.slots import Slots
from hybridrl.utils import clock
from hybridrl.utils.json_client import JsonClient, ServiceError, is_address

#: the environment variable with the bearer token of the server
TOKEN_VARIABLE = "HYBRIDRL_SANDBOX_TOKEN"
_ROUTE = "/run_code"


class RemoteSandbox(Sandbox):
    """Runs programs through `POST {url}`.

    A request that fails (no connection, an HTTP status of 500 and more, an answer that is none, `SandboxError`) is sent
    again after a pause that doubles, `attempts` times in all. One that the server is too busy for (429, 503) is sent
    again until `patience_s` is over.

    The server limits time and memory; the other `Limits` are its own.

    Args:
        url: the address; `/run_code` is added where it has no path.
        limits: where `run` gets none.
        max_concurrent: requests at once, over all processes of this user on the machine.
        attempts: how often a request that fails is sent.
        patience_s: seconds that a request may wait in the server's queue, and in all for a server that is too busy.
        pause_s: seconds before the second attempt.
        token: sent as `Authorization: Bearer`; None: the value of HYBRIDRL_SANDBOX_TOKEN, where it is set.

    Raises:
        SandboxError: the url is none.
    """

    def __init__(
        self,
        url: str,
        limits: Limits | None = None,
        max_concurrent: int = 64,
        attempts: int = 4,
        patience_s: float = 300.0,
        pause_s: float = 0.5,
        token: str | None = None,
    ) -> None:
        if not is_address(url):
            raise SandboxError(f"sandbox url {url!r}: give an address such as http://HOST:8080/run_code")
        parts = urllib.parse.urlsplit(url)
        self.url = url if parts.path not in ("", "/") else urllib.parse.urlunsplit(parts._replace(path=_ROUTE))
        self.limits = limits or Limits()
        self.slots = Slots(max_concurrent, "remote-" + hashlib.sha256(self.url.encode()).hexdigest()[:16])
        self._patience_s, self._token = patience_s, token
        self._client = JsonClient(self.url, token or os.environ.get(TOKEN_VARIABLE), attempts, patience_s, pause_s)

    def run(self, program: Program, limits: Limits | None = None) -> Ended:
        limits = limits or self.limits
        body = _request_of(program, limits)
        with clock.stopped(), self.slots.acquired():
            answer = self._request(body, program.compile_s + limits.wall_s)
        return _ended(answer, program, self.url)

    def check(self) -> str:
        """Run a small program, with a single attempt."""
        once = RemoteSandbox(self.url, self.limits, self.slots.count, 1, 10.0, 0.0, self._token)
        result = once.run(Program("print(6 * 7)"))
        if result.output.strip() != "42":
            raise SandboxError(
                f"{self.url}: a program that prints 42 printed {result.output[:100]!r} {result.errors[-200:]}"
            )
        return ""

    def _request(self, body: Mapping[str, Any], own_s: float) -> Mapping[str, Any]:
        """The server's answer.

        Raises:
            SandboxError: it gives none.
        """
        try:
            return self._client.post(body, own_s + self._patience_s, _own_failure)
        except ServiceError as error:
            raise SandboxError(f"sandbox {error}", error.reason) from None


def _own_failure(answer: Mapping[str, Any]) -> str | None:
    """Return the server's report of a failure of its own; None if it has none."""
    if answer.get("status") != "SandboxError":
        return None
    return f"it reports a failure of its own: {str(answer.get('message'))[:300]}"


def _request_of(program: Program, limits: Limits) -> dict[str, Any]:
    body: dict[str, Any] = {
        "code": program.code,
        "language": program.language,
        "compile_timeout": program.compile_s,
        "run_timeout": limits.wall_s,
        "memory_limit_MB": limits.memory_mb,
        "files": {path: base64.b64encode(data).decode() for path, data in program.files.items()},
        "fetch_files": list(program.fetch),
    }
    if program.stdin:
        body["stdin"] = program.stdin.decode("utf-8", "replace")
    return body


def _ended(answer: Mapping[str, Any], program: Program, url: str) -> Ended:
    """Convert an answer of the server.

    Raises:
        SandboxError: it is none of this API.
    """
    try:
        compiled = _part(answer.get("compile_result"))
        if (result := answer.get("run_result")) is None:
            if compiled is None or compiled.succeeded:
                raise ValueError("no run_result")
            ran = compiled
        else:
            part = _part(result)
            assert part is not None
            ran = part
        files = {
            str(path): base64.b64decode(text) for path, text in (answer.get("files") or {}).items() if text is not None
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, binascii.Error) as error:
        raise SandboxError(f"sandbox {url}: the answer does not follow the API: {error!r}") from None
    if program.one_stream:
        ran = replace(ran, output=ran.output + ran.errors, errors="")
    return replace(ran, files=files, compiled=compiled)


_ENDS = {"Finished": "", "Error": "", "TimeLimitExceeded": "time", "OutputLimitExceeded": "output"}


def _part(result: Mapping[str, Any] | None) -> Ended | None:
    """The end of compiling or of running."""
    if result is None:
        return None
    code, ended = result.get("return_code"), _ENDS[result["status"]]
    output, errors = result.get("stdout"), result.get("stderr")
    seconds = float(result.get("execution_time") or 0.0)
    if code is None and ended:
        code = 128 + signal.SIGKILL
    if not isinstance(code, int) or isinstance(code, bool):
        raise ValueError(f"status {result['status']} with the return code {code!r}: {errors!r:.300}")
    if not (isinstance(output, str) or (output is None and ended)):
        raise ValueError(f"status {result['status']} with the output {output!r:.300}")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"an execution time of {seconds} s")
    return Ended(output=output or "", errors=str(errors or ""), code=code, ended=ended, seconds=seconds)
