"""The HTTP server of everything that this package serves: limits of connections, sizes and time, token, start and end.

Every server is an ASGI application behind a `TokenGuard`, run by an `HttpServer`. Clients are not trusted:

- Connections whose client has not shown the token (strangers) leave a share of all connections free. Beyond it they get
  a moment to show it, and the one that came first gives way where there is no connection left.
- A head has a largest size, a request a largest time from its first byte to its last, and a body a largest size. The
  token is compared before the body is read.
- One request at a time: what a client sends while its request is answered is dropped, and the connection ends with the
  answer. So reading never pauses, and a client that vanishes is noticed: `receive` gives `http.disconnect`.
"""

import asyncio
import contextlib
import errno
import functools
import hmac
import json
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 2048
_RESERVED_SHARE = 0.25  # of all connections, for clients that have shown the token
_DISCARD_BYTES = 2**20  # of the body of a refused request, so that its client reads the answer
_DISCARD_S = 1.0
_TCP_USER_TIMEOUT = 18
_POLICY_VIOLATION = 1008  # the status of a WebSocket that is closed
_CONNECTION = "hybridrl.connection"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class HttpRefusal(Exception):
    """A request, or a connection, that is not served.

    Args:
        status: HTTP status.
        message: what is wrong and what to change.
        code: a short name of the error, where the API has such.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


#: the JSON of an error, in the format of the API that a path belongs to
ErrorBody = Callable[[str, HttpRefusal], Mapping[str, Any]]


def detail_body(path: str, error: HttpRefusal) -> Mapping[str, Any]:
    """An error as `{"detail": TEXT}`."""
    return {"detail": str(error)}


@dataclass(frozen=True)
class ServingLimits:
    """Limits on what a server accepts of its clients.

    Attributes:
        connections: at once.
        header_bytes: of a request's head.
        read_s: seconds from the first byte of a request to its last.
        newcomer_s: seconds in which a client shows the token where strangers have their share already.
        keep_alive_s: seconds that a connection may be idle after an answer.
        send_s: seconds for a client that takes nothing of its answer.
        stop_s: seconds for requests in progress when the server stops.
        error_body: the format of errors.
    """

    connections: int = 1024
    header_bytes: int = 16 * 2**10
    read_s: float = 30.0
    newcomer_s: float = 2.0
    keep_alive_s: int = 10
    send_s: int = 60
    stop_s: float = 5.0
    error_body: ErrorBody = detail_body

    @property
    def strangers(self) -> int:
        """Connections that clients who have not shown the token may keep."""
        return max(1, self.connections - max(1, int(self.connections * _RESERVED_SHARE)))


def listening_socket(host: str, port: int, send_s: int = ServingLimits.send_s) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
        OSError: the port is taken or not allowed, or the host is not an address of this machine.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    # Connections whose client is gone or reads nothing end; those that are accepted inherit the options.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # asyncio sets it only for sockets that were made with IPPROTO_TCP; without it an answer waits 40 ms for its body
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, send_s * 1000)
    return listener


class LimitedConnection(H11Protocol):
    """A connection that is refused where there are too many, and ended if a request takes too long to arrive.

    Attributes:
        admitted: its client has shown the token.
    """

    def __init__(self, limits: ServingLimits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.admitted = False
        self._limits = limits
        self._refused = False
        self._is_websocket = False
        self._since = self.loop.time()
        self._deadline: asyncio.TimerHandle | None = None
        self._probation: asyncio.TimerHandle | None = None
        inner = self.app

        async def with_connection(scope: Any, receive: Any, send: Any) -> None:
            await inner({**scope, "extensions": {**scope.get("extensions", {}), _CONNECTION: self}}, receive, send)

        self.app = with_connection

    def admit(self) -> None:
        """Note that the client has shown the token."""
        self.admitted = True
        self._end_probation()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        others = [connection for connection in self.connections if isinstance(connection, LimitedConnection)]
        if len(self.connections) >= self._limits.connections:
            newcomers = [connection for connection in others if connection._probation is not None]
            if not newcomers:
                self.transport = transport
                self._refuse()
                return
            min(newcomers, key=lambda connection: connection._since)._refuse()
        super().connection_made(transport)
        self._await_request()
        if sum(not connection.admitted for connection in others) >= self._limits.strangers:
            self._probation = self.loop.call_later(self._limits.newcomer_s, self._refuse)

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_is_here()
        self._end_probation()
        if self in self.connections:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._answers and self.conn.their_state is not h11.SEND_BODY:
            self.cycle.keep_alive = False
            return
        super().data_received(data)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to the protocol of WebSockets, whose application checks the token."""
        self._is_websocket = True
        self._end_probation()
        super().handle_websocket_upgrade(event)

    def handle_events(self) -> None:
        super().handle_events()
        if self.transport.is_closing() or self._is_websocket:
            self._request_is_here()
        elif self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            idle = self.cycle is not None and self.cycle.response_complete and self.timeout_keep_alive_task is not None
            self._request_is_here() if idle else self._await_request()
        else:
            self._request_is_here()
            if self.conn.trailing_data[0]:  # another request behind this one
                self.cycle.keep_alive = False
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request, in the format of the API."""
        if not (self._answers and self.cycle.response_started):
            self.transport.write(self._last_answer(HttpRefusal(HTTPStatus.BAD_REQUEST, msg)))
        self.transport.close()

    @property
    def _answers(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self) -> None:
        """End the connection, because there are too many."""
        self._refused = True
        self._request_is_here()
        self._end_probation()
        limit = self._limits.connections
        message = f"too many connections: this server takes {limit}; try again later"
        if not self._answers:
            answer = self._last_answer(HttpRefusal(HTTPStatus.SERVICE_UNAVAILABLE, message, "busy"), "retry-after: 1")
            self.transport.write(answer)
        self.connections.discard(self)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _last_answer(self, error: HttpRefusal, *headers: str) -> bytes:
        """An answer as it is sent, after which the connection is closed."""
        body = json.dumps(self._limits.error_body("", error)).encode()
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            *headers,
            f"content-length: {len(body)}",
            "content-type: application/json",
            "connection: close",
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.read_s, self.transport.abort)

    def _request_is_here(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_probation(self) -> None:
        if self._probation is not None:
            self._probation.cancel()
            self._probation = None


class TokenGuard:
    """ASGI middleware that checks the token before it reads a body, and bounds the body.

    Args:
        app: the application.
        token: that requests bring as `Authorization: Bearer TOKEN`; None serves everybody.
        body_bytes: longer bodies are refused.
        body_key: what the limit is called.
        open_paths: that need no token.
        error_body: the format of errors.
    """

    def __init__(
        self,
        app: App,
        token: str | None,
        body_bytes: int,
        body_key: str,
        open_paths: Sequence[str] = ("/health",),
        error_body: ErrorBody = detail_body,
    ) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._body_bytes = body_bytes
        self._body_key = body_key
        self._open_paths = tuple(open_paths)
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
        if scope["type"] == "websocket":
            await self._open(scope, headers, receive, send)
            return
        try:
            scope, admitted = self.checked(scope, headers)
            self._check_length(headers)
        except HttpRefusal as error:
            await self._refuse(scope["path"], error, receive, send)
            return
        connection = scope.get("extensions", {}).get(_CONNECTION)
        if admitted and connection is not None:
            connection.admit()
        read, whole = 0, False

        async def bounded() -> Message:
            nonlocal read, whole
            message = await receive()
            whole = whole or not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self._body_bytes:
                raise self.too_long(f"the body is longer than {self._body_bytes} bytes ({self._body_key})")
            return message

        began = False

        async def sending(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, bounded, sending)
        except HttpRefusal as error:
            if began:
                raise
            await self._refuse(scope["path"], error, receive, send, whole)

    async def _open(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        """Let the application accept a WebSocket; one without the token is refused with HTTP 403."""
        try:
            scope, _ = self.checked(scope, headers)
        except HttpRefusal as error:
            await receive()
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": str(error)})
            return
        await self._app(scope, receive, send)

    def checked(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[Scope, bool]:
        """The scope that the application gets, and whether the client has shown a key.

        Raises:
            HttpRefusal: it must show one, and has not.
        """
        if self.is_owner(headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()):
            return scope, True
        if scope["path"] in self._open_paths:
            return scope, False
        raise HttpRefusal(HTTPStatus.UNAUTHORIZED, "send the header Authorization: Bearer TOKEN", "invalid_api_key")

    def is_owner(self, key: bytes) -> bool:
        """Whether a key is the token."""
        return self._token is None or hmac.compare_digest(key, self._token)

    def too_long(self, message: str) -> Exception:
        """Return the exception that an application gets when it reads a body which is too long."""
        return HttpRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)

    def _check_length(self, headers: Mapping[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 20 or int(length) > self._body_bytes:
            size = length[:20].decode("latin-1")
            raise HttpRefusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {size} bytes; the limit is {self._body_bytes} ({self._body_key})",
            )

    async def _refuse(self, path: str, error: HttpRefusal, receive: Receive, send: Send, is_read: bool = False) -> None:
        """Answer with an error. A short body is read and thrown away; a connection with more of it is closed.

        Args:
            is_read: the body was read to its end.
        """
        headers = [(b"content-type", b"application/json")]
        if error.status == HTTPStatus.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        if error.status == HTTPStatus.TOO_MANY_REQUESTS:
            headers.append((b"retry-after", b"1"))
        if not is_read and not await _discarded(receive):
            headers.append((b"connection", b"close"))
        body = json.dumps(self._error_body(path, error)).encode()
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": int(error.status), "headers": headers})
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


class JsonApp:
    """An application whose requests and answers are JSON, one answer per request.

    Args:
        routes: (method, path) -> what answers a request's body, with status and answer. It is cancelled where the
            client vanishes, and raises `HttpRefusal` for what is not served.
    """

    def __init__(
        self, routes: Mapping[tuple[str, str], Callable[[Any], Awaitable[tuple[int, Mapping[str, Any]]]]]
    ) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._routes.get((scope["method"], scope["path"]))
        if answer is None:
            listed = ", ".join(f"{method} {path}" for method, path in self._routes)
            raise HttpRefusal(HTTPStatus.NOT_FOUND, f"unknown path; choose from {listed}")
        data = await _body(receive)
        if data is None:
            return
        try:
            body = json.loads(data) if scope["method"] == "POST" else None
        except (ValueError, RecursionError) as error:
            raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from None
        working = asyncio.ensure_future(answer(body))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return
            status, content = working.result()
        except asyncio.CancelledError:
            raise HttpRefusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server stops; send it again later") from None
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)
        text = json.dumps(content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None where the client vanishes before its end."""
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        data += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(data)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # whoever started the server ends it


