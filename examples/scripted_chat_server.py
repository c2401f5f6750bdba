"""A small server with the OpenAI chat API that answers from a script, for trying simulated users and judges.

    python examples/scripted_chat_server.py ANSWERS.jsonl [--port 8000]

A line is `{"contains": TEXT, "answers": [TEXT, ...]}`. A request gets an answer of the first line whose text is in its
last message, the answers of a line in turn. `--port 0` takes a free port; the first line of output has the address.
"""

import argparse
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


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


def handler_of(script: Script) -> type[BaseHTTPRequestHandler]:
    """What answers requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": "script", "object": "model"}]})

        def do_POST(self) -> None:
            try:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                answer = script.answer(str(body["messages"][-1]["content"]))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                self._send(400, {"error": f'send {{"messages": [...]}}: {error!r}'})
                return
            if answer is None:
                self._send(400, {"error": "the script has no answer to that"})
                return
            message = {"role": "assistant", "content": answer}
            self._send(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("script", type=Path, help="JSON lines with contains and answers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (8000)")
    arguments = parser.parse_args()
    lines = arguments.script.read_text(encoding="utf-8").splitlines()
    script = Script([json.loads(line) for line in lines if line.strip()])
    server = ThreadingHTTPServer((arguments.host, arguments.port), handler_of(script))
    print(f"http://{arguments.host}:{server.server_port}/v1 answers from {arguments.script}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
