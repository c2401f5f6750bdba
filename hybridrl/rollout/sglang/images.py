"""Images of requests in SGLang: it computes the very patches that the trainer sees, and prepares no image itself.

SGLang would resize and cut images by transformers' own processor, which may differ from the trainer's, and would
compute positions by a function of its own. Here a request brings patches, and an object of ours takes the place of
SGLang's processor of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from transformers import PreTrainedConfig

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.models.model_config import config_of
from hybridrl.models.vision import RotaryPositions, is_vision_model, offset_after
from hybridrl.models.vision_families import vision_family
from hybridrl.rollout.request_images import PromptImages, check_interleaved, split_images


def check_images(config: RolloutConfig, model: ModelConfig) -> None:
    """Refuse what would make SGLang compute something else than training.

    Raises:
        RolloutError: names the setting.
    """
    reader = config_of(model)
    if not is_vision_model(reader):
        return
    check_interleaved(reader, model.path, "SGLang")
    vision = reader.vision_config
    numbers = vision.patch_size**2 * vision.temporal_patch_size * getattr(vision, "in_channels", 3)
    if numbers != (readable := vision_family(reader).sglang_patch_numbers or numbers):
        raise RolloutError(
            f"{model.path}: its patches have {numbers} numbers (vision_config of its config.json), and SGLang reads "
            f"patches of {readable} alone (patch_size=14); set actor_rollout_ref.rollout.name=vllm or hf"
        )
    if config.pipeline_model_parallel_size > 1:
        raise RolloutError(
            f"actor_rollout_ref.rollout.pipeline_model_parallel_size={config.pipeline_model_parallel_size}: not built "
            f"with SGLang for vision-language models, and {model.path} is one; set it to 1"
        )


@dataclass(frozen=True, slots=True)
class NamedImages:
    """The images of a request on its way to SGLang's process.

    Attributes:
        images: in the dtype that the model computes in.
        names: of each image. SGLang caches an image's features under its name, so a name belongs to one image and one
            set of weights.
    """

    images: PromptImages
    names: tuple[str, ...]

    @classmethod
    def of(cls, images: PromptImages, dtype: torch.dtype, weights: int) -> NamedImages:
        """Name images.

        Args:
            dtype: that the vision tower would turn patches into first.
            weights: number of the weights.
        """
        assert isinstance(images.tensors, dict)
        names = tuple(f"{weights}-{image_digest}" for image_digest in images.digests())
        sent = {**images.tensors, "pixel_values": images.tensors["pixel_values"].to(dtype)}
        return cls(replace(images, tensors=sent), names)


class PatchProcessor:
    """Stands in for SGLang's processor of the model, in the process of its tokenizer.

    Args:
        config: of the model.
    """

    prefer_tokenized_input = True

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._positions = RotaryPositions(config)

    async def process_mm_data_async(
        self, image_data: Sequence[NamedImages], input_text: Sequence[int], **named: Any
    ) -> Any:
        """SGLang's form of a request's images.

        Args:
            image_data: those of the request, one entry.
            input_text: token ids of the prompt.
            named: what else SGLang passes on.
        """
        from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

        (sent,), ids = image_data, list(input_text)
        images = sent.images
        assert isinstance(images.tensors, dict)
        rotary = self._positions.of(ids, images.tensors, images.mask(len(ids)))[1:]
        return MultimodalProcessorOutput(
            mm_items=_items(sent),
            input_ids=ids,
            im_token_id=int(self._config.image_token_id),
            mrope_positions=rotary,
            mrope_position_delta=torch.tensor([[offset_after(rotary)]]),
        )

    def clear_preprocess_cache(self) -> None:
        """SGLang asks for this after an update; nothing is kept here."""

    def shutdown(self) -> None:
        """SGLang asks for this at its end; nothing runs here."""


def _items(sent: NamedImages) -> list[Any]:
    """Each image or clip by itself, with the place of its tokens, under its name.

    A clip is as many images as it has temporal patches. SGLang's tower of Qwen2.5-VL would let these attend to each
    other, which they do not in transformers.
    """
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    assert isinstance(sent.images.tensors, dict)
    items = []
    parts = split_images(sent.images.tensors)
    for part, (first, count), name in zip(parts, sent.images.places, sent.names, strict=True):
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            feature=part["pixel_values"],
            offsets=[(first, first + count - 1)],
            model_specific_data={"image_grid_thw": _stills(part["image_grid_thw"])},
        )
        item.set_hash(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big"))
        items.append(item)
    return items


def _stills(grid: torch.Tensor) -> torch.Tensor:
    """The grids of the temporal patches of a clip, [1, 3] -> [T, 3]."""
    return grid.new_tensor([[1, *grid[0, 1:].tolist()]] * int(grid[0, 0]))


def replace_processor(config: PreTrainedConfig) -> None:
    """Have SGLang's tokenizer manager of this process use a `PatchProcessor`, and load no processor itself."""
    from sglang.srt.managers import tokenizer_manager as manager

    manager.import_processors = lambda *arguments, **named: None
    manager.get_processor_wrapper = lambda: None
    manager.get_mm_processor = lambda *arguments, **named: PatchProcessor(config)
