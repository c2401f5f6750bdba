"""Messages as text through templates of many families: no text is lost without an error, whatever form it has."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.models.chat import as_messages, check_messages, with_answer
from hybridrl.models.rendering import LostTextError, rendered, unread_fields
from hybridrl.models.tiny import build_tokenizer
from tests.agents.template_families import FAMILIES

_TURNS = "{%% for m in messages %%}<|im_start|>{{ m.role }}\n%s<|im_end|>\n{%% endfor %%}"
#: templates that lose or change text that they do not expect, in the ways of public ones
FORMS = {
    "text_only": _TURNS % "{% if m.content is string %}{{ m.content }}{% endif %}",
    "prints": _TURNS % "{{ m.content | string | trim }}",
    "parts_only": _TURNS % "{% for part in m.content %}{{ part.text }}{% endfor %}",
    "three_roles": "{% for m in messages if m.role in ('system', 'user', 'assistant') %}[{{ m.content }}]{% endfor %}",
    "no_system": "{% for m in messages if m.role != 'system' %}[{{ m.role }}{{ m.content }}]{% endfor %}",
    "drops_thoughts": _TURNS % "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}",
    "reads_thoughts": _TURNS % "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}",
    "null_content": _TURNS % "{% if m.tool_calls and m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}",
    "python_arguments": _TURNS % "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments }}{% endfor %}",
}
TEMPLATES = {**FORMS, **{name: family.template for name, family in FAMILIES.items()}}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    plain = build_tokenizer()
    made = {}
    for name, template in TEMPLATES.items():
        made[name] = copy.deepcopy(plain)
        made[name].chat_template = template
    return made


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(str.strip)
ARGUMENTS = st.fixed_dictionaries({"city": TEXT, "days": st.integers(), "deep": st.fixed_dictionaries({"a": TEXT})})


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    def content() -> Any:
        texts = draw(st.lists(TEXT, min_size=1, max_size=2))
        return texts[0] if draw(st.booleans()) else [{"type": "text", "text": text} for text in texts]

    messages = [{"role": "system", "content": content()}] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": content()})
        if draw(st.booleans()):
            arguments = draw(ARGUMENTS)
            function = {"name": "weather", "arguments": json.dumps(arguments) if draw(st.booleans()) else arguments}
            call = {"id": f"functions.weather:{number}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": draw(st.sampled_from(["", None])), "tool_calls": [call]})
            messages.append({"role": "tool", "content": content(), "tool_call_id": call["id"]})
        messages.append({"role": "assistant", "content": content()})
    return messages


def texts_of(message: dict[str, Any]) -> list[str]:
    content = message["content"] or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        texts += ["weather", arguments["city"], str(arguments["days"]), arguments["deep"]["a"]]
    return [text.strip() for text in texts if text.strip()]


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations())
def test_text_in_is_text_out_or_a_named_error(tokenizers: dict[str, Any], name: str, messages: Any) -> None:
    check_messages(messages)
    try:
        text = rendered(tokenizers[name], as_messages(messages), add_generation_prompt=False)
    except LostTextError as error:
        lost = texts_of(messages[error.turn])
        assert lost and f"message {error.turn} ({messages[error.turn]['role']})" in str(error)
        assert name not in ("qwen", "qwen3_coder", "thinking", "reads_thoughts", "deepseek")  # these write everything
        return
    plain = text + text.replace("\\\\", "\\").replace('\\"', '"')
    for message in messages:
        for said in texts_of(message):
            assert said in plain or json.dumps(said, ensure_ascii=False)[1:-1] in text
    assert "[{'type'" not in text and "{'city'" not in text and "{'a'" not in text and '"{\\"city' not in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_parts_and_arguments_as_text_render_as_plain_messages_do(tokenizers: dict[str, Any], name: str) -> None:
    def talk(in_parts: bool) -> list[dict[str, Any]]:
        def content(text: str) -> Any:
            return [{"type": "text", "text": text}] if in_parts else text

        arguments: Any = {"city": "Rome", "days": 3}
        call = {"function": {"name": "weather", "arguments": json.dumps(arguments) if in_parts else arguments}}
        return [
            {"role": "user", "content": content("Weather in Rome, please?")},
            {"role": "assistant", "content": None if in_parts else "", "tool_calls": [{"id": "weather:1", **call}]},
            {"role": "tool", "tool_call_id": "weather:1", "content": content("12 degrees, or so")},
        ]

    def outcome(messages: Any) -> str:
        try:
            return rendered(tokenizers[name], as_messages(messages), add_generation_prompt=True)
        except LostTextError as error:
            return str(error)

    assert outcome(talk(True)) == outcome(talk(False))


def test_what_a_template_leaves_out_is_an_error(tokenizers: dict[str, Any]) -> None:
    question, answer = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
    system, developer = {"role": "system", "content": "5"}, {"role": "developer", "content": "Be brief, please."}
    thoughts = {"role": "assistant", "content": "<think>two and three</think>5"}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
    }
    for name, messages, said in (
        ("no_system", [system, question, answer], "message 0 (system): the chat template leaves out its content '5'"),
        ("no_system", [developer, question], "message 0 (system): the chat template leaves out its content 'Be brief"),
        ("three_roles", [question, {"role": "human", "content": "and now?"}], "message 1 (human)"),
        ("three_roles", [question, called], "message 1 (assistant): the chat template leaves out the name of its call"),
        ("drops_thoughts", [question, thoughts], "message 1 (assistant): the chat template leaves out its thoughts"),
        ("qwen", [question, {**answer, "thinking": "two and three"}], "does not read 'thinking'"),
        ("qwen", [question, {**answer, "refusal": "I will not"}], "does not read 'refusal'"),
    ):
        with pytest.raises(LostTextError) as caught:
            rendered(tokenizers[name], as_messages(messages), add_generation_prompt=False)
        assert said in str(caught.value)


def test_what_templates_may_do(tokenizers: dict[str, Any]) -> None:
    question = {"role": "user", "content": "  2+3?\n"}
    thoughts = {"role": "assistant", "content": "<think>two and three</think>5"}
    last = {"role": "assistant", "content": "6"}
    rendered(tokenizers["drops_thoughts"], as_messages([question, thoughts, question, last]))
    rendered(tokenizers["prints"], as_messages([question]))
    tool = {"role": "tool", "content": '{"a": "é"}\n'}
    rendered(tokenizers["llama3"], as_messages([question, last, tool]))
    for name in ("reasoning", "thinking", "reasoning_content"):  # under whatever name the template reads them
        text = rendered(tokenizers["reads_thoughts"], as_messages([question, {**last, name: "two and four"}]))
        assert "<think>two and four</think>6" in text


def test_what_a_model_wrote_is_no_error(tokenizers: dict[str, Any]) -> None:
    question = {"role": "user", "content": "2+3?"}
    thoughts = {"role": "assistant", "content": "<think>two and three</think>", "reasoning": "more"}
    text = rendered(tokenizers["drops_thoughts"], as_messages([question, thoughts]), is_generated=True)
    assert "two" not in text
    with pytest.raises(LostTextError, match=r"message 0 .system."):
        rendered(
            tokenizers["no_system"], as_messages([{"role": "system", "content": "Hi"}, question]), is_generated=True
        )


def test_a_system_message_that_another_message_repeats_is_not_taken_for_written(tokenizers: dict[str, Any]) -> None:
    system = {"role": "system", "content": "Answer with one number only."}
    question = {"role": "user", "content": "2+3? Answer with one number only."}
    with pytest.raises(LostTextError) as caught:
        rendered(tokenizers["no_system"], as_messages([system, question]))
    assert (caught.value.turn, caught.value.role) == (0, "system")
    assert rendered(tokenizers["qwen"], as_messages([system, question])).count(system["content"]) == 2


@pytest.mark.parametrize("name", ["qwen", "llama3", "reads_thoughts", "gpt-oss"])
@pytest.mark.parametrize("arguments", ["city=Rome", "[1, 2]", '{"city": "Ro', '"Rome"', "7"])
def test_arguments_of_calls_that_are_no_object_are_not_taught(
    tokenizers: dict[str, Any], name: str, arguments: str
) -> None:
    """A model would learn calls that no parser reads. One that was generated may be what it is."""
    question = {"role": "user", "content": "What is the weather like there?"}
    call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
    messages = as_messages([question, {"role": "assistant", "content": "", "tool_calls": [call]}])
    with pytest.raises(LostTextError) as caught:
        rendered(tokenizers[name], messages)
    assert (caught.value.turn, caught.value.role) == (1, "assistant") and repr(arguments) in str(caught.value)
    rendered(tokenizers[name], messages, is_generated=True)


def test_arguments_that_were_encoded_twice_are_objects(tokenizers: dict[str, Any]) -> None:
    question = {"role": "user", "content": "What is the weather like there?"}
    arguments = {"city": 'Rome "city"'}
    texts = []
    for form in (arguments, json.dumps(arguments), json.dumps(json.dumps(arguments))):
        call = {"type": "function", "function": {"name": "look_up", "arguments": form}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        texts.append(rendered(tokenizers["qwen"], as_messages([question, answer])))
    assert texts[0] == texts[1] == texts[2] and json.dumps(arguments) in texts[0]


def test_unread_fields(tokenizers: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "?", "name": "Ada", "id": 3, "prefix": None}, {"role": "tool", "name": "t"}]
    assert unread_fields(tokenizers["qwen"], messages) == {"name", "id"}
    named = copy.deepcopy(tokenizers["qwen"])
    named.chat_template = "{% for m in messages %}{{ m.name }}{{ m.content }}{{ m['id'] }}{% endfor %}"
    assert unread_fields(named, messages) == set()


def test_messages_have_one_form() -> None:
    call = {"name": "add", "arguments": {"a": 2, "b": None}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call, {"function": {"name": "sub", "arguments": None}}]},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "6"},
    ]
    user, assistant, first, second = as_messages(messages)
    assert user == {"role": "user", "content": "A\nB"}
    assert assistant["content"] == ""
    assert [one["function"] for one in assistant["tool_calls"]] == [
        {"name": "add", "arguments": {"a": 2, "b": None}},
        {"name": "sub", "arguments": {}},
    ]
    assert (first["name"], second["name"]) == ("add", "sub")
    assert as_messages(as_messages(messages)) == as_messages(messages)
    (padded,) = as_messages(messages[1:2], has_padding=True)
    assert padded["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    for fields, fault in (
        ({"reasoning": "a", "thinking": "b"}, "differ"),
        ({"reasoning": 3}, "must be text"),
        ({"tool_calls": [1]}, "no function with a name"),
        ({"tool_calls": "add"}, "is not a list"),
    ):
        with pytest.raises(ValueError, match=fault):
            check_messages([{"role": "assistant", "content": "", **fields}])


def test_an_answer_goes_on_with_the_turn_that_a_prompt_ends_with() -> None:
    question, begun = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "It is"}
    assert with_answer([question], "5") == [question, {"role": "assistant", "content": "5"}]
    assert with_answer([question, begun], " 5") == [question, {"role": "assistant", "content": "It is 5"}]
