"""Turns whose beginning the model does not write, and answers that are kept to a schema."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from gateway_stage import ECHO, FORMATS, LIMIT, TOKEN, GatewayStage, check_trained_once, staged
from raising import raises_with
from template_families import write_model

from hybridrl.registry import TOOL_PARSERS
from hybridrl.rollout.token_tree import TokenTree
from hybridrl.rollout.trace import trajectories_of
from hybridrl.serve import Listener, OpenAIServer, Served, create_app

CHAT_TOOLS: Any = [{"type": "function", "function": ECHO}]
NAMED: Any = {"type": "function", "function": {"name": "echo"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ARGUMENTS = {"text": "abc"}
#: what the model writes behind the opening of a call of `echo`
BEHIND: Mapping[str, str] = {
    "qwen": ' {"text": "abc"}}\n</tool_call>',
    "thinking": ' {"text": "abc"}}\n</tool_call>',
    "llama3": ' {"text": "abc"}}',
    "qwen3_coder": "<parameter=text>\nabc\n</parameter>\n</function>\n</tool_call>",
    "glm": "<arg_key>text</arg_key>\n<arg_value>abc</arg_value>\n</tool_call>",
    "kimi": '{"text": "abc"}<|tool_call_end|><|tool_calls_section_end|>',
    "gpt-oss": '{"text": "abc"}',
}
assert {*BEHIND, "deepseek"} == set(FORMATS)


@pytest.fixture(scope="module")
def model(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(micro_model, tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def qwen(model: Path) -> Iterator[GatewayStage]:
    with staged(model, "qwen") as stage:
        yield stage


@pytest.fixture(autouse=True)
def fresh(qwen: GatewayStage) -> Iterator[None]:
    qwen.model.calls.clear()
    qwen.model.requests.clear()
    qwen.model.texts = []
    yield
    qwen.model.hides = False
    qwen.close_sessions()


def clients(stage: GatewayStage, session: str) -> tuple[openai.OpenAI, anthropic.Anthropic]:
    root = f"{stage.root}/sessions/{session}"
    return (
        openai.OpenAI(base_url=f"{root}/v1", api_key="-", max_retries=0),
        anthropic.Anthropic(base_url=root, api_key="-", max_retries=0),
    )


def check_given(stage: GatewayStage, session: str, call: int, given: str) -> list[int]:
    """The turn begins with these tokens, which nobody trains on; its prompt without them."""
    prompt, made = stage.model.calls[call]
    ids = stage.turns.encoded(given)
    assert prompt[len(prompt) - len(ids) :] == ids
    for one in trajectories_of(stage.trace(session)):
        whole = [*one.prompt_ids, *one.token_ids]
        if whole[: len(prompt) + len(made.token_ids)] == [*prompt, *made.token_ids]:
            place = len(prompt) - len(one.prompt_ids)
            assert not any(one.mask[max(0, place - len(ids)) : place])
            assert all(one.mask[place : place + len(made.token_ids)])
            return prompt[: len(prompt) - len(ids)]
    raise AssertionError("the turn is in no trajectory")


@pytest.mark.parametrize("family", BEHIND)
def test_a_call_is_begun_in_the_models_own_format(model: Path, family: str) -> None:
    """The rest is the model's, and so are its log-probabilities."""
    with staged(model, family) as stage:
        parser = TOOL_PARSERS.get(FORMATS[family][0])()
        free, named = parser.opening(None), parser.opening("echo")
        assert free is not None and named is not None and named.startswith(free.rstrip('"'))
        thought = "\n</think>\n\n" if family == "thinking" else ""
        stage.model.texts = [(named + BEHIND[family]).removeprefix(free), BEHIND[family].replace("abc", "xy"), "good."]
        session = stage.open()
        chat, _ = clients(stage, session)
        history: list[Any] = [{"role": "user", "content": "How long is abc?"}]
        for choice, opening, text in (("required", free, "abc"), (NAMED, named, "xy")):
            found = chat.chat.completions.create(
                model="m", messages=history, tools=CHAT_TOOLS, tool_choice=choice
            ).choices[0]
            assert found.finish_reason == "tool_calls" and found.message.tool_calls
            (call,) = found.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("echo", {"text": text})  # type: ignore[union-attr]
            prompt = check_given(stage, session, -1, thought + opening)
            assert prompt == stage.turns.prompt(history, CHAT_TOOLS)
        history += [found.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        chat.chat.completions.create(model="m", messages=history, tools=CHAT_TOOLS)
        before = [*stage.model.calls[1][0], *stage.model.calls[1][1].token_ids]
        assert stage.model.calls[2][0][: len(before)] == before, "the tokens are gone on from"
        check_trained_once(stage.trace(session), stage.model.calls)
        assert TokenTree(stage.model.calls).branches()[-1].token_ids  # what the run itself takes


def test_a_format_whose_calls_begin_differently_is_refused(model: Path) -> None:
    with staged(model, "deepseek") as stage:
        chat, _ = clients(stage, stage.open())
        messages: Any = [{"role": "user", "content": "?"}]
        with pytest.raises(openai.BadRequestError, match="begins alike"):
            chat.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS, tool_choice="required")