class HttpServer:
    """The HTTP server of one application.

    Args:
        app: an ASGI application behind a `TokenGuard`.
        listening: a socket that listens; it is closed with the server.
        limits: what it accepts.
        whole_asgi: the application may accept WebSockets, and is told when the server starts and stops.
    """

    def __init__(self, app: Any, listening: socket.socket, limits: ServingLimits, whole_asgi: bool = False) -> None:
        self._socket = listening
        config = uvicorn.Config(
            app,
            http=functools.partial(LimitedConnection, limits),  # type: ignore[arg-type]
            ws="auto" if whole_asgi else "none",
            lifespan="auto" if whole_asgi else "off",
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=limits.header_bytes,
            timeout_keep_alive=limits.keep_alive_s,
            timeout_graceful_shutdown=int(limits.stop_s),
        )
        self.uvicorn = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve on the running event loop; returns when calls are answered.

        Raises:
            OSError: the server ended while it started.
        """
        self._task = asyncio.ensure_future(self.uvicorn.serve(sockets=[self._socket]))
        while not self.uvicorn.started:
            if self._task.done():
                await self._task
                raise OSError(errno.ECANCELED, "the HTTP server ended while it started")
            await asyncio.sleep(0.01)

    async def serve_until_ended(self, announcement: str) -> None:
        """Serve until SIGTERM or Ctrl-C, in the main thread of a program.

        Args:
            announcement: printed once calls are answered.
        """
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        await self.start()
        print(announcement, flush=True)
        await ended.wait()
        await self.stop()

    async def stop(self) -> None:
        """Stop: take no new calls, and give those in progress a few seconds."""
        self.uvicorn.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
