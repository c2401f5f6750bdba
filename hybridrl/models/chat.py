"""Chat messages, and the token ids of rendered text, the same in training, validation and serving.

The text is tokenised without adding special tokens. The chat template has already written them, and a second BOS would
change what the model sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_EXAMPLE = '[{"role": "user", "content": "..."}]'


def fault_in_messages(value: Any) -> str | None:
    """Return why `value` is not a list of chat messages, or None if it is one."""
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
        if content is not None and not isinstance(content, str):
            fault = _fault_in_parts(content)
            if fault:
                return f"message {number} ({role}): {fault}"
    return None


def _fault_in_parts(content: Any) -> str | None:
    if not isinstance(content, Sequence):
        return f"'content' is {type(content).__name__}; it must be text or a list of parts"
    for part in content:
        if not isinstance(part, Mapping) or "type" not in part:
            return "'content' is a list with a part that has no 'type'"
        if part["type"] != "text":
            return f"'content' has a part of type {part['type']!r}; only text is supported"
    return None


def clean_messages(value: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages without the None entries that parquet adds to give all rows the same fields."""
    return [
        {name: item for name, item in message.items() if item is not None or name == "content"} for message in value
    ]


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of rendered texts. No special tokens are added."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    return encoded["input_ids"]
