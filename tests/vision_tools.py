"""Rows with images of mixed sizes, and transformers' own processor and model as the peer."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor

from hybridrl.config.schema.model import ModelConfig
from hybridrl.data import PromptLoader, RLHFDataset
from hybridrl.data.preprocess.source import write_rows
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.models.vision import processor_of
from hybridrl.protocol import DataProto

#: text of a prompt, and the sizes of its images; two prompts differ in their image only
PROMPTS: list[tuple[str, list[tuple[int, int]]]] = [
    ("<image>What?", [(16, 16)]),
    ("<image>What?", [(16, 16)]),
    ("No image here", []),
    ("A<image> and <image>: equal?", [(40, 24), (9, 57)]),
    ("<image><image>", [(24, 16), (24, 16)]),
]


def picture(size: tuple[int, int], seed: int) -> Image.Image:
    """An image of noise."""
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


#: of images that come during a session
SIZES = [(16, 16), (24, 16), (9, 25)]


def tool_pictures(seed: int) -> list[Image.Image]:
    """What the tool of tests/agents/image_tools.py returns for a seed: one image or two, of different sizes."""
    return [picture(SIZES[(seed + n) % 3], 100 + seed + n) for n in range(1 + seed % 2)]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def pictures() -> list[list[Image.Image]]:
    """The images of `PROMPTS`."""
    return [[picture(size, 10 * row + n) for n, size in enumerate(sizes)] for row, (_, sizes) in enumerate(PROMPTS)]


def write_prompts(folder: Path) -> Path:
    """`PROMPTS` as the parquet file that the hub's image data sets are."""
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": text}],
            "images": [{"bytes": png(image)} for image in images],
            "reward_model": {"style": "rule", "ground_truth": "x"},
        }
        for (text, _), images in zip(PROMPTS, pictures(), strict=True)
    ]
    write_rows(folder / "images.parquet", rows)
    return folder / "images.parquet"


def dataset_of(file: Path, model: Path, **config: Any) -> RLHFDataset:
    settings = {"max_prompt_length": 200, **config}
    options = settings.pop("mm_processor_kwargs", None)
    processor = processor_of(ModelConfig(path=str(model)), options)
    return RLHFDataset(str(file), load_tokenizer(model), settings, processor=processor)


def prompts_of(file: Path, model: Path) -> DataProto:
    """The rows of a file as a batch of prompts."""
    dataset = dataset_of(file, model)
    return next(iter(PromptLoader(dataset, len(dataset))))


def peer_processor(model: Path) -> Any:
    """transformers' own processor; its videos would need torchvision."""

    class Images(Qwen3VLProcessor if "qwen3" in model.name else Qwen2_5_VLProcessor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
            return type(argument)

    return Images(AutoImageProcessor.from_pretrained(model, backend="pil"), load_tokenizer(model))


def peer_inputs(model: Path, row: int) -> dict[str, torch.Tensor]:
    """What transformers makes of a prompt."""
    processor, (text, _), images = peer_processor(model), PROMPTS[row], pictures()[row]
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split("<image>")):
        parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": piece}] * bool(piece)
    rendered = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    return dict(processor(text=[rendered], images=[images] if images else None, return_tensors="pt"))
