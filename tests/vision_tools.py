"""Rows with images of mixed sizes, and transformers' own processor and model as the peer."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from hybridrl.config import DataConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.data import PromptLoader, RLHFDataset
from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.models.model_config import load_model_config
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


#: text of a prompt, the sizes of its images, and the frames and frames per second of its videos; two prompts differ in
#: their video only
VIDEO_PROMPTS: list[tuple[str, list[tuple[int, int]], list[tuple[int, tuple[int, int], float]]]] = [
    ("<video>What?", [], [(4, (24, 16), 3.0)]),
    ("<video>What?", [], [(4, (24, 16), 3.0)]),
    ("No video here", [], []),
    ("A<image> before <video>!", [(24, 16)], [(3, (40, 24), 0.2)]),  # its times lie beyond the positions of the text
    ("<image>alone", [(16, 16)], []),
    ("<video> and <video>", [], [(2, (16, 24), 2.0), (4, (16, 24), 6.0)]),
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


def movies() -> list[list[tuple[list[Image.Image], float]]]:
    """The videos of `VIDEO_PROMPTS`."""
    return [
        [
            ([picture(size, 1000 * row + 100 * n + frame) for frame in range(count)], fps)
            for n, (count, size, fps) in enumerate(videos)
        ]
        for row, (_, _, videos) in enumerate(VIDEO_PROMPTS)
    ]


def write_video_prompts(folder: Path) -> Path:
    """`VIDEO_PROMPTS` as a parquet file."""
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": text}],
            "images": [{"bytes": png(picture(size, 10 * row + n))} for n, size in enumerate(sizes)],
            "videos": [{"frames": [{"bytes": png(one)} for one in frames], "fps": fps} for frames, fps in videos],
            "reward_model": {"style": "rule", "ground_truth": "x"},
        }
        for row, ((text, sizes, _), videos) in enumerate(zip(VIDEO_PROMPTS, movies(), strict=True))
    ]
    write_rows(folder / "videos.parquet", rows)
    return folder / "videos.parquet"


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
    return RLHFDataset(str(file), load_tokenizer(model), DataConfig(**settings), processor=processor)


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


def peer_video_inputs(model: Path, row: int) -> dict[str, torch.Tensor]:
    """What transformers makes of a prompt of `VIDEO_PROMPTS`: its own patches, timestamps and tokens of videos.

    Its video processors need torchvision to resize frames; those of `VIDEO_PROMPTS` keep their size.
    """
    processor, (text, sizes, _), videos = peer_processor(model), VIDEO_PROMPTS[row], movies()[row]
    vision = load_model_config(model).vision_config
    merge, together = vision.spatial_merge_size, vision.temporal_patch_size
    mean, std = (torch.tensor(getattr(processor.image_processor, name)) for name in ("image_mean", "image_std"))
    patches, grids, seconds, shown = [], [], [], []
    for frames, fps in videos:
        pixels = torch.stack([torch.tensor(np.asarray(one)) for one in frames]).float() / 255
        pixels = ((pixels - mean) / std).permute(0, 3, 1, 2)[None]
        found, *grid = Qwen3VLVideoProcessor.patchify(None, pixels, vision.patch_size, merge, together)
        patches.append(found[0])
        grids.append(grid)
        seconds.append(together / fps)
        given = {
            "video_grid_thw": torch.tensor([grid]),
            "video_metadata": [VideoMetadata(len(frames), fps=fps, frames_indices=list(range(len(frames))))],
        }
        processor.video_processor = SimpleNamespace(merge_size=merge, temporal_patch_size=together)
        shown.append(processor.replace_video_token(given, 0))
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    rendered = rendered.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    for one in shown:
        rendered = rendered.replace("<video>", f"<|vision_start|>{one}<|vision_end|>", 1)
    images = [picture(size, 10 * row + n) for n, size in enumerate(sizes)]
    inputs = dict(processor(text=[rendered], images=[images] if images else None, return_tensors="pt"))
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == processor.image_token_id).int()
    inputs["mm_token_type_ids"] += 2 * (inputs["input_ids"] == processor.video_token_id).int()
    if not videos:
        return inputs
    inputs |= {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
    return inputs if "qwen3" in model.name else {**inputs, "second_per_grid_ts": torch.tensor(seconds)}
