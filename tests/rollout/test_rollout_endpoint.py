"""`rollout.name=openai` against an HTTP server that answers as endpoints do: well, late, overloaded, wrongly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from raising import raises_with

from hybridrl.config import ConfigError, OpenAIConfig, load_config, validate
from hybridrl.rollout import RolloutError, SamplingParams
from hybridrl.rollout.openai_endpoint import Endpoint

SAMPLING = SamplingParams(do_sample=True, temperature=0.5, top_p=1.0, top_k=-1, max_new_tokens=9, seed=4)
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(text: str = "yes", **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    }


class Server:
    """Answers each POST by the next of `script` (status, body, headers, seconds), the last for ever."""

    def __init__(self) -> None:
        self.script: list[tuple[int, Any, dict[str, str], float]] = [(200, completion(), {}, 0.0)]
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self.models = ["m"]
        self.now = self.most = 0
        self.together = threading.Barrier(1)  # requests that are answered when all of them have come
        self._lock = threading.Lock()
        stage = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send(
                    200, {"object": "list", "data": [{"id": name, "object": "model"} for name in stage.models]}, {}
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stage._lock:
                    stage.bodies.append(body)
                    stage.headers.append(self.headers)
                    stage.now += 1
                    stage.most = max(stage.most, stage.now)
                    step = stage.script.pop(0) if len(stage.script) > 1 else stage.script[0]
                stage.together.wait(60)
                time.sleep(step[3])
                with stage._lock:
                    stage.now -= 1
                self.send(*step[:3])

            def send(self, status: int, body: Any, headers: dict[str, str]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                for name, value in {
                    "Content-Type": "application/json",
                    "Content-Length": str(len(data)),
                    **headers,
                }.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:  # a client that gave up
                pass

        self.http = Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def endpoint(server: Server) -> Iterator[Callable[..., Endpoint]]:
    opened: list[Endpoint] = []

    def make(**settings: Any) -> Endpoint:
        opened.append(Endpoint(OpenAIConfig(**{"base_url": server.url, "max_retries": 2} | settings)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def test_what_is_sent_and_what_comes_back(
    server: Server, endpoint: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDPOINT_KEY", "secret")
    entries = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]
    server.script = [(200, completion(logprobs={"content": entries}, token_ids=[7]), {}, 0.0)]
    client = endpoint(api_key_env="ENDPOINT_KEY", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert client.model == "m", "the only one that it has"
    reply = client.chat(MESSAGES, SAMPLING, log_probs=True).result(30)
    assert (reply.text, reply.finish_reason, reply.prompt_tokens, reply.tokens) == ("yes", "stop", 3, 5)
    assert (reply.log_probs, reply.token_ids) == ([-0.5], [7])
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.bodies[0] == {
        "model": "m",
        "messages": MESSAGES,
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 4,
        "logprobs": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    greedy = SamplingParams(
        do_sample=False, temperature=1.0, top_p=0.9, top_k=5, max_new_tokens=2, ignore_eos=True, stop=("x",), seed=1
    )
    other = endpoint(model="other", max_tokens_name="max_completion_tokens")
    other.chat(MESSAGES, greedy).result(30)
    assert server.bodies[1] == {
        "model": "other",
        "messages": MESSAGES,
        "temperature": 0,
        "max_completion_tokens": 2,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["x"],
        "ignore_eos": True,
    }


def test_overload_and_faults_of_the_server_are_tried_again(server: Server, endpoint: Callable[..., Endpoint]) -> None:
    server.script = [
        (429, error("slow down"), {"Retry-After": "0"}, 0.0),
        (503, error("starting"), {"Retry-After": "0"}, 0.0),
        (200, completion(), {}, 0.0),
    ]
    assert endpoint().chat(MESSAGES, SAMPLING).result(30).text == "yes"
    assert len(server.bodies) == 3


def test_an_answer_that_takes_too_long_is_asked_for_again(server: Server, endpoint: Callable[..., Endpoint]) -> None:
    server.script = [(200, completion("late"), {}, 5.0), (200, completion("in time"), {}, 0.0)]
    assert endpoint(timeout_s=1.0, model="m").chat(MESSAGES, SAMPLING).result(30).text == "in time"


@pytest.mark.parametrize(
    ("status", "sent", "words"),
    [
        (401, 1, r"refuses the API key \(actor_rollout_ref\.rollout\.openai\.api_key_env: none was sent"),
        (404, 1, r"no such thing.*openai\.model"),
        (400, 1, r"refuses a request: .*no such thing"),
        (429, 3, r"tried 3 times.*no such thing"),
        (500, 3, r"tried 3 times.*no such thing"),
    ],
)
def test_what_does_not_pass_is_told_in_the_endpoints_words(
    server: Server, endpoint: Callable[..., Endpoint], status: int, sent: int, words: str
) -> None:
    server.script = [(status, error("no such thing"), {"Retry-After": "0"}, 0.0)]
    with pytest.raises(RolloutError, match=words):
        endpoint().chat(MESSAGES, SAMPLING).result(30)
    assert len(server.bodies) == sent


def test_timeouts_and_missing_log_probs_are_told(server: Server, endpoint: Callable[..., Endpoint]) -> None:
    with raises_with(RolloutError, "data.log_probs=True"):
        endpoint().chat(MESSAGES, SAMPLING, log_probs=True).result(30)
    server.script = [(200, completion(), {}, 5.0)]
    with raises_with(RolloutError, "0.2", "1 times", "timeout_s"):
        endpoint(timeout_s=0.2, max_retries=0, model="m").chat(MESSAGES, SAMPLING).result(30)


def test_no_more_requests_than_allowed_are_in_flight(server: Server, endpoint: Callable[..., Endpoint]) -> None:
    server.together = threading.Barrier(3)
    client = endpoint(max_concurrency=3)
    for future in [client.chat(MESSAGES, SAMPLING) for _ in range(6)]:
        future.result(30)
    assert server.most == 3 and len(server.bodies) == 6


def test_which_model_is_asked_for_where_there_is_not_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.models = ["a", "b"]
    with pytest.raises(RolloutError, match=r"openai\.model is not set, and http://\S+ has 2: a, b"):
        Endpoint(OpenAIConfig(base_url=server.url))
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(RolloutError, match=r"openai\.base_url=\S+: its models cannot be listed"):
        Endpoint(OpenAIConfig(base_url=server.url, max_retries=0))
    with pytest.raises(RolloutError, match=r"cannot be reached, tried 1 times"):
        dead = Endpoint(OpenAIConfig(base_url=server.url, max_retries=0, model="m"))
        try:
            dead.chat(MESSAGES, SAMPLING).result(30)
        finally:
            dead.close()
    monkeypatch.delenv("ENDPOINT_KEY", raising=False)
    with raises_with(RolloutError, "ENDPOINT_KEY"):
        Endpoint(OpenAIConfig(base_url=server.url, api_key_env="ENDPOINT_KEY"))


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openai" else find(name))
    with raises_with(RolloutError, "scripts/install.sh"):
        Endpoint(OpenAIConfig(base_url="http://localhost:1/v1"))


def test_an_endpoint_cannot_train() -> None:
    config = load_config("ppo_trainer", ["actor_rollout_ref.rollout.name=openai"])
    with raises_with(ConfigError, "rollout.name=openai"):
        validate(config)
    wrong = ["actor_rollout_ref.rollout.name=openai", "actor_rollout_ref.rollout.openai.base_url=localhost:8000"]
    with raises_with(ConfigError, "base_url=localhost:8000", "http://", "https://"):
        validate(load_config("generation", wrong))
