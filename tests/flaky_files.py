"""A file system in memory whose calls fail when a test says so, and a real HTTP server for files."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class ThrottledError(OSError):
    """Says, as clients of object stores do, that there were too many requests."""

    status = 503


class FlakyFileSystem(MemoryFileSystem):
    """`flaky://`: files in memory.

    Attributes:
        faults: by the name of a call, what its next calls do first: each takes the arguments, and may raise,
            or return something true in place of the call.
        calls: how often each was called.
    """

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[dict[str, list[Callable[..., object]]]] = {}
    calls: ClassVar[Counter[str]] = Counter()

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(str(path).removeprefix("flaky://"))

    def get_file(self, rpath: str, lpath: str, **kwargs: Any) -> Any:
        return self._meet("get_file", rpath, lpath) or super().get_file(rpath, lpath, **kwargs)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> Any:
        return self._meet("put_file", lpath, rpath) or super().put_file(lpath, rpath, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._meet("info", path)
        return super().info(path, **kwargs)

    def _meet(self, call: str, *arguments: str) -> object:
        self.calls[call] += 1
        return self.faults[call].pop(0)(*arguments) if self.faults.get(call) else None


@contextlib.contextmanager
def flaky_files() -> Iterator[FlakyFileSystem]:
    """Register `flaky://`, and yield it empty."""
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem.store.clear()
    FlakyFileSystem.pseudo_dirs[:] = [""]
    FlakyFileSystem.faults.clear()
    FlakyFileSystem.calls.clear()
    yield FlakyFileSystem()


def raising(error: Exception) -> Callable[..., object]:
    """A fault: the call raises."""

    def fault(*_: object) -> None:
        raise error

    return fault


@dataclass
class FileServer:
    """An HTTP server of a folder.

    Attributes:
        address: `http://HOST:PORT`.
        gets: how often each path was fetched.
        refuses: path -> the status that it answers with.
        names_content: send the time of the last change.
    """

    address: str = ""
    gets: Counter[str] = field(default_factory=Counter)
    refuses: dict[str, int] = field(default_factory=dict)
    names_content: bool = True


@contextlib.contextmanager
def file_server(folder: Path) -> Iterator[FileServer]:
    """Serve a folder over HTTP on this machine."""
    state = FileServer()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def send_head(self) -> Any:
            path = self.path.partition("?")[0]
            if status := state.refuses.get(path):
                self.send_error(status)
                return None
            return super().send_head()

        def do_GET(self) -> None:
            state.gets[self.path.partition("?")[0]] += 1
            super().do_GET()

        def send_header(self, keyword: str, value: str) -> None:
            if keyword != "Last-Modified" or state.names_content:
                super().send_header(keyword, value)

        def log_message(self, *_: Any) -> None:
            """Requests are not printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
