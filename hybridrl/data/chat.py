"""Chat messages to token ids.

A conversation is rendered by the tokenizer's chat template and the text is tokenised without adding special tokens: the
template has written them already, and a second BOS would change what the model sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.data.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_EXAMPLE = '[{"role": "user", "content": "..."}]'


def fault_in_messages(value: Any) -> str | None:
    """What keeps ``value`` from being a list of chat messages, or None if it is one."""
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
    """Messages without the None entries that parquet adds to make all rows of one shape."""
    return [
        {name: item for name, item in message.items() if item is not None or name == "content"} for message in value
    ]


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        DataError: says how to supply one.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template, so messages cannot be "
            "turned into a prompt. "
            "Use an instruction-tuned model, or give a Jinja template with "
            "actor_rollout_ref.model.custom_chat_template='...' "
            "(for main_sft: model.custom_chat_template)."
        )


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[Message]],
    locate: Callable[[int], str],
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any],
) -> list[str]:
    """Render every conversation to text.

    Args:
        tokenizer: one with a chat template.
        conversations: lists of messages.
        locate: the address of the i-th conversation, for messages.
        add_generation_prompt: end with the opening of an assistant turn.
        template_kwargs: more variables of the template (``data.apply_chat_template_kwargs``).

    Raises:
        DataError: the template refuses a conversation; names its file and row.
    """
    arguments = {**template_kwargs, "add_generation_prompt": add_generation_prompt, "tokenize": False}
    texts = []
    for index, conversation in enumerate(conversations):
        try:
            texts.append(tokenizer.apply_chat_template(conversation, **arguments))
        except Exception as error:
            # A template is a program of its author: it may fail in any way, and the row that it fails on is what helps.
            raise DataError(
                f"{locate(index)}: the chat template of {tokenizer.name_or_path or 'the tokenizer'} refuses this "
                "conversation: "
                f"{type(error).__name__}: {error}. Mend the row, or set data.apply_chat_template_kwargs or "
                "model.custom_chat_template."
            ) from error
    return texts


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered texts; no special tokens are added."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    return encoded["input_ids"]


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Cut a sequence to ``limit`` tokens.

    ``left`` drops the beginning, ``right`` the end, ``middle`` keeps the first ``limit // 2`` and the last ``limit -
    limit // 2``.
    """
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[len(ids) - limit :]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]
