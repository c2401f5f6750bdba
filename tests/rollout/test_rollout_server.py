"""The OpenAI server over a real engine: the real `openai` client, plain HTTP, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import yaml
from fastapi.testclient import TestClient
from plain_engine import PlainEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import ModelConfig, PrometheusConfig, RolloutConfig, load_config
from hybridrl.rollout import RolloutError
from hybridrl.rollout.engine import Completion, Request
from hybridrl.rollout.server import (
    OpenAIServer,
    Served,
    check_installed,
    create_app,
    make_server,
    new_token,
    node_address,
    write_scrape_config,
)

TOKEN = "a-token-of-this-run"
LIMIT = 2048
MESSAGES: Any = [{"role": "user", "content": "Sort: 31524"}]
REPOSITORY = Path(__file__).resolve().parents[2]


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
        self.server = OpenAIServer(create_app(self, served, TOKEN, self.stats, self.health), "127.0.0.1")
        self.do(self.server.start())
        self.client = openai.OpenAI(base_url=self.server.url, api_key=TOKEN, max_retries=0)
        self.root = self.server.url.removesuffix("/v1")

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


@pytest.fixture(scope="module")
def stage(micro_model: Path) -> Iterator[Stage]:
    stage = Stage(micro_model)
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def log_probs(micro_model: Path) -> Callable[[list[int], list[int], float], list[float]]:
    """Log-probabilities of a response by transformers itself."""
    model = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32).eval()

    def compute(prompt: list[int], response: list[int], temperature: float) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        found = torch.log_softmax(logits / temperature, dim=-1)
        return found[torch.arange(len(response)), torch.tensor(response)].tolist()

    return compute


def eventually(holds: Callable[[], bool], limit: float = 30.0) -> None:
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ------------------------------------------------------------------ what a client gets


def test_chat_carries_tokens_log_probs_usage_and_version(
    stage: Stage, micro_model: Path, log_probs: Callable[..., list[float]]
) -> None:
    answer = stage.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=7, temperature=0.7, seed=5, logprobs=True, n=2
    )
    tokenizer = AutoTokenizer.from_pretrained(micro_model)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer.prompt_token_ids == prompt  # type: ignore[attr-defined]
    assert answer.weights_version == 3  # type: ignore[attr-defined]
    assert [choice.index for choice in answer.choices] == [0, 1]
    lengths = []
    for choice in answer.choices:
        ids = choice.token_ids  # type: ignore[attr-defined]
        lengths.append(len(ids))
        assert choice.message.role == "assistant"
        assert choice.message.content == tokenizer.decode(ids, skip_special_tokens=True)
        assert choice.finish_reason == ("stop" if ids[-1] == tokenizer.eos_token_id else "length")
        assert choice.logprobs is not None and choice.logprobs.content is not None
        told = [entry.logprob for entry in choice.logprobs.content]
        assert told == choice.token_logprobs  # type: ignore[attr-defined]
        assert told == pytest.approx(log_probs(prompt, ids, 0.7), abs=1e-4)
        assert choice.weights_versions == [[3, len(ids)]]  # type: ignore[attr-defined]
    assert answer.choices[0].token_ids != answer.choices[1].token_ids  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), sum(lengths))
    assert answer.usage.total_tokens == len(prompt) + sum(lengths)

    again = stage.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=7, temperature=0.7, seed=6
    )
    assert again.choices[0].token_ids == answer.choices[1].token_ids, "sample i draws with seed + i"  # type: ignore[attr-defined]


def test_completions_of_text_and_of_tokens_are_the_same(stage: Stage) -> None:
    ids = stage.engine.tokenizer.encode("Sort: 12")
    greedy: Any = {"model": "tiny", "temperature": 0, "max_tokens": 5, "logprobs": 0}
    text = stage.client.completions.create(prompt="Sort: 12", **greedy)
    several = stage.client.completions.create(prompt=[ids, ids[:3]], extra_body={"ignore_eos": True}, **greedy)
    assert text.choices[0].prompt_token_ids == ids == several.choices[0].prompt_token_ids  # type: ignore[attr-defined]
    assert several.choices[1].prompt_token_ids == ids[:3]  # type: ignore[attr-defined]
    first, second = text.choices[0].token_ids, several.choices[0].token_ids  # type: ignore[attr-defined]
    assert second[: len(first)] == first and len(second) == 5
    found = several.choices[0].logprobs
    assert found is not None and found.tokens is not None
    assert "".join(found.tokens) == stage.engine.tokenizer.decode(second)
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(5)]
    default = stage.client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True})
    assert default.usage is not None and default.usage.completion_tokens == 16


def test_top_logprobs_are_those_of_the_sampled_token_alone(stage: Stage) -> None:
    chat = stage.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=5, seed=1
    )
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content
    for entry in chat.choices[0].logprobs.content:
        assert [(top.token, top.logprob) for top in entry.top_logprobs] == [(entry.token, entry.logprob)]
    text = stage.client.completions.create(model="tiny", prompt="a", max_tokens=3, logprobs=4, seed=1)
    found = text.choices[0].logprobs
    assert found is not None and found.tokens and found.token_logprobs
    assert found.top_logprobs == [{t: p} for t, p in zip(found.tokens, found.token_logprobs, strict=True)]


def test_stop_strings_end_the_text_and_stay_in_the_tokens(stage: Stage) -> None:
    tokenizer = stage.engine.tokenizer
    free: Any = {"model": "tiny", "prompt": "Sort: 98", "temperature": 0, "max_tokens": 24}
    ignore = {"ignore_eos": True}
    ids = stage.client.completions.create(extra_body=ignore, **free).choices[0].token_ids  # type: ignore[attr-defined]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    stop = whole[3:5]
    cut = stage.client.completions.create(stop=[stop, "never"], extra_body=ignore, **free).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index(stop)]
    assert stop in tokenizer.decode(cut.token_ids)  # type: ignore[attr-defined]
    assert cut.token_ids == ids[: len(cut.token_ids)]  # type: ignore[attr-defined]
    kept = stage.client.completions.create(
        stop=stop, extra_body=ignore | {"include_stop_str_in_output": True}, **free
    ).choices[0]
    assert kept.text == whole[: whole.index(stop)] + stop


def test_a_stream_sends_each_choice_whole(stage: Stage) -> None:
    request: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "seed": 1, "n": 2}
    whole = stage.client.chat.completions.create(**request)
    texts, reasons, ids, usage = {0: "", 1: ""}, {}, {}, None
    for chunk in stage.client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
                ids[choice.index] = choice.token_ids  # type: ignore[attr-defined]
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        assert ids[choice.index] == choice.token_ids  # type: ignore[attr-defined]
    assert usage == whole.usage
    text = "".join(
        chunk.choices[0].text
        for chunk in stage.client.completions.create(
            model="tiny", prompt="ab", stream=True, temperature=0, max_tokens=4, extra_body={"ignore_eos": True}
        )
    )
    plain = stage.client.completions.create(
        model="tiny", prompt="ab", temperature=0, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert text == plain.choices[0].text


def test_sampling_and_session_reach_the_engine(stage: Stage) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 7,
        "max_tokens": 3,
        "seed": 11,
        "n": 2,
        "stop": "zz",
        "ignore_eos": True,
        "user": "somebody",
        "presence_penalty": 0,
        "tools": [],
        "logit_bias": None,
        "return_token_ids": False,
        "session_id": "of the body",
    }
    stage.seen.clear()
    status, text, _ = stage.post("/v1/chat/completions", body)
    assert status == 200, text
    answer = json.loads(text)
    assert "prompt_token_ids" not in answer and "token_ids" not in answer["choices"][0]
    first, second = sorted(stage.seen, key=lambda request: request.id)
    assert first.session == second.session == "of the body"
    sampling = first.sampling
    assert (sampling.do_sample, sampling.temperature, sampling.top_p, sampling.top_k) == (True, 0.5, 0.8, 7)
    assert (sampling.max_new_tokens, sampling.stop, sampling.ignore_eos) == (3, ("zz",), True)
    assert {first.sampling.seed, second.sampling.seed} == {11, 12}
    assert "user\na\nb<|im_end|>" in stage.engine.tokenizer.decode(first.prompt_ids)

    stage.post("/v1/chat/completions", body | {"n": 1}, {"X-Session-Id": "of the header"})
    assert stage.seen[-1].session == "of the header"


def test_requests_are_generated_together(stage: Stage) -> None:
    stage.engine.most_running = 0

    async def ask() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=stage.server.url, api_key=TOKEN, max_retries=0)
        calls = [
            client.completions.create(
                model="tiny", prompt=f"{number}", seed=number, max_tokens=40, extra_body={"ignore_eos": True}
            )
            for number in range(12)
        ]
        return await asyncio.gather(*calls)

    together = asyncio.run(ask())
    assert stage.engine.most_running >= 6
    for number in (0, 7):
        alone = stage.client.completions.create(
            model="tiny", prompt=f"{number}", seed=number, max_tokens=40, extra_body={"ignore_eos": True}
        )
        assert alone.choices[0].token_ids == together[number].choices[0].token_ids  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_has_its_requests_aborted(stage: Stage, stream: bool) -> None:
    stage.engine.aborted.clear()
    body = {"prompt": "x", "n": 3, "max_tokens": LIMIT - 1, "ignore_eos": True, "stream": stream, "temperature": 1}
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", stage.server.port)) as connection:
        connection.sendall(head.encode() + data)
        eventually(lambda: len(stage.engine.running) == 3 and all(stage.engine.running.values()))
    eventually(lambda: len(stage.engine.aborted) == 3)
    eventually(lambda: not stage.engine.running)


# ------------------------------------------------------------------ what is refused


def refused(answer: tuple[int, Any, Any], status: int) -> dict[str, Any]:
    assert answer[0] == status, answer[1]
    error = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer é"])
def test_only_the_token_of_the_run_is_served(stage: Stage, header: str) -> None:
    stage.seen.clear()
    raw = {"Authorization": header.encode().decode("latin-1")}
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = stage.post(path, {"prompt": "a", "messages": MESSAGES}, raw)
        assert refused(answer, 401)["code"] == "invalid_api_key"
        assert answer[2]["WWW-Authenticate"] == "Bearer"
    assert stage.open(urllib.request.Request(f"{stage.root}/v1/models", headers=raw))[0] == 401
    assert not stage.seen


def test_the_client_library_raises_its_own_errors(stage: Stage) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=stage.server.url, api_key="no", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError, match="no model 'gpt' here; this is 'tiny'"):
        stage.client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="the limit is 2048") as caught:
        stage.client.completions.create(model="tiny", prompt="a" * 10, max_tokens=LIMIT)
    assert caught.value.code == "context_length_exceeded"
    models = stage.client.models.list().data
    assert [(model.id, model.max_model_len) for model in models] == [("tiny", LIMIT)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changed", "param", "words"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty", "frequency_penalty=0.5 is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"tempratura": 1}, "tempratura", "tempratura=1 is not supported"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "warm"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user"}]}, "messages", "no 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "only text"),
        ({"messages": [{"role": "user", "content": "a" * LIMIT}]}, "messages", "the limit is 2048"),
    ],
)
def test_bad_parameters_are_named(stage: Stage, changed: dict[str, Any], param: str, words: str) -> None:
    error = refused(stage.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2} | changed), 400)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_bad_prompts_bodies_and_paths(stage: Stage) -> None:
    size = len(stage.engine.tokenizer)
    for prompt, words in (
        ([1, size], f"token id {size} is outside the vocabulary of {size}"),
        ([-1], "outside the vocabulary"),
        ("", "no token"),
        ([], "prompt"),
        (5, "prompt"),
        ([[1], "a"], "prompt"),
    ):
        assert words in refused(stage.post("/v1/completions", {"prompt": prompt}), 400)["message"]
    assert "body" in refused(stage.post("/v1/completions", b"{"), 400)["message"]
    assert refused(stage.post("/v1/completions", [1]), 400)
    assert "POST /v1/embeddings" in refused(stage.post("/v1/embeddings", {}), 404)["message"]
    assert refused(stage.open(f"{stage.root}/v1/completions"), 405)


def test_faults_of_the_engine_are_told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that the engine refuses is the client's fault, an engine that breaks is not."""
    monkeypatch.setattr(stage.engine.spec.config, "max_model_len", 4)
    error = refused(stage.post("/v1/completions", {"prompt": "abcdefgh"}), 400)
    assert error["message"] == "the prompt is too long"
    monkeypatch.undo()

    generate = PlainEngine.generate

    async def breaks(self: PlainEngine, request: Request) -> Completion:
        if request.id.endswith("-1"):
            raise RuntimeError("device lost")
        return await generate(self, request)

    monkeypatch.setattr(PlainEngine, "generate", breaks)
    body = {"prompt": "x", "n": 2, "max_tokens": LIMIT - 1, "ignore_eos": True}
    error = refused(stage.post("/v1/completions", body), 500)
    assert error["message"] == "the engine failed: RuntimeError: device lost"
    eventually(lambda: not stage.engine.running)  # the other of the two was aborted
    status, events, _ = stage.post("/v1/completions", body | {"stream": True})
    assert status == 200
    assert json.loads(events.split("data: ")[-1])["error"]["message"].endswith("device lost")
    eventually(lambda: not stage.engine.running)


