"""Batches reach workers without their padding and as they were: packed by the caller or not, even or padded."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np
import pytest
import ray
import torch

from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.packed import PackedProto
from hybridrl.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("ray_session")


def digests(batch: DataProto) -> list[str]:
    """A hash of each row: names, types and bits of all tensors in their order."""
    rows = []
    for row in range(len(batch)):
        content = hashlib.sha256()
        for name, tensor in batch.batch.items():
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape[1:])}".encode())
            content.update(tensor[row].flatten().clone().view(torch.uint8).numpy().tobytes())
        rows.append(content.hexdigest())
    return rows


class Digester(Worker):
    """Returns a hash of each row that it gets, and the rows themselves."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def digest(self, batch: DataProto) -> DataProto:
        columns = {"digest": object_array(digests(batch)), "kind": object_array([type(batch).__name__] * len(batch))}
        return DataProto.from_dict(tensors={"x": torch.zeros(len(batch))}, non_tensors=columns)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self, batch: DataProto) -> int:
        return int(batch.batch["attention_mask"].sum())


def long_tailed(rows: int, prompt: int = 64, response: int = 512) -> DataProto:
    """Rows with long-tailed lengths, and log-probabilities."""
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(4.0, 1.0, rows).astype(int) + 1, response)
    starts = prompt - generator.integers(1, prompt, rows)
    columns = np.arange(prompt + response)
    mask = (columns >= starts[:, None]) & (columns < prompt + lengths[:, None])
    ids = torch.from_numpy(np.where(mask, generator.integers(1, 150_000, mask.shape), 0))
    attention = torch.from_numpy(mask.astype(np.int64))
    return DataProto.from_dict(
        tensors={
            "responses": ids[:, prompt:].contiguous(),
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": torch.from_numpy(np.maximum(columns - starts[:, None], 0)),
            "response_mask": attention[:, prompt:].contiguous(),
            "old_log_probs": torch.rand(rows, response) * attention[:, prompt:],
            "row_ids": torch.arange(rows),
        },
        non_tensors={"uid": object_array([f"p{row // 4}" for row in range(rows)])},
        meta_info={"temperature": 0.5},
    )


@pytest.fixture(scope="module")
def group(ray_session) -> Any:
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(cls=Digester))
    yield group
    group.kill()
    pool.release()


@pytest.mark.parametrize("rows", [64, 65], ids=["even", "padded"])
@pytest.mark.parametrize("pack", [lambda batch: batch, PackedProto.of], ids=["plain", "packed"])
def test_workers_get_the_bits_that_the_controller_has(group, rows: int, pack) -> None:
    batch = long_tailed(rows)
    result = group.digest(pack(batch))
    assert set(result.non_tensor_batch["kind"].tolist()) == {"DataProto"}
    received = result.non_tensor_batch["digest"].tolist()
    if rows % 2 == 0:
        assert received == digests(batch)
    else:  # the marker of padding is a field of all rows then
        marked = batch.select()
        marked.batch["is_padding"] = torch.zeros(rows, dtype=torch.bool)
        assert received == digests(marked)


def test_rows_of_any_order_arrive_and_come_back_in_that_order(group) -> None:
    batch = long_tailed(64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    future = group.echo(PackedProto.of(batch).select_idxs(order))
    assert group.digest(future).non_tensor_batch["digest"].tolist() == digests(batch.select_idxs(order))
    returned = future.get()
    assert digests(returned) == digests(batch.select_idxs(order))
    assert returned.non_tensor_batch["uid"].tolist() == batch.non_tensor_batch["uid"][order.numpy()].tolist()
    assert returned.meta_info["temperature"] == 0.5


def test_all_ranks_read_one_packed_batch(group) -> None:
    batch = long_tailed(64)
    assert group.count(PackedProto.of(batch)) == [int(batch.batch["attention_mask"].sum())] * 2


def test_reading_a_packed_batch_makes_it_an_ordinary_one() -> None:
    batch = long_tailed(64)
    packed = PackedProto.of(batch)
    assert packed.is_packed and len(packed) == 64 and packed.tensor_names() == list(batch.batch.keys())
    assert torch.equal(packed.field("responses"), batch.batch["responses"]) and packed.is_packed
    packed.batch["row_ids"] = torch.zeros(64)
    assert not packed.is_packed and not packed.slice(0, 3).batch["row_ids"].any()
    assert digests(packed.select(["input_ids"])) == digests(batch.select(["input_ids"]))
