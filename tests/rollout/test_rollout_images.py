"""Images of requests: where their tokens are, their fingerprints, and how they travel to replicas."""

from __future__ import annotations

import asyncio
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import RolloutError
from hybridrl.models.model_config import load_model_config
from hybridrl.models.vision import digest
from hybridrl.rollout.request_images import PromptImages, ReceivedImages
from hybridrl.rollout.vllm.compat import current_names
from hybridrl.rollout.vllm.images import torchvision_or_stand_in

TOKEN = 9


class Config:
    """What is read of a model's configuration: one token for four patches."""

    image_token_id, video_token_id = TOKEN, TOKEN + 1

    class vision_config:
        spatial_merge_size = 2


def tensors(*sizes: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Images of so many patches in height and width."""
    grid = torch.tensor([[1, *size] for size in sizes])
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.rand(int(grid.prod(dim=-1).sum()), 12, generator=generator),
        "image_grid_thw": grid,
    }


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(0, 8), min_size=1)), max_size=4))
def test_each_image_has_the_places_of_its_tokens(images: list[tuple[int, int, list[int]]]) -> None:
    ids, expected = [1], []
    for height, width, text in images:
        expected.append((len(ids), height * width))
        ids += [TOKEN] * (height * width) + text
    given_tensors = tensors(*((2 * height, 2 * width) for height, width, _ in images)) if images else {}
    found = PromptImages.of(ids, given_tensors, Config, "it")  # type: ignore[arg-type]
    assert (found.places if found else ()) == tuple(expected)


def test_placeholders_that_are_not_those_of_the_images_are_refused(vision_models: dict[str, Path]) -> None:
    config = load_model_config(vision_models["qwen3_vl"])
    token = config.image_token_id
    for ids, images, said in (
        ([1, token], {}, "prompt 3 has 1 image placeholders, and its images have 0 tokens"),
        ([1, token], tensors((4, 4)), "1 image placeholders, and its images have 4 tokens"),
        ([token, token, 1, token, token], tensors((4, 4)), "interrupted at token 0"),
    ):
        with pytest.raises(RolloutError, match=said):
            PromptImages.of(ids, images, config, "prompt 3")


def test_fingerprints_are_of_all_images_and_of_each() -> None:
    both = tensors((2, 2), (4, 2))
    images = PromptImages(both, ((0, 1), (1, 2)))
    first = {"pixel_values": both["pixel_values"][:4], "image_grid_thw": both["image_grid_thw"][:1]}
    second = {"pixel_values": both["pixel_values"][4:], "image_grid_thw": both["image_grid_thw"][1:]}
    assert images.digest() == digest(both)
    assert images.digests() == [digest(first), digest(second)]
    assert PromptImages(tensors((2, 2), (4, 2), seed=1), images.places).digests() != images.digests()


def test_requests_with_the_same_images_share_their_memory(ray_session: None) -> None:
    large = PromptImages(tensors((40, 40)), ((0, 400),))
    small = PromptImages(tensors((2, 2)), ((0, 1),))
    assert small.sent() == small
    sent, again = large.sent(), replace(large).sent()
    assert isinstance(sent.tensors, ray.ObjectRef) and sent == again

    async def received() -> None:
        arrived = ReceivedImages()
        one, two = await arrived.take(sent), await arrived.take(again)
        assert one.tensors is two.tensors
        assert one.digest() == large.digest()
        arrived.give_back(sent)
        assert (await arrived.take(sent)).tensors is one.tensors
        for _ in range(2):
            arrived.give_back(sent)
        assert (await arrived.take(sent)).tensors is not one.tensors
        arrived.give_back(sent)

    asyncio.run(received())


def test_a_stand_in_for_torchvision_is_not_left_behind() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed, so nothing stands in for it")
    path, finders = list(sys.path), list(sys.meta_path)
    with torchvision_or_stand_in():
        assert importlib.import_module("torchvision.transforms.v2.functional").resize is not None
    assert (sys.path, sys.meta_path) == (path, finders)
    assert importlib.util.find_spec("torchvision") is None


def test_a_former_name_of_an_argument_of_vllm_means_what_it_meant() -> None:
    assert current_names({"disable_mm_preprocessor_cache": True, "seed": 1}) == {"mm_processor_cache_gb": 0, "seed": 1}
    assert current_names({"disable_mm_preprocessor_cache": False}) == {}
