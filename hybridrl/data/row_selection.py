"""The rows of every dataset: which are used, in which order, and the token that pads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybridrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PromptConfig, SupervisedDataConfig
    from hybridrl.data.table import Table

MEDIA_COLUMNS = ("images", "videos", "audios")


def seed_of(config: PromptConfig | SupervisedDataConfig) -> int:
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


def refuse_media(table: Table, key: str, columns: Sequence[str] = MEDIA_COLUMNS) -> None:
    """Refuse rows with images, audio or video, which would be left out of what the model sees.

    Args:
        key: the configuration key that named the files, for messages.
        columns: names of columns with media that the model does not read.

    Raises:
        DataError: a row has some; the error names the column.
    """
    for name in columns:
        if name in table.columns and any(table.column(name)):
            raise DataError(
                f"{key}: column {name!r} holds media, which is not supported here. Use a text-only data set, or remove "
                "the column; docs/vision.md says which models and programs read images."
            )
