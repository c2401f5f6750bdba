"""The generating processes of `main_generation`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hybridrl.config import ActorRolloutRefConfig, GenerationConfig, RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.registry import INFERENCE_ENGINES
from hybridrl.rollout import InPlaceRollout, Rollout, SamplingParams
from hybridrl.rollout.noise import stream_keys
from hybridrl.rollout.openai_endpoint import Endpoint, EndpointResponse
from hybridrl.rollout.start_replicas import check_layout, devices_per_replica, resolve_rollout
from hybridrl.rollout.stop_strings import StopStrings
from hybridrl.serve import start_rollout
from hybridrl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

__all__ = ["Endings", "Endpoint", "EndpointResponse", "Rollout", "sampling_of", "start_processes"]

ROLE = "actor_rollout_ref"


def start_processes(
    config: GenerationConfig, manager: ResourcePoolManager, log_folder: Path
) -> tuple[str, Callable[[], Rollout]]:
    """Reserve the devices of the manager's pool for generation, and start whatever does not need the model there.

    Args:
        manager: maps the role "actor_rollout_ref" to a pool.
        log_folder: folder for the output of the replicas.

    Returns:
        The engine that `rollout.name` stands for on these devices, and a function that loads the model and returns the
        rollout. With an engine, a replica takes as many devices as the product of its parallel sizes, and reads the
        checkpoint itself.

    Raises:
        UserError: the engine is not installed, or a setting cannot work with it.
    """
    policy, trainer = config.actor_rollout_ref, config.trainer
    manager.create_resource_pool()
    pool = manager.get_resource_pool(ROLE)
    engine = resolve_rollout(policy, pool.use_gpu)
    if not INFERENCE_ENGINES.metadata(engine).in_place:
        check_layout(devices_per_replica(policy), pool.store)
        check_reads_files(policy, engine)

        def start_replicas() -> Rollout:
            return start_rollout(policy, None, pool, threads=trainer.threads_per_worker, log_folder=log_folder)

        return engine, start_replicas
    group = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ActorRolloutRefWorker, config=policy, role="rollout", timeout_s=policy.nccl_timeout
        ),
        ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
        timeout_s=trainer.phase_timeout_s,
        threads=trainer.threads_per_worker,
    )

    def load() -> Rollout:
        group.init_model()
        return InPlaceRollout(group, policy.rollout)

    return engine, load


def check_reads_files(policy: ActorRolloutRefConfig, engine: str) -> None:
    """Refuse settings by which the model is another one than that in the files that an engine reads.

    Raises:
        RolloutError: there are such settings; the message names them.
    """
    if policy.model.adapted:
        raise RolloutError(
            f"actor_rollout_ref.model.lora_adapter_path={policy.model.lora_adapter_path} with {engine}, which "
            "reads the weights of model.path alone: set model.path to the merged model (hf_model of a checkpoint, "
            "or python -m hybridrl.checkpoint.merge), or rollout.name=hf"
        )
    if policy.model.load_in_4bit:
        raise RolloutError(
            f"actor_rollout_ref.model.load_in_4bit=True with {engine}, which reads the weights of model.path as they "
            "are; set load_in_4bit=False, or rollout.name=hf"
        )


def sampling_of(rollout: RolloutConfig, row: int, sample: int) -> SamplingParams:
    """Return the sampling parameters for an endpoint: those of training, with a seed for this sample.

    Raises:
        UserError: a setting is out of range.
    """
    key = stream_keys(rollout.seed, 0, "generate", [f"0-{row}"], [sample])[0]
    return replace(SamplingParams.for_training(rollout), seed=int(key) >> 33)  # 31 bits, which every endpoint accepts


class Endings:
    """Determines from a response's tokens whether it ended by itself.

    Args:
        config: `rollout` says where a response ends, and `model` with which tokens.
    """

    def __init__(self, config: ActorRolloutRefConfig) -> None:
        model, tokenizer = config.model, tokenizer_of(config.model)
        sampling = SamplingParams.for_training(config.rollout)
        self._limit = sampling.max_new_tokens
        self._eos = set() if sampling.ignore_eos else set(eos_token_ids(model.path, config_of(model), tokenizer))
        self._stop = StopStrings(tokenizer, sampling.stop)

    def reason(self, token_ids: Sequence[int]) -> str:
        """Return `stop` if the response ended by itself, even at its last allowed token, and `length` otherwise."""
        cut_off = len(token_ids) >= self._limit and token_ids[-1] not in self._eos and not self._stop.ends(token_ids)
        return "length" if cut_off else "stop"
