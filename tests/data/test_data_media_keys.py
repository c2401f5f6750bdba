"""Settings and columns of media for a model that does not read them are refused or named."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from raising import raises_with

from hybridrl.config import DataConfig, GenerationDataConfig, PairsDataConfig, SFTDataConfig
from hybridrl.data import DataError, create_preference_dataset, create_rl_dataset, create_sft_dataset
from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.models.vision import processor_of

ROWS = [{"prompt": "Sort: 21", "answer": "12", "chosen": "12", "rejected": "21", "photo": None} for _ in range(3)]


def rl(path: Path, tokenizer: Any, **settings: Any) -> Any:
    return create_rl_dataset(path, DataConfig(**settings), tokenizer)


def generation(path: Path, tokenizer: Any, **settings: Any) -> Any:
    return create_rl_dataset(path, GenerationDataConfig(**settings), tokenizer)


def sft(path: Path, tokenizer: Any, **settings: Any) -> Any:
    config = SFTDataConfig(prompt_key="prompt", response_key="answer", **settings)
    return create_sft_dataset(path, config, tokenizer)


def pairs(path: Path, tokenizer: Any, **settings: Any) -> Any:
    return create_preference_dataset(path, PairsDataConfig(**settings), tokenizer)


PROGRAMS = [rl, generation, sft, pairs]


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize("name", ["image_key", "video_key"])
@pytest.mark.parametrize("column", ["photo", "absent"])
def test_a_key_of_media_is_refused_for_a_model_that_reads_text(
    make: Callable[..., Any], name: str, column: str, write: Any, tokenizer: Any
) -> None:
    with raises_with(DataError, f"data.{name}={column}"):
        make(write("a.jsonl", ROWS), tokenizer, **{name: column})


@pytest.mark.parametrize("name", ["image_key", "video_key"])
def test_a_key_of_media_names_a_column(name: str, write: Any, vision_model: Path) -> None:
    from hybridrl.config import ModelConfig

    with raises_with(DataError, f"data.{name}=absent", "photo"):
        create_rl_dataset(
            write("a.jsonl", ROWS),
            DataConfig(**{name: "absent"}),
            load_tokenizer(vision_model),
            processor=processor_of(ModelConfig(path=str(vision_model))),
        )


def picture_file() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    return file.getvalue()


def images(folder: Path) -> Path:
    rows = [row | {"photo": {"bytes": picture_file(), "path": None}} for row in ROWS]
    write_rows(folder / "a.parquet", rows)
    return folder / "a.parquet"


def lists_of_images(folder: Path) -> Path:
    rows = [row | {"photo": [{"bytes": picture_file(), "path": None}]} for row in ROWS]
    write_rows(folder / "a.parquet", rows)
    return folder / "a.parquet"


def features(folder: Path) -> Path:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    columns["photo"] = [Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8))] * len(ROWS)
    datasets.Dataset.from_dict(columns).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize("written", [images, lists_of_images, features])
def test_a_column_of_media_of_any_name_is_named(
    make: Callable[..., Any], written: Callable[[Path], Path], tmp_path: Path, tokenizer: Any, capsys: Any
) -> None:
    make(written(tmp_path), tokenizer)
    lines = [line for line in capsys.readouterr().err.splitlines() if "'photo'" in line]
    assert len(lines) == 1
    assert "media" in lines[0]
    assert "data.image_key=photo" in lines[0]


def test_a_column_without_media_is_not(write: Any, tokenizer: Any, capsys: Any) -> None:
    rows = [row | {"photo": {"path": "a.png"}, "info": {"bytes": 3}} for row in ROWS]
    rl(write("a.jsonl", rows), tokenizer)
    rl(write("b.jsonl", ROWS), tokenizer)
    assert "media" not in capsys.readouterr().err


@pytest.mark.parametrize("make", PROGRAMS)
def test_places_of_media_for_a_model_of_text_are_counted(
    make: Callable[..., Any], write: Any, tokenizer: Any, capsys: Any
) -> None:
    texts = ["<image>What?", "plain", "Is <image> like <image>?", "<video>", "a < image > b"]
    make(write("a.jsonl", [ROWS[0] | {"prompt": text} for text in texts]), tokenizer)
    lines = [line for line in capsys.readouterr().err.splitlines() if "places of media" in line]
    assert len(lines) == 1
    for fact in ("3 of 5 rows", "<image> (2 rows)", "<video> (1 rows)"):
        assert fact in lines[0]
