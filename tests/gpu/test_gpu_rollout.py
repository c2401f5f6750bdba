"""Replicas on the trainer's GPU: weights by CUDA IPC, memory given back, log-probabilities alike."""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import ray
import torch
from gpu_helpers import check_errors

from hybridrl.config import load_config
from hybridrl.models.tiny import build_tiny_model
from hybridrl.protocol import DataProto
from hybridrl.rollout import Rollout
from hybridrl.rollout.start_replicas import start_rollout
from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from hybridrl.trainer.ppo.batching import repeat_for_sampling
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

pytestmark = pytest.mark.timeout(900)


ENGINES = {"plain": "gpu_engine:GpuEngine", "vllm": "vllm", "sglang": "sglang"}
TESTS = Path(__file__).parents[1]


class Parts(NamedTuple):
    """One rank on one GPU, and a replica next to it."""

    group: RayWorkerGroup
    rollout: Rollout
    before: float  # GiB in use without the replica
    weights: float  # GiB of its weights
    model: Path


#: the test's own engine takes whole tensors only
PLANNED = {"vllm": ("method=planned", "check_weights=true")}


@pytest.fixture(scope="module", params=ENGINES)
def parts(request, tmp_path_factory):
    if request.param != "plain" and importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: bash scripts/install.sh cuda {request.param}")
    folders = [str(TESTS / name) for name in ("gpu", "rollout")]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ["PYTHONPATH"]])
    folder = tmp_path_factory.mktemp("model")
    # more weights than what an engine keeps in any case
    model = build_tiny_model(folder / "model", hidden=2048, layers=14, heads=16, kv_heads=8)
    config = load_config(
        "ppo_trainer",
        overrides=[
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.rollout.name={ENGINES[request.param]}",
            "actor_rollout_ref.rollout.dtype=bfloat16",
            "actor_rollout_ref.rollout.prompt_length=32",
            "actor_rollout_ref.rollout.response_length=16",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
            "actor_rollout_ref.rollout.enforce_eager=True",
            *(f"actor_rollout_ref.rollout.checkpoint_engine.{word}" for word in PLANNED.get(request.param, ())),
        ],
    ).actor_rollout_ref
    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, logging_level="ERROR")
    pool = RayResourcePool([1], use_gpu=True, max_colocate_count=3)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ActorRolloutRefWorker, config=config, role="actor_rollout"))
    group.init_model()
    before = used(group)
    rollout = start_rollout(config, group, log_folder=folder / "logs")
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 2 / 2**30  # float32 there
    yield Parts(group, rollout, before, weights, model)
    rollout.close()
    pool.release()


def used(group) -> float:
    """GiB in use on the device, by whatever process."""
    facts = group.device_memory()[0]
    return facts["total_gb"] - facts["free_gb"]


def prompts() -> DataProto:
    """Few: the test's own engine computes the whole row for each token."""
    ids = torch.randint(6, 80, (4, 32), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    batch = DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1},
        non_tensors={"uid": [f"0-{i}" for i in range(4)]},
    )
    batch = repeat_for_sampling(batch, 2)
    batch.meta_info = {"global_steps": 1, "ignore_eos": True}
    return batch


def exact_log_probs(model: Path, batch: DataProto) -> torch.Tensor:
    """Of the responses, `[B, T]`, by transformers in float32 with the weights that both sides have."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float().cuda()
    fields = {name: batch.batch[name].cuda() for name in ("input_ids", "attention_mask", "position_ids", "responses")}
    with torch.no_grad():
        logits = module(**{name: value for name, value in fields.items() if name != "responses"}).logits
    width = fields["responses"].shape[1]
    log_probs = logits[:, -width - 1 : -1].log_softmax(-1).gather(-1, fields["responses"][..., None])[..., 0]
    return log_probs.cpu()


def test_sleeping_gives_the_memory_back_and_waking_takes_new_weights(parts: Parts, figures) -> None:
    group, rollout, before, *_ = parts
    awake = used(group)
    rollout.release()
    asleep = used(group)
    assert awake - before > 1 and asleep < awake - 1
    metrics = rollout.update_weights(0)
    figures(update_weights_gb_per_s=metrics["rollout/update_weights_gb_per_s"])
    figures(engine_awake_gib=awake - before, engine_asleep_gib=asleep - before)
    batch = rollout.generate(prompts())
    fields = ["responses", "input_ids", "attention_mask", "position_ids", "response_mask"]
    inputs = batch.select(batch_keys=fields, non_tensor_batch_keys=[])
    inputs.meta_info = {"temperature": 1.0}
    ours = group.compute_log_prob(inputs).get().batch["old_log_probs"]
    assert used(group) - before > 1
    mask = batch.batch["response_mask"].bool()
    exact = exact_log_probs(parts.model, batch)[mask]
    figures(**check_errors(batch.batch["rollout_log_probs"][mask], ours[mask], exact))


def test_a_step_that_generates_nothing_gives_all_memory_back_too(parts: Parts) -> None:
    """After an update the weights are awake and the cache is not, until there is something to generate."""
    group, rollout, before, weights, _ = parts
    rollout.update_weights(1)
    rollout.generate(prompts())
    awake = used(group)
    rollout.release()
    asleep = used(group)
    rollout.update_weights(2)
    updated = used(group)
    rollout.release()
    again = used(group)
    assert before < updated < awake
    assert again == pytest.approx(asleep, abs=0.2)
    if rollout.supervisor.settings.engine_name in ENGINES:  # the plain engine keeps its weights
        assert updated - again > 0.8 * weights


def test_a_replica_that_is_killed_comes_back_beside_training(parts: Parts) -> None:
    """The only replica of a shared GPU: its cache is released while it gets its weights again."""
    rollout = parts.rollout
    rollout.update_weights(3)
    rollout.generate(prompts())
    os.kill(rollout.supervisor.replicas[0].info.pid, signal.SIGKILL)
    batch = rollout.generate(prompts())
    assert batch.batch["response_mask"].bool().any(1).all() and rollout.supervisor.restarts == 1
