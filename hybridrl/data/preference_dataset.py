"""Pairs of answers to one prompt, of which the first is better: for DPO and for reward models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hybridrl.data.answered_prompts import CHUNK, AnsweredPrompts, AnswerTokens, Conversation, UnusableRow
from hybridrl.data.row_selection import LONG_ENOUGH, report_unread_texts
from hybridrl.errors import DataError
from hybridrl.models.chat import (
    Tokens,
    as_messages,
    check_messages,
    encode,
    encode_with_offsets,
    exceeds,
    first_part,
)
from hybridrl.notify import notify
from hybridrl.scored import LARGEST_REWARD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PairsDataConfig
    from hybridrl.models.vision import ImageProcessor

#: columns of scores of the two answers, as public data sets call them
_SCORES = (
    *(("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating")),
    *(("rating_chosen", "rating_rejected"), ("chosen-rating", "rejected-rating"), ("reward_chosen", "reward_rejected")),
)


def _check_difference(chosen: AnswerTokens, rejected: AnswerTokens) -> None:
    """Refuse answers that differ as messages and not as tokens: by spaces that the template strips, or by thoughts.

    Raises:
        UnusableRow: they are the same.
    """
    if chosen.has_answer_of(rejected):
        raise UnusableRow(
            "two equal answers",
            "the two answers differ as messages, but the chat template makes the same tokens of them, so there is "
            "nothing to prefer",
        )


def _number(value: Any) -> float | None:
    """A finite number, also as text or a decimal; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


