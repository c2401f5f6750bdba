"""A small server with the OpenAI chat API that answers from a script, for trying simulated users and judges.

    python examples/scripted_chat_server.py ANSWERS.jsonl [--port 8000]

A line is `{"contains": TEXT, "answers": [TEXT, ...]}`. A request gets an answer of the first line whose text is in its
last message, the answers of a line in turn. `--port 0` takes a free port; the first line of output has the address.
"""

import argparse
import asyncio
import itertools
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridrl.utils.http_server import HttpRefusal, HttpServer, JsonApp, ServingLimits, TokenGuard, listening_socket

LARGEST_BODY = 2**23


class Script:
    """Answers in turn."""

    def __init__(self, lines: Sequence[dict[str, Any]]) -> None:
        self._lines: list[tuple[str, Iterator[str]]] = [
            (line["contains"], itertools.cycle(line["answers"])) for line in lines
        ]
        self._lock = threading.Lock()

    def answer(self, question: str) -> str | None:
        """The next answer to a question; None where the script has none."""
        with self._lock:
            return next((next(answers) for contained, answers in self._lines if contained in question), None)


def service_of(script: Script) -> JsonApp:
    """What answers requests."""

    async def models(_: Any) -> tuple[int, dict[str, Any]]:
        return 200, {"object": "list", "data": [{"id": "script", "object": "model"}]}

    async def complete(body: Any) -> tuple[int, dict[str, Any]]:
        try:
            answer = script.answer(str(body["messages"][-1]["content"]))
        except (KeyError, TypeError, IndexError) as error:
            raise HttpRefusal(400, f'send {{"messages": [...]}}: {error!r}') from error
        if answer is None:
            raise HttpRefusal(400, "the script has no answer to that")
        message = {"role": "assistant", "content": answer}
        return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}

    return JsonApp({("GET", "/v1/models"): models, ("POST", "/v1/chat/completions"): complete})


def body_of_error(path: str, error: HttpRefusal) -> dict[str, Any]:
    """An error as this API has it."""
    return {"error": str(error)}


def server_of(script: Script, listener: socket.socket) -> HttpServer:
    """What serves a script."""
    guarded = TokenGuard(service_of(script), None, LARGEST_BODY, "LARGEST_BODY", error_body=body_of_error)
    return HttpServer(guarded, listener, ServingLimits(error_body=body_of_error))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("script", type=Path, help="JSON lines with contains and answers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (8000)")
    arguments = parser.parse_args()
    lines = arguments.script.read_text(encoding="utf-8").splitlines()
    script = Script([json.loads(line) for line in lines if line.strip()])
    listener = listening_socket(arguments.host, arguments.port)
    address = f"http://{arguments.host}:{listener.getsockname()[1]}/v1"
    server = server_of(script, listener)
    asyncio.run(server.serve_until_ended(f"{address} answers from {arguments.script}"))


if __name__ == "__main__":
    main()
