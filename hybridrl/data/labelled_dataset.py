"""Answers to prompts with a label, true for desirable ones: for KTO and other objectives without pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hybridrl.data.answered_prompts import CHUNK, AnsweredPrompts, AnswerTokens, Conversation, UnusableRow
from hybridrl.data.row_selection import report_unread_texts
from hybridrl.errors import DataError
from hybridrl.notify import notify

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import LabelledDataConfig
    from hybridrl.models.vision import ImageProcessor

_WORDS = {"true": True, "false": False}


class LabelledDataset(AnsweredPrompts):
    """Conversations whose last turn is an answer with a label, as token ids, with masks of the answers' tokens.

    A row has columns `config.completion_key` and `config.label_key`: an answer, in the forms of `PreferenceDataset`,
    and true or false. Or it is a pair, in columns `config.chosen_key` and `config.rejected_key`, which becomes two
    rows: the items are the preferred answers of all rows, then the others.

    An item is `{"input_ids", "loss_mask", "desirable": bool, "index": int}`. The index is the number of the row; of
    pairs twice that, and one more for the answer that is not preferred.

    Args:
        data_files, tokenizer, max_samples, key: see `ConversationDataset`, as for the errors.
        config: `LabelledDataConfig`.

    Raises:
        DataError: also for a label that is not true or false, for an empty answer and, with `truncation=error`, for one
            that is too long. With `filter_rows` the last two are left out, and counted.
    """

    plural: ClassVar[str] = "answers"
    filter_key: ClassVar[str] = "filter_rows"

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: LabelledDataConfig,
        max_samples: int = -1,
        key: str = "data.train_files",
        processor: ImageProcessor | None = None,
    ) -> None:
        super().__init__(data_files, tokenizer, config, max_samples, key, processor)
        pair = (config.chosen_key, config.rejected_key)
        self._is_paired = config.completion_key not in self.table.columns and set(pair) <= set(self.table.columns)
        answers = pair if self._is_paired else (config.completion_key,)
        self._require_columns(answers)
        report_unread_texts(self.table, key, [config.prompt_key, *answers, config.tools_key])
        self.read_columns((config.prompt_key, *answers))
        if self._is_paired:
            self._desirable = np.repeat([True, False], len(self._rows))
            self._rows = np.tile(self._rows, 2)
        else:
            self._desirable = self._read_labels(config.label_key)
        self._answers: list[AnswerTokens] = []
        self._cut = 0
        items: list[int] = []
        for start in range(0, len(self._rows), CHUNK):
            items += self._add(range(start, min(start + CHUNK, len(self._rows))))
        self.raise_refused()
        self._fields.warn()
        self._report_counts(total=len(self._rows))
        self._rows, self._desirable = self._rows[items], self._desirable[items]
        self._report_labels()

    def __getitem__(self, item: int) -> dict[str, Any]:
        answer = self._answers[item]
        row: dict[str, Any] = {**answer.item(), "desirable": bool(self._desirable[item])}
        if self._images is not None:
            row |= self.media(item, [(answer.ids, self._conversation_of(item))])[0]
        return {**row, "index": self._id_of(item)}

    @property
    def item_ids(self) -> list[int]:
        """The `index` of each item; `indices` are the numbers of their rows."""
        return [self._id_of(item) for item in range(len(self))]

    def _id_of(self, item: int) -> int:
        row = int(self._rows[item])
        return 2 * row + (not self._desirable[item]) if self._is_paired else row

    def _require_columns(self, answers: Sequence[str]) -> None:
        """Refuse files without a column of answers or labels.

        Raises:
            DataError: names the file and the column.
        """
        for name in answers:
            self.table.require(
                name,
                "data.completion_key",
                "A row is an answer with its label, or a pair of answers; name the columns with data.completion_key "
                "and data.label_key, or with data.chosen_key and data.rejected_key.",
            )
        if not self._is_paired:
            self.table.require(
                self.config.label_key,
                "data.label_key",
                "It holds true for desirable answers and false for others; name it with data.label_key.",
            )

    def _read_labels(self, name: str) -> np.ndarray:
        """Return the labels of the rows; the words true and false, which a CSV file has, are labels too.

        Raises:
            DataError: one is neither true nor false.
        """
        column = self.table.column(name)
        labels = []
        for index in map(int, self._rows):
            value = column[index]
            label = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
            if not isinstance(label, bool | np.bool_):
                raise DataError(
                    f"{self.table.locate(index)}: column {name!r} (data.label_key) is {value!r:.80}; a label is true "
                    "(desirable) or false, not a number or another text. Write booleans, for example by comparing "
                    "ratings with a threshold, or name another column with data.label_key."
                )
            labels.append(bool(label))
        return np.asarray(labels)

    def _conversation_of(self, item: int) -> Conversation:
        """The conversation of an item, which ends in its answer.

        Raises:
            DataError: a column holds something else.
            UnusableRow: the answer is empty.
        """
        config, index = self.config, int(self._rows[item])
        column = config.completion_key
        if self._is_paired:
            column = config.chosen_key if self._desirable[item] else config.rejected_key
        conversation = self.conversation(index, column, self._columns[column][index])
        self.check_answer(index, column, conversation)
        return conversation

    def _add(self, items: Sequence[int]) -> list[int]:
        """Tokenise some items, and return those that can be used."""
        conversations: dict[int, Conversation] = {}
        for item in items:
            try:
                conversations[item] = self._conversation_of(item)
            except UnusableRow as error:
                self.refuse(item, error)
        if not conversations:
            return []
        texts = list(conversations.values())
        for conversation in texts:
            self._fields.add(conversation)
        tokenized = self.tokenize(texts, list(conversations), lambda i: [len(texts[i]) - 1])
        usable = []
        for (item, conversation), tokens in zip(conversations.items(), tokenized, strict=True):
            try:
                answer = self.answer_tokens(*tokens)
                cut = self.within_limit(item, conversation, [answer], "the conversation")
            except UnusableRow as error:
                self.refuse(item, error)
                continue
            self._cut += cut is not None
            self._answers.append(answer if cut is None else cut[0])
            usable.append(item)
        return usable

    def _report_counts(self, total: int) -> None:
        """Say how many answers were left out or cut.

        Raises:
            DataError: none is left.
        """
        left_out = ", ".join(f"{count} with {kind}" for kind, count in sorted(self.left_out.items()))
        if not self._answers:
            raise DataError(
                f"{self.key}: no answer is left of {total}: {left_out}. Look at the data, or set other keys."
            )
        if left_out:
            notify(f"{self.key}: of {total} answers {sum(self.left_out.values())} were left out: {left_out}")
        if self._cut:
            notify(
                f"{self.key}: {self._cut} of {total} answers with their prompts are longer than data.max_length="
                f"{self.config.max_length} tokens and were cut (data.truncation={self.config.truncation})"
            )

    def _report_labels(self) -> None:
        """Tell how many answers have each label, and warn of labels that say nothing or contradict each other."""
        total, desirable = len(self), int(self._desirable.sum())
        source = "pairs, split in two" if self._is_paired else f"column {self.config.label_key!r}"
        notify(f"{self.key}: {desirable} desirable and {total - desirable} undesirable answers ({source})")
        if desirable in (0, total):
            label = "desirable" if desirable else "undesirable"
            notify(
                f"{self.key}: all {total} answers are {label}, so nothing tells the model what the other kind looks "
                "like; the loss is defined, but look whether the column is the right one",
                "warning",
            )
        labels: dict[bytes, set[bool]] = {}
        for answer, label_of_item in zip(self._answers, self._desirable, strict=True):
            labels.setdefault(answer.ids[: answer.end].tobytes(), set()).add(bool(label_of_item))
        if both := sum(len(each) == 2 for each in labels.values()):
            notify(
                f"{self.key}: {both} prompts have an answer that is labelled both desirable and undesirable (the same "
                "tokens, as the chat template makes them): these rows pull in opposite directions; leave one of each "
                "out if that is not meant",
                "warning",
            )
