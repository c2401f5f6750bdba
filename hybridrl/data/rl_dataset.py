"""Prompts for reinforcement learning."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from hybridrl.data.chat import check_chat_template, render, truncate
from hybridrl.data.files import read_table
from hybridrl.data.table import Table, table_of
from hybridrl.errors import DataError
from hybridrl.models.chat import Message, as_messages, encode, fault_in_messages, fault_in_prompt
from hybridrl.notify import notify

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PromptConfig, SFTDataConfig

TRUNCATIONS = ("error", "left", "right", "middle")
_MEDIA_COLUMNS = ("images", "videos", "audios")
#: methods of verl's class that nothing here calls -> what to do instead
_HOOKS_WITHOUT_EFFECT = {
    "_download": "Copy the files to a local disk first and name the copies, or read them in _read_files_and_tokenize.",
    "resume_dataset_state": "A resumed run builds the data set again: do the work in _read_files_and_tokenize.",
    **dict.fromkeys(
        ("process_vision_info", "process_multi_modal_info", "_process_multi_modal_info", "_extract_audio_info"),
        "Images, audio and video are not supported; use a text-only data set and model.",
    ),
}
#: columns that a batch has itself; a data column of this name would be overwritten
_BATCH_COLUMNS = (
    *("uid", "index", "sample", "raw_prompt", "prompts", "responses", "response_mask"),
    *("input_ids", "attention_mask", "position_ids"),
)
_CHUNK = 2048  # rows rendered and tokenised at a time
_CACHED_TOKENS = (
    50_000_000  # token ids kept in memory (int32: 200 MB); with more, prompts are tokenised again when drawn
)


class TokenCache:
    """Ragged token ids in one flat array. Nothing is kept once there are more than `limit`."""

    def __init__(self, limit: int = _CACHED_TOKENS) -> None:
        self.limit = limit
        self.lengths: list[int] = []
        self._chunks: list[np.ndarray] = []
        self._total = 0
        self._flat: np.ndarray | None = None
        self._starts: np.ndarray | None = None

    def add(self, sequences: Sequence[list[int]]) -> None:
        """Append sequences."""
        self.lengths.extend(map(len, sequences))
        self._total += sum(map(len, sequences))
        if self._total > self.limit:
            self._chunks = []
        else:
            self._chunks.extend(np.asarray(ids, dtype=np.int32) for ids in sequences)

    def freeze(self) -> None:
        """Finish the cache. Called once, after the last `add`."""
        if self._total <= self.limit:
            self._flat = np.concatenate(self._chunks) if self._chunks else np.empty(0, np.int32)
            self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._chunks = []

    def get(self, index: int) -> list[int] | None:
        """Return the ids of one sequence, or None if there were too many to keep."""
        if self._flat is None or self._starts is None:
            return None
        return self._flat[self._starts[index] : self._starts[index + 1]].tolist()


class RLHFDataset(Dataset):
    """Prompts as token ids, with the columns that rewards need.

    A row holds `config.prompt_key` (messages, or text) and whatever else the reward function reads, usually
    `data_source`, `reward_model` (`{"style", "ground_truth"}`) and `extra_info`. `config.ground_truth_key` makes
    `reward_model` of another column. Every row is checked when the dataset is created. If prompt lengths are needed at
    once (`filter_overlong_prompts`, or `truncation=error`), all prompts are also tokenised then, and the token ids are
    kept.

    An item is `{"input_ids": list[int], "raw_prompt": messages, "index": int, **other columns}`. `index` counts the
    rows of all files from 0, before any filter, so that it names the same row whatever is filtered.

    A subclass may override `build_messages`, `encode_prompts` or `__getitem__`, and verl's hooks
    `_read_files_and_tokenize`, `maybe_filter_out_long_prompts` and `_build_messages`. A subclass that defines one of
    verl's hooks that has no effect here is refused, and the error names the hook. `on_batch_end(batch)`, if defined,
    gets each batch after its update.

    Args:
        data_files: one or several paths.
        tokenizer: a tokenizer with a chat template.
        config: `DataConfig` or `GenerationDataConfig`; or a mapping, such as an OmegaConf group, in which the keys of
            `data` may be missing.
        processor: accepted for subclasses written for verl; must be None.
        max_samples: number of rows to use: the first ones, or a sample drawn with `config.seed` if `config.shuffle`;
            -1 uses all.
        key: the configuration key that named the files, for messages.

    Raises:
        DataError: a file is unreadable, a column is missing, a row is bad or overlong (each is named), no row is left,
            or a hook would not be called.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: PromptConfig | Mapping[str, Any],
        processor: None = None,
        max_samples: int = -1,
        key: str = "data.train_files",
    ) -> None:
        settings: PromptConfig = with_defaults(config)
        if processor is not None:
            raise DataError("processor: images, audio and video are not supported; use a text-only data set and model.")
        if settings.truncation not in TRUNCATIONS:
            raise DataError(f"data.truncation={settings.truncation!r}: allowed are {', '.join(TRUNCATIONS)}.")
        self._refuse_hooks_without_effect()
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = settings
        self.key = key
        self.data_files = [str(f) for f in ([data_files] if isinstance(data_files, str | Path) else data_files or [])]
        self.original_data_files = list(self.data_files)
        self.prompt_key = settings.prompt_key
        self.max_prompt_length = settings.max_prompt_length
        self.truncation = settings.truncation
        self.filter_overlong_prompts = settings.filter_overlong_prompts
        self._set_what_hooks_of_verl_read(max_samples)
        check_chat_template(tokenizer)
        self._table: Table | None = None
        self._dataframe: Any = None
        self._is_built = False
        self._read_files_and_tokenize()
        if settings.ground_truth_key is not None:
            self.table = self.table.with_ground_truth(settings.ground_truth_key)
        self._taken = [name for name in self.table.columns if name in _BATCH_COLUMNS]
        if self._taken:
            notify(
                f"{key}: {', '.join(self._taken)}: a batch has columns of these names itself, so it does not "
                "carry those of the data; rename them if the reward function reads them"
            )
        if not self._builds_messages():
            self.table.require(settings.prompt_key, "data.prompt_key")
        self._refuse_media()
        self._check_extra_info()
        self._rows = choose_rows(len(self.table), max_samples, settings.shuffle, seed_of(settings))
        prompts = self._prompt_column()
        if self.prompt_key in self.table.columns:
            values = self.column(self.prompt_key) if prompts is None else prompts
            if not any(isinstance(value, str) for value in values):
                self._taken.append(self.prompt_key)  # messages are in raw_prompt; text stays, for reward functions
        self._tokens: TokenCache | None = None
        if settings.filter_overlong_prompts or settings.truncation == "error":
            self._tokenize(prompts)
        else:
            for number in range(len(self._rows)):
                self._conversation(number, prompts)
        if not len(self._rows):
            raise DataError(
                f"{key}: no row is left; all {len(self.table)} prompts are longer than data.max_prompt_length="
                f"{settings.max_prompt_length} tokens. Raise it, or set data.filter_overlong_prompts=False with "
                "data.truncation=left."
            )
        self._dataframe, self._is_built = None, True

    # Methods that a subclass may override

    def build_messages(self, row: dict[str, Any]) -> list[Message]:
        """Return the chat messages of a row. `data.system_prompt` is added afterwards.

        Args:
            row: all columns. Changes that an override makes to it appear in the item.
        """
        if self._hook_takes_key:
            return self._build_messages(row, key=self.prompt_key)
        return self._build_messages(row)  # an override as in earlier versions of verl

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> list[Message]:
        """verl's name for `build_messages`; `key` is the prompt column."""
        return as_messages(example[key or self.prompt_key])

    def _read_files_and_tokenize(self) -> None:
        """Read `data_files`. As in verl, an override sets `self.dataframe`; see `table_of` for the allowed types."""
        self.table = read_table(self.data_files, self.key)
        if type(self).maybe_filter_out_long_prompts is not RLHFDataset.maybe_filter_out_long_prompts:
            self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """verl's hook for dropping rows. An override returns the rows to keep; overlong prompts are dropped later."""
        return self.dataframe if dataframe is None else dataframe

    @property
    def table(self) -> Table:
        """The rows as they were read."""
        if self._table is None:
            raise DataError(
                f"data.custom_cls: {type(self).__name__}._read_files_and_tokenize read no rows. It must set "
                "self.dataframe to a datasets.Dataset, a pandas.DataFrame or a list of dicts."
            )
        return self._table

    @table.setter
    def table(self, table: Table) -> None:
        self._table = table

    @property
    def dataframe(self) -> Any:
        """The rows as verl's `datasets.Dataset`: as they were read, and once the data set is built, one per item."""
        import datasets

        if self._dataframe is None:
            self._dataframe = datasets.Dataset(self.table.arrow())
            if self._is_built and len(self._rows) < len(self.table):
                self._dataframe = self._dataframe.select(self._rows)
        return self._dataframe

    @dataframe.setter
    def dataframe(self, rows: Any) -> None:
        if self._is_built:
            raise DataError(
                f"data.custom_cls: {type(self).__name__} sets self.dataframe after its rows were tokenised, "
                "which would have no effect; set it in _read_files_and_tokenize."
            )
        self._dataframe = None
        self.table = table_of(rows, f"{self.key}, as read by {type(self).__name__}")

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
        texts = render(
            tokenizer or self.tokenizer,
            conversations,
            lambda number: self.table.locate(indices[number]),
            add_generation_prompt=True,
            template_kwargs=self.apply_chat_template_kwargs,
            tools=self._tools_of(indices),
        )
        return encode(tokenizer or self.tokenizer, texts)

    def _tools_of(self, indices: Sequence[int]) -> list[list[dict[str, Any]]] | None:
        """The descriptions of each row's tools: all, or those that `extra_info.tool_selection` names."""
        if not self.tool_schemas:
            return None
        if "extra_info" not in self.table.columns:
            return [self.tool_schemas] * len(indices)
        from hybridrl.agents.tools.load import selected_tools

        infos, schemas = self.table.column("extra_info"), {one["function"]["name"]: one for one in self.tool_schemas}
        return [[schemas[name] for name in selected_tools(infos[index], list(schemas))] for index in indices]

    # The dataset

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = int(self._rows[item])
        row = self.table[index]
        messages = self._checked(index, row)
        ids = self._tokens.get(item) if self._tokens is not None else None
        if ids is None:
            ids = self.encode_prompts([messages], [index])[0]
        if self.config.truncation != "error":
            ids = truncate(ids, self.config.max_prompt_length, self.config.truncation)
        for name in self._taken:
            row.pop(name, None)
        return {**row, "input_ids": ids, "raw_prompt": messages, "index": index}

    @property
    def pad_token_id(self) -> int:
        """The id that shorter prompts are padded with. The mask, not this id, marks padding."""
        return pad_token_id(self.tokenizer)

    @property
    def columns(self) -> list[str]:
        """The columns that an item keeps. Reward functions receive them by name."""
        return [name for name in self.table.columns if name not in self._taken]

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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_dataframe": None}

    # Construction

    def _set_what_hooks_of_verl_read(self, max_samples: int) -> None:
        """Set the other attributes that verl's class has when its hooks run. Media are not supported."""
        settings = self.config
        self.max_samples = max_samples
        self.shuffle, self.seed = settings.shuffle, seed_of(settings)
        self.num_workers = settings.filter_overlong_prompts_workers
        self.apply_chat_template_kwargs = dict(settings.apply_chat_template_kwargs or {})
        self.image_key, self.video_key, self.audio_key = _MEDIA_COLUMNS
        self.tool_config_path = settings.get("tool_config_path")
        self.function_tool_path = settings.get("function_tool_path")
        self.tool_schemas = None
        if self.tool_config_path is not None or self.function_tool_path is not None:
            from hybridrl.agents.tools.load import tool_schemas  # brings Ray, which other data sets do not need

            self.tool_schemas = tool_schemas(self.tool_config_path, self.function_tool_path)
        self.return_raw_chat, self.return_full_prompt, self.need_tools_kwargs = True, False, False
        self.serialize_dataset = self.return_multi_modal_inputs = self.use_shm = False
        self._hook_takes_key = "key" in inspect.signature(self._build_messages).parameters

    def _refuse_media(self) -> None:
        for name in _MEDIA_COLUMNS:
            if name in self.table.columns and any(self.table.column(name)):
                raise DataError(
                    f"{self.key}: column {name!r} holds media, which is not supported. Use a text-only data set and "
                    "model."
                )

    def _check_extra_info(self) -> None:
        for index, value in enumerate(self.table.column("extra_info") if "extra_info" in self.table.columns else ()):
            if value is not None and not isinstance(value, Mapping):
                raise DataError(
                    f"{self.table.locate(index)}: column 'extra_info' is {type(value).__name__}, and reward functions "
                    "get it as a dict; make it an object {NAME: VALUE}, or rename the column."
                )

    def _refuse_hooks_without_effect(self) -> None:
        for name, instead in _HOOKS_WITHOUT_EFFECT.items():
            if hasattr(type(self), name):
                raise DataError(
                    f"data.custom_cls: {type(self).__name__} defines {name}, a hook of verl's that hybridrl does not "
                    f"call. {instead}"
                )

    def _builds_messages(self) -> bool:
        """Return whether a subclass builds the messages, so that the prompt column may hold anything."""
        base, cls = RLHFDataset, type(self)
        return cls.build_messages is not base.build_messages or cls._build_messages is not base._build_messages

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
            fault = fault_in_prompt(row[self.config.prompt_key])
            if fault:
                column = self.config.prompt_key
                raise DataError(f"{self.table.locate(index)}: column {column!r} cannot be used as a prompt: {fault}.")
            return as_messages(self.build_messages(row), self.config.system_prompt)
        who = f"{self.table.locate(index)}: build_messages of {type(self).__name__}"
        try:
            messages = self.build_messages(row)
        except Exception as error:
            raise DataError(f"{who} failed: {type(error).__name__}: {error}") from error
        fault = fault_in_messages(messages)
        if fault:
            raise DataError(f"{who} returned what cannot be used as a prompt: {fault}.")
        return as_messages(messages, self.config.system_prompt)

    def _tokenize(self, prompts: list[Any] | None) -> None:
        """Tokenise every prompt, and drop or refuse those that are too long."""
        limit = self.config.max_prompt_length
        cache, kept, overlong = TokenCache(), [], []
        for indices, sequences in self._encoded_chunks(prompts):
            fitting = [number for number, ids in enumerate(sequences) if len(ids) <= limit]
            overlong += [(indices[n], len(ids)) for n, ids in enumerate(sequences) if len(ids) > limit]
            if not self.config.filter_overlong_prompts:
                fitting = list(range(len(sequences)))
            cache.add([sequences[number] for number in fitting])
            kept += [indices[number] for number in fitting]
        if overlong and self.config.filter_overlong_prompts:
            notify(
                f"{self.key}: {len(overlong)} of {len(self._rows)} prompts are longer than "
                f"data.max_prompt_length={limit} tokens and were left out"
            )
        elif overlong and self.config.truncation == "error":
            index, length = overlong[0]
            raise DataError(
                f"{self.table.locate(index)}: the prompt has {length} tokens, more than data.max_prompt_length={limit} "
                f"({len(overlong)} such rows of {len(self._rows)}, the longest with {max(n for _, n in overlong)}). "
                "Raise data.max_prompt_length, or set data.filter_overlong_prompts=True, or data.truncation to left, "
                "right or middle."
            )
        cache.freeze()
        self._tokens = cache
        self._rows = np.asarray(kept, dtype=np.int64)

    def _encoded_chunks(self, prompts: list[Any] | None) -> Iterator[tuple[list[int], list[list[int]]]]:
        """Yield the row numbers and token ids of the prompts, chunk by chunk.

        `filter_overlong_prompts_workers` threads share the work, because tokenising releases the interpreter lock.
        Each thread has a copy of the tokenizer, which two threads must not use at once.
        """
        own = threading.local()

        def encode_chunk(start: int) -> tuple[list[int], list[list[int]]]:
            if not hasattr(own, "tokenizer"):
                own.tokenizer = copy.deepcopy(self.tokenizer) if workers > 1 else self.tokenizer
            indices = [int(index) for index in self._rows[start : start + _CHUNK]]
            messages = [self._conversation(start + number, prompts) for number in range(len(indices))]
            return indices, self.encode_prompts(messages, indices, own.tokenizer)

        workers = self.config.filter_overlong_prompts_workers
        starts = range(0, len(self._rows), _CHUNK)
        if workers == 1:
            yield from map(encode_chunk, starts)
            return
        with ThreadPoolExecutor(workers) as executor:
            yield from executor.map(encode_chunk, starts)


