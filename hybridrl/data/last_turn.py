"""Prompts that end with a turn of the assistant: `data.last_assistant_turn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridrl.data.table import REWARD_MODEL, Table
from hybridrl.errors import DataError
from hybridrl.models.chat import Message, as_messages, check_prompt

if TYPE_CHECKING:
    from hybridrl.config import PromptConfig

GROUND_TRUTH, CONTINUE = "ground_truth", "continue"


def split_last_turn(messages: Sequence[Message], setting: str, where: str) -> tuple[list[Message], str | None]:
    """Return the messages of the prompt, and the text of a last turn of the assistant that is the ground truth.

    Args:
        setting: `data.last_assistant_turn`.
        where: the row, for messages.

    Raises:
        DataError: the setting does not allow the last message.
    """
    last = messages[-1]
    if last["role"] in ("system", "developer") and _answers(messages):
        raise DataError(
            f"{where}: the last message is of the role {last['role']!r} and follows a turn of the assistant, which "
            "would be part of what the model reads. Write it before the messages of the user, or leave the row out."
        )
    if last["role"] != "assistant":
        if setting == GROUND_TRUTH:
            raise DataError(
                f"{where}: data.last_assistant_turn={GROUND_TRUTH}, but the last message is of the role "
                f"{last['role']!r}, so the row has no answer. Add it, or leave the row out."
            )
        return list(messages), None
    if setting not in (GROUND_TRUTH, CONTINUE):
        raise DataError(
            f"{where}: the prompt ends with a turn of the assistant ({str(last.get('content'))[:60]!r}), which would "
            f"be part of what the model reads. Set data.last_assistant_turn={GROUND_TRUTH} to take it out of the "
            f"prompt, as the ground truth of the reward, or data.last_assistant_turn={CONTINUE} if the model is to go "
            "on with this text; or end the messages with the user's."
        )
    content = last.get("content")
    if last.get("tool_calls") or not isinstance(content, str) or not content.strip():
        raise DataError(
            f"{where}: data.last_assistant_turn={setting}, but the last turn of the assistant has "
            f"{'tool calls' if last.get('tool_calls') else 'no text'}; it must be text alone."
        )
    if all(message["role"] in ("system", "developer") for message in messages[:-1]):
        raise DataError(
            f"{where}: data.last_assistant_turn={setting}, but no message of the user comes before the answer, "
            "so nothing is left of the prompt. Leave the row out."
        )
    if setting == CONTINUE:
        return list(messages), None
    if messages[-2]["role"] == "assistant":
        raise DataError(
            f"{where}: data.last_assistant_turn={setting}, and the message before the last is the assistant's, too, so "
            "a part of the answer would stay in the prompt. Join both, or leave the row out."
        )
    return list(messages[:-1]), content


def _answers(messages: Sequence[Message]) -> bool:
    """Whether the last message that is no instruction is an answer of the assistant."""
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return bool(others) and others[-1]["role"] == "assistant"


def table_with_answers(table: Table, config: PromptConfig) -> Table:
    """Return a table whose column `reward_model` has the last turn of each prompt, if that is the ground truth.

    Raises:
        DataError: a row has no such turn, or the rows have a ground truth already.
    """
    if config.last_assistant_turn != GROUND_TRUTH:
        return table
    own = config.ground_truth_key or (REWARD_MODEL if REWARD_MODEL in table.columns else None)
    if own is not None:
        raise DataError(
            f"data.last_assistant_turn={GROUND_TRUTH}, but column {own!r} is the ground truth already; remove one of "
            "them."
        )
    answers = []
    for index, value in enumerate(table.column(config.prompt_key)):
        where = f"{table.locate(index)}: column {config.prompt_key!r}"
        try:
            check_prompt(value, ("text", "image", "video"))
        except ValueError as error:
            raise DataError(f"{where} cannot be used as a prompt: {error}.") from None
        answers.append(split_last_turn(as_messages(value), GROUND_TRUTH, where)[1])
    return table.with_answers(answers)


def prompt_hint(table: Table) -> str:
    """Return the remedy for a missing prompt column; empty: nothing special."""
    if "messages" not in table.columns:
        return ""
    return (
        "Name the right column with data.prompt_key=COLUMN. data.prompt_key=messages takes whole conversations: if "
        f"they end with an answer, data.last_assistant_turn={GROUND_TRUTH} makes it the ground truth."
    )
