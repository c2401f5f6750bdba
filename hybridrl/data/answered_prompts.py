"""Prompts with answers as token ids: what the data sets of preference optimisation share."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hybridrl.data.conversation_dataset import ConversationDataset
from hybridrl.data.turn_weights import TURN_FIELDS, turn_weight
from hybridrl.data.written_turns import written_form
from hybridrl.errors import DataError
from hybridrl.models.chat import Message, as_messages, check_messages, check_no_conversation, check_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import SupervisedDataConfig
    from hybridrl.models.vision import ImageProcessor

CHUNK = 512  # rows that are tokenised at once
_NAMED_ROWS = 5

Conversation = list[Message]


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """A conversation: its tokens [T], and where the answer begins and ends."""

    ids: np.ndarray
    first: int
    end: int

    def item(self) -> dict[str, list[int]]:
        """Return the tokens, and the mask of those of the answer."""
        mask = np.zeros(len(self.ids), dtype=np.int64)
        mask[self.first : self.end] = 1
        return {"input_ids": self.ids.tolist(), "loss_mask": mask.tolist()}

    def has_answer_of(self, other: AnswerTokens) -> bool:
        """Whether both have the same tokens up to the end of their answers, so that nothing tells them apart."""
        return self.first == other.first and np.array_equal(self.ids[: self.end], other.ids[: other.end])

    def cut(self, start: int, length: int) -> AnswerTokens:
        """The `length` tokens from `start` on, or as many as there are."""
        ids = self.ids[start : start + length]
        return AnswerTokens(ids, self.first - start, min(self.end - start, len(ids)))


class UnusableRow(ValueError):
    """Why a row cannot be trained on, as a clause; `data.filter_pairs` and `data.filter_rows` leave such rows out.

    Attributes:
        kind: what is wrong, for counting.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def _counts_fully(message: Message) -> bool:
    try:
        return turn_weight(message) in (None, 1.0)
    except ValueError:
        return False


