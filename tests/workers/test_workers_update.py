"""An update call reaches every row of the batch exactly once, whatever the layout of the ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import ray
import torch
from raising import raises_with

from hybridrl.engine import Engine, Geometry, MicroBatching
from hybridrl.errors import WorkerError
from hybridrl.protocol import DataProto
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from hybridrl.trainer.ppo.batching import spread_over_ranks
from hybridrl.utils.metrics import Metric, merge_metrics
from hybridrl.workers.model_worker import ModelWorker
from hybridrl.workers.update_plan import UpdatePlan

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
TENSOR_PARALLEL = 2


class RecordingEngine(Engine):
    """Ranks 0 and 1 hold one copy of a model together, as do ranks 2 and 3. It notes which rows it trains on."""

    geometry = Geometry(0, 1)

    def __init__(self, rank: int, world_size: int) -> None:
        self.geometry = Geometry(
            dp_rank=rank // TENSOR_PARALLEL,
            dp_size=world_size // TENSOR_PARALLEL,
            tp_rank=rank % TENSOR_PARALLEL,
            tp_size=TENSOR_PARALLEL,
        )
        self.seen: list[list[int]] = []

    @contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        yield

    def train_batch(self, batch: DataProto, *_: Any, **__: Any) -> dict[str, Metric]:
        trained = batch.batch["response_mask"].any(dim=1)
        self.seen.append(batch.batch["key"][trained].tolist())
        return {"rows": Metric(float(trained.sum()), kind="sum")}


RecordingEngine.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class RecordingWorker(ModelWorker):
    metric_prefix = "actor"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.engine = RecordingEngine(self.rank, self.world_size)
        self.place_in_mesh("actor")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def update_actor(self, batch: DataProto) -> DataProto:
        return self.update(batch, MicroBatching(), lambda *_: (torch.zeros(()), {}))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen(self) -> list[list[int]]:
        return self.engine.seen


def batch_of(rows: int) -> DataProto:
    ones = torch.ones(rows, 4, dtype=torch.int64)
    return DataProto.from_dict(
        tensors={"key": torch.arange(rows), "attention_mask": ones, "response_mask": ones[:, 2:].clone()}
    )


def arranged(batch: DataProto, mini_batches: list[np.ndarray], dp_size: int) -> DataProto:
    spread, planned = spread_over_ranks(batch, mini_batches, dp_size)
    return UpdatePlan(mini_batches=planned, dp_size=dp_size, updates=len(planned)).attach_to(spread)


@pytest.mark.slow
def test_a_group_of_two_shards_on_four_ranks_trains_on_every_row(ray_session: None) -> None:
    """Four ranks are two copies of the model. A batch that is arranged for four shards would lose half of its rows."""
    worker = RayClassWithInitArgs(RecordingWorker, timeout_s=100)
    pool = RayResourcePool([4], use_gpu=False)
    try:
        check_every_row_is_trained(RayWorkerGroup(pool, worker, timeout_s=200))
    finally:
        pool.release()


def check_every_row_is_trained(group: RayWorkerGroup) -> None:
    group.init_model()
    assert (group.world_size, group.dp_size("actor")) == (4, 2)
    mini_batches = [np.arange(8), np.arange(8, 15)]  # the second does not divide

    updated = group.update_actor(arranged(batch_of(15), mini_batches, group.dp_size("actor"))).get()
    seen = group.seen()
    assert seen[0] == seen[1] and seen[2] == seen[3]  # ranks that hold one copy together see the same rows
    for number, rows in enumerate(mini_batches):
        assert sorted(seen[0][number] + seen[2][number]) == rows.tolist()
    trained = merge_metrics({name: m} for name, found in updated.meta_info["metrics"].items() for m in found)
    assert trained["actor/rows"].value == pytest.approx(15 / 2)  # a sum is averaged over the two updates

    with raises_with(WorkerError, "dp_size=4", "4 rows", "dp_size=2", "8 rows"):
        group.update_actor(arranged(batch_of(15), mini_batches, group.world_size)).get()


def test_a_plan_that_does_not_use_every_row_is_refused() -> None:
    batch = arranged(batch_of(8), [np.arange(4), np.arange(4, 8)], dp_size=2)
    plan = UpdatePlan.of(batch)
    plan.check(rows=4, dp_size=2)
    for rows, dp_size in ((5, 2), (3, 2), (4, 1)):
        with raises_with(ValueError, "dp_size=2", "4 rows", f"dp_size={dp_size}", f"{rows} rows"):
            plan.check(rows=rows, dp_size=dp_size)
    with raises_with(ValueError, "update_plan"):
        UpdatePlan.of(batch_of(2))
