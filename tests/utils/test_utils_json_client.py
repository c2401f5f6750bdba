"""The client of services, against servers that answer slowly, wrongly or not at all: an answer or a `ServiceError`."""

import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest

from hybridrl.sandbox import Program, RemoteSandbox, SandboxError
from hybridrl.scored import Reason
from hybridrl.utils.json_client import JsonClient, ServiceError

OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def answering(parts_of: Callable[[], Iterable[bytes]], pause_s: float = 0.0) -> Iterator[str]:
    """The address of a server that sends these parts to each request, with a pause after each."""
    over = threading.Event()

    def talk(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(2**16)
            for part in parts_of():
                connection.sendall(part)
                if over.wait(pause_s):
                    return

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            if over.is_set():
                return
            threads.append(threading.Thread(target=talk, args=(connection,)))
            threads[-1].start()

    listener, threads = socket.create_server(("127.0.0.1", 0)), []
    threads.append(threading.Thread(target=serve))
    threads[0].start()
    address = listener.getsockname()
    try:
        yield f"http://{address[0]}:{address[1]}/run_code"
    finally:
        over.set()
        socket.create_connection(address).close()
        for thread in threads:
            thread.join()
        listener.close()


def outcome(url: str, timeout_s: float = 30.0) -> object:
    """The answer to a request, or the reason why there is none. Any other exception is a fault of the client."""
    try:
        return JsonClient(url, attempts=1, patience_s=0.0).post({}, timeout_s)
    except ServiceError as error:
        return error.reason


@pytest.mark.parametrize(
    ("first", "part"),
    [
        (OK, b"X"),
        (OK + b"X: ", b"y"),
        (OK + b"Content-Length: 100000\r\n\r\n", b" "),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 100000\r\n\r\n", b" "),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 100000\r\n\r\n", b""),
        (b"", b""),
    ],
)
def test_a_server_that_never_ends_its_answer_is_given_up(first: bytes, part: bytes) -> None:
    """Each part came within the limit of a read, so the request waited for ever, and the run with it."""
    with answering(lambda: (first if number == 0 else part for number in range(10_000)), 0.1) as url:
        assert outcome(url, 0.5) in (Reason.TIMEOUT, Reason.INFRA)


def test_an_answer_within_the_time_arrives_whole() -> None:
    body = json.dumps({"text": "x" * 2**20}).encode()
    head = OK + b"Content-Length: %d\r\n\r\n" % len(body)
    with answering(lambda: [head, body[:100], body[100:]], 0.05) as url:
        assert outcome(url) == {"text": "x" * 2**20}


WORDS = [
    OK, b"HTTP/1.1 ", b"HTTP/9.9 200 OK\r\n", b"200", b"302 X\r\n", b"503 Busy\r\n", b"\xff\xfe", b"\0", b"\r\n",
    b"\r\n\r\n", b"{", b"}", b"Location: http://[\r\n", b"Location: http://x:y/\r\n", b"Location: file:///etc/hosts\r\n",
    b"Location: \xc3\xa4\r\n", b"Location: /\r\n", b"Content-Length: -5\r\n", b"Content-Length: 99\r\n",
    b"Content-Length: abc\r\n", b"Transfer-Encoding: chunked\r\n", b"zz\r\n", b"5\r\n{}   \r\n", b"0\r\n\r\n",
    b'{"a": 1}', b"null", b"[" * 100_000, b"9" * 5000, b'"\xed\xa0\x80"', b"NaN", b"Content-Type: a; charset=x\r\n",
]  # fmt: skip


def test_whatever_a_server_sends_is_an_answer_or_no_answer() -> None:
    """Random words of HTTP and JSON, some of them redirects that lead nowhere."""
    draw = random.Random(28)
    sent: list[bytes] = []
    with answering(lambda: [sent[-1]]) as url:
        for _ in range(300):
            sent.append(
                draw.choice([b"", OK, b"HTTP/1.1 302 X\r\n"]) + b"".join(draw.choices(WORDS, k=draw.randrange(1, 7)))
            )
            found = outcome(url)
            assert isinstance(found, (dict, Reason)), sent[-1]


ANSWER = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "42\n", "stderr": ""}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"stdout": None},
        {"stdout": 42},
        {"return_code": None},
        {"return_code": True},
        {"return_code": "0"},
        {"execution_time": "nan"},
        {"execution_time": -1},
        {"execution_time": 1e400},
        {"status": "Other"},
        {"status": ["Finished"]},
    ],
    ids=str,
)
def test_an_answer_that_lacks_what_the_program_did_is_unscored(wrong: dict[str, object]) -> None:
    """The output of a program that printed the right answer was taken for an empty one."""

    def body(result: dict[str, object]) -> bytes:
        text = json.dumps({**ANSWER, "run_result": result}).encode()
        return OK + b"Content-Length: %d\r\n\r\n" % len(text) + text

    right = ANSWER["run_result"]
    assert isinstance(right, dict)
    with answering(lambda: [body(right)]) as url:
        assert RemoteSandbox(url, attempts=1).run(Program("")).output == "42\n"
    with answering(lambda: [body({**right, **wrong})]) as url, pytest.raises(SandboxError, match=r"^sandbox http"):
        RemoteSandbox(url, attempts=1).run(Program(""))
