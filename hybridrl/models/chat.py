"""Chat messages, and the token ids of rendered text, the same in training, validation and serving.

The text is tokenised without adding special tokens. The chat template has already written them, and a second BOS would
change what the model sees.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
TEXT = ("text",)
TEXT_AND_IMAGES = ("text", "image", "video")

_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]""")
_EXAMPLE = '[{"role": "user", "content": "..."}]'

_CHARACTERS = 64  # of a text that are tokenised at first per token of the limit; tokens have 3 to 5 on average
_FEWEST = 64  # tokens of the limit that the first part counts with


def fault_in_messages(value: Any, kinds: Sequence[str] = TEXT) -> str | None:
    """Return why `value` is not a list of chat messages, or None if it is one.

    Args:
        kinds: types of the parts that the content of a message may have.
    """
    if isinstance(value, str):
        return (
            f"it is text ({value[:60]!r}{'...' if len(value) > 60 else ''}), not a list of messages; write {_EXAMPLE}"
        )
    if not isinstance(value, Sequence):
        return f"it is {'missing' if value is None else type(value).__name__}, not a list of messages; write {_EXAMPLE}"
    if not value:
        return f"the list of messages is empty; write at least {_EXAMPLE}"
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            return f"message {number} is {type(message).__name__}, not an object with 'role' and 'content'"
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            return f"message {number} has no 'role' (keys found: {', '.join(map(str, message)) or 'none'})"
        if content is None and not message.get("tool_calls"):
            return f"message {number} ({role}) has no 'content'"
        fault = _fault_in_text(content) if isinstance(content, str) else None
        if content is not None and not isinstance(content, str):
            fault = _fault_in_parts(content, kinds)
        if fault:
            return f"message {number} ({role}): {fault}"
    return None


def _fault_in_text(text: str) -> str | None:
    """Return why a tokenizer cannot read text, or None."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return (
            f"character {error.start} is the lone surrogate {text[error.start]!r}, half of a character that was cut in "
            "two; remove it, or write the whole character"
        )
    return None


def fault_in_prompt(value: Any, kinds: Sequence[str] = TEXT) -> str | None:
    """Return why `value` is neither text nor a list of chat messages, or None if it is one of them."""
    if not isinstance(value, str):
        return fault_in_messages(value, kinds)
    if not value.strip():
        return "the text is empty"
    if fault := _fault_in_text(value):
        return fault
    if _MESSAGES_AS_TEXT.match(value):
        return (
            f"it is a list of messages written as text ({value[:40]!r}...); write the list itself, as JSON or parquet"
        )
    return None


def as_messages(value: str | Sequence[Mapping[str, Any]], system_prompt: str | None = None) -> list[Message]:
    """Return a prompt as chat messages: text becomes a message of the user.

    Args:
        value: text, or messages without a fault.
        system_prompt: begins the conversation, unless that has a system message of its own.
    """
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else clean_messages(value)
    if system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _fault_in_parts(content: Any, kinds: Sequence[str]) -> str | None:
    if not isinstance(content, Sequence):
        return f"'content' is {type(content).__name__}; it must be text or a list of parts"
    for part in content:
        if not isinstance(part, Mapping) or "type" not in part:
            return "'content' is a list with a part that has no 'type'"
        if part["type"] not in kinds:
            taken = f"{' and '.join(kinds)} are" if len(kinds) > 1 else f"only {kinds[0]} is"
            return f"'content' has a part of type {part['type']!r}; {taken} supported"
        if part["type"] != "text":
            continue
        if not isinstance(part.get("text"), str):
            return "'content' has a part of type 'text' without a text"
        if fault := _fault_in_text(part["text"]):
            return fault
    return None


def clean_messages(value: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages without the None entries that parquet adds to give all rows the same fields."""
    return [
        {name: item for name, item in message.items() if item is not None or name == "content"} for message in value
    ]


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int | None = None) -> list[list[int]]:
    """Return the token ids of rendered texts. No special tokens are added.

    Args:
        tokenizer: of the model.
        texts: what the template rendered.
        limit: of a text with more than twice as many tokens, only the first and the last `limit` tokens are returned.
            The rest is not tokenised, which takes minutes and gigabytes for a text of some megabytes.
    """
    if limit is not None and (long := [number for number, text in enumerate(texts) if exceeds(tokenizer, text, limit)]):
        ends = [_ends(tokenizer, texts[number], limit) for number in long]
        rest = iter(encode(tokenizer, [text for number, text in enumerate(texts) if number not in set(long)]))
        cut = dict(zip(long, ends, strict=True))
        return [cut[number] if number in cut else next(rest) for number in range(len(texts))]
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    return encoded["input_ids"]


def exceeds(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> bool:
    """Whether the beginning of a text alone has more than twice `limit` tokens; False for texts that are not long.

    The first part that is tokenised has 64 characters per token of the limit, further ones four times as many.
    """
    size = _CHARACTERS * max(limit, _FEWEST)
    while size < len(text):
        if len(encode(tokenizer, [text[:size]])[0]) > 2 * limit:
            return True
        size *= 4
    return False


def _ends(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> list[int]:
    """The first and the last `limit` tokens of a text that `exceeds` the limit."""
    size, whole = _CHARACTERS * max(limit, _FEWEST), len(text)
    while True:
        first, last = encode(tokenizer, [text[:size], text[whole - min(size, whole) :]])
        if size >= whole or min(len(first), len(last)) > limit:
            return [*first[:limit], *last[len(last) - limit :]]
        size *= 4
