"""Four ranks as two shards of two: the same training as on one rank, through workers, groups and dispatch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import tensor_parallel
import torch
from tensor_parallel import TensorParallelEngine

from hybridrl.config import ActorRolloutRefConfig
from hybridrl.engine import ExportsShards, TrainEngines
from hybridrl.engine.capabilities import require
from hybridrl.errors import ModelError
from hybridrl.protocol import DataProto
from hybridrl.rollout.select import resolve_rollout
from hybridrl.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, register
from hybridrl.trainer.ppo.batching import spread_over_ranks
from hybridrl.utils.metrics import merge_metrics
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.loss_prepass import ROW_IDS
from hybridrl.workers.update_plan import UpdatePlan

for module in (sys.modules[__name__], tensor_parallel):
    ray.cloudpickle.register_pickle_by_value(module)

PROMPT, RESPONSE, ROWS = 4, 9, 14


class TensorParallelActor(ActorRolloutRefWorker):
    """The policy's own worker on the tensor-parallel engine."""

    def __init__(self, config: ActorRolloutRefConfig, tp: int) -> None:
        super().__init__(config, role="actor")
        self.tp = tp

    def build_engine(self, *_: Any) -> None:
        self.engine = TensorParallelEngine(self.tp, lr=0.2)
        self.engine.initialize()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.engine.export_weights())


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


def trained(world: int, tp: int, loss_mode: str) -> tuple[DataProto, dict[str, float], list[dict[str, torch.Tensor]]]:
    """Log-probabilities before, metrics, and the weights of every rank after two epochs of two mini-batches."""
    worker = RayClassWithInitArgs(TensorParallelActor, config_of(loss_mode), tp=tp)
    group = RayWorkerGroup(RayResourcePool([world], use_gpu=False), worker, timeout_s=300)
    group.init_model()
    batch = make_batch()
    before = group.compute_log_prob(batch).get()
    batch = batch.union(before.select(batch_keys=["old_log_probs"]))
    dp_size, results = group.dp_size("actor"), []
    assert dp_size == world // tp
    mini_batches = [np.arange(7), np.arange(7, 14)]  # seven rows do not divide by two shards
    for epoch in range(2):
        spread, planned = spread_over_ranks(batch, mini_batches, dp_size, seeds=[10 * epoch + 1, 10 * epoch + 2])
        plan = UpdatePlan(mini_batches=planned, dp_size=dp_size, updates=4, response_length=RESPONSE, temperature=0.8)
        results.append(group.update_actor(plan.attach_to(spread)).get().meta_info["metrics"])
    merged = merge_metrics({name: m} for part in results for name, found in part.items() for m in found)
    return before, {name: float(metric.value) for name, metric in merged.items()}, group.weights()


@pytest.mark.slow
def test_two_shards_of_two_ranks_train_like_one_rank(ray_session: None) -> None:
    """clip_cov chooses tokens of the whole mini-batch, so its pre-pass must see each row once and only once."""
    expected_outputs, expected_metrics, (expected,) = trained(1, 1, "clip_cov")
    outputs, metrics, weights = trained(4, 2, "clip_cov")
    for name in ("old_log_probs", "entropys"):
        torch.testing.assert_close(outputs.batch[name], expected_outputs.batch[name], atol=1e-5, rtol=1e-5)
    start = TensorParallelEngine.initial_weights()
    for rank in range(4):
        assert weights[rank].keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[rank][name], tensor, atol=1e-6, rtol=1e-6)
            assert (tensor - start[name]).abs().max() > 1e-3  # it has moved, far beyond the tolerance
    assert metrics.keys() == expected_metrics.keys() and expected_metrics["actor/pg_clipfrac"] > 0
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_missing_capability_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"some\.key=1.*ExportsShards.*TensorParallelEngine.*leave it off"):
        require(TensorParallelEngine(1, 1.0), ExportsShards, key="some.key=1", instead="leave it off")


def test_generation_in_place_needs_an_engine_that_can(micro_model: Path) -> None:
    """Refused when the rollout is chosen, before a model is loaded."""
    TrainEngines.register("language_model", "tensor_parallel_for_tests")(TensorParallelEngine)
    config = ActorRolloutRefConfig()
    config = replace(
        config,
        model=replace(config.model, path=str(micro_model)),
        rollout=replace(config.rollout, name="hf", prompt_length=8, response_length=8),
    )
    assert resolve_rollout(config, use_gpu=False) == "hf"
    config = replace(config, actor=replace(config.actor, strategy="tensor_parallel_for_tests"))
    with pytest.raises(ModelError, match=r"rollout\.name=hf.*TensorParallelEngine.*vllm.*actor\.strategy"):
        resolve_rollout(config, use_gpu=False)
