"""The rows of every dataset: which are used, in which order, and the token that pads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridrl.errors import DataError
from hybridrl.notify import notify

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PromptConfig, SupervisedDataConfig
    from hybridrl.data.table import Table

#: characters of a prompt, with which answers do not begin by chance
LONG_ENOUGH = 8
MEDIA_COLUMNS = ("images", "videos", "audios")
#: columns that hold media in some data sets, and a word or number in others
_POSSIBLE_MEDIA_COLUMNS = ("image", "video", "audio")
_MEDIA_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".mp4", ".webm", ".mov", ".wav", ".mp3", ".flac")
#: columns that other libraries write into what the model reads
_TEXT_COLUMNS = ("system", "system_prompt", "instruction", "input", "context", "history", "tools", "functions")


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


def report_unread_texts(table: Table, key: str, read: Iterable[str]) -> None:
    """Name columns that other libraries write into what the model reads, and that no setting here names.

    Args:
        key: the configuration key that named the files, for messages.
        read: the columns that are read.
    """
    names = [name for name in _TEXT_COLUMNS if name in table.columns and name not in set(read)]
    if unread := [name for name in names if any(table.column(name))]:
        notify(
            f"{key}: columns {', '.join(map(repr, unread))} are not read. If the model is to read them, write them "
            "into the prompt or the messages"
        )


def refuse_other_media(table: Table, key: str, read: Sequence[str] = ()) -> None:
    """Refuse files of images, audio or video in columns that only some data sets have for them.

    Args:
        key: the configuration key that named the files, for messages.
        read: columns with media that the model reads.

    Raises:
        DataError: a row has some; the error names the column.
    """
    possible = [name for name in _POSSIBLE_MEDIA_COLUMNS if name in table.columns and name not in read]
    if media := next((name for name in possible if any(map(_is_media, table.column(name)))), None):
        advice = f"name it with data.{media}_key={media}" if read and media != "audio" else "remove the column"
        raise DataError(
            f"{key}: column {media!r} holds media that the model would not see. Use a text-only data set, or {advice}; "
            "docs/vision.md says which models and programs read images."
        )


def check_media_keys(config: Any, table: Table, key: str, *, reads_media: bool, has_columns: bool = True) -> None:
    """Refuse `data.image_key` and `data.video_key` that were set and name nothing that is read, or no column.

    Args:
        config: the settings `data`.
        key: the configuration key that named the files, for messages.
        reads_media: whether the model reads images and videos.
        has_columns: whether media are in columns of the files; otherwise a dataset class adds them.

    Raises:
        DataError: names the setting.
    """
    for name, usual in (("image_key", MEDIA_COLUMNS[0]), ("video_key", MEDIA_COLUMNS[1])):
        column = config.get(name, usual)
        if column == usual:
            continue
        if not reads_media:
            raise DataError(
                f"data.{name}={column} has no effect, because the model reads text alone. Use a vision-language model, "
                "or remove the setting; docs/vision.md says which models read images."
            )
        if has_columns and column not in table.columns:
            raise DataError(
                f"data.{name}={column}: {key} has no column {column!r} (columns found: {', '.join(table.columns)}). "
                "Name the column of the media, or remove the setting."
            )


def report_other_media(table: Table, key: str, read: Sequence[str] = ()) -> None:
    """Name columns with files of media that the model does not see, whatever they are called.

    Args:
        key: the configuration key that named the files, for messages.
        read: columns that the model reads.
    """
    if names := [name for name in table.media_columns() if name not in read]:
        notify(
            f"{key}: columns {', '.join(map(repr, names))} hold media, which the model does not see. A vision-language "
            f"model reads those of one column with data.image_key={names[0]} (or data.video_key)",
            "warning",
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


def _is_media(value: Any) -> bool:
    """Whether a value is a file of an image, video or sound, by its form or its suffix."""
    if isinstance(value, list):
        return any(map(_is_media, value))
    if isinstance(value, Mapping):
        return value.get("bytes") is not None or value.get("path") is not None
    if isinstance(value, str):
        return value.lower().endswith(_MEDIA_SUFFIXES) and not any(map(str.isspace, value))
    return isinstance(value, bytes) or hasattr(value, "convert")  # an image of Pillow
