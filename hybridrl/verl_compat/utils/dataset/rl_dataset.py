"""`verl.utils.dataset.rl_dataset`: the data set of prompts with the hooks of verl's class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridrl import data
from hybridrl.data import DataError
from hybridrl.data.data_files import read_table
from hybridrl.data.row_selection import MEDIA_COLUMNS, seed_of
from hybridrl.data.table import Table, table_of
from hybridrl.models.chat import Message, as_messages
from hybridrl.protocol import object_array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PromptConfig
    from hybridrl.models.vision import ImageProcessor

__all__ = ["RLHFDataset", "collate_fn"]

#: methods of verl's class that nothing here calls -> the remedy
_HOOKS_WITHOUT_EFFECT = {
    "_download": "Copy the files to a local disk first and name the copies, or read them in _read_files_and_tokenize.",
    "resume_dataset_state": "A resumed run builds the data set again: do the work in _read_files_and_tokenize.",
    **dict.fromkeys(
        ("process_vision_info", "process_multi_modal_info", "_process_multi_modal_info", "_extract_audio_info"),
        "Return messages with parts {'type': 'image', 'image': ...} from build_messages instead.",
    ),
}


class RLHFDataset(data.RLHFDataset):
    """`hybridrl.data.RLHFDataset` for classes written for verl.

    A subclass may override `_read_files_and_tokenize`, `maybe_filter_out_long_prompts` and `_build_messages`, which
    find the attributes of verl's class. One that defines a hook without effect here is refused by name.

    Args:
        config: settings of `data`; or a mapping, such as an OmegaConf group, in which keys of `data` may be missing.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: PromptConfig | Mapping[str, Any],
        processor: ImageProcessor | None = None,
        max_samples: int = -1,
        key: str = "data.train_files",
    ) -> None:
        self.max_samples = max_samples
        self._dataframe: Any = None
        self._is_built = False
        super().__init__(data_files, tokenizer, with_defaults(config), processor, max_samples, key)
        self._dataframe, self._is_built = None, True

    def build_messages(self, row: dict[str, Any]) -> list[Message]:
        """Return the chat messages of a row, by `_build_messages`."""
        if "key" in inspect.signature(self._build_messages).parameters:
            return self._build_messages(row, key=self.prompt_key)
        return self._build_messages(row)  # an override as in earlier versions of verl

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> list[Message]:
        return as_messages(example[key or self.prompt_key])

    def _read_files_and_tokenize(self) -> None:
        """Read `data_files`. An override sets `self.dataframe`; see `table_of` for the allowed types."""
        self.table = read_table(self.data_files, self.key)
        if type(self).maybe_filter_out_long_prompts is not RLHFDataset.maybe_filter_out_long_prompts:
            self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return the rows to keep. Overlong prompts are dropped later in any case."""
        return self.dataframe if dataframe is None else dataframe

    @property
    def dataframe(self) -> Any:
        """The rows as a `datasets.Dataset`: as they were read, and once the data set is built, one per item."""
        import datasets

        if self._dataframe is None:
            self._dataframe = datasets.Dataset(self.table.arrow())
            if self._is_built and len(self) < len(self.table):
                self._dataframe = self._dataframe.select(self.indices)
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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_dataframe": None}

    def _read(self) -> Table:
        self._set_attributes_of_verl()
        self._read_files_and_tokenize()
        if "table" not in self.__dict__:
            raise DataError(
                f"data.custom_cls: {type(self).__name__}._read_files_and_tokenize read no rows. It must set "
                "self.dataframe to a datasets.Dataset, a pandas.DataFrame or a list of dicts."
            )
        return self.table

    def _set_attributes_of_verl(self) -> None:
        """Set the other attributes that verl's class has when its hooks run."""
        settings = self.config
        self.original_data_files = list(self.data_files)
        self.truncation = settings.truncation
        self.filter_overlong_prompts = settings.filter_overlong_prompts
        self.shuffle, self.seed = settings.shuffle, seed_of(settings)
        self.num_workers = settings.filter_overlong_prompts_workers
        *_, self.audio_key = MEDIA_COLUMNS
        self.tool_config_path = settings.get("tool_config_path")
        self.function_tool_path = settings.get("function_tool_path")
        self.return_raw_chat, self.return_full_prompt, self.need_tools_kwargs = True, False, False
        self.serialize_dataset = self.use_shm = False
        self.return_multi_modal_inputs = self.processor is not None

    def _check_hooks(self) -> None:
        for name, remedy in _HOOKS_WITHOUT_EFFECT.items():
            if hasattr(type(self), name):
                raise DataError(
                    f"data.custom_cls: {type(self).__name__} defines {name}, a hook of verl's that hybridrl does not "
                    f"call. {remedy}"
                )

    def _builds_messages(self) -> bool:
        cls = type(self)
        return (
            cls.build_messages is not RLHFDataset.build_messages
            or cls._build_messages is not RLHFDataset._build_messages
        )


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


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rows as one dict: tensors stacked, everything else as an array of objects."""
    keys = dict.fromkeys(key for row in data_list for key in row)
    columns = {key: [row[key] for row in data_list if key in row] for key in keys}
    return {
        key: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_array(values)
        for key, values in columns.items()
    }
