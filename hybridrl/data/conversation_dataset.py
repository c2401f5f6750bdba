"""Shared parts of the datasets of supervised training: whole conversations as token ids, and the turn of each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch.utils.data import Dataset

from hybridrl.config.schema.choices import TRUNCATIONS
from hybridrl.data.data_files import read_table
from hybridrl.data.dataset_rendering import FieldNotice, check_chat_template, render
from hybridrl.data.row_selection import (
    MEDIA_COLUMNS,
    check_media_keys,
    choose_rows,
    pad_token_id,
    refuse_media,
    refuse_other_media,
    report_other_media,
    seed_of,
)
from hybridrl.data.table import Table
from hybridrl.errors import DataError
from hybridrl.models.chat import TEXT, TEXT_AND_IMAGES, Message, Tokens, encode_with_offsets, without_padding
from hybridrl.models.rendering import reads_variable
from hybridrl.notify import notify
from hybridrl.utils.finite_json import NoNumberError, finite_json

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import SupervisedDataConfig
    from hybridrl.data.row_images import RowImages
    from hybridrl.models.videos import Clip
    from hybridrl.models.vision import ImageProcessor

_ASSISTANT = "assistant"

Span = tuple[int, int]


class ConversationDataset(Dataset):
    """Rows of files that hold conversations. A subclass tokenises them.

    A row may have a column `config.tools_key`, whose tools its chat template gets, and `config.enable_thinking_key`.

    Args:
        data_files: one or several paths.
        tokenizer: a tokenizer with a chat template and offsets (a "fast" tokenizer).
        config: `SFTDataConfig` or `PairsDataConfig`.
        max_samples: number of rows to use; -1 uses all.
        key: the configuration key that named the files, for messages.
        processor: prepares images for a vision-language model; None for a model that reads text.

    Raises:
        DataError: a file is unreadable, a column is missing, a row is bad or overlong (each is named), or the chat
            template renders earlier turns differently once later ones follow, so that the model would be prompted with
            text that it was never trained on.
    """

    truncations: ClassVar[tuple[str, ...]] = TRUNCATIONS

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: SupervisedDataConfig,
        max_samples: int = -1,
        key: str = "data.train_files",
        processor: ImageProcessor | None = None,
    ) -> None:
        if config.truncation not in self.truncations:
            raise DataError(f"data.truncation={config.truncation!r}: allowed are {', '.join(self.truncations)}.")
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'} ({type(tokenizer).__name__}) gives no "
                "character offsets, which are "
                "needed to find the assistant's tokens. Use a fast tokenizer (a model directory with tokenizer.json)."
            )
        check_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self.config: Any = config
        self.key = key
        self.table: Table = read_table(data_files, key)
        self._images = None if processor is None else _row_images(processor, config)
        check_media_keys(config, self.table, key, reads_media=self._images is not None)
        read = () if self._images is None else self._images.columns
        refuse_media(self.table, key, [column for column in MEDIA_COLUMNS if column not in read])
        refuse_other_media(self.table, key, read)
        report_other_media(self.table, key, read)
        self._rows = choose_rows(len(self.table), max_samples, config.shuffle, seed_of(config))
        self._template_columns = self._read_template_columns()
        columns = [config.get(name) for name in ("prompt_key", "response_key", "messages_key", "chosen_key")]
        columns = [name for name in columns if name in self.table.columns]
        self._fields = FieldNotice(
            tokenizer, key, columns, reads_media=self._images is not None, system_prompt=config.system_prompt
        )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def pad_token_id(self) -> int:
        """The id that shorter sequences are padded with. The mask, not this id, marks padding."""
        return pad_token_id(self.tokenizer)

    @property
    def indices(self) -> list[int]:
        """The row number of each item, as in its `index`."""
        return [int(index) for index in self._rows]

    def locate(self, item: int) -> str:
        """Return the file and row of an item, for messages."""
        return self.table.locate(int(self._rows[item]))

    # ------------------------------------------------------------------ images

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of content that messages may hold."""
        return TEXT if self._images is None else TEXT_AND_IMAGES

    def _placed(self, item: int, messages: list[Message]) -> tuple[list[Message], list[Image | Clip]]:
        """Return messages of an item as the chat template takes them, and their images in order."""
        if self._images is None:
            return messages, []
        return self._images.place(messages, self.table[int(self._rows[item])], self.locate(item))

    def is_text(self, item: int, messages: list[Message]) -> bool:
        """Return whether a conversation has no images, so that it may be cut."""
        return not self._placed(item, messages)[1]

    def has_images(self, ids: np.ndarray) -> bool:
        """Return whether token ids have placeholders of images, which are never cut."""
        return self._images is not None and bool(np.isin(ids, self._images.processor.media_tokens).any())

    def media(self, item: int, sides: Sequence[tuple[np.ndarray, list[Message]]]) -> list[dict[str, Any]]:
        """Return the model's inputs for the images of an item's conversations: `multi_modal_inputs` and `position_ids`.

        Args:
            sides: token ids of each conversation, and its messages. All have the same images.

        Returns:
            For each conversation the entries of `RowImages.item`; empty for a model that reads text.
        """
        if self._images is None:
            return [{} for _ in sides]
        images = self._placed(item, sides[0][1])[1] if self.has_images(sides[0][0]) else []
        first = self._images.item(sides[0][0].tolist(), images, self.locate(item))
        inputs = first["multi_modal_inputs"]
        positions = [self._images.processor.positions(ids.tolist(), inputs) for ids, _ in sides[1:]]
        return [first, *({**first, "position_ids": own} for own in positions)]

    # ------------------------------------------------------------------ columns of the chat template

    def _read_template_columns(self) -> dict[str, list[Any]]:
        """Read and check the columns that chat templates get: by the template's name, the values of all rows."""
        config, template_columns = self.config, {}
        for name, key, default_key, check in (
            ("tools", "tools_key", "tools", _tools_of),
            ("enable_thinking", "enable_thinking_key", "enable_thinking", _flag_of),
        ):
            column = config.get(key, default_key)
            if column != default_key:
                self.table.require(column, f"data.{key}")
            if column not in self.table.columns:
                continue
            values = self.table.column(column)
            # A null of a field that some row has a value for may be Parquet's. One that no row has is the schema's.
            own_nulls = self.table.empty_fields(column)
            for index in map(int, self._rows):
                is_text = isinstance(values[index], str)
                try:
                    values[index] = check(values[index])
                    if self.table.has_padding(index) and not is_text:
                        values[index] = without_padding(values[index], own_nulls)
                except ValueError as error:
                    raise DataError(f"{self.table.locate(index)}: column {column!r} (data.{key}) {error}.") from error
            template_columns[name] = values
            self._report_unread(name, column, [values[index] for index in map(int, self._rows)])
        default = config.get("enable_thinking_default")
        if default is not None and not reads_variable(self.tokenizer, "enable_thinking"):
            raise DataError(
                f"data.enable_thinking_default={default} has no effect, because the chat template of "
                f"{self.tokenizer.name_or_path or 'the tokenizer'} does not read enable_thinking. Remove it, or give "
                "another template with model.custom_chat_template."
            )
        return template_columns

    def _report_unread(self, variable: str, column: str, values: Sequence[Any]) -> None:
        """Say that the chat template does not read what some rows have for it."""
        count = sum(value is not None for value in values)
        if count and not reads_variable(self.tokenizer, variable):
            notify(
                f"{self.key}: {count} of {len(values)} rows have {variable} in column {column!r}, which the chat "
                f"template of {self.tokenizer.name_or_path or 'the tokenizer'} does not read, so the model does not "
                "see them; write them into a message of the system, or give another template with "
                "model.custom_chat_template",
                "warning",
            )

    def template_arguments(self, item: int) -> dict[str, Any]:
        """Return the variables of the chat template for an item, besides its messages."""
        index = int(self._rows[item])
        default = self.config.get("enable_thinking_default")
        own = {name: values[index] for name, values in self._template_columns.items()}
        if own.get("enable_thinking") is None and default is not None:
            own["enable_thinking"] = default
        configured = self.config.apply_chat_template_kwargs or {}
        return {**configured, **{name: value for name, value in own.items() if value is not None}}

    # ------------------------------------------------------------------ rendering and tokenising

    def tokenize(
        self, conversations: Sequence[list[Message]], items: Sequence[int], turns: Callable[[int], Sequence[int]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokenise conversations, and find the tokens of turns of the assistant.

        The tokens of a turn are those from the end of its opening, as the generation prompt writes it, to its end,
        including the template's end-of-turn token but not the whitespace after it.

        Args:
            conversations: messages.
            items: the item that each belongs to.
            turns: for the i-th conversation the numbers of the messages to find.

        Returns:
            For each conversation its token ids [T], and for each token 1 + the position in `turns(i)` of the turn that
            it belongs to, 0 for none.
        """
        placed = [self._placed(item, messages) for item, messages in zip(items, conversations, strict=True)]
        texts, spans = self._render_with_spans([conversation for conversation, _ in placed], items, turns)
        rows = zip(self.encoded(texts, items, [bool(own) for _, own in placed]), spans, placed, items, strict=True)
        return [
            self._expanded(
                np.asarray(ids, dtype=np.int32),
                turn_of_token(np.asarray(offsets).reshape(-1, 2), turn_spans),
                images,
                item,
            )
            for (ids, offsets), turn_spans, (_, images), item in rows
        ]

    def encoded(self, texts: Sequence[str], items: Sequence[int], has_images: Sequence[bool]) -> list[Tokens]:
        """Return the tokens of rendered conversations; of one that is much too long, only those at its ends.

        Args:
            texts: conversations as rendered.
            items: the item that each belongs to.
            has_images: whether each has images.
        """
        return encode_with_offsets(self.tokenizer, texts, self.config.max_length)

    def _expanded(
        self, ids: np.ndarray, turn_of: np.ndarray, images: Sequence[Image | Clip], item: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens with one placeholder per token of an image. They belong to no turn: nothing predicts them.

        A conversation with images that is much too long is returned as it is: it is refused, since images are not cut.
        """
        if self._images is None or (images and len(ids) >= 2 * self.config.max_length):
            return ids, turn_of
        times = self._images.repeats(ids.tolist(), images, self.locate(item))
        ids, turn_of = np.repeat(ids, times), np.repeat(turn_of, times)
        turn_of[np.isin(ids, self._images.processor.media_tokens)] = 0
        return ids, turn_of

    def _render_with_spans(
        self, conversations: Sequence[list[Message]], items: Sequence[int], turns: Callable[[int], Sequence[int]]
    ) -> tuple[list[str], list[list[Span]]]:
        """Return the text of every conversation, and the spans of the turns in it."""
        owners = [(number, turn) for number in range(len(conversations)) for turn in turns(number)]

        def rendered(parts: list[list[Message]], generation: bool, rows: Sequence[int]) -> list[str]:
            return render(
                self.tokenizer,
                parts,
                lambda i: self.locate(items[rows[i]]),
                add_generation_prompt=generation,
                continues=False,
                template_kwargs=lambda i: self.template_arguments(items[rows[i]]),
            )

        rows = [number for number, _ in owners]
        texts = rendered(list(conversations), False, range(len(conversations)))
        closed = rendered([conversations[number][: turn + 1] for number, turn in owners], False, rows)
        # no generation begins with the model's turn, so there is no prompt before one, only its opening
        question_flags = [_has_question(conversations[number][:turn]) for number, turn in owners]
        own = [n for n, has_question in enumerate(question_flags) if has_question]
        prompts = rendered([conversations[rows[n]][: owners[n][1]] for n in own], True, [rows[n] for n in own])
        opened = ["" for _ in owners]
        for n, prompt in zip(own, prompts, strict=True):
            opened[n] = prompt
        for n in (n for n, has_question in enumerate(question_flags) if not has_question):
            number, turn = owners[n]
            opened[n] = self._opened(conversations[number], turn, closed[n], items[number])
        spans: list[list[Span]] = [[] for _ in conversations]
        for number, before, after in zip(rows, opened, closed, strict=True):
            self._check_append_only(texts[number], before, after, items[number])
            spans[number].append((len(before), len(after.rstrip())))
        return texts, spans

    def _opened(self, messages: list[Message], turn: int, closed: str, item: int) -> str:
        """Return the text up to a turn of the assistant that comes before all turns of the user.

        Args:
            closed: the conversation up to the end of the turn.

        Raises:
            DataError: where its text begins cannot be told.
        """
        content = messages[turn].get("content")
        text = content.strip() if isinstance(content, str) else ""
        before = "".join(str(message.get("content") or "").strip() for message in messages[:turn])
        at = closed.rfind(text) if text else -1
        if at < 0 or messages[turn].get("tool_calls") or text in before:
            raise DataError(
                f"{self.locate(item)}: message {turn} is of the assistant and comes before any of the user, and where "
                "its text begins in the rendered conversation cannot be told. Begin the row with a message of the user."
            )
        return closed[:at]

    def _check_append_only(self, text: str, before: str, after: str, item: int) -> None:
        for part, label in (
            (before, "the prompt of an assistant turn"),
            (after, "the conversation up to an assistant turn"),
        ):
            if not text.startswith(part):
                at = next(
                    (i for i, (a, b) in enumerate(zip(text, part, strict=False)) if a != b), min(len(text), len(part))
                )
                raise DataError(
                    f"{self.locate(item)}: the chat template of {self.tokenizer.name_or_path or 'the tokenizer'} is "
                    f"not append-only: {label} is rendered as {part[max(0, at - 20) : at + 30]!r} on its own but as "
                    f"{text[max(0, at - 20) : at + 30]!r} in the whole conversation. Which tokens to learn cannot be "
                    "told. Make one row of each assistant turn (it last, the turns before it as its prompt), set "
                    "data.apply_chat_template_kwargs (for example enable_thinking), or give an append-only "
                    "model.custom_chat_template."
                )


def _has_question(messages: Sequence[Message]) -> bool:
    return any(message["role"] not in ("system", "developer", "assistant") for message in messages)


def _row_images(processor: ImageProcessor, config: Any) -> RowImages:
    from hybridrl.data.row_images import RowImages

    return RowImages(processor, config.image_key, config.video_key)


def turn_of_token(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return for each token 1 + the number of the span that its characters lie in, 0 for none.

    A token that begins before a span belongs to the prompt. A token without characters belongs to no span.

    Args:
        offsets: `[T, 2]` first and past-the-last character of each token.
        spans: first and past-the-last character of each turn.
    """
    turns = np.zeros(len(offsets), dtype=np.int32)
    for number, (first, last) in enumerate(spans):
        inside = (offsets[:, 0] >= first) & (offsets[:, 0] < last) & (offsets[:, 1] > offsets[:, 0])
        turns[inside] = number + 1
    return turns


def _tools_of(value: Any) -> list[Any] | None:
    """Return the tools of a row.

    Raises:
        ValueError: they are no list of schemas.
    """
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = finite_json(value)
        except (ValueError, RecursionError, NoNumberError) as error:
            raise ValueError(f"is text that is no JSON ({error}); write the list of tools") from error
    if value is None:
        return None
    if isinstance(value, Mapping | str) or not isinstance(value, Sequence):
        raise ValueError(f"is {type(value).__name__}; it must be a list of tool schemas")
    if wrong := next((type(tool).__name__ for tool in value if not isinstance(tool, Mapping)), None):
        raise ValueError(f"has {wrong} in its list; each tool is an object, its JSON schema")
    return list(value) or None


def _flag_of(value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool | np.bool_):
        raise ValueError(f"is {value!r}; it must be true, false or null")
    return None if value is None else bool(value)
