"""Limits of the HTTP server: connections, header and body size, time, and the token before the body is read."""

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from hybridrl.rollout.server.schema import ApiError

MAX_HEADER_BYTES = 16 * 2**10
BODY_MB, BODY_MB_WITH_IMAGES = 8, 64
_BODY_KEY = "actor_rollout_ref.rollout.server.max_body_mb"
READ_S = 30.0  # from the first byte of a request to its last
SEND_S = 60  # for a client that takes nothing of its answer
KEEP_ALIVE_S = 10
_DISCARD_BYTES = 2**20  # of the body of a refused request, so that its client reads the answer
_DISCARD_S = 5.0
_TCP_USER_TIMEOUT = 18
_OPEN_PATHS = ("/health", "/metrics")
_SESSIONS = "/sessions/"
_GENERATING = ("/v1/", "/inference/v1/")
_TELLING = ("/is_paused", "/weight_info")  # of the state that answers of a session depend on
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def limit_sending(listener: socket.socket) -> None:
    """End connections whose client is gone or reads nothing; those that are accepted inherit the options."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # asyncio sets it only for sockets that were made with IPPROTO_TCP; without it an answer waits 40 ms for its body
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, SEND_S * 1000)


def error_bytes(error: ApiError) -> bytes:
    """An error in OpenAI's format as the body of an answer."""
    return json.dumps(error.body()).encode()


def body_of_error(path: str, error: ApiError) -> dict[str, Any]:
    """An error in the format of the API that a path belongs to."""
    body = error.body()
    if not path.endswith(_ANTHROPIC_PATHS):
        return body
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}, "request_id": None}


def _whole_answer(status: str, error: ApiError) -> bytes:
    """The last answer on a connection, as it is sent."""
    body = error_bytes(error)
    headers = f"content-length: {len(body)}\r\ncontent-type: application/json\r\nconnection: close"
    return f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n".encode() + body


class LimitedConnection(H11Protocol):
    """A connection that is refused where there are too many, and ended if a request takes too long to arrive.

    uvicorn's `limit_concurrency` is one more than the number of connections, because uvicorn applies it to requests.
    """

    _refused = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency - 1:
            self._refused = True
            limit = self.limit_concurrency - 1
            error = ApiError(503, f"too many connections: this server takes {limit}; try again later", code="busy")
            transport.write(_whole_answer("503 Service Unavailable\r\nretry-after: 1", error))
            transport.close()
            return
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._refused:
            self._request_is_here()
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.transport.is_closing():
            self._request_is_here()
        elif self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            idle = self.cycle is not None and self.cycle.response_complete and self.timeout_keep_alive_task is not None
            self._request_is_here() if idle else self._await_request()
        else:
            self._request_is_here()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request; uvicorn would answer in plain text."""
        self.transport.write(_whole_answer("400 Bad Request", ApiError(400, msg)))
        self.transport.close()

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(READ_S, self.transport.abort)

    def _request_is_here(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Guard:
    """ASGI middleware that checks the token before it reads a body, and bounds the body.

    Args:
        app: the application.
        token: the key that every path except `/health` and `/metrics` requires; None serves everybody.
        is_session: whether a text is the id of an open session. The id is a key too, for what generates in it.
        max_body_mb: longer bodies are refused.
    """

    def __init__(
        self,
        app: Any,
        token: str | None,
        is_session: Callable[[str], bool] = lambda id: False,
        max_body_mb: int = BODY_MB,
    ) -> None:
        self._app = app
        self._max_body = max_body_mb * 2**20
        self._token = token
        self._is_session = is_session

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
        path = scope["path"]
        session, error = self._session_and_fault(path, headers)
        if error is not None:
            await _refuse(path, error, receive, send)
            return
        if session is not None:
            scope = {**scope, "state": {**scope.get("state", {}), "session": session}}
            _, found, rest = path.partition(f"{_SESSIONS}{session}")
            if found and rest.startswith(_GENERATING):  # one route serves calls inside and outside of sessions
                scope |= {"path": rest, "raw_path": rest.encode()}
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:
                raise HTTPException(413, f"the body is longer than {self._max_body} bytes ({_BODY_KEY})")
            return message

        await self._app(scope, bounded, send)

    def _session_and_fault(self, path: str, headers: dict[bytes, bytes]) -> tuple[str | None, ApiError | None]:
        """The session that a request belongs to, and why it is refused."""
        key = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        session = self._named_session(path, key.decode("latin-1"))
        owner = self._token is None or hmac.compare_digest(key, self._token.encode())
        if session is None and path.startswith(_SESSIONS):
            id = path.removeprefix(_SESSIONS).partition("/")[0]
            if self._is_session(id):  # who knows the id may read and close the session
                session = id
            else:
                return None, ApiError(
                    404, f"{path}: there is no such session, or it was closed", code="session_not_found"
                )
        if session is None and not owner and path not in _OPEN_PATHS:
            return None, ApiError(
                401,
                "wrong or missing token: send `Authorization: Bearer TOKEN` with this run's token, or the id of an "
                "open session",
                code="invalid_api_key",
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._max_body:
            size = length[:20].decode("latin-1")
            return None, ApiError(413, f"the body has {size} bytes; the limit is {self._max_body} ({_BODY_KEY})")
        return session, None

    def _named_session(self, path: str, key: str) -> str | None:
        """The session whose id is the key of a request that generates or tells."""
        return key if (path.startswith(_GENERATING) or path in _TELLING) and self._is_session(key) else None


async def _refuse(path: str, error: ApiError, receive: Receive, send: Send) -> None:
    """Answer with an error. A short body is read and thrown away; a connection with more of it is closed."""
    headers = [(b"content-type", b"application/json")]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if not await _discarded(receive):
        headers.append((b"connection", b"close"))
    body = json.dumps(body_of_error(path, error)).encode()
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _discarded(receive: Receive) -> bool:
    """Whether the body ended within the limits."""
    read = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            while read < _DISCARD_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return message["type"] == "http.request"
                read += len(message.get("body", b""))
    except TimeoutError:
        pass
    return False