# ------------------------------------------------------------------ health, metrics, Prometheus, Grafana


def scraped(stage: Stage) -> str:
    status, text, _ = stage.open(f"{stage.root}/metrics")
    assert status == 200
    return text


def test_health_is_open_and_tells_the_fault(stage: Stage) -> None:
    assert stage.open(f"{stage.root}/health")[0] == 200
    stage.fault = "replica 1 does not answer"
    status, body, _ = stage.open(f"{stage.root}/health")
    stage.fault = None
    assert (status, body) == (503, {"status": "replica 1 does not answer"})


def test_metrics_count_what_was_generated(stage: Stage) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def value(name: str) -> float:
        samples = [s for family in text_string_to_metric_families(scraped(stage)) for s in family.samples]
        (found,) = [sample for sample in samples if sample.name == name]
        assert found.labels == {"replica": "0"}
        return found.value

    before, prompts = value("hybridrl_generated_tokens_total"), value("hybridrl_prompt_tokens_total")
    stage.client.completions.create(model="tiny", prompt="abcd", max_tokens=9, n=2, extra_body={"ignore_eos": True})
    assert value("hybridrl_generated_tokens_total") - before == 18
    assert value("hybridrl_prompt_tokens_total") - prompts == 8
    assert value("hybridrl_weights_version") == 3


