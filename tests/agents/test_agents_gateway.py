"""Agents behind the server: what is trained on is what was sampled, whatever they speak and however they go on."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest
from gateway_stage import AGENTS, ECHO, FORMATS, TOKEN, GatewayStage, check_trained_once, staged
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with
from template_families import BROKEN, ENDS, FAMILIES, MARKS, write_model

from hybridrl.errors import RolloutError
from hybridrl.rollout.request import Completion
from hybridrl.rollout.token_tree import TokenTree
from hybridrl.rollout.trace import training_trace, trajectories_of
from hybridrl.serve.client_images import Prompt
from hybridrl.serve.replies import ReplyChoice
from hybridrl.serve.schema import SessionSettings
from hybridrl.serve.session_table import ServerSession

TOOLS: Any = [{"type": "function", "function": ECHO}]
DATA_URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": DATA_URL}}
INPUT_IMAGE = {"type": "input_image", "image_url": DATA_URL}
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.fixture(scope="module")
def model(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(micro_model, tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module", params=list(FORMATS))
def stage(request: pytest.FixtureRequest, model: Path) -> Iterator[GatewayStage]:
    with staged(model, request.param) as stage:
        yield stage


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[GatewayStage]:
    with staged(model, "qwen") as stage:
        yield stage


@pytest.fixture
def qwen(shared: GatewayStage) -> Iterator[GatewayStage]:
    model = shared.model
    model.calls.clear()
    model.requests.clear()
    model.aborted.clear()
    model.texts = []
    yield shared
    model.held, model.fault, model.hides = None, None, False
    shared.close_sessions()


def chat_of(stage: GatewayStage, session: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stage.root}/sessions/{session}/v1", api_key="-", max_retries=0, **options)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", AGENTS)
def test_trained_tokens_are_the_sampled_ones(stage: GatewayStage, dialect: str, stream: bool) -> None:
    """Parallel calls, a truncated turn, a fork, and the same request twice."""
    model, family = stage.model, FAMILIES[stage.family]
    model.calls.clear()
    several = stage.family not in ("gpt-oss", "llama3")  # whose templates take one call per turn
    wanted = [{"text": "abc", "times": 2}] + ([{"text": "x"}] if several else [])
    model.texts = [stage.write(wanted), "I would say...", "six.", "Four.", "Four!", "Yes."]
    session = stage.open(metadata={"row": 7})
    agent = AGENTS[dialect](f"{stage.root}/sessions/{session}", "whatever", stream)

    first = agent.ask("How long is abc?")
    assert [arguments for _, arguments in first.calls] == wanted and first.ended == "tool_calls"
    assert len({id for id, _ in first.calls}) == len(wanted)
    second = agent.answer([(id, f"answer {number}") for number, (id, _) in enumerate(first.calls)])
    assert (second.ended, second.calls) == ("length", [])
    third = agent.ask("Go on.")
    assert (third.text, third.ended) == ("six.", "stop")

    after_tools, after_cut = model.calls[1][0], model.calls[2][0]
    known = [*model.calls[0][0], *model.calls[0][1].token_ids]
    assert after_tools[: len(known)] == known
    behind = stage.tokenizer.decode(after_tools[len(known) :])
    assert all(f"answer {number}" in behind for number in range(len(wanted)))
    if len(wanted) == 1:
        assert family.behind.replace("ANSWER", "answer 0") == behind
    known = [*after_tools, *model.calls[1][1].token_ids]
    assert after_cut[: len(known)] == known
    end = stage.tokenizer.decode(after_cut[len(known) : len(known) + 1])
    assert end in (*ENDS, *MARKS), "the cut turn is ended by the template's token"

    agent.change_first("How long is xyz?")
    agent.ask("And now?")
    del agent.history[-1]
    agent.go_on()  # another sample of the same turn
    agent.ask("Sure?")
    assert model.calls[3][0] == model.calls[4][0] and model.calls[3][0][: len(known)] != known
    known = [*model.calls[4][0], *model.calls[4][1].token_ids]
    assert model.calls[5][0][: len(known)] == known, "the later of two samples is gone on with"

    trajectories = check_trained_once(stage.trace(session), model.calls)
    assert len(trajectories) == 3 and [one.turn for one in trajectories] == [0, 1, 2]
    about = stage.http.delete(f"/sessions/{session}").json()
    assert (about["turns"], about["branches"], about["metadata"]) == (6, 3, {"row": 7})
    assert stage.http.get(f"/sessions/{session}").status_code == 404


# ------------------------------------------------------------------ what continues, and what forks


def test_tokens_that_no_text_shows_are_kept(qwen: GatewayStage) -> None:
    """Tokenised again, the turns would lose a token each."""
    qwen.model.hides, qwen.model.texts = True, [qwen.write([{"text": "a"}]), "one", "two"]
    session = qwen.open()
    agent = AGENTS["chat"](f"{qwen.root}/sessions/{session}", "-", False)
    (call, _) = agent.ask("?").calls[0]
    agent.answer([(call, "1")])
    agent.ask("again")
    for (prompt, made), (later, _) in zip(qwen.model.calls, qwen.model.calls[1:], strict=False):
        assert made.token_ids[0] == qwen.tokenizer.pad_token_id
        assert later[: len(prompt) + len(made.token_ids)] == [*prompt, *made.token_ids]
    (one,) = check_trained_once(qwen.trace(session), qwen.model.calls)
    assert sum(one.mask) == sum(len(made.token_ids) for _, made in qwen.model.calls)


def test_several_answers_follow_where_a_template_takes_one_call(model: Path) -> None:
    with staged(model, "llama3") as stage:
        stage.model.texts = [stage.write([{"text": "a"}, {"text": "b"}]), "both"]
        session = stage.open()
        agent = AGENTS["messages"](f"{stage.root}/sessions/{session}", "-", False)
        calls = agent.ask("?").calls
        agent.answer([(id, f"answer {number}") for number, (id, _) in enumerate(calls)])
        (prompt, made), (later, _) = stage.model.calls
        behind = stage.tokenizer.decode(later[len(prompt) + len(made.token_ids) :])
        assert behind.index('"answer 0"') < behind.index('"answer 1"')
        check_trained_once(stage.trace(session), stage.model.calls)


@pytest.mark.parametrize(
    ("match", "changed", "goes_on"),
    [
        ("strict", {}, True),
        ("strict", {"arguments": '{ "times": 2, "text": "a" }'}, True),  # the same value
        ("strict", {"arguments": '{"text": "a", "times": "2"}'}, False),
        ("strict", {"id": "another"}, False),
        ("strict", {"content": " "}, False),
        ("loose", {"arguments": '{"text": " a", "times": "2", "more": null}', "id": "another", "content": " "}, True),
        ("loose", {"arguments": '{"text": "b", "times": 2}'}, False),
    ],
)
def test_which_messages_are_the_same(qwen: GatewayStage, match: str, changed: dict[str, str], goes_on: bool) -> None:
    qwen.model.texts = [qwen.write([{"text": "a", "times": 2}]), "done"]
    session = qwen.open(match=match)
    client = chat_of(qwen, session)
    messages: list[Any] = [{"role": "user", "content": "?"}]
    message = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
    turn = message.model_dump()
    turn["content"] = changed.get("content", turn["content"])
    (call,) = turn["tool_calls"]
    call["id"] = changed.get("id", call["id"])
    call["function"]["arguments"] = changed.get("arguments", call["function"]["arguments"])
    messages += [turn, {"role": "tool", "tool_call_id": call["id"], "content": "1"}]
    client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    (prompt, made), (later, _) = qwen.model.calls
    assert (later[: len(prompt) + len(made.token_ids)] == [*prompt, *made.token_ids]) == goes_on
    assert len(check_trained_once(qwen.trace(session), qwen.model.calls)) == (1 if goes_on else 2)


def test_an_answer_that_the_agent_rewrote_leaves_those_before_it_as_tokens(qwen: GatewayStage) -> None:
    qwen.model.texts, qwen.model.hides = ["one", "two", "three"], True
    session = qwen.open()
    agent = AGENTS["chat"](f"{qwen.root}/sessions/{session}", "-", False)
    agent.ask("1?")
    agent.ask("2?")
    agent.history[-1] = {"role": "assistant", "content": "TWO"}
    agent.ask("3?")
    first, second, third = qwen.model.calls
    kept = [*first[0], *first[1].token_ids]
    assert third[0][: len(kept)] == kept and third[0][: len(second[0]) + 3] != [*second[0], *second[1].token_ids][:-1]
    assert "TWO" in qwen.tokenizer.decode(third[0])
    assert [sum(one.mask) for one in check_trained_once(qwen.trace(session), qwen.model.calls)] == [
        len(first[1].token_ids) + len(second[1].token_ids),
        len(third[1].token_ids),
    ]


def test_other_tools_or_another_system_message_begin_a_branch(qwen: GatewayStage) -> None:
    session = qwen.open()
    client = chat_of(qwen, session)
    messages: list[Any] = [{"role": "user", "content": "?"}]
    answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
    messages += [answer, {"role": "user", "content": "and?"}]
    client.chat.completions.create(model="m", messages=messages)
    client.chat.completions.create(model="m", messages=[{"role": "developer", "content": "Be brief."}, *messages])
    assert qwen.http.get(f"/sessions/{session}").json()["branches"] == 3
    assert "system\nBe brief." in qwen.tokenizer.decode(qwen.model.calls[2][0])


def test_an_answer_that_was_lost_is_given_again(qwen: GatewayStage) -> None:
    """A client that asks again says so, and gets what was generated for it; who asks the same anew gets a sample."""
    session = qwen.open()
    qwen.model.texts = ["first", "second"]
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    path = f"/sessions/{session}/v1/chat/completions"
    texts = [
        qwen.http.post(path, json=body, headers={"x-stainless-retry-count": str(count)}).json()["choices"][0]["message"]
        for count in (0, 1, 0)
    ]
    assert [text["content"] for text in texts] == ["first", "first", "second"]
    assert qwen.http.get(f"/sessions/{session}").json()["turns"] == len(qwen.model.calls) == 2


def test_the_id_is_a_key_of_the_plain_routes(qwen: GatewayStage) -> None:
    session = qwen.open()
    openai.OpenAI(base_url=f"{qwen.root}/v1", api_key=session).completions.create(model="other", prompt="ab")
    client = anthropic.Anthropic(base_url=qwen.root, api_key=session)
    asked: Any = {"model": "other", "messages": [{"role": "user", "content": "?"}]}
    client.messages.create(max_tokens=5, **asked)
    assert client.messages.count_tokens(**asked).input_tokens == len(qwen.model.calls[1][0])
    tokens = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}, "return_token_ids": True}
    found = qwen.http.post("/inference/v1/generate", json=tokens, headers={"Authorization": f"Bearer {session}"}).json()
    assert [sorted(span) for span in found["choices"][0]["weight_versions"]] == [["end", "start", "version"]] * 2
    assert [request.session for request in qwen.model.requests] == [session] * 3
    assert len(check_trained_once(qwen.trace(session), qwen.model.calls)) == 3


def test_who_may_do_what(qwen: GatewayStage) -> None:
    session, other = qwen.open(), qwen.open()
    bare = httpx.Client(base_url=qwen.root)
    body = {"messages": [{"role": "user", "content": "?"}]}
    as_session = {"Authorization": f"Bearer {session}"}
    assert bare.post("/sessions").status_code == 401
    assert bare.post("/sessions", headers=as_session).status_code == 401
    assert bare.get("/metrics-of-others", headers=as_session).status_code == 401
    assert bare.post("/v1/chat/completions", json=body).status_code == 401
    assert bare.get(f"/sessions/{other[:-1]}/trace", headers=as_session).status_code == 404
    assert bare.delete(f"/sessions/{session}", headers=as_session).json()["closed"]
    assert bare.post("/v1/chat/completions", json=body, headers=as_session).status_code == 401
    assert bare.post(f"/sessions/{session}/v1/chat/completions", json=body).status_code == 404
    wrong = bare.post("/v1/messages", json=body, headers={"x-api-key": "wrong"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    right = {"x-api-key": TOKEN}
    assert bare.post("/v1/messages", json=body | {"max_tokens": 3}, headers=right).json()["type"] == "message"
    assert qwen.http.get(f"/sessions/{other}").json()["turns"] == 0


def test_sampling_and_limits_of_a_session(qwen: GatewayStage) -> None:
    fixed = qwen.open(sampling_params={"temperature": 0.5, "top_k": 7}, fixed_sampling=True, max_response_tokens=40)
    client = chat_of(qwen, fixed)
    messages: list[Any] = [{"role": "user", "content": "?"}]
    qwen.model.texts = ["a" * 20]
    asked = client.chat.completions.create(model="m", messages=messages, temperature=0, max_tokens=10000)
    sampling = qwen.model.requests[-1].sampling
    assert (sampling.temperature, sampling.do_sample, sampling.top_k, sampling.max_new_tokens) == (0.5, True, 7, 40)
    messages += [asked.choices[0].message, {"role": "user", "content": "b" * 30}]
    with raises_with(openai.BadRequestError, "max_response_length") as caught:
        client.chat.completions.create(model="m", messages=messages)
    assert caught.value.code == "context_length_exceeded"
    usual = chat_of(qwen, qwen.open(sampling_params={"temperature": 0.5}))
    usual.chat.completions.create(model="m", messages=messages[:1], temperature=0.25)
    assert qwen.model.requests[-1].sampling.temperature == 0.25
    for _ in range(62):
        qwen.open()
    too_many = qwen.http.post("/sessions")
    assert too_many.status_code == 429 and "max_sessions" in too_many.json()["error"]["message"]
    assert qwen.http.post("/sessions", json={"tempratura": 1}).status_code == 400


# ------------------------------------------------------------------ what goes wrong


def test_who_goes_away_is_aborted_and_leaves_no_turn(qwen: GatewayStage) -> None:
    session, model = qwen.open(), qwen.model

    async def hold() -> None:
        model.held = asyncio.Event()

    qwen.do(hold())
    impatient = chat_of(qwen, session, timeout=5)
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    deadline = time.monotonic() + 60
    while qwen.http.get(f"/sessions/{session}").json()["in_flight"] or not model.aborted:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    model.held = None
    chat_of(qwen, session).chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    assert qwen.http.get(f"/sessions/{session}").json()["turns"] == 1


def test_a_fault_of_the_engine_is_told_in_each_dialect(qwen: GatewayStage) -> None:
    session = qwen.open()
    qwen.model.fault = RuntimeError("no more tokens")
    root = f"{qwen.root}/sessions/{session}"
    with pytest.raises(openai.InternalServerError, match="no more tokens"):
        chat_of(qwen, session).responses.create(model="m", input="?")
    client = anthropic.Anthropic(base_url=root, api_key="-", max_retries=0)
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 5}
    with pytest.raises(anthropic.InternalServerError, match="no more tokens"):
        client.messages.create(**asked)
    with pytest.raises(anthropic.APIStatusError, match="no more tokens"), client.messages.stream(**asked) as stream:
        stream.get_final_message()
    last = list(chat_of(qwen, session).responses.create(model="m", input="?", stream=True))[-1]
    assert last.type == "response.failed" and "no more tokens" in last.response.error.message


@pytest.mark.parametrize(
    ("path", "changed", "words"),
    [
        ("chat/completions", {"tool_choice": "required"}, "tools has no function"),
        ("chat/completions", {"tool_choice": "auto or none"}, "tool_choice='auto or none'"),
        (
            "chat/completions",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sum"}}},
            "tools has echo",
        ),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "vllm can"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "json_schema with a schema"),
        (
            "chat/completions",
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            "response_format with tools",
        ),
        ("chat/completions", {"continue_final_message": True}, "must be the assistant's"),
        ("chat/completions", {"add_generation_prompt": False}, "add_generation_prompt=False"),
        ("chat/completions", {"tools": [{"type": "web_search"}]}, "the server runs no tools"),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "no function with a name",
        ),
        ("responses", {"tools": [{"type": "web_search"}]}, "'web_search'"),
        ("responses", {"text": {"format": {"type": "json_object"}}}, "vllm can"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("responses", {"previous_response_id": "resp-1"}, "no response 'resp-1'"),
        ("responses", {"background": True}, "background=True"),
        ("responses", {"temperature": -1}, "temperature"),
        ("messages", {"tool_choice": {"type": "any"}}, "tools has no function"),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "vllm can"),
        ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
        ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, "'image_url'; only text"),
        ("responses", {"input": [{"role": "user", "content": [INPUT_IMAGE]}]}, "'image_url'; only text"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "file_id"),
        ("messages", {"messages": [{"role": "user", "content": [IMAGE_BLOCK]}]}, "'image_url'; only text"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "an image with the source"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ("messages", {"max_tokens": None}, "max_tokens"),
        ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_what_is_not_supported_is_named(qwen: GatewayStage, path: str, changed: dict[str, Any], words: str) -> None:
    messages = [{"role": "user", "content": "?"}]
    body = {"chat/completions": {"messages": messages}, "responses": {"input": "?"}}.get(
        path, {"messages": messages, "max_tokens": 5}
    )
    answer = qwen.http.post(f"/sessions/{qwen.open()}/v1/{path}", json=body | changed)
    assert answer.status_code in (400, 404) and words in answer.json()["error"]["message"], answer.text
    assert not qwen.model.requests


@pytest.mark.parametrize("broken", ["no end", "counts answers"])
def test_a_template_that_cannot_be_continued_is_named(model: Path, broken: str) -> None:
    """The second one only in sessions with tools; without sessions both are rendered as they are."""
    with staged(model, "qwen") as stage:
        stage.turns.tokenizer.chat_template = BROKEN[broken][0]
        body = {"messages": [{"role": "user", "content": "?"}]}
        assert stage.http.post("/v1/chat/completions", json=body).status_code == 200
        answer = stage.http.post("/sessions")
        if broken == "counts answers":
            path = f"/sessions/{answer.json()['id']}/v1/chat/completions"
            assert stage.http.post(path, json=body).status_code == 200
            answer = stage.http.post(path, json=body | {"tools": TOOLS})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and str(model) in message and BROKEN[broken][1] in message


def test_a_malformed_call_is_text(qwen: GatewayStage) -> None:
    qwen.model.texts = ['Well.<tool_call>{"name": "echo", "arguments": </tool_call>']
    answer = chat_of(qwen, qwen.open()).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert choice.message.content == 'Well.\n{"name": "echo", "arguments":'
    assert "not JSON" in choice.malformed_tool_calls[0]["reason"]  # type: ignore[attr-defined]


def test_calls_are_not_looked_for_unasked(qwen: GatewayStage) -> None:
    text = qwen.write([{"text": "a"}, {"text": "b"}])
    client, asked = chat_of(qwen, qwen.open()), {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    for more, calls in (({}, 0), ({"tools": TOOLS, "tool_choice": "none"}, 0), ({"tools": TOOLS}, 2)):
        qwen.model.texts = [text]
        found: Any = client.chat.completions.create(**asked, **more).choices[0].message
        assert len(found.tool_calls or ()) == calls and (found.content == text) == (not calls)
    qwen.model.texts = [text]
    one: Any = client.chat.completions.create(**asked, tools=TOOLS, parallel_tool_calls=False).choices[0].message
    assert len(one.tool_calls) == 1


def test_responses_go_on_from_a_stored_one(qwen: GatewayStage) -> None:
    session = qwen.open()
    client = chat_of(qwen, session)
    first = client.responses.create(model="m", input="1?")
    client.responses.create(model="m", input="2?", previous_response_id=first.id)
    (prompt, made), (later, _) = qwen.model.calls
    assert later[: len(prompt) + len(made.token_ids)] == [*prompt, *made.token_ids]
    assert qwen.http.get(f"/sessions/{session}").json()["branches"] == 1


def test_sessions_side_by_side(qwen: GatewayStage) -> None:
    """Each of many agents, in threads of their own, finds its own conversation."""

    def work(number: int) -> tuple[str, list[str]]:
        session = qwen.open()
        agent = AGENTS[list(AGENTS)[number % 3]](f"{qwen.root}/sessions/{session}", "-", number % 2 == 0)
        for turn in range(3):
            agent.ask(f"agent {number} turn {turn}")
        return session, [f"agent {number} turn {turn}" for turn in range(3)]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(work, range(12)))
    for session, asked in found:
        trace = qwen.trace(session)
        (one,) = trajectories_of(trace)
        text = qwen.tokenizer.decode([*one.prompt_ids, *one.token_ids])
        assert [text.count(words) for words in asked] == [1, 1, 1] and len(trace["turns"]) == 3
        qwen.http.delete(f"/sessions/{session}")


def test_a_long_session_keeps_each_message_once() -> None:
    """Each call brings all messages again."""
    session = ServerSession("session-a", SessionSettings())
    messages: list[dict[str, Any]] = []
    ids: list[int] = [1]
    for turn in range(50):
        messages = [*json.loads(json.dumps(messages)), {"role": "user", "content": f"question {turn}"}]
        tools = json.loads(json.dumps(TOOLS))
        reply = ReplyChoice(Completion(str(turn), [turn], [-1.0], "stop"), f"answer {turn}")
        session.add(messages, tools, Prompt(ids), reply)
        session.store(f"resp-{turn}", [*messages, reply.message()])
        messages.append(reply.message())
        ids = [*ids, turn, 1]
    rewritten = [{"role": "user", "content": "another"}, *messages[1:3]]
    session.add(rewritten, TOOLS, Prompt([1]), ReplyChoice(Completion("x", [7], [-1.0], "stop"), "so"))
    assert len(session.history) == 100 + 3
    assert session.messages() == [*rewritten, {"role": "assistant", "content": "so"}]
    assert session.stored("resp-49") == messages
    turns = session.trace()["turns"]
    assert [turn["request"]["messages"] for turn in turns[:50]] == [messages[: 2 * turn + 1] for turn in range(50)]
    assert all(turn["request"]["tools"] == TOOLS for turn in turns)


# ------------------------------------------------------------------ the tree of tokens, and its trace


class TrainingTurn(pydantic.BaseModel):
    """A turn of OpenEnv 0.10's `TrainingTrace`: its fields, and what it checks."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    node_id: str = pydantic.Field(min_length=1)
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, Any] = {}
    response: dict[str, Any] = {}
    metadata: dict[str, Any] = {}

    @pydantic.model_validator(mode="after")
    def _aligned(self) -> "TrainingTurn":
        assert self.prompt_token_ids and min(self.prompt_token_ids + self.completion_token_ids) >= 0
        assert len(self.per_token_logps) == len(self.completion_token_ids) and max(self.per_token_logps, default=0) <= 0
        assert self.loss_mask == [0] * len(self.prompt_token_ids) + [1] * len(self.completion_token_ids)
        return self


