"""Conversations for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridrl.data.conversation_dataset import ConversationDataset
from hybridrl.data.row_selection import LONG_ENOUGH, report_unread_texts
from hybridrl.data.turn_weights import TURN_FIELDS, is_mask, may_be_mask, turn_weight
from hybridrl.errors import DataError
from hybridrl.models.chat import (
    Message,
    Tokens,
    as_messages,
    check_messages,
    check_no_conversation,
    check_prompt,
    exceeds,
)
from hybridrl.notify import notify

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import SFTDataConfig
    from hybridrl.models.vision import ImageProcessor

_CHUNK = 1024


class SFTDataset(ConversationDataset):
    """Whole conversations as token ids, with a mask of the tokens that the loss covers.

    A row holds `config.messages_key`, a list of messages with at least one from the assistant. If `config.prompt_key`
    and `config.response_key` are set, it holds a prompt (text or messages) and a response (text) instead, of which the
    response is learnt. The loss
    covers the assistant's turns: the text from the end of the turn's opening, as the generation prompt writes it, to
    the end of the turn, including the template's end-of-turn token but not the whitespace after it.

    A message of the assistant may have `train` (false: its turn is read and not learned) or `weight`, a number that the
    loss of its tokens is multiplied by. The spellings of other libraries act, too (`hybridrl.data.turn_weights`). The
    template does not see these fields.

    An item is `{"input_ids": list[int], "loss_mask": list[int], "index": int}`. Both lists have the same length. If
    any turn of the data has a weight other than 0 and 1, it also has `loss_weight: list[float]`. With a `processor`,
    rows may have images in the column `config.image_key` (`hybridrl.data.row_images`), and items also have
    `multi_modal_inputs` and `position_ids` [4, tokens]. No image's token is trained on, and a conversation with images
    is never cut.

    Args:
        data_files, tokenizer, max_samples, key: see `ConversationDataset`, as for the errors.
        config: `SFTDataConfig`.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
        max_samples: int = -1,
        key: str = "data.train_files",
        processor: ImageProcessor | None = None,
    ) -> None:
        super().__init__(data_files, tokenizer, config, max_samples, key, processor)
        self._cut, self._empty, self._repeating = 0, 0, 0
        self._ids: list[np.ndarray] = []
        self._weights: list[np.ndarray] = []
        self._columns: dict[str, list[Any]] = self._checked_columns()
        self._refuse_masks()
        report_unread_texts(self.table, key, self._read_columns())
        for start in range(0, len(self), _CHUNK):
            items = range(start, min(start + _CHUNK, len(self)))
            self._tokenize([self._conversation(item) for item in items], start)
        if self._images is None:
            self._columns = {}  # messages are read again for their images alone
        self._is_weighted = any(((weights != 0) & (weights != 1)).any() for weights in self._weights)
        self._fields.warn()
        self._warn_of_cuts()
        if self._empty:
            notify(
                f"{key}: {self._empty} of {len(self)} rows have an empty turn of the assistant, of which nothing but "
                "the end is learnt; leave these rows out if answers are missing",
                "warning",
            )
        if self._repeating:
            notify(
                f"{key}: in {self._repeating} of {len(self)} rows the response begins with the prompt, as in files "
                "whose answers hold the whole text; if that is so here, leave the prompt out of the responses: it "
                "would be part of what is learnt",
                "warning",
            )
        self._check_end_of_turn()

    def __getitem__(self, item: int) -> dict[str, Any]:
        weights = self._weights[item]
        row = {
            "input_ids": self._ids[item].tolist(),
            "loss_mask": (weights > 0).astype(np.int64).tolist(),
            "index": int(self._rows[item]),
        }
        if self._images is not None:
            row |= self.media(item, [(self._ids[item], self._conversation(item))])[0]
        return {**row, "loss_weight": weights.tolist()} if self._is_weighted else row

    def _checked_columns(self) -> dict[str, list[Any]]:
        """The columns that conversations are made of, by the names of their keys."""
        prompt_key, response_key = self.config.prompt_key, self.config.response_key
        if (prompt_key is None) != (response_key is None):
            raise DataError(
                f"data.prompt_key={prompt_key} and data.response_key={response_key}: set both for rows of prompt and "
                "response, or neither for rows of messages (data.messages_key)."
            )
        if prompt_key is not None and prompt_key == response_key:
            inner = self.config.prompt_dict_keys, self.config.response_dict_keys
            if inner[0] == inner[1]:
                raise DataError(
                    f"data.prompt_key={prompt_key} and data.response_key={response_key} name one column, so the model "
                    "would learn to repeat its prompt. Name the column of the answers with data.response_key."
                )
        if prompt_key is not None and response_key is not None:
            self.table.require(prompt_key, "data.prompt_key")
            self.table.require(response_key, "data.response_key")
            return {"prompt_key": self.table.column(prompt_key), "response_key": self.table.column(response_key)}
        name = self.config.messages_key
        self.table.require(
            name,
            "data.messages_key",
            "Name the column of messages with data.messages_key, or set data.prompt_key and data.response_key.",
        )
        return {"messages_key": self.table.column(name)}

    def _conversation(self, item: int) -> list[Message]:
        """The messages of an item.

        Raises:
            DataError: they cannot be used.
        """
        index = int(self._rows[item])
        if "messages_key" not in self._columns:
            return self._from_prompt_and_response(index)
        value = self._columns["messages_key"][index]
        try:
            check_messages(value, self.kinds)
            if not any(message["role"] == "assistant" for message in value):
                raise ValueError("it has no message of role 'assistant', so there is nothing to learn")
        except ValueError as error:
            raise DataError(
                f"{self.table.locate(index)}: column {self.config.messages_key!r} cannot be used as a conversation: "
                f"{error}."
            ) from None
        return as_messages(value, self.config.system_prompt, has_padding=self.table.has_padding(index))

    def _from_prompt_and_response(self, index: int) -> list[Message]:
        prompt_key, response_key = self.config.prompt_key, self.config.response_key
        prompt = self._inside(index, self._columns["prompt_key"][index], prompt_key, "prompt_dict_keys")
        response = self._inside(index, self._columns["response_key"][index], response_key, "response_dict_keys")
        try:
            check_prompt(prompt, self.kinds)
            if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
                raise ValueError("its last message is of the assistant, and the response would follow it")
        except ValueError as error:
            raise DataError(
                f"{self.table.locate(index)}: column {prompt_key!r} cannot be used as a prompt: {error}."
            ) from None
        if not isinstance(response, str) or not response:
            kind = "empty" if response == "" else "missing" if response is None else type(response).__name__
            raise DataError(
                f"{self.table.locate(index)}: column {response_key!r} must be text that is not empty; it is {kind}."
            )
        answer: Message = {"role": "assistant", "content": response}
        try:
            check_messages([answer])
            check_no_conversation(response)
        except ValueError as error:
            raise DataError(
                f"{self.table.locate(index)}: column {response_key!r} cannot be learned: {error}."
            ) from None
        padded = self.table.has_padding(index)
        messages = as_messages(prompt, self.config.system_prompt, has_padding=padded)
        question = messages[-1].get("content")
        if isinstance(question, str) and len(question.strip()) >= LONG_ENOUGH:
            self._repeating += response.strip().startswith(question.strip())
        return [*(_read_only(message) for message in messages), answer]

    def _inside(self, index: int, value: Any, column: str, key: str) -> Any:
        """The entry of a column's mappings that `data.<key>` leads to."""
        for name in self.config[key]:
            if not isinstance(value, Mapping) or name not in value:
                actual = f"has {', '.join(map(str, value))}" if isinstance(value, Mapping) else "is not a mapping"
                raise DataError(
                    f"{self.table.locate(index)}: data.{key}={self.config[key]}: column {column!r} {actual}, and "
                    f"{name!r} is looked for in it."
                )
            value = value[name]
        return value

    def _tokenize(self, conversations: list[list[Message]], start: int) -> None:
        turns: list[list[int]] = []
        weights: list[list[float]] = []
        stripped: list[list[Message]] = []
        for number, messages in enumerate(conversations):
            weighted = [(turn, self._weight(message, turn, start + number)) for turn, message in enumerate(messages)]
            # A turn that is not learnt may change when the conversation goes on, as templates drop earlier thoughts.
            learnt = [(turn, weight) for turn, weight in weighted if messages[turn]["role"] == "assistant" and weight]
            turns.append([turn for turn, _ in learnt])
            weights.append([0.0, *(weight for _, weight in learnt)])
            if not learnt:
                raise DataError(
                    f"{self.locate(start + number)}: no turn of the assistant is trained on (train is false or "
                    "weight is 0 in all of them), so there is nothing to learn. Leave the row out."
                )
            answers = [m for m in messages if m["role"] == "assistant" and not m.get("tool_calls")]
            self._empty += any(not str(m.get("content") or "").strip() for m in answers)
            stripped.append([{n: v for n, v in message.items() if n not in TURN_FIELDS} for message in messages])
            self._fields.add(stripped[-1])
        items = range(start, start + len(stripped))
        for number, (ids, turn_of) in enumerate(self.tokenize(stripped, items, turns.__getitem__)):
            self._append(ids, np.asarray(weights[number], dtype=np.float32)[turn_of], start + number)

    def _weight(self, message: Message, turn: int, item: int) -> float:
        """Return the factor of the loss of a message's tokens.

        Raises:
            DataError: the message says something else than a weight.
        """
        try:
            weight = turn_weight(message)
        except ValueError as error:
            raise DataError(f"{self.locate(item)}: message {turn} ({message['role']}) {error}.") from error
        return 1.0 if weight is None else weight

    def _read_columns(self) -> set[str]:
        keys = ("messages_key", "prompt_key", "response_key", "tools_key", "enable_thinking_key")
        return {self.config[key] for key in keys if self.config[key] is not None}

    def _refuse_masks(self) -> None:
        """Refuse columns that say for other libraries which tokens are learnt, and name those that may say so.

        Raises:
            DataError: names such a column.
        """
        read = self._read_columns()
        columns = [name for name in self.table.columns if name not in read]
        for name in columns:
            if may_be_mask(name) and is_mask(name, self.table.column(name)):
                raise DataError(
                    f"{self.key}: column {name!r} is not read, and it looks like a mask or weight of what is learnt. "
                    "Give each message a field train or weight instead, or remove the column."
                )
        if possible := [name for name in columns if may_be_mask(name)]:
            notify(
                f"{self.key}: columns {', '.join(map(repr, possible))} are not read. If they say what is learnt, give "
                "each message a field train or weight instead"
            )

    def encoded(self, texts: Sequence[str], items: Sequence[int], has_images: Sequence[bool]) -> list[Tokens]:
        """Return the tokens of conversations; see `ConversationDataset.encoded`.

        Raises:
            DataError: one is much too long, and is not to be cut.
        """
        limit = self.config.max_length
        for text, item, has_some in zip(texts, items, has_images, strict=True):
            if (self.config.truncation == "error" or has_some) and exceeds(self.tokenizer, text, limit):
                raise DataError(
                    f"{self.locate(item)}: the conversation has more than {2 * limit} tokens ({len(text)} characters), "
                    f"more than data.max_length={limit}. Raise data.max_length, or {self._instead(has_some)}."
                )
        return super().encoded(texts, items, has_images)

    @staticmethod
    def _instead(has_images: bool) -> str:
        if has_images:
            return "make images smaller with data.mm_processor_kwargs.max_pixels: images are never truncated"
        return "set data.truncation to left or right"

    def _append(self, ids: np.ndarray, weights: np.ndarray, item: int) -> None:
        limit = self.config.max_length
        if len(ids) > limit:
            if self.config.truncation == "error" or self.has_images(ids):
                raise DataError(
                    f"{self.locate(item)}: the conversation has {len(ids)} tokens, more than data.max_length={limit}. "
                    f"Raise data.max_length, or {self._instead(self.has_images(ids))}."
                )
            keep = kept_positions(len(ids), limit, self.config.truncation)
            ids, weights = ids[keep], weights[keep]
            self._cut += 1
        self._ids.append(ids)
        self._weights.append(weights)

    def _warn_of_cuts(self) -> None:
        """Report how many conversations were cut, and how many of them have nothing left to learn.

        Raises:
            DataError: none has anything left to learn.
        """
        if not self._cut:
            return
        idle = sum(not (weights[1:] > 0).any() for weights in self._weights)  # nothing is before the first token
        limit, side = self.config.max_length, self.config.truncation
        message = (
            f"{self.key}: {self._cut} of {len(self._ids)} conversations are longer than data.max_length={limit} tokens "
            f"and were cut (data.truncation={side})"
        )
        if idle == len(self._ids):
            raise DataError(f"{message}, and no turn of the assistant is left in any of them. Raise data.max_length.")
        idle_note = f"; in {idle} of them no turn of the assistant is left, so nothing is learned from these"
        notify(message + idle_note * bool(idle), "warning" if idle else "notice")

    def _check_end_of_turn(self) -> None:
        """Warn once if no assistant turn ends in the EOS token, because a model trained this way may never stop."""
        eos = self.tokenizer.eos_token_id
        if eos is not None and not any(
            (ids[weights > 0] == eos).any() for ids, weights in zip(self._ids, self._weights, strict=True)
        ):
            notify(
                f"{self.key}: no learnt turn contains the EOS token {self.tokenizer.eos_token!r}; the chat template "
                "ends turns in another way, so generation must stop at that token",
                "warning",
            )


def _read_only(message: Message) -> Message:
    """A message of a prompt. Its turn is not learnt, unless it says so itself."""
    if message["role"] != "assistant" or any(message.get(name) is not None for name in TURN_FIELDS):
        return message
    return {**message, "train": False}


def kept_positions(length: int, limit: int, side: str) -> np.ndarray:
    """Return the positions that survive truncation to `limit`; see `hybridrl.data.dataset_rendering.truncate`."""
    if side == "left":
        return np.arange(length - limit, length)
    if side == "right":
        return np.arange(limit)
    head = limit // 2
    return np.concatenate([np.arange(head), np.arange(length - (limit - head), length)])
