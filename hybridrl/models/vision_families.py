"""Vision-language models whose images and videos are read here, and how they differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class VisionFamily:
    """Metadata of a model type.

    Attributes:
        video_defaults: settings of transformers' video processor that the model's files may leave out.
        writes_times: whether a video is one clip per temporal patch with its time written before it; else it is one
            clip, whose positions follow the clock (`second_per_grid_ts`).
        interleaves: whether the kinds of rotary positions are interleaved, which engines read of `config.json`.
    """

    video_defaults: Mapping[str, Any]
    writes_times: bool = False
    interleaves: bool = False


#: by model type
FAMILIES: dict[str, VisionFamily] = {
    "qwen2_5_vl": VisionFamily(
        {
            "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
            "do_sample_frames": False,
            "fps": None,
            "max_video_tokens": 128_000,
        }
    ),
    "qwen3_vl": VisionFamily(
        {
            "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
            "do_sample_frames": True,
            "fps": 2,
            "max_video_tokens": 768,
        },
        writes_times=True,
        interleaves=True,
    ),
}


def vision_family(config: PreTrainedConfig) -> VisionFamily:
    """Return the metadata of a vision-language model."""
    return FAMILIES[config.model_type]