class _WithDefaults:
    """A mapping of settings as attributes, with the defaults of `data`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        from hybridrl.config import DataConfig

        self._values, self._defaults = values, DataConfig()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is unpickled or copied
            raise AttributeError(name)
        return self._values[name] if name in self._values else getattr(self._defaults, name)

    def get(self, name: str, default: Any = None) -> Any:
        """The setting called `name`, or `default` if there is none."""
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._defaults


def with_defaults(config: Any) -> Any:
    """Return settings that are a mapping, as code written for verl has them, with the defaults of `data`."""
    return _WithDefaults(config) if isinstance(config, Mapping) else config


def seed_of(config: PromptConfig | SFTDataConfig) -> int:
    """Return `data.seed`. Null means 1, never a random seed, because a resumed run must see the same order."""
    return 1 if config.seed is None else config.seed


def choose_rows(total: int, max_samples: int, shuffle: bool, seed: int) -> np.ndarray:
    """Return the numbers of the rows to use, ascending.

    Raises:
        DataError: no rows are requested.
    """
    if max_samples == 0:
        raise DataError("data.train_max_samples or val_max_samples is 0, so no row is left. Set it to -1 for all.")
    if max_samples < 0 or max_samples >= total:
        return np.arange(total)
    if shuffle:
        return np.sort(np.random.default_rng(seed).choice(total, size=max_samples, replace=False))
    return np.arange(max_samples)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the pad id, or the EOS id if the tokenizer has no pad id.

    Raises:
        DataError: the tokenizer has neither.
    """
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if value is not None:
            return int(value)
    raise DataError(
        f"the tokenizer of {tokenizer.name_or_path or 'the model'} has neither a pad nor an EOS token; set one in its "
        "tokenizer_config.json."
    )
