"""Images of rows travel to the workers once, whatever the number of calls, ranks and samples."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
import ray
import torch

from hybridrl.models.vision import digest
from hybridrl.protocol import DataProto, object_array
from hybridrl.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register
from hybridrl.single_controller.ray import image_references
from hybridrl.single_controller.ray.image_references import with_images, with_references

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("ray_session")


class Reader(Worker):
    """Tells what its rows' images are, and which rows have the same object."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def read(self, batch: DataProto) -> DataProto:
        column = batch.non_tensor_batch["multi_modal_inputs"].tolist()
        first = {id(one): number for number, one in reversed(list(enumerate(column)))}
        seen = [digest(one) for one in column]
        shared = torch.tensor([first[id(one)] for one in column])
        return DataProto.from_dict(tensors={"shared": shared}, non_tensors={"digest": object_array(seen)})


def rows() -> DataProto:
    """Three prompts with two samples each: large images, none, small ones."""
    generator = torch.Generator().manual_seed(0)
    prompts: list[dict[str, torch.Tensor]] = [
        {"pixel_values": torch.rand(n, 96, generator=generator), "image_grid_thw": torch.tensor([[1, 2, n // 2]])}
        if n
        else {}
        for n in (400, 0, 4)
    ]
    batch = DataProto.from_dict(
        tensors={"x": torch.arange(3)}, non_tensors={"multi_modal_inputs": object_array(list(prompts))}
    )
    return batch.repeat(2, interleave=True)


@pytest.fixture
def group() -> Any:
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(cls=Reader))
    yield group
    group.kill()
    pool.release()


def test_workers_read_the_images_that_the_controller_has(group: RayWorkerGroup) -> None:
    batch, before = rows(), len(image_references.stored_images)
    expected = [digest(one) for one in batch.non_tensor_batch["multi_modal_inputs"]]
    for order in ([0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 2, 4], [0, 2, 4, 1, 3, 5]):
        given = batch.select_idxs(torch.tensor(order))
        found = group.read(given)
        assert found.non_tensor_batch["digest"].tolist() == [expected[row] for row in order]
        assert len(image_references.stored_images) == before + 1  # put once, for all samples, ranks and calls
        kept = given.non_tensor_batch["multi_modal_inputs"]
        assert all(isinstance(one, dict) for one in kept)  # the controller's batch has them as before
    assert group.read(batch).batch["shared"].tolist() == [0, 0, 2, 0, 1, 1]
    del batch, given, kept, found
    gc.collect()
    assert len(image_references.stored_images) == before


def test_a_reference_is_of_one_image() -> None:
    batch = rows()
    column = with_references(batch).non_tensor_batch["multi_modal_inputs"].tolist()
    assert isinstance(column[0], ray.ObjectRef) and column[0] == column[1]
    assert column[2:4] == [{}, {}] and isinstance(column[4], dict)
    assert with_references(batch).non_tensor_batch["multi_modal_inputs"][0] == column[0]
    back = with_images(with_references(batch)).non_tensor_batch["multi_modal_inputs"]
    for one, own in zip(back, batch.non_tensor_batch["multi_modal_inputs"], strict=True):
        assert one.keys() == own.keys() and all(one[name].equal(own[name]) for name in own)
    other = rows()
    assert with_references(other).non_tensor_batch["multi_modal_inputs"][0] != column[0]
    for value in (3, np.arange(2), DataProto.from_dict(tensors={"x": torch.arange(2)})):
        assert with_references(value) is value and with_images(value) is value


def test_an_image_is_put_again_for_another_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new cluster numbers its jobs from 1 again, so the job alone does not tell two of them apart."""
    batch = rows()
    first = with_references(batch).non_tensor_batch["multi_modal_inputs"][0]
    context = type(ray.get_runtime_context())
    monkeypatch.setattr(context, "get_node_id", lambda _: "a node of the next cluster")
    again = with_references(batch).non_tensor_batch["multi_modal_inputs"][0]
    assert again != first and with_references(batch).non_tensor_batch["multi_modal_inputs"][0] == again
