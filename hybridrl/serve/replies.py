"""Conversion of a completion into the choice that a client gets: text, thoughts and tool calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.chat.parsers.tool_parser import FunctionCall, MalformedCall, ToolParser
from hybridrl.models.chat import Message
from hybridrl.rollout.request import Completion
from hybridrl.serve.schema import ChatRequest, SamplingRequest

_BEGIN, _END = "<think>", "</think>"


@dataclass(frozen=True)
class ReplyChoice:
    """One choice of an answer.

    Attributes:
        completion: what was generated.
        content: the text.
        calls: the tool calls, each with an id.
        malformed: what looks like calls and cannot be read; `content` has their text.
        reasoning: thoughts, where they are apart from the text.
        opening: the beginning of the text, if the client sent one; `content` is what follows.
    """

    completion: Completion
    content: str
    calls: tuple[FunctionCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    reasoning: str = ""
    opening: str = ""

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why it ended."""
        reason = self.completion.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def message(self) -> Message:
        """The message as OpenAI's chat API has it."""
        message: Message = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.tool_call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for call in self.calls
            ]
        return message

    def whole_message(self) -> Message:
        """The message with the beginning that the client sent."""
        return self.message() | ({"content": self.opening + self.content} if self.opening else {})


def text_of(tokenizer: Any, completion: Completion, request: SamplingRequest) -> str:
    """A completion without special tokens, cut before the first stop string unless that was asked for."""
    return _cut(tokenizer.decode(completion.token_ids, skip_special_tokens=True), completion, request)


def _cut(text: str, completion: Completion, request: SamplingRequest) -> str:
    if completion.finish_reason != "stop":
        return text
    matches = [(text.find(stop), len(stop)) for stop in request.stops if stop in text]
    if not matches:
        return text
    start, length = min(matches)
    return text[: start + length] if request.include_stop_str_in_output else text[:start]


def reply_of(
    tokenizer: Any,
    parser: ToolParser,
    ends: Sequence[int],
    completion: Completion,
    request: ChatRequest,
    new_id: Callable[[], str],
    opening: str = "",
) -> ReplyChoice:
    """Return the choice that a client gets for a completion.

    Args:
        tokenizer: decodes it.
        parser: reads the calls, where there are tools.
        ends: tokens that end a turn; they belong to no text.
        request: the call's body.
        new_id: makes the id of a call that the model gave none.
        opening: the beginning of the turn, which the model did not write.
    """
    plain = text_of(tokenizer, completion, request)
    own = opening if request.continue_final_message else ""
    if not request.separates_thoughts:
        return ReplyChoice(completion, plain, opening=own)
    ids = completion.token_ids
    marked = _cut(tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids), completion, request)
    if not request.reads_calls:
        thought, content = _thought_and_rest(plain)
        return ReplyChoice(completion, content, reasoning=thought, opening=own)
    parsed = parser.parse(opening + marked, request.tools)
    calls = [call for call in parsed.calls if isinstance(call, FunctionCall)]
    malformed = tuple(call for call in parsed.calls if isinstance(call, MalformedCall))
    content = "\n".join(filter(None, [parsed.content, *(call.text.strip() for call in malformed)]))
    used_ids: set[str] = set()
    named = []
    for call in calls if request.parallel_tool_calls else calls[:1]:
        id = call.tool_call_id if call.tool_call_id and call.tool_call_id not in used_ids else new_id()
        used_ids.add(id)
        named.append(FunctionCall(call.name, call.arguments, id))
    if own:  # of which the client knows
        content = content.removeprefix(own.strip())
    return ReplyChoice(completion, content, tuple(named), malformed, _thought_and_rest(marked)[0], own)


def _thought_and_rest(text: str) -> tuple[str, str]:
    """A thought at the beginning of a text, and what follows it. The template may have opened the thought."""
    before, closed, after = text.partition(_END)
    if closed:
        return before.replace(_BEGIN, "", 1).strip(), after.strip()
    before, opened, after = text.partition(_BEGIN)
    return (after.strip(), before.strip()) if opened else ("", text)


def calls_in(message: Mapping[str, Any]) -> list[FunctionCall]:
    """The tool calls of a message of the inner conversation."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        arguments_by_name = arguments if isinstance(arguments, Mapping) else {}
        calls.append(FunctionCall(call["function"]["name"], arguments_by_name, call.get("id")))
    return calls
