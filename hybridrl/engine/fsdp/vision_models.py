"""Vision-language models in `FSDPEngine`: what they cannot be combined with, and what is changed in them."""

from __future__ import annotations

from typing import Any

from torch import nn

from hybridrl.errors import ModelError
from hybridrl.models.model_config import config_of
from hybridrl.models.vision import is_vision_model, place_images_by_position, vision_tower
from hybridrl.models.vision_families import FAMILIES


def check_vision(model: Any, engine: Any) -> None:
    """Refuse settings that a vision-language model cannot be combined with, or that need one.

    Args:
        model: a `ModelConfig`.
        engine: an `FSDPConfig`.

    Raises:
        ModelError: the message names the key.
    """
    config = config_of(model)
    if not is_vision_model(config):
        if engine.freeze_vision_tower:
            raise ModelError(
                f"freeze_vision_tower=True: {model.path} ({config.model_type}) has no vision tower that is known; "
                f"{' and '.join(FAMILIES)} have one. Leave it at False"
            )
        return
    refused = {
        "model.share_prefixes=True": model.share_prefixes,
        f"ulysses_sequence_parallel_size={engine.ulysses_sequence_parallel_size}": (
            engine.ulysses_sequence_parallel_size > 1
        ),
        "use_torch_compile=True": engine.use_torch_compile,
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ModelError(
                f"{setting} is not built for vision-language models, and {model.path} is one ({config.model_type}); "
                "leave it at its default"
            )


def prepare_vision(module: nn.Module, engine: Any) -> None:
    """Place images by position, and freeze the vision tower if `freeze_vision_tower` is set."""
    place_images_by_position(module)
    if engine.freeze_vision_tower:
        vision_tower(module).requires_grad_(False)
