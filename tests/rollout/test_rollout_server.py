"""The OpenAI server over a real engine: the real `openai` client, plain HTTP, and clients that go away."""

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from fastapi.testclient import TestClient
from plain_engine import PlainEngine
from raising import raises_with
from server_stage import LIMIT, MESSAGES, TOKEN, Stage
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.rollout.request import Completion, Request
from hybridrl.serve import (
    Listener,
    Served,
    create_app,
)


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
        client = openai.AsyncOpenAI(base_url=stage.listener.url, api_key=TOKEN, max_retries=0)
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
    with socket.create_connection(("127.0.0.1", stage.listener.port)) as connection:
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
        openai.OpenAI(base_url=stage.listener.url, api_key="no", max_retries=0).models.list()
    with raises_with(openai.NotFoundError, "'gpt'", "'tiny'"):
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
    key = {"Authorization": f"Bearer {TOKEN}"}
    assert refused(stage.open(urllib.request.Request(f"{stage.root}/v1/completions", headers=key)), 405)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b'{"prompt": "\\ud800"}', "prompt"),
        ("/v1/completions", b'{"prompt": "a", "stop": "\\ud800"}', "stop"),
        ("/v1/completions", b'{"prompt": "a", "\\ud800": 1}', None),
        ("/v1/completions", b'{"prompt": "a", "model": "\\ud800"}', "model"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": [{"type": "text", "text": null}]}]}',
            "messages",
        ),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages"),
        ("/v1/completions", b'{"prompt": ' + b"[" * 100_000, None),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": ' + b"1" * 5000 + b"}", None),
    ],
)
def test_texts_that_are_none_are_the_clients_fault(stage: Stage, path: str, body: bytes, param: str | None) -> None:
    status, answer, _ = stage.post(path, body)
    assert status in (400, 404), answer
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("tokenize", False),
        ("documents", [{"title": "a"}]),
    ],
)
def test_clients_bring_no_templates(stage: Stage, monkeypatch: pytest.MonkeyPatch, field: str, value: Any) -> None:
    rendered = []
    tokenizer = type(stage.engine.tokenizer)
    real = tokenizer.apply_chat_template

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        rendered.append(kwargs)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "apply_chat_template", noting)
    error = refused(stage.post("/v1/chat/completions", {"messages": MESSAGES, field: value}), 400)
    assert error["param"] == field and error["code"] == "unsupported_parameter"
    assert not rendered, "it is refused before anything is rendered"
    assert stage.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})[0] == 200
    assert [sorted(kwargs) for kwargs in rendered] == [["add_generation_prompt", "tokenize"]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_long_text_is_measured_before_it_is_tokenised(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    tokenizer = stage.engine.tokenizer
    monkeypatch.setattr(type(tokenizer), "_encode_plus", None)  # tokenising anything would fail
    text = "a" * (4 * 10**6)
    body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    error = refused(stage.post(path, body), 400)
    assert error["code"] == "context_length_exceeded" and f"limit is {LIMIT}" in error["message"]


def test_one_call_and_all_calls_together_are_bounded(stage: Stage) -> None:
    error = refused(stage.post("/v1/completions", {"prompt": ["a"] * 60, "n": 1000}), 400)
    assert error["param"] == "n" and "60000" in error["message"] and "1024" in error["message"]

    tokenizer = stage.engine.tokenizer
    app = create_app(stage, Served("tiny", tokenizer, LIMIT, len(tokenizer)), None, max_requests=8)
    with TestClient(app) as client:
        body = {"prompt": "a", "max_tokens": 1, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body | {"n": 9})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        for stream in (False, True, False, True):  # those that are over count no longer
            assert client.post("/v1/completions", json=body | {"n": 8, "stream": stream}).status_code == 200
    assert refused(stage.post("/v1/completions", {"prompt": "a"}, {"X-Session-Id": "s" * 257}), 400)["param"] == (
        "session_id"
    )


def test_what_is_no_http_request_gets_openais_format_too(stage: Stage) -> None:
    for text in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000):
        with socket.create_connection(("127.0.0.1", stage.listener.port), timeout=60) as connection:
            connection.sendall(text)
            answer = connection.makefile("rb").read().decode()
        assert answer.startswith("HTTP/1.1 400 ")
        assert json.loads(answer.split("\r\n\r\n")[1])["error"]["type"] == "invalid_request_error"


def test_a_fault_of_the_server_is_told_in_openais_format(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no health")

    monkeypatch.setattr(stage, "health", fails)
    error = refused(stage.open(f"{stage.root}/health"), 500)
    assert error["type"] == "server_error" and "no health" in error["message"]


# ------------------------------------------------------------------ vLLM's token endpoint


def test_generate_answers_with_token_ids_log_probs_and_spans_of_weights(
    stage: Stage, log_probs: Callable[..., list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = stage.engine.tokenizer.encode("Sort: 312")
    sampling = {"max_tokens": 6, "n": 2, "temperature": 0.8, "seed": 4, "logprobs": 0, "ignore_eos": True}
    body = {"request_id": "mine", "token_ids": prompt, "sampling_params": sampling | {"detokenize": False}}
    status, text, _ = stage.post("/inference/v1/generate", body | {"return_token_ids": True})
    assert status == 200, text
    answer = json.loads(text)
    assert answer["request_id"] == "mine" and answer["prompt_token_ids"] == prompt
    assert answer["usage"]["completion_tokens"] == 12
    same = stage.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=6, n=2, temperature=0.8, seed=4, extra_body={"ignore_eos": True}
    )
    for choice, other in zip(answer["choices"], same.choices, strict=True):
        assert choice["token_ids"] == other.token_ids  # type: ignore[attr-defined]
        entries = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in entries] == choice["token_ids"]
        assert [entry["logprob"] for entry in entries] == pytest.approx(
            log_probs(prompt, choice["token_ids"], 0.8), abs=1e-4
        )
        assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 6}]

    generate = Stage.generate

    async def two_weights(self: Stage, request: Request) -> Completion:
        completion = await generate(self, request)
        completion.versions = [(3, 1), (3, 1), (4, len(completion.token_ids) - 2)]
        return completion

    monkeypatch.setattr(Stage, "generate", two_weights)
    answer = json.loads(stage.post("/inference/v1/generate", body)[1])
    assert answer["prompt_token_ids"] is None
    assert answer["choices"][0]["weight_versions"] == [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 6},
    ]


