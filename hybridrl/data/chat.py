"""Renders a dataset's conversations with the chat template, names the row of any error, and truncates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.errors import DataError
from hybridrl.models.chat import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        DataError: there is no chat template; the error says how to supply one.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template, so messages cannot be "
            "turned into a prompt. Use an instruction-tuned model, or give a Jinja template with "
            "actor_rollout_ref.model.custom_chat_template='...' (for main_sft, main_dpo and main_rm: "
            "model.custom_chat_template)."
        )


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[Message]],
    locate: Callable[[int], str],
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any] | Callable[[int], Mapping[str, Any]],
) -> list[str]:
    """Render every conversation to text.

    Args:
        tokenizer: a tokenizer with a chat template.
        conversations: lists of messages.
        locate: returns the file and row of the i-th conversation, for messages.
        add_generation_prompt: whether to end with the opening of an assistant turn.
        template_kwargs: further variables of the template (`data.apply_chat_template_kwargs`), or a function that
            returns those of the i-th conversation.

    Raises:
        DataError: the template refuses a conversation; the error names its file and row.
    """
    texts = []
    for index, conversation in enumerate(conversations):
        own = template_kwargs(index) if callable(template_kwargs) else template_kwargs
        arguments = {**own, "add_generation_prompt": add_generation_prompt, "tokenize": False}
        try:
            texts.append(tokenizer.apply_chat_template(conversation, **arguments))
        except Exception as error:
            # A template is a program and may fail in any way. The row that it fails on is what helps the user.
            raise DataError(
                f"{locate(index)}: the chat template of {tokenizer.name_or_path or 'the tokenizer'} refuses this "
                f"conversation: {type(error).__name__}: {error}. Fix the row, or set data.apply_chat_template_kwargs "
                "or model.custom_chat_template."
            ) from error
    return texts


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Cut a sequence to `limit` tokens.

    `left` drops the beginning, `right` the end, `middle` keeps the first `limit // 2` and the last `limit -
    limit // 2`.
    """
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[len(ids) - limit :]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]