@pytest.mark.parametrize("choice", ["any", "tool"])
def test_other_dialects_force_calls_in_their_own_words(qwen: GatewayStage, choice: str) -> None:
    opening = TOOL_PARSERS.get("hermes")().opening(None if choice == "any" else "echo")
    assert opening is not None
    rest = (' "echo", "arguments":' if choice == "any" else "") + BEHIND["qwen"]
    qwen.model.texts = [rest, rest]
    session = qwen.open()
    chat, messages = clients(qwen, session)
    tool: Any = {"name": "echo", "description": "", "input_schema": ECHO["parameters"]}
    wanted: Any = {"type": "any"} if choice == "any" else {"type": "tool", "name": "echo"}
    found = messages.messages.create(
        model="m", max_tokens=99, messages=[{"role": "user", "content": "?"}], tools=[tool], tool_choice=wanted
    )
    assert [(block.type, block.input) for block in found.content] == [("tool_use", ARGUMENTS)]  # type: ignore[union-attr]
    check_given(qwen, session, 0, opening)
    forced: Any = "required" if choice == "any" else {"type": "function", "name": "echo"}
    response = chat.responses.create(
        model="m", input="?", tools=[{"type": "function", "strict": False, **ECHO}], tool_choice=forced
    )
    assert [item.type for item in response.output] == ["function_call"]
    check_given(qwen, session, 1, opening)


def test_what_the_model_makes_of_a_begun_call_may_be_none(qwen: GatewayStage) -> None:
    qwen.model.texts = [" nonsense"]
    chat, _ = clients(qwen, qwen.open())
    messages: Any = [{"role": "user", "content": "?"}]
    choice = chat.chat.completions.create(
        model="m", messages=messages, tools=CHAT_TOOLS, tool_choice="required"
    ).choices[0]
    assert choice.finish_reason == "stop" and not choice.message.tool_calls
    assert choice.malformed_tool_calls[0]["text"] == '{"name": nonsense'  # type: ignore[attr-defined]


