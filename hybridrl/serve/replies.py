"""From a completion to what a client sees of it: text, thoughts and tool calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.chat.parsers.base import FunctionCall, MalformedCall, ToolParser
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
        given: the beginning of the text, where the client gave it; `content` is what follows.
    """

    completion: Completion
    content: str
    calls: tuple[FunctionCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    reasoning: str = ""
    given: str = ""

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why it ended."""
        reason = self.completion.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def message(self) -> Message:
        """The message as OpenAI's chat API has it."""
        found: Message = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {
                    "id": call.tool_call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for call in self.calls
            ]
        return found

    def whole_message(self) -> Message:
        """The message with the beginning that the client gave."""
        return self.message() | ({"content": self.given + self.content} if self.given else {})


def text_of(tokenizer: Any, completion: Completion, request: SamplingRequest) -> str:
    """A completion without special tokens, cut before the first stop string unless that was asked for."""
    return _cut(tokenizer.decode(completion.token_ids, skip_special_tokens=True), completion, request)


def _cut(text: str, completion: Completion, request: SamplingRequest) -> str:
    if completion.finish_reason != "stop":
        return text
    found = [(text.find(stop), len(stop)) for stop in request.stops if stop in text]
    if not found:
        return text
    start, length = min(found)
    return text[: start + length] if request.include_stop_str_in_output else text[:start]


def reply_of(
    tokenizer: Any,
    parser: ToolParser,
    ends: Sequence[int],
    completion: Completion,
    request: ChatRequest,
    new_id: Callable[[], str],
    given: str = "",
) -> ReplyChoice:
    """What a client sees of a completion.

    Args:
        tokenizer: decodes it.
        parser: reads the calls, where there are tools.
        ends: tokens that end a turn; they belong to no text.
        request: the call's body.
        new_id: makes the id of a call that the model gave none.
        given: the beginning of the turn, which the model did not write.
    """
    plain = text_of(tokenizer, completion, request)
    own = given if request.continue_final_message else ""
    if not request.separates_thoughts:
        return ReplyChoice(completion, plain, given=own)
    ids = completion.token_ids
    marked = _cut(tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids), completion, request)
    if not request.reads_calls:
        thought, content = _thought_and_rest(plain)
        return ReplyChoice(completion, content, reasoning=thought, given=own)
    parsed = parser.parse(given + marked, request.tools)
    calls = [call for call in parsed.calls if isinstance(call, FunctionCall)]
    malformed = tuple(call for call in parsed.calls if isinstance(call, MalformedCall))
    content = "\n".join(filter(None, [parsed.content, *(call.text.strip() for call in malformed)]))
    taken: set[str] = set()
    named = []
    for call in calls if request.parallel_tool_calls else calls[:1]:
        id = call.tool_call_id if call.tool_call_id and call.tool_call_id not in taken else new_id()
        taken.add(id)
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
    found = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        known = arguments if isinstance(arguments, Mapping) else {}
        found.append(FunctionCall(call["function"]["name"], known, call.get("id")))
    return found
