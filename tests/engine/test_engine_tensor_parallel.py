"""Ranks with tensor, pipeline and data parallelism: the same training as on one, and the transfers between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import tensor_parallel
import torch
from raising import raises_with
from tensor_parallel import TensorParallelEngine

from hybridrl.config import ActorRolloutRefConfig
from hybridrl.engine import ExportsShards, register_train_engine
from hybridrl.engine.capabilities import require
from hybridrl.errors import ModelError, WorkerError
from hybridrl.protocol import DataProto
from hybridrl.rollout.select import resolve_rollout
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    make_one_to_all_dispatch_fn,
    register,
)
from hybridrl.trainer.ppo.batching import spread_over_ranks
from hybridrl.utils.metrics import merge_metrics
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.loss_prepass import ROW_IDS
from hybridrl.workers.model_worker import pipeline_mesh
from hybridrl.workers.update_plan import UpdatePlan

for module in (sys.modules[__name__], tensor_parallel):
    ray.cloudpickle.register_pickle_by_value(module)

PROMPT, RESPONSE, ROWS = 4, 9, 14


class TensorParallelActor(ActorRolloutRefWorker):
    """The policy's own worker on the tensor-parallel engine, with a method for each transfer protocol of the paper."""

    def __init__(self, config: ActorRolloutRefConfig, tp: int, pp: int) -> None:
        super().__init__(config, role="actor")
        self.tp, self.pp = tp, pp

    def build_engine(self, *_: Any) -> None:
        self.engine = TensorParallelEngine(self.tp, lr=0.2, pp=self.pp)
        self.engine.initialize()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.engine.export_weights())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, number: int) -> tuple[int, int]:
        return self.rank, number

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, number: int) -> tuple[int, int]:
        return self.rank, number

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def dp(self, batch: DataProto) -> DataProto:
        return self._with_rank(batch)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def three_d(self, batch: DataProto) -> DataProto:
        return self._with_rank(batch)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    def every_rank_generates(self, batch: DataProto) -> DataProto:
        return self._with_rank(batch)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="generation"))
    def groups_generate(self, batch: DataProto) -> DataProto:
        return self._with_rank(batch)

    @register(dispatch_mode=make_one_to_all_dispatch_fn(mesh_name=pipeline_mesh("actor")))
    def names_of_stage(self, number: int) -> tuple[int, list[str], int]:
        return self.rank, sorted(self.engine.parameters), number

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place_for_generation(self, tp: int, pp: int) -> None:
        self.place_in_generation_mesh("generation", tp=tp, pp=pp)

    def _with_rank(self, batch: DataProto) -> DataProto:
        """The rows that this rank got, and its rank."""
        return DataProto.from_dict(tensors={"x": batch.batch["x"], "rank": torch.full((len(batch),), self.rank)})


