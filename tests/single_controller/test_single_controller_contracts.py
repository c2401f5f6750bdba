"""Contracts of worker methods: a batch that lacks what a method reads is refused before anything is sent."""

from __future__ import annotations

import sys

import pytest
import ray
import torch

from hybridrl import DataProto
from hybridrl.config.roles import ROLES
from hybridrl.errors import MissingFieldError
from hybridrl.protocol.fields import check_fields, stages_by_field
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)
from hybridrl.single_controller.base.worker_group import registered_methods
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.critic import CriticWorker

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Judging(Worker):
    """Writes grades, of which it makes ranks."""

    calls = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("essay",), writes=("grade",))
    def grade(self, batch: DataProto) -> DataProto:
        self.calls += 1
        return DataProto.from_dict(tensors={"grade": 2 * batch.batch["essay"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("grade", "author"))
    def order(self, batch: DataProto) -> DataProto:
        self.calls += 1
        return DataProto.from_dict(tensors={"order": batch.batch["grade"].argsort()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("grade",))
    def best(self, batch: DataProto) -> DataProto:
        self.calls += 1
        return DataProto.from_dict(tensors={"best": batch.batch["grade"]})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        return self.calls


def test_a_dataflow_that_misses_a_stage_is_refused_before_the_call(ray_session: None) -> None:
    group = RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(Judging))
    try:
        essays = DataProto.from_dict(tensors={"essay": torch.arange(3)}, non_tensors={"author": ["a", "b", "c"]})
        with pytest.raises(MissingFieldError) as refused:
            group.order(essays)
        text = str(refused.value)
        assert "Judging.order" in text and "grade" in text and "Judging.grade" in text and "essay" in text
        with pytest.raises(MissingFieldError) as unknown:
            group.order(essays.select(batch_keys=["essay"], non_tensor_batch_keys=[]))
        assert "author, which no known stage gives" in str(unknown.value)
        assert group.count() == [0]
        grades = group.grade(essays)
        with pytest.raises(MissingFieldError) as pending:  # a future: what it may have is declared
            group.order(grades)
        assert "author" in str(pending.value)
        assert group.best(grades).batch["best"].tolist() == [0, 2, 4]
        assert sorted(group.order(essays.union(grades.get())).batch["order"].tolist()) == [0, 1, 2]
        assert group.count() == [3]
    finally:
        group.resource_pool.release()


def test_the_table_of_roles_and_the_worker_methods_agree() -> None:
    stages = stages_by_field()
    methods = {
        name: getattr(cls, name)._hybridrl_registered
        for cls in (ActorRolloutRefWorker, CriticWorker)
        for name in registered_methods(cls)
    }
    updates = {spec.update.method: spec.update for spec in ROLES.values() if spec.update is not None}
    for name in ("update_actor", "update_critic"):
        assert set(updates[name].fields) <= set(methods[name]["reads"])
        assert all(field in stages for field in methods[name]["reads"])
    for name in ("compute_log_prob", "compute_ref_log_prob", "compute_values"):
        assert methods[name]["reads"] and methods[name]["writes"]
        assert any(name in stage for field in methods[name]["writes"] for stage in stages.get(field, ()))


@pytest.mark.parametrize(
    ("missing", "stage"),
    [
        ("advantages", "compute_advantage"),
        ("old_log_probs", "compute_log_prob"),
        ("values", "compute_values"),
        ("token_level_scores", "reward manager"),
        ("responses", "generation"),
    ],
)
def test_the_stages_of_the_library_are_named(missing: str, stage: str) -> None:
    check_fields("mine", [missing], {missing, "uid"})
    with pytest.raises(MissingFieldError) as refused:
        check_fields("mine", ["uid", missing], {"uid"})
    assert "mine" in str(refused.value) and missing in str(refused.value) and stage in str(refused.value)
