"""Families of vision-language models whose images and videos are read here, and how they differ.

A family computes as Qwen's do: its inner model (`model.model`) has a vision tower `visual` over patches, a method
`get_rope_index` for the positions of tokens, and `get_placeholder_mask` for the places of images. A user registers a
further one from a module that `model.external_lib` names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from hybridrl.errors import ModelError


@dataclass(frozen=True)
class VisionFamily:
    """Metadata of a model type.

    Attributes:
        video_defaults: settings of transformers' video processor that the model's files may leave out.
        vllm_class: module and name of the class of vLLM that computes it; None: vLLM is refused.
        writes_times: whether a video is one clip per temporal patch with its time written before it; else it is one
            clip, whose positions follow the clock (`second_per_grid_ts`).
        interleaves: whether the kinds of rotary positions are interleaved, which engines read of `config.json`.
        sglang_patch_numbers: the numbers of a patch that SGLang reads; it takes patches of another size for embeddings
            of tokens. None: patches of any size.
    """

    video_defaults: Mapping[str, Any]
    vllm_class: tuple[str, str] | None = None
    writes_times: bool = False
    interleaves: bool = False
    sglang_patch_numbers: int | None = None


#: by model type
FAMILIES: dict[str, VisionFamily] = {}


def register_vision_family(model_type: str, family: VisionFamily) -> None:
    """Add a family, of models whose `config.json` has this `model_type`.

    Raises:
        ModelError: another family has the model type already.
    """
    if FAMILIES.setdefault(model_type, family) != family:
        raise ModelError(f"register_vision_family({model_type!r}): there is another family of this model type already")


def vision_family(config: PreTrainedConfig) -> VisionFamily:
    """Return the metadata of a vision-language model."""
    return FAMILIES[config.model_type]


_VLLM = "vllm.model_executor.models"
register_vision_family(
    "qwen2_5_vl",
    VisionFamily(
        {
            "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
            "do_sample_frames": False,
            "fps": None,
            "max_video_tokens": 128_000,
        },
        vllm_class=(f"{_VLLM}.qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        sglang_patch_numbers=1176,
    ),
)
for _model_type, _module, _class in (
    ("qwen3_vl", "qwen3_vl", "Qwen3VLForConditionalGeneration"),
    ("qwen3_5", "qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ("qwen3_5_moe", "qwen3_5", "Qwen3_5MoeForConditionalGeneration"),
):
    register_vision_family(
        _model_type,
        VisionFamily(
            {
                "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
                "do_sample_frames": True,
                "fps": 2,
                "max_video_tokens": 768,
            },
            vllm_class=(f"{_VLLM}.{_module}", _class),
            writes_times=True,
            interleaves=True,
        ),
    )