@pytest.mark.parametrize("dialect", ["chat", "messages"])
@pytest.mark.parametrize("with_tools", [False, True], ids=["text", "tools"])
def test_an_answer_goes_on_from_its_beginning(qwen: GatewayStage, dialect: str, with_tools: bool) -> None:
    """The answer is what follows; the client joins both, and the conversation continues the tokens."""
    qwen.model.texts, qwen.model.hides = [" is 4.", "Yes."], True  # so that the text alone gives other tokens
    session = qwen.open()
    chat, messages = clients(qwen, session)
    history: Any = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "The sum"}]
    if dialect == "chat":
        given: Any = {"continue_final_message": True, "add_generation_prompt": False}
        tools: Any = CHAT_TOOLS if with_tools else openai.omit
        made = chat.chat.completions.create(model="m", messages=history, tools=tools, extra_body=given)
        text = str(made.choices[0].message.content)
    else:
        tool: Any = {"name": "echo", "description": ECHO["description"], "input_schema": ECHO["parameters"]}
        tools = [tool] if with_tools else anthropic.omit
        asked: Any = {"model": "m", "messages": history, "tools": tools}
        text = messages.messages.create(max_tokens=99, **asked).content[0].text  # type: ignore[union-attr]
        counted = messages.messages.count_tokens(**asked).input_tokens
        assert counted == len(qwen.model.calls[0][0])
    assert text.removeprefix("<|pad|>").strip() == "is 4."
    prompt = check_given(qwen, session, 0, "The sum")
    assert prompt == qwen.turns.prompt(history[:1], CHAT_TOOLS if with_tools else None)
    history[-1] = {"role": "assistant", "content": "The sum" + text}
    history.append({"role": "user", "content": "Sure?"})
    if dialect == "chat":
        chat.chat.completions.create(model="m", messages=history, tools=tools)
    else:
        messages.messages.create(model="m", max_tokens=99, messages=history, tools=tools)
    before = [*qwen.model.calls[0][0], *qwen.model.calls[0][1].token_ids]
    assert qwen.model.calls[1][0][: len(before)] == before
    (one,) = check_trained_once(qwen.trace(session), qwen.model.calls)
    assert sum(one.mask) == sum(len(made.token_ids) for _, made in qwen.model.calls)


def test_a_schema_reaches_an_engine_that_can_keep_to_it(qwen: GatewayStage) -> None:
    served = Served("tiny", qwen.tokenizer, LIMIT, len(qwen.tokenizer), constrains=True)
    listener = Listener("127.0.0.1")
    server = OpenAIServer(create_app(qwen.model, served, TOKEN), listener.socket)
    qwen.do(server.start())
    root = listener.url.removesuffix("/v1")
    chat = openai.OpenAI(base_url=listener.url, api_key=TOKEN, max_retries=0)
    messages: Any = [{"role": "user", "content": "?"}]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    chat.chat.completions.create(model="tiny", messages=messages, response_format=schema)
    chat.chat.completions.create(model="tiny", messages=messages, response_format={"type": "json_object"})
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    assert chat.responses.create(model="tiny", input="?", text=text).text.format.schema_ == SCHEMA  # type: ignore[union-attr]
    claude = anthropic.Anthropic(base_url=root, api_key=TOKEN, max_retries=0)
    claude.messages.create(
        model="tiny",
        max_tokens=9,
        messages=messages,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
    )
    chat.chat.completions.create(model="tiny", messages=messages)
    told = [request.sampling.json_schema for request in qwen.model.requests]
    assert [None if one is None else json.loads(one) for one in told] == [
        SCHEMA,
        {"type": "object"},
        SCHEMA,
        SCHEMA,
        None,
    ]
    qwen.do(server.stop())


def test_a_session_that_samples_as_training_does_takes_no_schema(qwen: GatewayStage) -> None:
    """Its log-probabilities would be those of what the schema leaves of the distribution."""
    served = Served("tiny", qwen.tokenizer, LIMIT, len(qwen.tokenizer), turns=qwen.turns, constrains=True)
    listener = Listener("127.0.0.1")
    server = OpenAIServer(create_app(qwen.model, served, TOKEN), listener.socket)
    qwen.do(server.start())
    messages: Any = [{"role": "user", "content": "?"}]
    for fixed in (True, False):
        root = listener.url.removesuffix("/v1")
        id = qwen.http.post(f"{root}/sessions", json={"fixed_sampling": fixed}).json()["id"]
        chat = openai.OpenAI(base_url=f"{root}/sessions/{id}/v1", api_key="-", max_retries=0)
        if fixed:
            with raises_with(openai.BadRequestError, "sampling=run"):
                chat.chat.completions.create(model="m", messages=messages, response_format={"type": "json_object"})
        else:
            chat.chat.completions.create(model="m", messages=messages, response_format={"type": "json_object"})
    assert len(qwen.model.requests) == 1
    qwen.do(server.stop())
