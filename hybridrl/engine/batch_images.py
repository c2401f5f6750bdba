"""The images of a batch: counted against the placeholders of each row, and laid out for each micro-batch.

Shapes: B rows, S their width, N patches of D numbers, K images, b rows of a micro-batch, W its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from hybridrl.engine.microbatch import BatchPlan, MicroBatchLayout
from hybridrl.models.vision import GRID, PIXELS, ImageTensors, digest, placeholders_in, smallest_image, tokens_per_image
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import IMAGE_DIGEST, IMAGE_MASK, MULTI_MODAL_INPUTS


@dataclass(slots=True)
class LayoutImages:
    """The images of a micro-batch, in the order of its rows and of the placeholders in each."""

    tensors: ImageTensors  # pixel_values [N, D], image_grid_thw [K, 3]
    places: torch.Tensor  # [b, W] true where an image's token belongs

    def to(self, target: torch.device) -> LayoutImages:
        moved = {name: tensor.to(target, non_blocking=True) for name, tensor in self.tensors.items()}
        return LayoutImages(moved, self.places.to(target, non_blocking=True))


class BatchImages:
    """The images of a batch's rows (`multi_modal_inputs`).

    A placeholder is a token with the model's id of images or videos that was not generated: a policy may sample it.
    Where images come after the prompt, as those of tools do, the batch has a mask of their tokens.

    Args:
        batch: with `multi_modal_inputs`; where the sampler records its images, `image_digest`; where images may come
            after the prompt, `image_mask` [B, S].
        config: of the model.

    Raises:
        ValueError: a row has more or fewer placeholders than its images have tokens, or other images than the sampler
            saw.
    """

    def __init__(self, batch: DataProto, config: PreTrainedConfig) -> None:
        column = batch.non_tensor_batch.get(MULTI_MODAL_INPUTS)
        rows = [{}] * len(batch) if column is None else [images or {} for images in column.tolist()]
        self._rows: list[ImageTensors] = rows
        self._config = config
        digests = batch.non_tensor_batch.get(IMAGE_DIGEST)
        if digests is not None:
            self._check_digests(digests.tolist())

    def _check_digests(self, digests: Sequence[str | None]) -> None:
        digest_by_id: dict[int, str] = {}  # rows of a group share their images
        for row, (images, expected) in enumerate(zip(self._rows, digests, strict=True)):
            if id(images) not in digest_by_id:
                digest_by_id[id(images)] = digest(images)
            if expected is not None and digest_by_id[id(images)] != expected:
                raise ValueError(
                    f"sequence {row}: its images are not those that its response was generated from (other pixels, or "
                    "another order). Columns of the batch were reordered apart from each other, or images were changed "
                    "after generation"
                )

    def add_to(self, layout: MicroBatchLayout, rows: Sequence[int], plan: BatchPlan) -> MicroBatchLayout:
        """Return the micro-batch with the images of its rows."""
        images_by_row = [self._rows[row] for row in rows]
        assert layout.origins is not None  # images are refused with other layouts
        origins = layout.origins
        places = (origins >= 0) & self._placeholders(plan).flatten()[origins.clamp(min=0)]
        places = places.view_as(layout.input_ids)
        self._check_counts(places.sum(dim=1).tolist(), images_by_row, rows)
        present = [images for images in images_by_row if images]
        if not present:
            return layout
        tensors = {name: torch.cat([images[name] for images in present]) for name in (PIXELS, GRID)}
        return replace(layout, images=LayoutImages(tensors, places))

    def _placeholders(self, plan: BatchPlan) -> torch.Tensor:
        """[B, S]: true for tokens of images."""
        image_mask = plan.tensors.get(IMAGE_MASK)
        placeholders = placeholders_in(self._config, plan.input_ids)
        if image_mask is not None:
            return placeholders & image_mask.bool()
        # All of a response was generated, also tokens that rejection takes out of the mask of an update.
        start = plan.width - plan.response_width
        placeholders[:, start:] &= False if "responses" in plan.tensors else ~plan.response_mask
        return placeholders

    def _check_counts(self, counts: Sequence[int], images: Sequence[ImageTensors], rows: Sequence[int]) -> None:
        for count, own, row in zip(counts, images, rows, strict=True):
            expected = int(tokens_per_image(self._config, own["image_grid_thw"]).sum()) if own else 0
            if count != expected:
                number = len(own["image_grid_thw"]) if own else 0
                raise ValueError(
                    f"sequence {row}: it has {count} image placeholders, and its {number} images have {expected} "
                    "tokens. Its tokens and its multi_modal_inputs belong to different prompts, or its prompt was "
                    "truncated"
                )


def with_some_image(layout: MicroBatchLayout, config: Any) -> MicroBatchLayout:
    """The micro-batch; one without images gets an image that no token reads.

    Ranks gather the shards of the vision tower together, so each of them computes it as often as the others.
    """
    if layout.images is not None:
        return layout
    nowhere = torch.zeros_like(layout.input_ids, dtype=torch.bool)
    return replace(layout, images=LayoutImages(smallest_image(config), nowhere))