def test_the_trace_is_openenvs(qwen: GatewayStage) -> None:
    qwen.model.texts = [qwen.write([{"text": "a"}]), "done"]
    session = qwen.open()
    agent = AGENTS["chat"](f"{qwen.root}/sessions/{session}", "-", False)
    agent.answer([(agent.ask("?").calls[0][0], "1")])
    trace = qwen.trace(session)
    assert trace.keys() == {"schema_version", "turns"} and trace["schema_version"] == 1
    turns = [TrainingTurn.model_validate(turn) for turn in trace["turns"]]
    assert len({turn.node_id for turn in turns}) == len(turns) == 2
    assert turns[1].metadata["parent"] == turns[0].node_id and turns[0].metadata["finish_reason"] == "stop"
    assert turns[0].response["finish_reason"] == "tool_calls" and turns[1].request["messages"][1]["tool_calls"]
    with raises_with(RolloutError, "schema_version=2"):
        trajectories_of(trace | {"schema_version": 2})
    trace["turns"][0]["loss_mask"] = [0] * len(trace["turns"][0]["loss_mask"])  # a reader may leave turns out
    (one,) = trajectories_of(trace)
    assert sum(one.mask) == len(turns[1].completion_token_ids)


CALLS = st.lists(
    st.tuples(
        st.integers(-1, 6),  # the call that is gone on from; -1: none
        st.lists(st.integers(0, 2), max_size=2),  # tokens between
        st.lists(st.integers(0, 2), max_size=3),  # generated
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=200)
@given(CALLS)
def test_whatever_a_session_did_every_token_is_trained_on_once(calls: list[tuple[int, list[int], list[int]]]) -> None:
    made: list[tuple[list[int], Completion]] = []
    for number, (before, between, generated) in enumerate(calls):
        prompt = [9, *between]
        if made and before >= 0:
            earlier, completion = made[before % len(made)]
            prompt = [*earlier, *completion.token_ids, *between]
        log_probs = [-float(number + 1 + place / 16) for place in range(len(generated))]
        made.append((prompt, Completion(str(number), generated, log_probs, "stop", [(number, len(generated))])))
    tree = TokenTree(made)
    assert [turn.token_ids for turn in tree.turns] == [[*prompt, *one.token_ids] for prompt, one in made]
    trace = json.loads(json.dumps(training_trace(tree)))
    found = check_trained_once(trace, made)
    assert all(any(one.mask) for one in found)
    for branch in tree.branches():
        assert branch.prompt_ids == branch.turns[0].between


MOVES = st.lists(
    st.sampled_from(["ask", "ask", "answer", "again", "back", "rewrite", "edit", "two"]), min_size=1, max_size=7
)


@settings(max_examples=25)
@given(moves=MOVES, stream=st.booleans())
def test_whatever_an_agent_does_with_its_history(shared: GatewayStage, moves: list[str], stream: bool) -> None:
    """Goes on, answers calls, repeats itself, goes back, rewrites its words or the user's, takes several samples."""
    model = shared.model
    model.calls.clear()
    model.hides = True
    session = shared.open()
    agent = AGENTS["chat"](f"{shared.root}/sessions/{session}", "-", stream)
    client, calls = chat_of(shared, session), list[Any]()
    for number, move in enumerate(["ask", *moves]):
        model.texts = [f"text {number}", f"other {number}"]
        if move == "answer" and calls:
            calls = agent.answer([(id, f"result {number}") for id, _ in calls]).calls
            continue
        if move == "ask":
            model.texts = [shared.write([{"text": "a"}]) if number % 2 else f"text {number}"]
        elif move == "again":
            del agent.history[-1]
            agent.go_on()
            continue
        elif move == "back":
            del agent.history[2:]
        elif move == "rewrite":
            agent.history[-1] = {"role": "assistant", "content": f"my own {number}"}
        elif move == "edit":
            agent.history[0] = {"role": "user", "content": f"edited {number}"}
        elif move == "two":
            agent.history.append({"role": "user", "content": "two?"})
            found = client.chat.completions.create(model="m", messages=agent.history, tools=TOOLS, n=2)
            agent.history.append(found.choices[number % 2].message)
            continue
        calls = agent.ask(f"question {number}").calls
    check_trained_once(shared.trace(session), model.calls)
    model.hides = False
    shared.close_sessions()