class AnsweredPrompts(ConversationDataset):
    """Rows with a prompt and answers to it; a subclass says which answers a row has.

    Args:
        data_files, tokenizer, config, max_samples, key, processor: see `ConversationDataset`, as for the errors.
    """

    truncations: ClassVar[tuple[str, ...]] = ("error", "left", "right")
    plural: ClassVar[str]  # the rows, in messages
    filter_key: ClassVar[str]  # the setting that leaves unusable rows out

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: SupervisedDataConfig,
        max_samples: int,
        key: str,
        processor: ImageProcessor | None,
    ) -> None:
        super().__init__(data_files, tokenizer, config, max_samples, key, processor)
        self.left_out: collections.Counter[str] = collections.Counter()
        self._refused: list[tuple[int, UnusableRow]] = []
        self._columns: dict[str, list[Any]] = {}

    def read_columns(self, names: Sequence[str]) -> None:
        """Read those of the columns that there are."""
        self._columns = {name: self.table.column(name) for name in names if name in self.table.columns}

    @property
    def filters(self) -> bool:
        """Whether unusable rows are left out; else they are refused."""
        return bool(self.config.get(self.filter_key))

    # ------------------------------------------------------------------ rows that cannot be used

    def refuse(self, item: int, error: UnusableRow) -> None:
        """Count a row that cannot be trained on, and keep it for `raise_refused` unless such rows are left out."""
        if not self.filters:
            self._refused.append((item, error))
        self.left_out[error.kind] += 1

    def raise_refused(self) -> None:
        """Refuse rows that cannot be trained on and are not to be left out.

        Raises:
            DataError: names the first of them, and says where the next ones are and how many there are.
        """
        if not self._refused:
            return
        item, error = self._refused[0]
        others = ""
        if len(self._refused) > 1:
            rows = "; ".join(self.locate(other) for other, _ in self._refused[1:_NAMED_ROWS])
            counts = ", ".join(f"{count} with {kind}" for kind, count in sorted(self.left_out.items()))
            others = f" Of {len(self._rows)} {self.plural} {counts} are refused; the next: {rows}."
        raise DataError(
            f"{self.locate(item)}: {error}. Fix or remove the row, or set data.{self.filter_key}=True to leave such "
            f"{self.plural} out.{others}"
        ) from error

    def check_answer(self, index: int, column: str, conversation: Conversation) -> None:
        """Refuse an answer that is empty, or that has a weight of its own.

        Raises:
            DataError: it has one.
            UnusableRow: it is empty.
        """
        answer = conversation[-1]
        content = answer.get("content")
        if not _counts_fully(answer):
            fields = " and ".join(name for name in TURN_FIELDS if answer.get(name) is not None)
            raise DataError(
                f"{self.table.locate(index)}: the answer in column {column!r} has train or weight ({fields}), which "
                "conversations for fine-tuning have; every answer counts the same. Remove the field."
            )
        if not answer.get("tool_calls") and (not content or (isinstance(content, str) and not content.strip())):
            raise UnusableRow("an empty answer", f"the answer in column {column!r} is empty")

    # ------------------------------------------------------------------ prompts and answers

    def _answer(self, index: int, value: Any) -> Conversation:
        """The messages of a column with answers: an answer alone, or a conversation that ends with it.

        Raises:
            ValueError: they are none; the text is a clause about the value.
        """
        if isinstance(value, str):
            answer: Conversation = [{"role": "assistant", "content": value}]
            check_messages(answer)
            check_no_conversation(value)
            return answer
        check_messages(value, self.kinds)
        answer = as_messages(value, has_padding=self.table.has_padding(index))
        if answer[-1]["role"] != "assistant":
            raise ValueError(f"its last message is of the role {answer[-1]['role']!r}, and an answer is of 'assistant'")
        return answer

    def conversation(self, index: int, column: str, value: Any) -> Conversation:
        """The prompt and one of its answers as messages."""
        where = self.table.locate(index)
        if value is None:
            raise DataError(f"{where}: column {column!r} has no answer; fill it in, or remove the row.")
        try:
            answer = self._answer(index, value)
        except ValueError as error:
            raise DataError(f"{where}: column {column!r} cannot be used as an answer: {error}.") from None
        if answer[0]["role"] != "assistant":
            return as_messages(answer, self.config.system_prompt)
        if len(answer) > 1 and self.config.prompt_key not in self._columns:
            return as_messages(answer, self.config.system_prompt)  # whole conversations that the assistant begins
        if len(answer) > 1:
            raise DataError(
                f"{where}: column {column!r} holds {len(answer)} messages that begin with one of the assistant; an "
                "answer is one message, and the conversation before it belongs into the prompt."
            )
        name = self.config.prompt_key
        hint = (
            f"Column {column!r} holds answers alone, so their prompt is needed: name its column with data.prompt_key, "
            f"or write whole conversations into {column!r}."
        )
        if isinstance(value, str) and (form := written_form(value)) is not None:
            hint = (
                f"Column {column!r} holds conversations written as one text ({form}): make a list of messages of "
                'each, [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...].'
            )
        self.table.require(name, "data.prompt_key", hint)
        prompt = self._columns[name][index]
        try:
            check_prompt(prompt, self.kinds)
            if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
                raise ValueError("its last message is of the assistant, and the answer would follow it")
        except ValueError as error:
            raise DataError(f"{where}: column {name!r} cannot be used as a prompt: {error}.") from None
        padded = self.table.has_padding(index)
        return [*as_messages(prompt, self.config.system_prompt, has_padding=padded), *answer]

    def answer_tokens(self, ids: np.ndarray, turn_of: np.ndarray) -> AnswerTokens:
        """Return a conversation of `tokenize` with the place of its answer.

        Raises:
            UnusableRow: the answer has no tokens.
        """
        inside = turn_of.nonzero()[0]
        if not len(inside):
            raise UnusableRow("an empty answer", "an answer has no tokens of its own")
        return AnswerTokens(ids, int(inside[0]), int(inside[-1]) + 1)

    def within_limit(
        self, item: int, messages: Conversation, sides: Sequence[AnswerTokens], conversation: str
    ) -> list[AnswerTokens] | None:
        """Conversations of one prompt within `data.max_length`. A prompt that is cut at the left is cut equally in all.

        Args:
            item: that they are of.
            messages: one of the conversations; all have the same images.
            sides: their tokens.
            conversation: the longest of them, for messages.

        Returns:
            The tokens that are left of each; None if nothing has to be cut.

        Raises:
            UnusableRow: they are too long, or nothing would be left of the prompt or of an answer.
        """
        limit, side = self.config.max_length, self.config.truncation
        longest = max(len(own.ids) for own in sides)
        if longest <= limit:
            return None
        has_images = not self.is_text(item, messages)
        too_long = self.too_long(longest, conversation)
        if side == "error" or self.filters or has_images:
            instead = (
                "make images smaller, which are never cut" if has_images else "set data.truncation to left or right"
            )
            raise UnusableRow("too many tokens", f"{too_long}; raise data.max_length, or {instead}")
        start = longest - limit if side == "left" else 0
        cut = [own.cut(start, limit) for own in sides]
        if any(own.first < 1 or own.first >= own.end for own in cut):
            part = "the whole prompt" if side == "left" else "a whole answer"
            raise UnusableRow("too many tokens", f"{too_long}, and data.truncation={side} would cut {part} away")
        return cut

    def too_long(self, longest: int, conversation: str) -> str:
        """Say by how much a conversation is too long, as a clause."""
        limit = self.config.max_length
        at_least = "at least " if longest >= 2 * limit else ""
        return f"{conversation} has {at_least}{longest} tokens, more than data.max_length={limit}"
