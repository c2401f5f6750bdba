"""What generates for a program that only generates: `main_generation`."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hybridrl.config import ActorRolloutRefConfig, GenerationConfig, RolloutConfig
from hybridrl.models.facts import config_of, eos_token_ids, tokenizer_of
from hybridrl.protocol import DataProto
from hybridrl.rollout import RolloutError, SamplingParams
from hybridrl.rollout.endpoint import Endpoint, Reply
from hybridrl.rollout.noise import stream_keys
from hybridrl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

__all__ = ["Endpoint", "Generator", "Reply", "end_tokens", "sampling_of", "start_generator"]


@dataclass(frozen=True)
class Generator:
    """Generates in the cluster.

    Attributes:
        generate: a batch of prompts to a batch of responses; see `Rollout.generate`.
        load: has the processes load the model, and waits for them.
        in_flight: batches that may be given at once, from as many threads: with an engine the end of one, where few
            long responses are left, overlaps the beginning of the next.
        close: ends what does not end with its worker group.
    """

    generate: Callable[[DataProto], DataProto]
    load: Callable[[], None]
    in_flight: int = 1
    close: Callable[[], None] = lambda: None


def start_generator(config: GenerationConfig, engine: str, manager: ResourcePoolManager) -> Generator:
    """Start the processes that generate, in the manager's pool; returns before they are up.

    Args:
        engine: `rollout.name`, resolved.
        manager: maps the role "actor_rollout_ref" to a pool.
    """
    if engine != "hf":
        raise RolloutError(f"actor_rollout_ref.rollout.name={engine}: main_generation cannot start it yet; use hf")
    policy, trainer = config.actor_rollout_ref, config.trainer
    manager.create_resource_pool()
    group = RayWorkerGroup(
        resource_pool=manager.get_resource_pool("actor_rollout_ref"),
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ActorRolloutRefWorker, config=policy, role="rollout", timeout_s=policy.nccl_timeout
        ),
        ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
        timeout_s=trainer.phase_timeout_s,
        threads=trainer.threads_per_worker,
    )
    return Generator(generate=group.generate_sequences, load=group.init_model)


def sampling_of(rollout: RolloutConfig, row: int, sample: int) -> SamplingParams:
    """How an endpoint is to sample: as training does, with a seed that belongs to the sample.

    Raises:
        UserError: a setting is out of range.
    """
    key = stream_keys(rollout.seed, 0, "generate", [f"0-{row}"], [sample])[0]
    return replace(SamplingParams.for_training(rollout), seed=int(key) >> 33)  # 31 bits: what every endpoint takes


def end_tokens(config: ActorRolloutRefConfig) -> set[int]:
    """Tokens that end a response."""
    model = config.model
    return set(eos_token_ids(model.path, config_of(model), tokenizer_of(model)))