def test_every_metric_of_the_dashboard_is_one_that_is_given(stage: Stage) -> None:
    dashboard = json.loads((REPOSITORY / "configs" / "grafana" / "hybridrl.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = set(re.findall(r"hybridrl_\w+", " ".join([*queries, json.dumps(dashboard["templating"])])))
    given = set(re.findall(r"^(hybridrl_\w+)\{", scraped(stage), re.M))
    assert given == {
        "hybridrl_generated_tokens_total",
        "hybridrl_prompt_tokens_total",
        "hybridrl_prefix_cache_queries_total",
        "hybridrl_prefix_cache_hits_total",
        "hybridrl_requests_running",
        "hybridrl_requests_waiting",
        "hybridrl_kv_cache_usage_ratio",
        "hybridrl_weights_version",
        "hybridrl_weight_update_seconds",
        "hybridrl_replica_restarts_total",
    }
    assert asked == given
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) and all(panel["title"] for panel in dashboard["panels"])


def test_prometheus_is_told_where_to_scrape(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a listener in Prometheus' place, that notes what it is asked."""
    asked = []
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                asked.append(connection.recv(4096).decode().splitlines()[0])
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    file = tmp_path / "made" / "prometheus.yml"
    where = "actor_rollout_ref.rollout.prometheus"
    words = ["actor_rollout_ref.model.path=org/name", f"{where}.enable=true", f"{where}.file={file}"]
    settings = load_config("ppo_trainer", [*words, f"{where}.port={listener.getsockname()[1]}"])
    config = settings.actor_rollout_ref.rollout.prometheus
    assert write_scrape_config(config, [stage.server.address]) == file
    assert asked == ["POST /-/reload HTTP/1.1"]
    (job,) = yaml.safe_load(file.read_text())["scrape_configs"]
    (static,) = job["static_configs"]
    assert static["labels"] == {"model_name": "org/name"}
    assert "hybridrl_requests_running" in stage.open(f"http://{static['targets'][0]}/metrics")[1]

    whole = yaml.safe_load(file.read_text())
    whole["scrape_configs"].insert(0, {"job_name": "ray", "static_configs": []})
    file.write_text(yaml.safe_dump(whole | {"alerting": {}}))
    write_scrape_config(config, ["10.0.0.1:1", "10.0.0.2:2"])
    renewed = yaml.safe_load(file.read_text())
    assert [job["job_name"] for job in renewed["scrape_configs"]] == ["ray", "hybridrl"]
    assert renewed["scrape_configs"][1]["static_configs"][0]["targets"] == ["10.0.0.1:1", "10.0.0.2:2"]
    assert "alerting" in renewed
    listener.shutdown(socket.SHUT_RDWR)  # closing alone leaves `accept` waiting, and answering
    listener.close()

    capsys.readouterr()
    write_scrape_config(config, ["10.0.0.1:1"])
    assert f"127.0.0.1:{config.port}" in capsys.readouterr().err, "no Prometheus is a notice, not an error"
    assert write_scrape_config(PrometheusConfig(file=str(file)), []) is None
    file.write_text("- a list")
    with pytest.raises(RolloutError, match=r"prometheus\.file=.*something else than a Prometheus configuration"):
        write_scrape_config(config, ["10.0.0.1:1"])


def test_the_example_of_a_scrape_configuration_names_the_metrics_path(repository: Path) -> None:
    example = yaml.safe_load((repository / "configs" / "grafana" / "prometheus.yml").read_text())
    (job,) = example["scrape_configs"]
    assert job["job_name"] == "hybridrl" and job["metrics_path"] == "/metrics"


# ------------------------------------------------------------------ where it listens


def test_a_server_made_from_the_configuration(
    micro_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    repository: Path,
) -> None:
    """In a thread of its own; the access file is what a client needs (docs/generation.md), for its owner alone."""
    rollout = RolloutConfig(prompt_length=20, response_length=12)
    rollout.prometheus.served_model_name = "policy"
    engine = PlainEngine.of(micro_model, max_model_len=32)
    started = threading.Event()

    class Late:
        """Starts its engine on the server's loop."""

        async def generate(self, request: Request) -> Completion:
            if not started.is_set():
                await engine.start()
                started.set()
            return await engine.generate(request)

        async def abort(self, ids: Any) -> None:
            await engine.abort(ids)

    async def stats() -> dict[str, Any]:
        return {}

    async def health() -> None:
        return None

    server, access = make_server(rollout, ModelConfig(path=str(micro_model)), Late(), stats, health)
    assert server.host == node_address()
    server.start_thread()
    try:
        path = access.write(tmp_path)
        assert path.stat().st_mode & 0o777 == 0o600
        found = json.loads(path.read_text())
        client = openai.OpenAI(base_url=found["base_url"], api_key=found["api_key"])
        answer = client.completions.create(model=found["model"], prompt="ab", max_tokens=3)
        assert answer.model == "policy" and answer.choices[0].token_ids  # type: ignore[attr-defined]
        page = (repository / "docs" / "generation.md").read_text()
        (snippet,) = re.findall(r"```python run\n(.*?)```", page, re.DOTALL)
        monkeypatch.chdir(tmp_path)
        exec(compile(snippet, "docs/generation.md", "exec"), {})
        assert "[" in capsys.readouterr().out
        with pytest.raises(openai.BadRequestError, match="the limit is 32"):
            client.completions.create(model="policy", prompt="ab", max_tokens=31)
    finally:
        server.stop_thread()
    with pytest.raises(OSError):
        socket.create_connection((server.host, server.port), timeout=5).close()


def test_taken_ports_foreign_hosts_and_missing_tokens(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RolloutError, match=rf"server\.port={stage.server.port} on 127\.0\.0\.1 is taken"):
        OpenAIServer(None, "127.0.0.1", stage.server.port)
    with pytest.raises(RolloutError, match=r"server\.host=192\.0\.2\.7: cannot listen there"):
        OpenAIServer(None, "192.0.2.7", 0)
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(RolloutError, match="MY_TOKEN is not set"):
        new_token("MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "mine")
    assert new_token("MY_TOKEN") == "mine"
    assert new_token() != new_token() and len(new_token()) > 30


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    with pytest.raises(RolloutError, match=r"need uvicorn, .*pip install 'hybridrl\[server\]'"):
        check_installed()


def test_a_seed_that_the_engine_would_not_heed_is_refused(stage: Stage) -> None:
    tokenizer = stage.engine.tokenizer
    served = Served("tiny", tokenizer, LIMIT, len(tokenizer), heeds_seeds=False)
    with TestClient(create_app(stage, served, None)) as client:
        body = {"prompt": "a", "max_tokens": 1}
        answer = client.post("/v1/completions", json=body | {"seed": 1})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "seed"


@pytest.mark.parametrize("field", [{"seed": 2**63}, {"seed": -(2**63) - 1}, {"top_k": 2**31}])
def test_numbers_that_no_engine_can_hold_are_refused(stage: Stage, field: dict[str, int]) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(field))):
        stage.client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body=field)
