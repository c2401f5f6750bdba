"""Prompts for reinforcement learning."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from hybridrl.config.schema.choices import TRUNCATIONS
from hybridrl.data.data_files import read_table
from hybridrl.data.dataset_rendering import FieldNotice, check_chat_template, render, truncate
from hybridrl.data.last_turn import GROUND_TRUTH, prompt_hint, split_last_turn, table_with_answers
from hybridrl.data.row_selection import (
    MEDIA_COLUMNS,
    check_media_keys,
    choose_rows,
    pad_token_id,
    refuse_media,
    refuse_other_media,
    report_other_media,
    report_unread_texts,
    seed_of,
)
from hybridrl.data.table import FieldPath, Table
from hybridrl.data.token_cache import TokenCache
from hybridrl.errors import DataError
from hybridrl.models.chat import (
    TEXT,
    TEXT_AND_IMAGES,
    Message,
    as_messages,
    check_messages,
    check_prompt,
    encode,
    without_padding,
)
from hybridrl.notify import notify
from hybridrl.protocol.bookkeeping import left_out

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PromptConfig
    from hybridrl.data.row_images import RowImages
    from hybridrl.models.videos import Clip
    from hybridrl.models.vision import ImageProcessor

#: verl's hooks for subclasses; `verl.utils.dataset.rl_dataset.RLHFDataset` calls them
_HOOKS_OF_VERL = ("_build_messages", "_read_files_and_tokenize", "maybe_filter_out_long_prompts")
#: entries that a rollout adds to `extra_info` before a reward function gets it
_ADDED_INFO = ("num_turns", "rollout_reward_scores")
#: columns, or entries of `extra_info`, that become keyword arguments
_KEYWORDS = ("tools_kwargs", "env_kwargs", "interaction_kwargs")
_CHUNK = 2048  # rows rendered and tokenised at a time


class RLHFDataset(Dataset):
    """Prompts as token ids, with the columns that rewards need.

    A row holds `config.prompt_key` (messages, or text) and whatever else the reward function reads, usually
    `data_source`, `reward_model` (`{"style", "ground_truth"}`) and `extra_info`. `config.ground_truth_key` makes
    `reward_model` of another column. Every row is checked when the dataset is created. If prompt lengths are needed at
    once (`filter_overlong_prompts`, or `truncation=error`), all prompts are also tokenised then, and the token ids are
    kept.

    An item is `{"input_ids": list[int], "raw_prompt": messages, "index": int, **other columns}`. `index` counts the
    rows of all files from 0, before any filter, so that it names the same row whatever is filtered.

    With a `processor`, rows may have images in the column `config.image_key` and videos in `config.video_key`
    (`hybridrl.data.row_images`). Each item then also has `multi_modal_inputs` (`hybridrl.models.vision.ImageTensors`,
    `{}` for a row without images) and `position_ids` [4, tokens]. The columns themselves are left out. A prompt with
    images is never truncated. With the attribute `keeps_image_files`, which gateway agents set, an item has the
    files as `image_files`.

    A subclass may override `build_messages`, `encode_prompts` or `__getitem__`. `on_batch_end(batch)`, if defined, gets
    each batch after its update. verl's hooks are called by the class that `verl.utils.dataset.rl_dataset` has.

    Args:
        data_files: one or several paths.
        tokenizer: a tokenizer with a chat template.
        config: `DataConfig` or `GenerationDataConfig`.
        processor: prepares images for a vision-language model; None for a model that reads text.
        max_samples: number of rows to use: the first ones, or a sample drawn with `config.seed` if `config.shuffle`;
            -1 uses all.
        key: the configuration key that named the files, for messages.

    Raises:
        DataError: a file is unreadable, a column is missing, a row is bad or overlong (each is named), no row is left,
            or a hook of verl's would not be called.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: PromptConfig,
        processor: ImageProcessor | None = None,
        max_samples: int = -1,
        key: str = "data.train_files",
    ) -> None:
        settings = config
        _check_processor(processor)
        if settings.truncation not in TRUNCATIONS:
            raise DataError(f"data.truncation={settings.truncation!r}: allowed are {', '.join(TRUNCATIONS)}.")
        self._check_hooks()
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = settings
        self.key = key
        self.data_files = [str(f) for f in ([data_files] if isinstance(data_files, str | Path) else data_files or [])]
        self.prompt_key = settings.prompt_key
        self.max_prompt_length = settings.max_prompt_length
        self._images = _row_images(processor, settings)
        self._empty: dict[str, set[FieldPath]] = {}
        self.keeps_image_files = False
        self.apply_chat_template_kwargs = dict(settings.apply_chat_template_kwargs or {})
        self.image_key, self.video_key = settings.image_key, settings.video_key
        self.tool_schemas = _tool_schemas(settings)
        check_chat_template(tokenizer)
        self.table = self._read()
        if not self._builds_messages():
            self.table.require(settings.prompt_key, "data.prompt_key", prompt_hint(self.table))
            self.table = table_with_answers(self.table, settings)
        elif settings.last_assistant_turn == GROUND_TRUTH:
            raise DataError(
                f"data.last_assistant_turn={GROUND_TRUTH}: build_messages of {type(self).__name__} makes the prompts, "
                "so no column has the answer; leave the answer out there, and set data.ground_truth_key."
            )
        if settings.ground_truth_key is not None:
            self.table = self.table.with_ground_truth(settings.ground_truth_key)
        self.left_out = left_out(self.table.columns)
        self._dropped_columns = list(self.left_out)
        if self._dropped_columns:
            notify(
                f"{key}: {', '.join(self._dropped_columns)}: a batch has columns of these names itself, so it does not "
                "carry those of the data; rename them if the reward function or an agent reads them"
            )
        self._check_media()
        if not self._builds_messages():
            report_unread_texts(self.table, key, [settings.prompt_key, settings.ground_truth_key or ""])
        self._check_extra_info()
        self.table.check_ground_truths()
        self._rows = choose_rows(len(self.table), max_samples, settings.shuffle, seed_of(settings))
        prompts = self._prompt_column()
        if self.prompt_key in self.table.columns:
            values = self.column(self.prompt_key) if prompts is None else prompts
            if not any(isinstance(value, str) for value in values):
                # messages are in raw_prompt; text stays, for reward functions
                self._dropped_columns.append(self.prompt_key)
        self._tokens: TokenCache | None = None
        self._fields: FieldNotice | None = FieldNotice(
            tokenizer,
            key,
            [self.prompt_key],
            reads_media=self._images is not None,
            system_prompt=settings.system_prompt,
        )
        if settings.filter_overlong_prompts or settings.truncation == "error" or self._images is not None:
            self._tokenize(prompts)
        else:
            self._render_all(prompts)
        self._fields.warn()
        self._fields = None
        if not len(self._rows):
            raise DataError(
                f"{key}: no row is left; all {len(self.table)} prompts are longer than data.max_prompt_length="
                f"{settings.max_prompt_length} tokens. Raise it, or set data.filter_overlong_prompts=False with "
                "data.truncation=left."
            )

    def _check_media(self) -> None:
        """Refuse media that nobody reads. Of those that are read, what the model reads travels, and not the columns."""
        reads, named = self._images is not None, (self.image_key, self.video_key)
        has_columns = not self._builds_messages()
        check_media_keys(self.config, self.table, self.key, reads_media=reads, has_columns=has_columns)
        others = [column for column in MEDIA_COLUMNS if column not in named]
        refuse_media(self.table, self.key, others if reads else [*named, *others])
        if has_columns:
            refuse_other_media(self.table, self.key, named if reads else ())
            report_other_media(self.table, self.key, named if reads else ())
        if reads:
            self._dropped_columns += [column for column in named if column in self.table.columns]

    # Methods that a subclass may override

    def build_messages(self, row: dict[str, Any]) -> list[Message]:
        """Return the chat messages of a row. `data.system_prompt` is added afterwards.

        Args:
            row: all columns. Changes that an override makes to it appear in the item.
        """
        return as_messages(row[self.prompt_key])

    def encode_prompts(
        self,
        conversations: list[list[Message]],
        indices: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> list[list[int]]:
        """Return the token ids of rendered conversations, including the generation prompt.

        Args:
            conversations: lists of messages.
            indices: their row numbers.
            tokenizer: a copy of the dataset's tokenizer, if several threads are at work.
        """
        own = tokenizer or self.tokenizer
        return encode(own, self._rendered(conversations, indices, own), self.max_prompt_length)

    def _rendered(
        self, conversations: list[list[Message]], indices: Sequence[int], tokenizer: PreTrainedTokenizerBase
    ) -> list[str]:
        return render(
            tokenizer,
            conversations,
            lambda number: self.table.locate(indices[number]),
            add_generation_prompt=True,
            template_kwargs=lambda number: self._template_kwargs(indices[number]),
        )

    def _template_kwargs(self, index: int) -> dict[str, Any]:
        """The further variables of the template for a row: with tools, all or those of `extra_info.tool_selection`."""
        if not self.tool_schemas:
            return self.apply_chat_template_kwargs
        from hybridrl.agents.tools.load_tools import selected_tools

        schemas = {schema["function"]["name"]: schema for schema in self.tool_schemas}
        selected = selected_tools(self.table[index].get("extra_info"), list(schemas))
        return {**self.apply_chat_template_kwargs, "tools": [schemas[name] for name in selected]}

    # The dataset

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = int(self._rows[item])
        row = self._without_padding(index, self.table[index])
        messages = self._checked(index, row)
        ids = self._tokens.get(item) if self._tokens is not None else None
        template_messages, images = self._placed(index, row, messages)
        if ids is None:
            ids = self._encoded([template_messages], [images], [index])[0]
        if self.config.truncation != "error" and not images:
            ids = truncate(ids, self.config.max_prompt_length, self.config.truncation)
        more: dict[str, Any] = {}
        if self._images is not None:
            where = self.table.locate(index)
            files = self._images.files(images, where) if self.keeps_image_files else {}
            more = self._images.item(ids, images, where) | files
        for name in self._dropped_columns:
            row.pop(name, None)
        return {
            **row,
            "input_ids": ids,
            "raw_prompt": _without_images(messages, template_messages),
            "index": index,
            **more,
        }

    @property
    def pad_token_id(self) -> int:
        """The id that shorter prompts are padded with. The mask, not this id, marks padding."""
        return pad_token_id(self.tokenizer)

    @property
    def columns(self) -> list[str]:
        """The columns that an item keeps. Reward functions receive them by name."""
        return [name for name in self.table.columns if name not in self._dropped_columns]

    @property
    def has_videos(self) -> bool:
        """Whether an item has a video in the column `config.video_key`."""
        if self._images is None or self.video_key not in self.table.columns:
            return False
        return any(value is not None and len(value) for value in self.column(self.video_key))

    @property
    def indices(self) -> list[int]:
        """The row number of each item, as in its `index`."""
        return [int(index) for index in self._rows]

    def locate(self, item: int) -> str:
        """Return the file and row of an item, for messages."""
        return self.table.locate(int(self._rows[item]))

    def column(self, name: str) -> list[Any]:
        """Return one column of all items, None where a file lacks it."""
        values = self.table.column(name)
        return [values[int(index)] for index in self._rows]

    # Construction

    def _read(self) -> Table:
        """Read `data_files`."""
        return read_table(self.data_files, self.key)

    def _without_padding(self, index: int, row: dict[str, Any]) -> dict[str, Any]:
        """A row whose arguments of tools and the like lack the nulls of fields that only other rows have."""
        if not self.table.has_padding(index):
            return row
        own, info = [name for name in _KEYWORDS if isinstance(row.get(name), Mapping)], row.get("extra_info")
        row |= {name: without_padding(row[name], self._empty_fields(name)) for name in own}
        if isinstance(info, Mapping) and (inner := [name for name in _KEYWORDS if isinstance(info.get(name), Mapping)]):
            keep = self._empty_fields("extra_info")
            row["extra_info"] = {**info, **{name: without_padding(info[name], keep, (name,)) for name in inner}}
        return row

    def _empty_fields(self, column: str) -> set[FieldPath]:
        if column not in self._empty:
            self._empty[column] = self.table.empty_fields(column)
        return self._empty[column]

    def _check_extra_info(self) -> None:
        values = self.table.column("extra_info") if "extra_info" in self.table.columns else []
        replaced = [name for name in _ADDED_INFO if any(isinstance(info, Mapping) and name in info for info in values)]
        if replaced:
            notify(
                f"{self.key}: extra_info has {' and '.join(replaced)}, which reward functions get from the rollout "
                "instead, as in verl; rename the entry if the reward function reads that of the data",
                "warning",
            )
        for index, value in enumerate(values):
            if value is not None and not isinstance(value, Mapping):
                raise DataError(
                    f"{self.table.locate(index)}: column 'extra_info' is {type(value).__name__}, and reward functions "
                    "get it as a dict; make it an object {NAME: VALUE}, or rename the column."
                )

    def _check_hooks(self) -> None:
        """Refuse hooks of verl's, which this class does not call."""
        for name in _HOOKS_OF_VERL:
            if hasattr(type(self), name):
                raise DataError(
                    f"data.custom_cls: {type(self).__name__} defines {name}, a hook of verl's; derive the class from "
                    "verl.utils.dataset.rl_dataset.RLHFDataset, which calls it, or override build_messages."
                )

    def _builds_messages(self) -> bool:
        """Return whether a subclass builds the messages, so that the prompt column may hold anything."""
        return type(self).build_messages is not RLHFDataset.build_messages

    def _prompt_column(self) -> list[Any] | None:
        """Return the prompts of the chosen rows, or None if a subclass builds them from whole rows."""
        if self._builds_messages():
            return None
        column = self.table.column(self.config.prompt_key)
        return [column[int(index)] for index in self._rows]

    def _conversation(self, number: int, prompts: list[Any] | None) -> list[Message]:
        """Return the checked messages of the chosen row `number`."""
        index = int(self._rows[number])
        return self._checked(index, self.table[index] if prompts is None else {self.config.prompt_key: prompts[number]})

    def _checked(self, index: int, row: dict[str, Any]) -> list[Message]:
        """Return the messages of a row.

        Raises:
            DataError: it has none, or they have the wrong form; the error names the row.
        """
        if not self._builds_messages():
            column = self.config.prompt_key
            try:
                check_prompt(row[column], self._kinds)
            except ValueError as error:
                raise DataError(
                    f"{self.table.locate(index)}: column {column!r} cannot be used as a prompt: {error}."
                ) from None
            return self._normal(index, self.build_messages(row))
        who = f"{self.table.locate(index)}: build_messages of {type(self).__name__}"
        try:
            messages = self.build_messages(row)
        except Exception as error:
            raise DataError(f"{who} failed: {type(error).__name__}: {error}") from error
        try:
            check_messages(messages, self._kinds)
        except ValueError as error:
            raise DataError(f"{who} returned what cannot be used as a prompt: {error}.") from None
        return self._normal(index, messages)

    def _normal(self, index: int, messages: Sequence[Message]) -> list[Message]:
        """Messages of a row in normal form, without an answer that is its ground truth."""
        padded = self.table.has_padding(index)
        normal = as_messages(messages, self.config.system_prompt, has_padding=padded)
        if self._fields is not None:
            self._fields.add(normal)
        return split_last_turn(normal, self.config.last_assistant_turn, self.table.locate(index))[0]

    def _render_all(self, prompts: list[Any] | None) -> None:
        """Check and render all prompts, so that a bad one is found before the run starts."""
        renders = type(self).encode_prompts is RLHFDataset.encode_prompts
        for start in range(0, len(self._rows), _CHUNK):
            indices = [int(index) for index in self._rows[start : start + _CHUNK]]
            messages = [self._conversation(start + number, prompts) for number in range(len(indices))]
            if renders:
                self._rendered(messages, indices, self.tokenizer)

    @property
    def _kinds(self) -> tuple[str, ...]:
        """The kinds of content that messages may hold."""
        return TEXT if self._images is None else TEXT_AND_IMAGES

    def _placed(
        self, index: int, row: dict[str, Any], messages: list[Message]
    ) -> tuple[list[Message], list[Image | Clip]]:
        """Return the messages of a row as the chat template takes them, and their images."""
        return (messages, []) if self._images is None else self._images.place(messages, row, self.table.locate(index))

    def _encoded(
        self,
        conversations: list[list[Message]],
        images: Sequence[Sequence[Image | Clip]],
        indices: Sequence[int],
        *tokenizer: PreTrainedTokenizerBase,
    ) -> list[list[int]]:
        """Return the token ids of prompts, with as many placeholders as their images have tokens.

        A prompt with images whose text is much too long stays as it is. It is left out or refused.
        """
        encoded = self.encode_prompts(conversations, indices, *tokenizer)
        if self._images is None:
            return encoded
        limit = 2 * self.config.max_prompt_length
        rows = zip(encoded, images, indices, strict=True)
        return [
            ids if own and len(ids) >= limit else self._images.expand(ids, own, self.table.locate(index))
            for ids, own, index in rows
        ]

    def _tokenize(self, prompts: list[Any] | None) -> None:
        """Tokenise every prompt, and drop or refuse those that are too long."""
        limit, dropped = self.config.max_prompt_length, self.config.filter_overlong_prompts
        cache, rows, overlong = TokenCache(), [], []
        refused: list[tuple[int, int]] = []
        for indices, sequences, has_images in self._encoded_chunks(prompts):
            fitting = [number for number, ids in enumerate(sequences) if len(ids) <= limit]
            too_long = [n for n, ids in enumerate(sequences) if len(ids) > limit]
            overlong += [(indices[n], len(sequences[n])) for n in too_long]
            refused += [(indices[n], len(sequences[n])) for n in too_long if has_images[n]]
            if not dropped:
                fitting = list(range(len(sequences)))
            cache.add([sequences[number] for number in fitting])
            rows += [indices[number] for number in fitting]
        if self.config.truncation == "error":
            refused = overlong
        if overlong and dropped:
            notify(
                f"{self.key}: {len(overlong)} of {len(self._rows)} prompts are longer than "
                f"data.max_prompt_length={limit} tokens and were left out"
            )
        elif refused:
            raise self._too_long(refused)
        cache.freeze()
        self._tokens = cache
        self._rows = np.asarray(rows, dtype=np.int64)

    def _too_long(self, rows: Sequence[tuple[int, int]]) -> DataError:
        """The error for rows, each with the length of its prompt, that are neither left out nor truncated."""
        index, length = rows[0]
        instead = "or data.truncation to left, right or middle"
        longest = max(n for _, n in rows)
        at_least = ["at least " if n >= 2 * self.config.max_prompt_length else "" for n in (length, longest)]
        if self._images is not None:
            instead = (
                "or make images smaller with data.mm_processor_kwargs.max_pixels (of videos, fps and videos_kwargs): "
                "images are never truncated"
            )
        return DataError(
            f"{self.table.locate(index)}: the prompt has {at_least[0]}{length} tokens, more than "
            f"data.max_prompt_length={self.config.max_prompt_length} ({len(rows)} such rows of {len(self._rows)}, "
            f"the longest with {at_least[1]}{longest}). Raise data.max_prompt_length, or set "
            f"data.filter_overlong_prompts=True, {instead}."
        )

    def _encoded_chunks(self, prompts: list[Any] | None) -> Iterator[tuple[list[int], list[list[int]], list[bool]]]:
        """Yield the row numbers and token ids of the prompts, and which have images, chunk by chunk.

        `filter_overlong_prompts_workers` threads share the work, because tokenising releases the interpreter lock.
        Each thread has a copy of the tokenizer, which two threads must not use at once.
        """
        own = threading.local()

        def encode_chunk(start: int) -> tuple[list[int], list[list[int]], list[bool]]:
            if not hasattr(own, "tokenizer"):
                own.tokenizer = copy.deepcopy(self.tokenizer) if workers > 1 else self.tokenizer
            indices = [int(index) for index in self._rows[start : start + _CHUNK]]
            if self._images is None:
                messages = [self._conversation(start + number, prompts) for number in range(len(indices))]
                return indices, self.encode_prompts(messages, indices, own.tokenizer), [False] * len(indices)
            placed = []
            for index in indices:
                row = self.table[index]
                placed.append(self._placed(index, row, self._checked(index, row)))
            conversations, images = [messages for messages, _ in placed], [media for _, media in placed]
            has_images = [bool(media) for media in images]
            return indices, self._encoded(conversations, images, indices, own.tokenizer), has_images

        workers = self.config.filter_overlong_prompts_workers
        starts = range(0, len(self._rows), _CHUNK)
        if workers == 1:
            yield from map(encode_chunk, starts)
            return
        with ThreadPoolExecutor(workers) as executor:
            yield from executor.map(encode_chunk, starts)


def _check_processor(processor: Any) -> None:
    if processor is None:
        return
    from hybridrl.models.vision import ImageProcessor

    if not isinstance(processor, ImageProcessor):
        raise DataError(
            f"processor: it is a {type(processor).__name__}; give what hybridrl.models.vision.processor_of returns, or "
            "None for a model that reads text."
        )


def _row_images(processor: ImageProcessor | None, config: Any) -> RowImages | None:
    if processor is None:
        return None
    from hybridrl.data.row_images import RowImages

    return RowImages(processor, config.image_key, config.video_key)


def _tool_schemas(config: PromptConfig) -> list[dict[str, Any]] | None:
    """The schemas of the tools that prompts name; None without tools."""
    paths = config.get("tool_config_path"), config.get("function_tool_path")
    if paths == (None, None):
        return None
    from hybridrl.agents.tools.load_tools import tool_schemas  # brings Ray, which other data sets do not need

    return tool_schemas(*paths)


def _without_images(messages: list[Message], template_messages: list[Message]) -> list[Message]:
    """The messages for reward functions: as they are, but those of parts without their images."""
    pairs = zip(messages, template_messages, strict=True)
    return [own if isinstance(own.get("content"), str | None) else stripped for own, stripped in pairs]
