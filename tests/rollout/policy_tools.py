"""What the tests of engines next to real training workers share: settings, prompts, the trainer's log-probabilities.

Also the test of a layout: after each transfer the engine's log-probabilities are the trainer's, and the bytes received
are those of the plan that is computed from the shapes alone.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
import torch

from hybridrl.config import ActorRolloutRefConfig, load_config
from hybridrl.hybrid_engine.plan import plan
from hybridrl.layouts.model_tensors import model_tensors
from hybridrl.layouts.topology import GenerationLayout, Layout
from hybridrl.models.model_config import config_of
from hybridrl.protocol import DataProto
from hybridrl.rollout.start_replicas import start_rollout
from hybridrl.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, register
from hybridrl.trainer.ppo.batching import repeat_for_sampling
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH = 24
PROMPT = 80
MAX_LOG_PROB_DIFFERENCE = 1e-5  # float32 on both sides


class ScaledPolicy(ActorRolloutRefWorker):
    """A policy whose weights a test can change, and that sends them in buckets far smaller than a layer's parts."""

    def __init__(self, *args, **kwargs) -> None:
        from hybridrl.hybrid_engine import transports

        super().__init__(*args, **kwargs)
        transports.LEAST_BUCKET, transports.PIPELINED = 2**12, 2**12

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale(self, factor: float) -> None:
        """Multiply every weight, so that copies of one on several ranks stay equal."""
        chunks = self.engine.chunks if hasattr(self.engine, "chunks") else [self.engine.module]
        with torch.no_grad():
            for parameter in (each for chunk in chunks for each in chunk.parameters()):
                parameter.mul_(factor)


@contextmanager
def scaled_policy(config: ActorRolloutRefConfig, ranks: int) -> Iterator[RayWorkerGroup]:
    """A group of `ScaledPolicy`."""
    pool = RayResourcePool([ranks], use_gpu=False)
    cls = RayClassWithInitArgs(ScaledPolicy, config=config, role="actor_rollout")
    try:
        group = RayWorkerGroup(pool, cls, threads=1)
        group.init_model()
        yield group
    finally:
        pool.release()


def settings(model_dir: Path, *words: str, engine: str = "vllm") -> ActorRolloutRefConfig:
    """A policy in float32 and an engine; small enough for many engines on one machine."""
    return load_config(
        "ppo_trainer",
        overrides=[
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            f"actor_rollout_ref.rollout.name={engine}",
            f"actor_rollout_ref.rollout.prompt_length={PROMPT}",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
            f"actor_rollout_ref.rollout.response_length={WIDTH}",
            "actor_rollout_ref.rollout.temperature=0.8",
            "actor_rollout_ref.rollout.max_num_seqs=64",
            *words,
        ],
    ).actor_rollout_ref


def prompts_of(count: int, n: int = 1, width: int = 16, **meta) -> DataProto:
    """Left-padded prompts of different lengths (long ones where there is much room), n rows each."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(6, 80, (count, width), generator=generator)
    lengths = torch.randint(max(3, width - 14), width + 1, (count,), generator=generator)
    mask = (torch.arange(width)[None] >= width - lengths[:, None]).long()
    batch = DataProto.from_dict(
        tensors={
            "input_ids": ids * mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        },
        non_tensors={"uid": [f"0-{i}" for i in range(count)]},
    )
    batch = repeat_for_sampling(batch, n)
    batch.meta_info = {"global_steps": 1, **meta}
    return batch


def trainer_log_probs(policy, batch: DataProto, temperature: float = 0.8) -> torch.Tensor:
    fields = ["responses", "input_ids", "attention_mask", "position_ids", "response_mask"]
    fields += [name for name in ("image_mask",) if name in batch.batch.keys()]
    images = [name for name in ("multi_modal_inputs", "image_digest") if name in batch.non_tensor_batch]
    inputs = batch.select(batch_keys=fields, non_tensor_batch_keys=images)
    inputs.meta_info = {"temperature": temperature}
    return policy.compute_log_prob(inputs).get().batch["old_log_probs"]


def assert_each_transfer_brings_the_trainers_weights(
    policy: RayWorkerGroup, config: ActorRolloutRefConfig, training: Layout, logs: Path, transfers: int = 3
) -> None:
    """Engines on all devices of the policy; transfers with other weights each time."""
    specs, layers = model_tensors(config_of(config.model))
    tp, pp = config.rollout.tensor_model_parallel_size, config.rollout.pipeline_model_parallel_size
    generation = GenerationLayout(tp=tp, pp=pp, replicas=training.devices // (tp * pp))
    received = plan(specs, training, generation, layers).received.max() * 4e-9
    rollout = start_rollout(config, policy, threads=1, log_folder=logs)
    try:
        for version in range(transfers):
            metrics = rollout.update_weights(version)
            assert metrics["rollout/update_weights_received_gb"] == pytest.approx(received, rel=1e-12)
            batch = rollout.generate(prompts_of(12, n=2))
            mask = batch.batch["response_mask"].bool()
            ours = trainer_log_probs(policy, batch)
            assert float((ours - batch.batch["rollout_log_probs"])[mask].abs().max()) < MAX_LOG_PROB_DIFFERENCE
            policy.scale(1.1)
            assert float((trainer_log_probs(policy, batch) - ours)[mask].abs().max()) > 1e-3
    finally:
        rollout.close()
