"""The tokens between two turns of the model: what the chat template writes for the answers of tools.

Generated tokens stay as they are. The template renders a short conversation of placeholders, and only the text after
the model's turn is tokenised and appended:

    tokens so far ... generated tokens, end of turn | answers of the tools, opening of the next turn

So the text is right if what the template writes after a turn depends on nothing before it, and if earlier turns stay
what they were. `Turns.check` tries both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from hybridrl.chat.log import without_pixels
from hybridrl.chat.parsers.tool_parser import FunctionCall
from hybridrl.chat.session_images import images_in
from hybridrl.errors import RolloutError
from hybridrl.models.chat import Message, encode
from hybridrl.models.rendering import rendered
from hybridrl.models.vision import ImageProcessor, ImageTensors, tokens_per_image
from hybridrl.rollout.request_images import join_images

_MARKS = ("qzxj0qzxj", "qzxj1qzxj")  # what the model writes in its turns
_STRICT, _IGNORE, _DISABLE = "strict", "ignore_strippable", "disable"
_KEY = "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode"


class Turns:
    """Continues conversations as token ids.

    Args:
        tokenizer: with a chat template.
        eos_token_ids: the model's turns end with one of these.
        template_kwargs: further variables of the template.
        mode: `multi_turn.tokenization_sanity_check_mode`.
        processor: of a model that reads images. Messages may have some then, as patches (`ImageReader.prepared`); text
            that looks like a placeholder of images is changed, so that it becomes none.
        limit: most tokens of a session. Of a text with more than twice as many, those at its ends stand for all, which
            is too long as well (`hybridrl.models.chat.encode`); None: all text is tokenised.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        mode: str = _STRICT,
        processor: ImageProcessor | None = None,
        limit: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._limit = limit
        self._processor = processor
        media = [] if processor is None else [processor.config.image_token_id, processor.config.video_token_id]
        self._media_tokens = [str(tokenizer.convert_ids_to_tokens(token)) for token in media]
        self._ends = {tokenizer.convert_ids_to_tokens(token): token for token in eos_token_ids}
        self._kwargs = dict(template_kwargs or {})
        self._mode = mode

    @property
    def image_config(self) -> PreTrainedConfig | None:
        """The configuration of a model that reads images."""
        return None if self._processor is None else self._processor.config

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """The tokens of a conversation, and the opening of the model's turn."""
        return self.expanded(self.encoded(self.text(messages, tools)), images_in(messages))

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """A conversation as the template writes it, and the opening of the model's turn.

        Raises:
            RolloutError: the template refuses it; the cause has its own error.
        """
        return self._render(messages, tools, opening=True)

    def encoded(self, text: str) -> list[int]:
        """The tokens of a text that the template wrote."""
        return encode(self.tokenizer, [text], self._limit)[0]

    def following(
        self,
        last_token: int,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        calls: Sequence[FunctionCall] = (),
    ) -> list[int]:
        """The tokens that follow a turn of the model: `messages`, and the opening of its next turn.

        Args:
            last_token: the last one that the model generated. The end of its turn is added where it is another one,
                unless the template ends turns with a token that the model never does (gpt-oss), and the turn is ended.
            messages: of tools or of the user.
            tools: descriptions of the tools that the conversation began with.
            calls: those that the messages answer, some templates name them; none: the turn was text.

        Raises:
            RolloutError: the template cannot render this.
        """
        first, rest = self._after_turn(self._continued(calls, [list(messages)], tools, opening=True), _MARKS[0])
        ids = self.encoded(first + rest)
        if self.tokenizer.convert_ids_to_tokens(ids[0]) != first:
            raise RolloutError(f"{self._name}: the end of a turn, {first!r}, is not one token; {_ADVICE}")
        ids = self.expanded(ids, images_in(messages))
        ended = last_token == ids[0] or (first not in self._ends and last_token in self._ends.values())
        return ids[1:] if ended else ids

    def check(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Refuse a template that cannot be continued, or whose earlier text changes when a conversation goes on.

        Args:
            tools: descriptions; None: messages of the user follow instead of answers of tools.

        Raises:
            RolloutError: names the template and the difference.
        """
        calls = [FunctionCall(tools[0]["function"]["name"], {})] if tools else []
        answers: list[Message] = answers_of([(calls[0], "one")]) if calls else [{"role": "user", "content": "one"}]
        shorter = self._continued(calls, [answers], tools, opening=False)
        once = self._continued(calls, [answers], tools, opening=True)
        twice = self._continued(calls, [answers, answers], tools, opening=True)
        after, after_again = self._after_turn(once, _MARKS[0]), self._after_turn(twice, _MARKS[1])
        if self._mode == _DISABLE:
            return
        if self._differs("".join(after), "".join(after_again)):
            raise RolloutError(
                f"{self._name}: it writes {''.join(after)!r} after the first turn of the model and "
                f"{''.join(after_again)!r} after the second, for the same answer; {_ADVICE}"
            )
        if self._differs(shorter, twice[: len(shorter)]):
            start = next((i for i, (a, b) in enumerate(zip(shorter, twice, strict=False)) if a != b), len(twice))
            raise RolloutError(
                f"{self._name}: it is not append-only: a conversation that goes on changes earlier text, from "
                f"{shorter[start : start + 40]!r} to {twice[start : start + 40]!r}; {_ADVICE}"
            )

    def expanded(self, ids: list[int], images: Sequence[ImageTensors]) -> list[int]:
        """Token ids with each placeholder as often as its image has tokens; as they are if they are too many.

        Raises:
            RolloutError: the template wrote another number of placeholders than of images.
        """
        if self._processor is None or (images and self._limit is not None and len(ids) >= 2 * self._limit):
            return ids  # too long, so it is not generated from
        grid = join_images(images).get("image_grid_thw")
        counts = [] if grid is None else tokens_per_image(self._processor.config, grid).tolist()
        try:
            return self._processor.expand(ids, counts)
        except ValueError as error:
            raise RolloutError(f"{self._name}: {error}; {_ADVICE}") from error

    def _as_shown(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template gets them: without pixels, and without text that would become a placeholder."""
        stripped = without_pixels(messages)
        for message in stripped:
            content = message.get("content")
            if isinstance(content, str):
                message["content"] = self.harmless(content)
            for part in content if isinstance(content, list) else ():
                if isinstance(part.get("text"), str):
                    part["text"] = self.harmless(part["text"])
        return stripped

    def harmless(self, text: str) -> str:
        """Text that becomes no placeholder of images."""
        for token in self._media_tokens:
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def _differs(self, first: str, second: str) -> bool:
        if self._mode == _IGNORE:
            return "".join(first.split()) != "".join(second.split())
        return first != second

    def _after_turn(self, text: str, mark: str) -> tuple[str, str]:
        """The token that ends the turn which holds `mark`, and all text after it."""
        rest = text[text.rfind(mark) + len(mark) :]
        ends = [(rest.index(end), end) for end in self._ends if end and end in rest]
        if not ends:
            special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
            ends = [(rest.index(end), end) for end in special if end in rest]
        if not ends:
            raise RolloutError(
                f"{self._name}: it writes no token that ends the model's turn (known are "
                f"{', '.join(map(repr, self._ends))}), so answers of tools cannot follow it; {_ADVICE}"
            )
        start, end = min(ends)
        return end, rest[start + len(end) :]

    def _continued(
        self,
        calls: Sequence[FunctionCall],
        answers: Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] | None,
        opening: bool,
    ) -> str:
        """A question, and for each of `answers` a turn of the model (its n-th mark, and `calls`) and these messages.

        Some templates take one call alone. The first way that the template shows is used.
        """
        failure: RolloutError | None = None
        for shown_calls in (calls, calls[-1:]):
            messages: list[Message] = [{"role": "user", "content": "?"}]
            for mark, more in zip(_MARKS, answers, strict=False):
                messages += [_turn(mark, shown_calls), *more]
            try:
                text = self._render(messages, tools, opening)
            except RolloutError as error:
                failure = failure or error
                continue
            if all(mark in text for mark in _MARKS[: len(answers)]):
                return text
        raise failure or RolloutError(f"{self._name}: it leaves out a turn of the model; {_ADVICE}")

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, opening: bool) -> str:
        arguments = {**self._kwargs, "add_generation_prompt": opening}
        if tools:
            arguments["tools"] = list(tools)
        try:
            return rendered(self.tokenizer, self._as_shown(messages), is_generated=True, **arguments)
        except Exception as error:  # a template is a program, and may fail in any way
            raise RolloutError(
                f"{self._name} refuses a conversation: {type(error).__name__}: {error}; {_ADVICE}"
            ) from error

    @property
    def _name(self) -> str:
        return f"the chat template of {self.tokenizer.name_or_path or 'the tokenizer'}"


_ADVICE = (
    "give another template with actor_rollout_ref.model.custom_chat_template, or loosen the check with "
    f"{_KEY} ({_STRICT}, {_IGNORE}, {_DISABLE})"
)


def answers_of(answered: Sequence[tuple[FunctionCall, str | list[dict[str, Any]]]]) -> list[Message]:
    """The messages that answer calls, each by text or by parts."""
    return [
        {"role": "tool", "name": call.name, "tool_call_id": _id_of(call, number), "content": text}
        for number, (call, text) in enumerate(answered)
    ]


def _turn(mark: str, calls: Sequence[FunctionCall]) -> Message:
    """A turn of the model that ends with `mark`, in its text or in the arguments of its last call."""
    if not calls:
        return {"role": "assistant", "content": mark}
    tool_calls = []
    for number, call in enumerate(calls):
        function = {"name": call.name, "arguments": {"a": mark if number == len(calls) - 1 else ""}}
        tool_calls.append({"id": _id_of(call, number), "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _id_of(call: FunctionCall, number: int) -> str:
    return call.tool_call_id or f"call{number + 1:05d}"  # nine letters and digits, which some templates insist on
