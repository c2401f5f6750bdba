"""JSON over HTTP to a service that may fail or be busy. Light: for the processes of reward functions."""

import http.client
import json
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.verdict import Reason

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
        what: str,
        reason: Reason = Reason.INFRA,
        refused: bool = False,
        busy: bool = False,
        status: int | None = None,
    ) -> None:
        super().__init__(what)
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
                what = fault(answer)
                if what is None:
                    return answer
                failure = ServiceError(what)
            except ServiceError as error:
                failure = error
            failures += not failure.busy
            waited = time.monotonic() - started
            if failure.refused or failures >= self.attempts or (failure.busy and waited > self.patience_s):
                often = f" ({failures} attempts)" if failures > 1 else f" for {waited:.0f} s" if failure.busy else ""
                what = f"{self.url}{often}: {failure}"
                raise ServiceError(what, failure.reason, failure.refused, failure.busy, failure.status)
            time.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _post(self, body: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                data = reply.read(_LARGEST + 1)
        except urllib.error.HTTPError as error:
            told = error.read(2000).decode("utf-8", "replace").strip()
            busy, refused = error.code in _BUSY, error.code < 500 and error.code not in (408, *_BUSY)
            what = f"HTTP {error.code} {error.reason}: {told[:300]}"
            raise ServiceError(what, refused=refused, busy=busy, status=error.code) from None
        except (OSError, http.client.HTTPException) as error:  # a URLError is an OSError
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                raise ServiceError(f"no answer within {timeout_s:g} s", Reason.TIMEOUT) from None
            raise ServiceError(f"{type(cause).__name__}: {cause}") from None
        if len(data) > _LARGEST:
            raise ServiceError(f"an answer of more than {_LARGEST} bytes", refused=True)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            raise ServiceError(f"an answer that is no JSON: {data[:100]!r}") from None
        if not isinstance(answer, dict):
            raise ServiceError(f"an answer that is no object: {data[:100]!r}")
        return answer