class PreferenceDataset(AnsweredPrompts):
    """Pairs of conversations that differ in their last turn, as token ids, with masks of the answers' tokens.

    A row has columns `config.chosen_key` and `config.rejected_key`, which hold

    * text: the answers to `config.prompt_key` (text or messages);
    * messages of the assistant: the same;
    * whole conversations, which end in an answer. They must be equal up to it. A column of the prompt is not read.

    `config.margin_key` names a column of numbers: by how much the chosen answer is better.

    An item is `{"chosen": {"input_ids", "loss_mask"}, "rejected": {...}, "index": int}`, with `margin` if there are
    margins. With a `processor`, prompts may have images (`config.image_key`), and both sides also have
    `multi_modal_inputs` and `position_ids`. The masks cover the answer with the template's end-of-turn token, but not
    what the template writes after it.

    Args:
        data_files, tokenizer, max_samples, key: see `ConversationDataset`, as for the errors.
        config: `PairsDataConfig`.

    Raises:
        DataError: also for a pair with an empty answer, two equal answers or two prompts, and with
            `truncation=error` for one that is too long. With `filter_pairs` the first two and the last are left out,
            and counted.
    """

    plural: ClassVar[str] = "pairs"
    filter_key: ClassVar[str] = "filter_pairs"

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: PairsDataConfig,
        max_samples: int = -1,
        key: str = "data.train_files",
        processor: ImageProcessor | None = None,
    ) -> None:
        super().__init__(data_files, tokenizer, config, max_samples, key, processor)
        for name, setting in ((config.chosen_key, "chosen_key"), (config.rejected_key, "rejected_key")):
            self.table.require(name, f"data.{setting}")
        columns = (config.prompt_key, config.chosen_key, config.rejected_key)
        report_unread_texts(self.table, key, [*columns, config.tools_key])
        self.read_columns(columns)
        self._cut, self._repeating, self._other_prompts = 0, 0, 0
        self._sides: list[tuple[AnswerTokens, AnswerTokens]] = []
        rows: list[int] = []
        for start in range(0, len(self._rows), CHUNK):
            rows += self._add(range(start, min(start + CHUNK, len(self._rows))))
        self.raise_refused()
        self._fields.warn()
        self._report_counts(total=len(self._rows))
        self._rows = self._rows[rows]
        self._warn_of_scores()
        self._margins = None if config.margin_key is None else self._read_margins(config.margin_key)

    def __getitem__(self, item: int) -> dict[str, Any]:
        sides = self._sides[item]
        media: list[dict[str, Any]] = [{}, {}]
        if self._images is not None:
            media = self.media(item, [(side.ids, own) for side, own in zip(sides, self._pair(item), strict=True)])
        chosen, rejected = ({**side.item(), **own} for side, own in zip(sides, media, strict=True))
        row: dict[str, Any] = {"chosen": chosen, "rejected": rejected, "index": int(self._rows[item])}
        return row if self._margins is None else {**row, "margin": self._margins[item]}

    # ------------------------------------------------------------------ reading

    def _add(self, items: Sequence[int]) -> list[int]:
        """Tokenise some items, and return those that are kept."""
        usable: list[int] = []
        conversations: list[Conversation] = []
        for item in items:
            try:
                conversations += self._pair(item)
            except UnusableRow as error:
                self.refuse(item, error)
                continue
            usable.append(item)
        if not usable:
            return []
        for conversation in conversations[::2]:
            self._fields.add(conversation)
        owners = [item for item in usable for _ in range(2)]
        tokenized = self.tokenize(conversations, owners, lambda i: [len(conversations[i]) - 1])
        rows = []
        for number, item in enumerate(usable):
            try:
                sides = [self.answer_tokens(*tokenized[2 * number + side]) for side in range(2)]
                _check_difference(*sides)
                self._sides.append(self._pair_within_limit(item, conversations[2 * number], *sides))
            except UnusableRow as error:
                self.refuse(item, error)
                continue
            rows.append(item)
        return rows

    def _pair(self, item: int) -> tuple[Conversation, Conversation]:
        """The two conversations of an item, each of which ends in an answer.

        Raises:
            DataError: a column holds something else, or the conversations differ before their answers.
            UnusableRow: an answer is empty, or both are the same.
        """
        index = int(self._rows[item])
        config = self.config
        sides = []
        for key in (config.chosen_key, config.rejected_key):
            sides.append(self.conversation(index, key, self._columns[key][index]))
        chosen, rejected = sides
        if chosen[:-1] != rejected[:-1]:
            shared = min(len(chosen), len(rejected)) - 1
            at = next((n for n in range(shared) if chosen[n] != rejected[n]), shared)
            raise DataError(
                f"{self.table.locate(index)}: columns {config.chosen_key!r} and {config.rejected_key!r} do not answer "
                f"one prompt: the conversations differ from message {at} on, and have {len(chosen)} and "
                f"{len(rejected)} messages. They may differ in their last message alone; cut both after the first "
                "message in which they differ."
            )
        for key, side in ((config.chosen_key, chosen), (config.rejected_key, rejected)):
            self.check_answer(index, key, side)
        self._other_prompts += self._has_another_prompt(index, chosen)
        prompt = chosen[-2].get("content") if len(chosen) > 1 else None
        begins = [side[-1].get("content") for side in (chosen, rejected)]
        if (
            isinstance(prompt, str)
            and len(prompt.strip()) >= LONG_ENOUGH
            and all(isinstance(text, str) for text in begins)
        ):
            self._repeating += all(str(text).strip().startswith(prompt.strip()) for text in begins)
        if chosen[-1] == rejected[-1]:
            raise UnusableRow(
                "two equal answers",
                f"columns {config.chosen_key!r} and {config.rejected_key!r} hold the same answer, so there is nothing "
                "to prefer",
            )
        return chosen, rejected

    def _has_another_prompt(self, index: int, chosen: Conversation) -> bool:
        """Whether a row of whole conversations, whose prompt column is not read, has another prompt there."""
        whole = self._columns[self.config.chosen_key][index]
        prompt = self._columns[self.config.prompt_key][index] if self.config.prompt_key in self._columns else None
        if prompt is None or isinstance(whole, str) or whole[0]["role"] == "assistant":
            return False
        contents = [str(message.get("content") or "").strip() for message in chosen[:-1]]
        if isinstance(prompt, str):
            text = prompt.strip()
            return bool(text) and not any(own and (own in text or text in own) for own in contents)
        try:
            check_messages(prompt, self.kinds)
        except ValueError:
            return True
        own = as_messages(prompt, self.config.system_prompt)
        return [str(message.get("content") or "").strip() for message in own] != contents

    def _warn_of_scores(self) -> None:
        """Warn where columns of scores say that the rejected answers are the better ones."""
        for names in _SCORES:
            if not all(name in self.table.columns for name in names):
                continue
            chosen, rejected = (self.table.column(name) for name in names)
            pairs = [(_number(chosen[row]), _number(rejected[row])) for row in self._rows]
            worse = sum(first is not None and second is not None and first < second for first, second in pairs)
            if worse:
                notify(
                    f"{self.key}: in {worse} of {len(pairs)} rows the column {names[0]!r} is below {names[1]!r}, so "
                    f"the answers in column {self.config.chosen_key!r} are the worse ones there. Exchange "
                    "data.chosen_key and data.rejected_key if all are, or leave these rows out",
                    "warning",
                )

    def _read_margins(self, name: str) -> list[float]:
        self.table.require(name, "data.margin_key")
        column = self.table.column(name)
        for index in map(int, self._rows):
            value = column[index]
            number = None if isinstance(value, str) else _number(value)
            if number is None or abs(number) > LARGEST_REWARD:
                raise DataError(
                    f"{self.table.locate(index)}: column {name!r} (data.margin_key) is {value!r:.80}; it must be a "
                    f"number of at most {LARGEST_REWARD:.3g}."
                )
        margins = [float(column[int(index)]) for index in self._rows]
        below = sum(margin < 0 for margin in margins)
        if below:
            notify(
                f"{self.key}: in {below} of {len(margins)} rows the column {name!r} (data.margin_key) is below 0, so "
                "the answer that is preferred is the worse one there; leave these rows out, or exchange their answers",
                "warning",
            )
        return margins

    # ------------------------------------------------------------------ lengths

    def encoded(self, texts: Sequence[str], items: Sequence[int], has_images: Sequence[bool]) -> list[Tokens]:
        """Return the tokens of conversations; see `ConversationDataset.encoded`.

        Where prompts are cut at the left, the two conversations of a pair begin at the same character of its prompt.
        """
        if self.config.truncation != "left":
            return super().encoded(texts, items, has_images)
        limit, tokens = self.config.max_length, []
        for n in range(0, len(texts), 2):
            pair = texts[n : n + 2]
            is_long = not has_images[n] and any(exceeds(self.tokenizer, text, limit) for text in pair)
            start = self._start(*pair) if is_long else 0
            if not start:
                tokens += super().encoded(pair, items[n : n + 2], has_images[n : n + 2])
                continue
            for ids, offsets in encode_with_offsets(self.tokenizer, [text[start:] for text in pair]):
                tokens.append((ids, [(first + start, last + start) for first, last in offsets]))
        return tokens

    def _start(self, chosen: str, rejected: str) -> int:
        """The character of two conversations' prompt before which nothing is left of it; 0: an answer is too long.

        What is behind it is longer than `data.max_length`, so it is cut as the whole would be.
        """
        limit, shorter = self.config.max_length, min(len(chosen), len(rejected))
        shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), shorter)
        if any(exceeds(self.tokenizer, text[shared:], limit) for text in (chosen, rejected)):
            return 0
        size = first_part(limit)
        while size < shared:
            if len(encode(self.tokenizer, [chosen[shared - size : shared]])[0]) > limit:
                return shared - size
            size *= 4
        return 0

    def _pair_within_limit(
        self, item: int, messages: Conversation, chosen: AnswerTokens, rejected: AnswerTokens
    ) -> tuple[AnswerTokens, AnswerTokens]:
        """Both sides within `data.max_length`. A prompt that is cut at the left is cut equally in both.

        Args:
            item: that they are of.
            messages: one of the conversations; both have the same images.
            chosen, rejected: what was tokenised of them.

        Raises:
            UnusableRow: they are too long, or nothing would be left of the prompt or of an answer.
        """
        cut = self.within_limit(item, messages, (chosen, rejected), "the longer conversation")
        if cut is None:
            return chosen, rejected
        first, second = cut
        if first.has_answer_of(second):
            too_long = self.too_long(max(len(chosen.ids), len(rejected.ids)), "the longer conversation")
            raise UnusableRow("two equal answers", f"{too_long}, and cut to it the two answers are the same")
        self._cut += 1
        return first, second

    def _report_counts(self, total: int) -> None:
        """Say how many pairs were left out or cut.

        Raises:
            DataError: none is left.
        """
        left_out = ", ".join(f"{count} with {kind}" for kind, count in sorted(self.left_out.items()))
        if not self._sides:
            raise DataError(f"{self.key}: no pair is left of {total}: {left_out}. Look at the data, or set other keys.")
        if left_out:
            notify(f"{self.key}: of {total} pairs {sum(self.left_out.values())} were left out: {left_out}")
        if self._other_prompts:
            notify(
                f"{self.key}: in {self._other_prompts} of {total} pairs the column {self.config.prompt_key!r} has "
                f"another prompt than the conversation in column {self.config.chosen_key!r}, which is the one that is "
                "read; leave out the column, or the prompt in the conversations"
            )
        if self._repeating:
            notify(
                f"{self.key}: in {self._repeating} of {total} pairs both answers begin with the prompt, as in files "
                "whose answers hold the whole text; if that is so here, leave the prompt out of the answers: it would "
                "be part of what is learnt",
                "warning",
            )
        if self._cut:
            notify(
                f"{self.key}: {self._cut} of {total} pairs are longer than data.max_length={self.config.max_length} "
                f"tokens and were cut (data.truncation={self.config.truncation})"
            )