def make_batch() -> DataProto:
    """Responses of 1 to 9 tokens, some with a hole in their mask."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, tensor_parallel.VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=generator)
    attention = torch.zeros_like(ids)
    for row in range(ROWS):
        attention[row, row % PROMPT : PROMPT + 1 + row % RESPONSE] = 1
    mask = attention[:, PROMPT:].clone()
    mask[4, 1] = mask[8, 3] = 0
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "responses": ids[:, PROMPT:].clone(),
            "response_mask": mask,
            "advantages": torch.randn(ROWS, RESPONSE, generator=generator),
            ROW_IDS: torch.arange(ROWS),
        },
        meta_info={"temperature": 0.8},
    )


def config_of(loss_mode: str) -> ActorRolloutRefConfig:
    config = ActorRolloutRefConfig()
    policy_loss = replace(
        config.actor.policy_loss, loss_mode=loss_mode, clip_cov_ratio=0.2, clip_cov_lb=0.01, clip_cov_ub=9.0
    )
    actor = replace(config.actor, policy_loss=policy_loss, ppo_micro_batch_size_per_gpu=3, calculate_entropy=True)
    return replace(config, actor=actor, rollout=replace(config.rollout, log_prob_micro_batch_size_per_gpu=2))


@pytest.fixture
def start(ray_session: None) -> Iterator[Callable[[int, int, int], RayWorkerGroup]]:
    """Starts a group of `world` ranks with tensor and pipeline parallelism."""
    pools = []

    def start(world: int, tp: int, pp: int) -> RayWorkerGroup:
        pools.append(RayResourcePool([world], use_gpu=False))
        worker = RayClassWithInitArgs(TensorParallelActor, config_of("clip_cov"), tp=tp, pp=pp)
        group = RayWorkerGroup(pools[-1], worker, timeout_s=300, threads=1)
        group.init_model()
        assert group.dp_size("actor") == world // (tp * pp)
        return group

    yield start
    for pool in pools:
        pool.release()


def trained(group: RayWorkerGroup) -> tuple[DataProto, dict[str, float], list[dict[str, torch.Tensor]]]:
    """Log-probabilities before, metrics, and the weights of every rank after two epochs of two mini-batches."""
    batch = make_batch()
    before = group.compute_log_prob(batch).get()
    batch = batch.union(before.select(batch_keys=["old_log_probs"]))
    dp_size, results = group.dp_size("actor"), []
    mini_batches = [np.arange(7), np.arange(7, 14)]  # seven rows do not divide by two shards
    for epoch in range(2):
        spread, planned = spread_over_ranks(batch, mini_batches, dp_size, seeds=[10 * epoch + 1, 10 * epoch + 2])
        plan = UpdatePlan(mini_batches=planned, dp_size=dp_size, updates=4, response_length=RESPONSE, temperature=0.8)
        results.append(group.update_actor(plan.attach_to(spread)).get().meta_info["metrics"])
    merged = merge_metrics({name: m} for part in results for name, found in part.items() for m in found)
    return before, {name: float(metric.value) for name, metric in merged.items()}, group.weights()


@pytest.mark.slow
def test_shards_of_several_ranks_train_like_one_rank(
    start: Callable[[int, int, int], RayWorkerGroup], tmp_path: Path
) -> None:
    """Eight ranks: two stages, two shards, two parts of each tensor.

    clip_cov chooses tokens of the whole mini-batch, so its pre-pass must see each row once and only once.
    """
    alone = start(1, 1, 1)
    group = start(8, 2, 2)
    check_protocols(group)
    expected_outputs, expected_metrics, (expected,) = trained(alone)
    outputs, metrics, weights = trained(group)
    for name in ("old_log_probs", "entropys"):
        torch.testing.assert_close(outputs.batch[name], expected_outputs.batch[name], atol=1e-5, rtol=1e-5)
    first = TensorParallelEngine.initial_weights()
    for rank in range(8):
        assert weights[rank].keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[rank][name], tensor, atol=1e-6, rtol=1e-6)
            assert (tensor - first[name]).abs().max() > 1e-3  # it has moved, far beyond the tolerance
    assert metrics.keys() == expected_metrics.keys() and expected_metrics["actor/pg_clipfrac"] > 0
    for name, value in expected_metrics.items():
        if name.startswith("perf/"):  # memory
            continue
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name

    group.save_checkpoint(str(tmp_path / "eight"), ["model"])
    alone.load_checkpoint(str(tmp_path / "eight"), ["model"])
    assert all(torch.equal(alone.weights()[0][name], tensor) for name, tensor in weights[0].items())
    with pytest.raises(WorkerError, match=r"tp.*divides 2.*tp=4"):
        group.place_for_generation(4, 1)


def check_protocols(group: RayWorkerGroup) -> None:
    """Table 3 of HybridFlow's paper: who gets which rows, and whose results are collected.

    Rank r has tensor rank r % 2, data-parallel rank r // 2 % 2 and pipeline stage r // 4.
    """
    assert group.one_to_all(5) == [(rank, 5) for rank in range(8)]
    assert group.all_to_all(list(range(10, 18))) == [(rank, 10 + rank) for rank in range(8)]
    batch = DataProto.from_dict(tensors={"x": torch.arange(8)})

    def ranks_of(method: str) -> list[int]:
        result = getattr(group, method)(batch)
        assert result.batch["x"].tolist() == list(range(8)), f"{method}: a row is missing or at another place"
        return result.batch["rank"].tolist()

    assert ranks_of("dp") == list(range(8))
    assert ranks_of("three_d") == [4] * 4 + [6] * 4, "the last stage's first rank of each shard"
    # Each copy of the model is four ranks (0, 1, 4, 5 and 2, 3, 6, 7), each of which generates by itself.
    assert ranks_of("every_rank_generates") == [0, 1, 4, 5, 2, 3, 6, 7]
    group.place_for_generation(2, 1)  # groups 0-1, 4-5, 2-3, 6-7
    assert ranks_of("groups_generate") == [0, 0, 4, 4, 2, 2, 6, 6]
    first, last = group.names_of_stage(7)
    assert first == (0, ["down", "embedding", "position", "up"], 7) and last == (4, ["head"], 7)


def test_a_missing_capability_is_refused_by_name() -> None:
    with raises_with(ModelError, "some.key=1", "ExportsShards", "TensorParallelEngine"):
        require(TensorParallelEngine(1, 1.0), ExportsShards, key="some.key=1", instead="leave it off")


def test_generation_in_place_needs_an_engine_that_can(micro_model: Path) -> None:
    """Refused when the rollout is chosen, before a model is loaded."""
    register_train_engine("tensor_parallel_for_tests", model_types=("language_model",))(TensorParallelEngine)
    config = ActorRolloutRefConfig()
    config = replace(
        config,
        model=replace(config.model, path=str(micro_model)),
        rollout=replace(config.rollout, name="hf", prompt_length=8, response_length=8),
    )
    assert resolve_rollout(config, use_gpu=False) == "hf"
    config = replace(config, actor=replace(config.actor, strategy="tensor_parallel_for_tests"))
    with raises_with(ModelError, "rollout.name=hf", "TensorParallelEngine", "vllm", "actor.strategy"):
        resolve_rollout(config, use_gpu=False)
