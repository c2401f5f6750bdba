"""Requests, completions and images as the run and its server process send them: JSON, because clients' data is in them.

Patches of an image, and experts of a request's tokens, are bytes (`hybridrl.processes.peer.JSON`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from hybridrl.models.vision import ImageTensors, tokens_per_image
from hybridrl.rollout.request import CLIENT_PRIORITY, Completion, Request
from hybridrl.rollout.request_images import PromptImages, join_images
from hybridrl.rollout.sampling import SamplingParams


def request_to_plain(request: Request) -> dict[str, Any]:
    """A request as JSON can hold it."""
    return {
        "id": request.id,
        "prompt_ids": request.prompt_ids,
        "sampling": asdict(request.sampling),
        "session": request.session,
        "routing": request.routing,
    }


def image_to_plain(tensors: ImageTensors) -> dict[str, Any]:
    """An image: the numbers of its patches, and the patches."""
    patches = tensors["pixel_values"].float().contiguous()
    return {"grid": tensors["image_grid_thw"][0].tolist(), "patches": patches.numpy().tobytes()}


def image_from_plain(data: Mapping[str, Any], config: PreTrainedConfig) -> ImageTensors:
    """The patches of an image.

    Args:
        config: of the model, which says how long a patch is.

    Raises:
        ValueError, TypeError, KeyError: they are none.
    """
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    size = channels * vision.temporal_patch_size * vision.patch_size**2
    grid = [int(side) for side in data["grid"]]
    if len(grid) != 3 or min(grid) < 1 or any(side % vision.spatial_merge_size for side in grid[1:]):
        raise ValueError(f"an image of {grid} patches")
    patches = torch.frombuffer(bytearray(data["patches"]), dtype=torch.float32)
    image_grid = torch.tensor([grid])
    return {"pixel_values": patches.reshape(int(image_grid.prod()), size), "image_grid_thw": image_grid}


def images_from_plain(
    data: Mapping[str, Any],
    prompt_ids: Sequence[int],
    images_by_number: Mapping[int, ImageTensors],
    config: PreTrainedConfig,
) -> PromptImages:
    """The images of a request.

    Args:
        data: `numbers` of images, and `places` (first token, number of tokens).
        images_by_number: images that the process has sent.

    Raises:
        ValueError, TypeError, KeyError: they do not fit the prompt.
    """
    tensors = join_images([images_by_number[int(number)] for number in data["numbers"]])
    places = tuple((int(first), int(count)) for first, count in data["places"])
    if [count for _, count in places] != tokens_per_image(config, tensors["image_grid_thw"]).tolist():
        raise ValueError("images with other numbers of tokens")
    end = 0
    for first, count in places:
        if first < end or set(prompt_ids[first : first + count]) != {config.image_token_id}:
            raise ValueError(f"an image at token {first}, where no placeholders are")
        end = first + count
    if end > len(prompt_ids):
        raise ValueError("an image after the prompt")
    return PromptImages(tensors, places)


def request_from_plain(data: dict[str, Any], images: PromptImages | None = None) -> Request:
    """A request of a client; whatever the server process says, training comes first.

    Args:
        images: of its prompt.

    Raises:
        ValueError, TypeError, KeyError: it is no request.
    """
    sampling = SamplingParams(**{**data["sampling"], "stop": tuple(map(str, data["sampling"]["stop"]))})
    prompt_ids = [int(token) for token in data["prompt_ids"]]
    return Request(
        str(data["id"]),
        prompt_ids,
        sampling,
        str(data["session"]),
        CLIENT_PRIORITY,
        images=images,
        routing=bool(data["routing"]),
    )


def completion_to_plain(completion: Completion, routing: bool) -> dict[str, Any]:
    """A completion as JSON can hold it, with its experts as bytes.

    Args:
        routing: they were asked for.
    """
    experts = completion.routed_experts if routing else None
    plain = asdict(replace(completion, routed_experts=None))
    if experts is None:
        return plain
    return plain | {"experts": [str(experts.dtype), list(experts.shape), experts.tobytes()]}


def completion_from_plain(plain: Mapping[str, Any]) -> Completion:
    """The completion that `completion_to_plain` made plain."""
    fields = dict(plain)
    experts = fields.pop("experts", None)
    fields["versions"] = [(version, tokens) for version, tokens in fields["versions"]]
    if experts is not None:
        kind, shape, data = experts
        fields["routed_experts"] = np.frombuffer(data, dtype=kind).reshape(shape)
    return Completion(**fields)
