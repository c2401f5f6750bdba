"""JSON over HTTP to a service that may fail or be busy. Light: for the processes of reward functions."""

import contextlib
import http.client
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.scored import Reason

_BUSY = (429, 503)  # the service has too much to do, and says so at once
_LARGEST = 1 << 28  # bytes of an answer
_LONGEST_PAUSE_S = 10.0


class ServiceError(Exception):
    """A service gave no answer.

    Attributes:
        reason: `timeout` where it took too long, otherwise `infra`.
        refused: it answered that the request is wrong (an HTTP status of 400 to 499 other than 408 and 429).
        busy: it has too much to do.
        status: the HTTP status of its last answer, where it is the fault.
    """

    def __init__(
        self,
        message: str,
        reason: Reason = Reason.INFRA,
        refused: bool = False,
        busy: bool = False,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason, self.refused, self.busy, self.status = reason, refused, busy, status


def is_address(url: object) -> bool:
    """Whether a value is an address of HTTP or HTTPS."""
    if not isinstance(url, str):
        return False
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.netloc)


@dataclass(frozen=True)
class JsonClient:
    """Sends requests again that fail.

    Attributes:
        url: where requests go.
        token: sent as `Authorization: Bearer`; None: nothing is sent.
        attempts: how often a request is sent that fails: no connection, a status of 500 and more, an answer that is no
            JSON object.
        patience_s: seconds for which a request is sent again that the service is too busy for (429, 503).
        pause_s: seconds before the second attempt. Pauses double, up to 10 s.
    """

    url: str
    token: str | None = None
    attempts: int = 4
    patience_s: float = 300.0
    pause_s: float = 0.5

    def post(
        self,
        body: Mapping[str, Any],
        timeout_s: float,
        fault: Callable[[Mapping[str, Any]], str | None] = lambda answer: None,
    ) -> Mapping[str, Any]:
        """The answer to a request.

        Args:
            body: sent as JSON.
            timeout_s: seconds that an answer may take.
            fault: what is wrong with an answer, so that the request is sent again; None where nothing is.

        Raises:
            ServiceError: there is none.
        """
        failures, pause, started = 0, self.pause_s, time.monotonic()
        while True:
            try:
                answer = self._post(body, timeout_s)
                problem = fault(answer)
                if problem is None:
                    return answer
                failure = ServiceError(problem)
            except ServiceError as error:
                failure = error
            failures += not failure.busy
            waited = time.monotonic() - started
            if failure.refused or failures >= self.attempts or (failure.busy and waited > self.patience_s):
                often = f" ({failures} attempts)" if failures > 1 else f" for {waited:.0f} s" if failure.busy else ""
                problem = f"{self.url}{often}: {failure}"
                raise ServiceError(problem, failure.reason, failure.refused, failure.busy, failure.status)
            time.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _post(self, body: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        try:
            with _Deadline(timeout_s) as deadline:
                data = _answer_to(request, timeout_s, deadline)
        except ServiceError:
            if deadline.is_over:
                raise _late(timeout_s) from None
            raise
        # a URLError is an OSError, and an address that a redirect leads to may be none
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            if deadline.is_over or isinstance(cause, TimeoutError):
                raise _late(timeout_s) from None
            raise ServiceError(f"{type(cause).__name__}: {cause}") from None
        if deadline.is_over:
            raise _late(timeout_s)
        if len(data) > _LARGEST:
            raise ServiceError(f"an answer of more than {_LARGEST} bytes", refused=True)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            raise ServiceError(f"an answer that is no JSON: {data[:100]!r}") from None
        if not isinstance(answer, dict):
            raise ServiceError(f"the answer is not a JSON object: {data[:100]!r}")
        return answer


def _late(timeout_s: float) -> ServiceError:
    return ServiceError(f"no answer within {timeout_s:g} s", Reason.TIMEOUT)


def _answer_to(request: urllib.request.Request, timeout_s: float, deadline: "_Deadline") -> bytes:
    """The body of an answer.

    Raises:
        ServiceError: its status is that of an error.
        OSError, http.client.HTTPException, ValueError: it did not arrive.
    """
    opener = urllib.request.build_opener(_Http(deadline), _Https(deadline))
    try:
        with opener.open(request, timeout=timeout_s) as reply:
            data: bytes = reply.read(_LARGEST + 1)
            return data
    except urllib.error.HTTPError as error:
        detail = b""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # what it says besides is not needed
            detail = error.read(2000)
        busy, refused = error.code in _BUSY, error.code < 500 and error.code not in (408, *_BUSY)
        message = f"HTTP {error.code} {error.reason}: {detail.decode('utf-8', 'replace').strip()[:300]}"
        raise ServiceError(message, refused=refused, busy=busy, status=error.code) from None


class _Deadline:
    """Ends the connections of one request when its time is over: a timeout of sockets bounds each read alone.

    Args:
        seconds: until then.
    """

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def connection(self, kind: type[http.client.HTTPConnection]) -> Callable[..., http.client.HTTPConnection]:
        """Return a class of connections of a kind that end at the deadline."""
        deadline = self

        class Watched(kind):  # type: ignore[misc, valid-type]
            def connect(self) -> None:
                super().connect()
                deadline._watch(self.sock)

        return Watched

    def _watch(self, connected: socket.socket) -> None:
        with self._lock:
            self._sockets.append(connected)
            over = self.is_over
        if over:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            for connected in self._sockets:
                with contextlib.suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._connection_type = deadline.connection(http.client.HTTPConnection)

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection_type, request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._connection_type = deadline.connection(http.client.HTTPSConnection)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection_type, request, context=self._context)  # type: ignore[attr-defined]