def test_generate_reads_vllms_own_request_and_vllm_reads_the_answer(stage: Stage) -> None:
    protocol = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    asked = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "temperature": 0.5, "logprobs": 1}}
    body = protocol.GenerateRequest(**asked).model_dump(mode="json", exclude_unset=True, exclude={"sampling_params"})
    status, text, _ = stage.post("/inference/v1/generate", body | {"sampling_params": asked["sampling_params"]})
    assert status == 200, text
    answer = protocol.GenerateTokensResponse.model_validate_json(text)
    (choice,) = answer.choices
    (span,) = choice.weight_versions
    assert (span.version, span.start, span.end) == ("3", 0, len(choice.token_ids))
    assert [entry.token_id for entry in choice.logprobs.content] == choice.token_ids


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": [1], "sampling_params": {"max_tokens": 1, "min_p": 0.5}}, "min_p"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "n"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [10**6], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [1] * LIMIT, "sampling_params": {}}, "token_ids"),
        ({"token_ids": [1]}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {}, "stream": True}, "stream"),
        ({"token_ids": [1], "sampling_params": {}, "output_mode": "text"}, "output_mode"),
        ({"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {}}}, "features"),
    ],
)
def test_generate_names_what_it_refuses(stage: Stage, body: dict[str, Any], param: str) -> None:
    assert refused(stage.post("/inference/v1/generate", body), 400)["param"] == param


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


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Header and body are two packets; the second would wait for the client's delayed acknowledgement of the first."""
    listener = Listener("127.0.0.1")
    with socket.create_connection(("127.0.0.1", listener.port)):
        accepted, _ = listener.socket.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    listener.close()
