"""An engine behind the OpenAI server, as the tests of the server use it."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
from plain_engine import PlainEngine

from hybridrl.rollout.request import Completion, Request
from hybridrl.serve import (
    Listener,
    OpenAIServer,
    Served,
    create_app,
)

TOKEN = "a-token-of-this-run"
LIMIT = 2048
MESSAGES: Any = [{"role": "user", "content": "Sort: 31524"}]


class Stage:
    """An engine with a server in front of it, on an event loop in a thread."""

    def __init__(self, model: Path) -> None:
        self.engine = PlainEngine.of(model, max_model_len=LIMIT)
        self.seen: list[Request] = []
        self.fault: str | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.do(self.engine.start())
        served = Served("tiny", self.engine.tokenizer, LIMIT, len(self.engine.tokenizer))
        self.listener = Listener("127.0.0.1")
        self.server = OpenAIServer(create_app(self, served, TOKEN), self.listener.socket)
        self.do(self.server.start())
        self.client = openai.OpenAI(base_url=self.listener.url, api_key=TOKEN, max_retries=0)
        self.root = self.listener.url.removesuffix("/v1")

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def generate(self, request: Request) -> Completion:
        self.seen.append(request)
        completion = await self.engine.generate(request)
        completion.versions = [(3, len(completion.token_ids))]  # as a replica does
        return completion

    async def abort(self, ids: Any) -> None:
        await self.engine.abort(ids)

    async def stats(self) -> dict[str, dict[str, float]]:
        own = {"weights_version": 3.0, "weight_update_seconds": 0.25, "restarts": 0.0}
        return {"0": self.engine.stats() | own}

    async def health(self) -> str | None:
        return self.fault

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
        """Status, decoded body and headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"} | (headers or {})
        return self.open(urllib.request.Request(self.root + path, data=data, headers=sent))

    def open(self, request: Any) -> tuple[int, Any, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), error.headers

    def close(self) -> None:
        self.do(self.server.stop())
        self.do(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
