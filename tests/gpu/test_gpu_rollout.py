"""Replicas on the trainer's GPU: weights by CUDA IPC, memory given back, log-probabilities alike."""

import importlib.util

import pytest
import ray
import torch

from hybridrl.config import load_config
from hybridrl.models.tiny import build_tiny_model
from hybridrl.protocol import DataProto
from hybridrl.rollout.start import start_rollout
from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from hybridrl.trainer.ppo.batching import repeat_for_sampling
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def parts(request, tmp_path_factory):
    """One rank on one GPU, and a replica beside it."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: bash scripts/install.sh cuda {request.param}")
    folder = tmp_path_factory.mktemp("model")
    model = build_tiny_model(folder / "model", hidden=512, layers=4, heads=8, kv_heads=4)
    config = load_config(
        "ppo_trainer",
        overrides=[
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.rollout.name={request.param}",
            "actor_rollout_ref.rollout.dtype=bfloat16",
            "actor_rollout_ref.rollout.prompt_length=32",
            "actor_rollout_ref.rollout.response_length=64",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        ],
    ).actor_rollout_ref
    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level="ERROR")
    pool = RayResourcePool([1], use_gpu=True, max_colocate_count=3)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ActorRolloutRefWorker, config=config, role="actor_rollout"))
    group.init_model()
    before = used(group)
    rollout = start_rollout(config, group, log_folder=folder / "logs")
    yield group, rollout, before
    rollout.close()
    pool.release()


def used(group) -> float:
    """GiB in use on the device, by whatever process."""
    facts = group.device_memory()[0]
    return facts["total_gb"] - facts["free_gb"]


def prompts() -> DataProto:
    ids = torch.randint(6, 80, (16, 32), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    batch = DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1},
        non_tensors={"uid": [f"0-{i}" for i in range(16)]},
    )
    batch = repeat_for_sampling(batch, 4)
    batch.meta_info = {"global_steps": 1, "ignore_eos": True}
    return batch


def test_sleeping_gives_the_memory_back_and_waking_takes_new_weights(parts) -> None:
    group, rollout, before = parts
    awake = used(group)
    rollout.release()
    asleep = used(group)
    assert awake - before > 1 and asleep - before < 0.25 * (awake - before)
    metrics = rollout.update_weights(0)
    assert metrics["rollout/update_weights_gb_per_s"] > 0
    batch = rollout.generate(prompts())
    fields = ["responses", "input_ids", "attention_mask", "position_ids", "response_mask"]
    inputs = batch.select(batch_keys=fields, non_tensor_batch_keys=[])
    inputs.meta_info = {"temperature": 1.0}
    ours = group.compute_log_prob(inputs).get().batch["old_log_probs"]
    difference = (ours - batch.batch["rollout_log_probs"]).abs()
    assert float(difference.mean()) < 5e-3 and float(difference.max()) < 0.3  # bfloat16 on both sides
    assert used(group) - before > 1


def test_a_step_that_generates_nothing_gives_all_memory_back_too(parts) -> None:
    """After an update the weights are awake and the cache is not, until there is something to generate."""
    group, rollout, before = parts
    rollout.update_weights(1)
    rollout.generate(prompts())
    awake = used(group)
    rollout.release()
    rollout.update_weights(2)
    updated = used(group)
    rollout.release()
    asleep = used(group)
    assert before < updated < awake and asleep - before < 0.25 * (awake - before)
