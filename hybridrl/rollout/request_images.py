"""The images of requests: their patches, the places of their tokens, and how they travel to replicas.

Shapes: N patches of D numbers, K images.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig

from hybridrl.errors import RolloutError
from hybridrl.models.vision import GRID, PIXELS, SECONDS, ImageTensors, digest, media_tokens, tokens_per_image
from hybridrl.models.vision_families import vision_family
from hybridrl.rollout.image_place import ImagePlace
from hybridrl.single_controller.ray.image_references import reference_of, tensors_of

_LOCK = threading.Lock()
_digests: Any = WeakIdKeyDictionary()  # patches -> digest of all images, and of each


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a request's prompt, in the order of their tokens.

    Attributes:
        tensors: `pixel_values` [N, D] and `image_grid_thw` [K, 3]; on the way to a replica, a reference to them in the
            object store.
        places: of each image, the index of its first token in the prompt, and how many tokens it has. Any other token
            with the placeholder's id is a plain token.
    """

    tensors: ImageTensors | ray.ObjectRef
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        tensors: ImageTensors,
        config: PreTrainedConfig,
        where: str,
        generated: Collection[int] = (),
    ) -> PromptImages | None:
        """The images of a prompt in which every placeholder stands for a part of an image; None without images.

        Args:
            ids: of the prompt.
            tensors: `{}` if it has no images.
            config: of the model.
            where: names the prompt in errors.
            generated: the indices of tokens that the policy wrote, which are no placeholders.

        Raises:
            RolloutError: there are more or fewer placeholders than tokens of images.
        """
        tokens = media_tokens(config)
        counts = tokens_per_image(config, tensors["image_grid_thw"]).tolist() if tensors else []
        placeholders = [index for index, token in enumerate(ids) if token in tokens and index not in generated]
        if len(placeholders) != sum(counts):
            raise RolloutError(
                f"{where} has {len(placeholders)} image placeholders, and its images have {sum(counts)} tokens: its "
                "images are not in multi_modal_inputs, or belong to another prompt"
            )
        if not counts:
            return None
        places, start = [], 0
        for count in counts:
            first, last = placeholders[start], placeholders[start + count - 1]
            if last - first != count - 1:
                raise RolloutError(f"{where}: the placeholders of an image are interrupted at token {first}")
            places.append((first, count))
            start += count
        return cls(tensors, tuple(places))

    def mask(self, length: int) -> torch.Tensor:
        """`[length]`: true for the tokens of images of a sequence that begins with the prompt."""
        mask = torch.zeros(length, dtype=torch.bool)
        for first, count in self.places:
            mask[first : first + count] = True
        return mask

    def in_tokens(self) -> tuple[ImagePlace, ...]:
        """Return the images in the form of a `TokenTree`."""
        pairs = zip(self.places, self.digests(), strict=True)
        return tuple(ImagePlace(first, count, digest) for (first, count), digest in pairs)

    def digest(self) -> str:
        """The fingerprint of all images, as `hybridrl.models.vision.digest` computes it."""
        return self._fingerprints()[0]

    def digests(self) -> list[str]:
        """The fingerprint of each image by itself."""
        return self._fingerprints()[1]

    def _fingerprints(self) -> tuple[str, list[str]]:
        """Computed once for all requests with these tensors."""
        assert isinstance(self.tensors, dict)
        patches = self.tensors["pixel_values"]
        with _LOCK:
            fingerprints: tuple[str, list[str]] | None = _digests.get(patches)
        if fingerprints is None:
            fingerprints = digest(self.tensors), [digest(image) for image in split_images(self.tensors)]
            with _LOCK:
                _digests[patches] = fingerprints
        return fingerprints

    def sent(self) -> PromptImages:
        """Return a copy with a reference in place of large tensors, which are put into the object store once."""
        return replace(self, tensors=reference_of(self.tensors))


class ReceivedImages:
    """Resolves the references of requests; requests with the same images share their memory."""

    def __init__(self) -> None:
        self._tensors: dict[ray.ObjectRef, ImageTensors] = {}
        self._users: dict[ray.ObjectRef, int] = {}

    async def take(self, images: PromptImages) -> PromptImages:
        """Return a copy with tensors in place of a reference. Call `give_back` when the request is done."""
        reference = images.tensors
        if not isinstance(reference, ray.ObjectRef):
            return images
        self._users[reference] = self._users.get(reference, 0) + 1
        if reference not in self._tensors:
            self._tensors[reference] = tensors_of(await reference)
        return replace(images, tensors=self._tensors[reference])

    def give_back(self, images: PromptImages) -> None:
        """Forget images that no request uses any more.

        Args:
            images: the argument of `take`.
        """
        reference = images.tensors
        if not isinstance(reference, ray.ObjectRef):
            return
        self._users[reference] -= 1
        if not self._users[reference]:
            del self._users[reference]
            self._tensors.pop(reference, None)


def check_interleaved(config: PreTrainedConfig, path: str, engine: str) -> None:
    """Refuse a Qwen3-VL whose `config.json` lacks what an engine reads of it, and transformers knows by its type.

    Args:
        config: of the model.
        path: of the model.
        engine: its name, for the message.

    Raises:
        RolloutError: the engine would compute other positions.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if vision_family(config).interleaves and not rope.get("mrope_interleaved"):
        raise RolloutError(
            f"{path}: text_config.rope_parameters of its config.json has no mrope_interleaved=true, without "
            f"which {engine} computes other positions for images than transformers; add it, or set "
            "actor_rollout_ref.rollout.name=hf"
        )


def split_images(tensors: ImageTensors) -> list[ImageTensors]:
    """Each image or clip of a prompt by itself."""
    grid, seconds = tensors[GRID], tensors.get(SECONDS)
    images = []
    for number, part in enumerate(tensors[PIXELS].split(grid.prod(dim=-1).tolist())):
        image = {PIXELS: part, GRID: grid[number : number + 1]}
        if seconds is not None and seconds[number] > 0:
            image[SECONDS] = seconds[number : number + 1]
        images.append(image)
    return images


def join_images(images: Sequence[ImageTensors]) -> ImageTensors:
    """The images and clips of a prompt, one after the other; `{}` if there are none. One image keeps its memory."""
    if len(images) <= 1:
        return dict(images[0]) if images else {}
    joined = {name: torch.cat([image[name] for image in images]) for name in (PIXELS, GRID)}
    if any(SECONDS in image for image in images):
        joined[SECONDS] = torch.cat([image.get(SECONDS, torch.zeros(len(image[GRID]))) for image in images])
    return joined
