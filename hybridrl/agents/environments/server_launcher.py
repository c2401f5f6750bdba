"""Serves an ASGI application: `python server_launcher.py MODULE:NAME FD SERVER`. It ends when its input does.

It runs with the Python of the server's own environment, so it imports nothing of hybridrl but the one file SERVER,
which needs uvicorn alone. The standard input is a pipe from the trainer, which closes however the trainer ends; its
first line is the token of requests.
"""

import asyncio
import importlib.util
import os
import socket
import sys
import threading
from typing import Any

BODY_BYTES = 2**28


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _loaded(path: str) -> Any:
    """A module of a file that is in no package here."""
    spec = importlib.util.spec_from_file_location("hybridrl_http_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Serve."""
    name, descriptor, server = sys.argv[1:]
    token = sys.stdin.buffer.readline().decode().strip()
    here = os.path.dirname(os.path.abspath(__file__))
    # Modules next to this file have the names of packages.
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if os.path.abspath(path or ".") != here)]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from uvicorn.importer import import_from_string

    http_server = _loaded(server)
    guarded = http_server.TokenGuard(import_from_string(name), token, BODY_BYTES, "the limit of environments")
    listening = socket.socket(fileno=int(descriptor))
    running = http_server.HttpServer(guarded, listening, http_server.ServingLimits(), whole_asgi=True)
    asyncio.run(running.serve_until_ended(f"serves {name}"))


if __name__ == "__main__":
    main()
