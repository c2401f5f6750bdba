"""Cross-checks before anything starts: valid settings that conflict with each other or with this machine."""

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybridrl.config.checks.algorithm import (
    check_correction,
    check_estimator,
    check_full_kl,
    check_names,
    check_rewards_to_advantages,
)
from hybridrl.config.checks.paths import check_class, check_files, check_function, check_model
from hybridrl.config.own_settings import read_own
from hybridrl.config.schema.actor import MICRO_BATCH_SIZE, ActorConfig
from hybridrl.config.schema.critic import CriticConfig
from hybridrl.config.schema.data import PromptConfig
from hybridrl.config.schema.engine import CheckpointConfig, OptimConfig
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.root import (
    EvaluationConfig,
    GenerationConfig,
    PPOTrainerConfig,
    RootConfig,
    SFTTrainerConfig,
)
from hybridrl.config.schema.trainer import JobConfig, PlacementConfig, RunConfig, TrainerConfig
from hybridrl.errors import ConfigError
from hybridrl.registry import (
    ADV_ESTIMATORS,
    INFERENCE_ENGINES,
    POLICY_LOSSES,
    REWARD_MANAGERS,
    TRAIN_ENGINES,
    Registry,
    has_replicas,
    is_endpoint,
)

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"


def validate(config: RootConfig) -> None:
    """Check a whole configuration against itself, the files it names and the devices of this machine.

    Raises:
        ConfigError: the configuration has faults. The message lists all of them, each with its keys, their values and
            what to change.
    """
    faults = [fault for check in _checks(config) for fault in check]
    if faults:
        raise ConfigError(faults)


def _checks(config: RootConfig) -> Iterator[Iterable[str]]:
    if isinstance(config, SFTTrainerConfig):
        return _sft_checks(config)
    if isinstance(config, GenerationConfig):
        return _generation_checks(config)
    if isinstance(config, EvaluationConfig):
        return _evaluation_checks(config)
    return _ppo_checks(config)


def _ppo_checks(config: PPOTrainerConfig) -> Iterator[Iterable[str]]:
    policy, trainer = config.actor_rollout_ref, config.trainer
    yield check_model("actor_rollout_ref.model", policy.model, config.trainer.device)
    if config.use_critic and config.critic.model.path != policy.model.path:
        yield check_model("critic.model", config.critic.model, config.trainer.device)
        yield check_names("critic.", config.critic.model.external_lib, {})
    yield _check_prompts(config)
    yield _check_reward(config)
    yield check_names("actor_rollout_ref.", policy.model.external_lib, _chosen(config))
    yield check_estimator(config)
    yield check_rewards_to_advantages(config)
    yield check_correction(config)
    yield check_full_kl(config)
    yield _check_batches(config, _ACTOR, policy.actor)
    if config.use_critic:
        yield _check_batches(config, "critic", config.critic)
    yield _check_lengths(config)
    yield _check_sampling(policy.rollout)
    yield _check_trainable(policy.rollout)
    yield _check_engines(config)
    yield _check_run(trainer)
    yield _check_keep(config)
    roles = {"actor_rollout_ref": True, "critic": config.use_critic, "ref": False, **dict.fromkeys(config.roles, False)}
    yield _check_placement(config.placement, trainer, roles)
    yield _check_devices(trainer, config.ray_kwargs.ray_init)


def _chosen(config: PPOTrainerConfig) -> dict[str, tuple[Registry[Any], str]]:
    """Everything that the run chooses by name: for each key, the registry and the name."""
    policy, manager = config.actor_rollout_ref, config.reward.reward_manager
    chosen: dict[str, tuple[Registry[Any], str]] = {
        "algorithm.adv_estimator": (ADV_ESTIMATORS, config.algorithm.adv_estimator),
        f"{_ACTOR}.policy_loss.loss_mode": (POLICY_LOSSES, policy.actor.policy_loss.loss_mode),
        f"{_ACTOR}.strategy": (TRAIN_ENGINES, policy.actor.strategy),
        "actor_rollout_ref.ref.strategy": (TRAIN_ENGINES, policy.ref.strategy),
        "critic.strategy": (TRAIN_ENGINES, config.critic.strategy),
    }
    if manager.source == "register":
        chosen["reward.reward_manager.name"] = (REWARD_MANAGERS, manager.name)
    return chosen | _chosen_rollout(policy.rollout)


def _chosen_rollout(rollout: RolloutConfig) -> dict[str, tuple[Registry[Any], str]]:
    return {} if rollout.name == "auto" else {f"{_ROLLOUT}.name": (INFERENCE_ENGINES, rollout.name)}


def _sft_checks(config: SFTTrainerConfig) -> Iterator[Iterable[str]]:
    yield check_model("model", config.model, config.trainer.device)
    yield check_names("", config.model.external_lib, {"engine.strategy": (TRAIN_ENGINES, config.engine.strategy)})
    yield _check_conversations(config)
    yield _check_contents("checkpoint", config.checkpoint, config.trainer)
    yield _check_optimizer("optim", config.optim)
    yield _check_run(config.trainer)
    yield _check_placement(config.placement, config.trainer, {"model": True})
    yield _check_devices(config.trainer, config.ray_kwargs.ray_init)


def _generation_checks(config: GenerationConfig) -> Iterator[Iterable[str]]:
    policy = config.actor_rollout_ref
    yield check_names("actor_rollout_ref.", policy.model.external_lib, _chosen_rollout(policy.rollout))
    if is_endpoint(policy.rollout.name):
        yield _check_endpoint(policy.rollout)
    else:
        yield check_model("actor_rollout_ref.model", policy.model, config.trainer.device)
    yield _check_answers(config)
    yield _check_same_lengths(policy.rollout, config.data)
    yield _check_greedy(policy.rollout, config.data.n_samples)
    if policy.rollout.nnodes:
        yield [f"{_ROLLOUT}.nnodes={policy.rollout.nnodes}: all machines generate here; set trainer.nnodes instead"]
    yield _check_placement(config.placement, config.trainer, {"actor_rollout_ref": True})
    yield _check_devices(config.trainer, config.ray_kwargs.ray_init)


def _evaluation_checks(config: EvaluationConfig) -> Iterator[Iterable[str]]:
    if not config.data.path:
        yield ["data.path is not set; give the parquet, json or jsonl files that hold responses"]
    yield check_files("data.path", config.data.path)
    yield check_function(config.reward.custom_reward_function)


# ---------------------------------------------------------------- data and rewards


def _check_prompts(config: PPOTrainerConfig) -> Iterator[str]:
    data, trainer = config.data, config.trainer
    yield from check_class("data.custom_cls", data.custom_cls.path, data.custom_cls.name, "path", "name")
    sampler = data.sampler
    yield from check_class("data.sampler", sampler.class_path, sampler.class_name, "class_path", "class_name")
    if data.custom_cls.path is None:
        yield from check_files("data.train_files", data.train_files)
        yield from check_files("data.val_files", data.val_files)
    if not data.train_files:
        yield "data.train_files is not set; give parquet, json or jsonl files with prompts"
    if not data.val_files and trainer.val_only:
        yield "trainer.val_only=True without data.val_files"
    if not data.val_files and trainer.test_freq > 0:
        yield f"trainer.test_freq={trainer.test_freq} without data.val_files; set them, or trainer.test_freq=-1"
    if 0 <= data.train_max_samples < data.train_batch_size:
        yield (
            f"data.train_max_samples={data.train_max_samples} is less than data.train_batch_size="
            f"{data.train_batch_size}: there would be no batch"
        )


def _check_answers(config: GenerationConfig) -> Iterator[str]:
    """Check `data` of generation: its inputs and its outputs."""
    data, samples = config.data, config.actor_rollout_ref.rollout.n
    yield from check_class("data.custom_cls", data.custom_cls.path, data.custom_cls.name, "path", "name")
    if not data.path:
        yield "data.path is not set; give parquet, json or jsonl files with prompts"
    if data.custom_cls.path is None:
        yield from check_files("data.path", data.path)
    output = Path(data.output_path).expanduser()
    if not data.output_path:
        yield "data.output_path is not set; name the parquet file that the responses go to"
    elif output.suffix != ".parquet" or output.is_dir():
        yield f"data.output_path={data.output_path}: must name a file that ends in .parquet"
    elif output.resolve() in [Path(file).expanduser().resolve() for file in data.path]:
        yield f"data.output_path={data.output_path} is an input file (data.path) too; name another"
    if samples not in (1, data.n_samples):
        yield f"data.n_samples={data.n_samples} and {_ROLLOUT}.n={samples} are the same thing; set one of them"


def _check_endpoint(rollout: RolloutConfig) -> Iterator[str]:
    """Check `rollout.openai`."""
    where, settings = f"{_ROLLOUT}.openai", rollout.openai
    if not settings.base_url:
        yield f"{_ROLLOUT}.name=openai without {where}.base_url; set it, e.g. to http://localhost:8000/v1"
    elif not settings.base_url.startswith(("http://", "https://")):
        yield f"{where}.base_url={settings.base_url}: must begin with http:// or https://"
    if settings.api_key_env and not os.environ.get(settings.api_key_env, "").strip():
        yield f"{where}.api_key_env={settings.api_key_env}: the environment variable is not set"


def _check_conversations(config: SFTTrainerConfig) -> Iterator[str]:
    data = config.data
    yield from check_class("data.custom_cls", data.custom_cls.path, data.custom_cls.name, "path", "name")
    if data.custom_cls.path is None:
        yield from check_files("data.train_files", data.train_files)
        yield from check_files("data.val_files", data.val_files)
    if not data.train_files:
        yield "data.train_files is not set; give parquet, json or jsonl files with conversations"
    if not data.val_files and config.trainer.test_freq > 0:
        yield f"trainer.test_freq={config.trainer.test_freq} without data.val_files; set them, or trainer.test_freq=-1"
    if (data.prompt_key is None) != (data.response_key is None):
        given = "prompt_key" if data.prompt_key else "response_key"
        yield f"data.{given}={data[given]} alone: set data.prompt_key and data.response_key, or neither for messages"
    if data.micro_batch_size_per_gpu > data.train_batch_size and data.micro_batch_size_per_gpu != MICRO_BATCH_SIZE:
        yield (
            f"data.micro_batch_size_per_gpu={data.micro_batch_size_per_gpu} is more than data.train_batch_size="
            f"{data.train_batch_size}, the sequences of one step"
        )
    if data.use_dynamic_bsz and data.max_token_len_per_gpu < data.max_length:
        yield (
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} is less than data.max_length={data.max_length}: "
            "the longest sequence does not fit into a micro-batch"
        )
    if 0 <= data.train_max_samples < data.train_batch_size:
        yield (
            f"data.train_max_samples={data.train_max_samples} is less than data.train_batch_size="
            f"{data.train_batch_size}: there would be no batch"
        )


def _check_reward(config: PPOTrainerConfig) -> Iterator[str]:
    manager = config.reward.reward_manager
    yield from check_function(config.reward.custom_reward_function)
    if manager.source == "importlib":
        module = manager.module
        yield from check_class("reward.reward_manager.module", module.path, module.name, "path", "name")
        if manager.module.path is None:
            yield "reward.reward_manager.source=importlib without reward.reward_manager.module.path"
    elif (settings := REWARD_MANAGERS.settings(manager.name)) is not None:
        yield from read_own(settings, config.reward.reward_kwargs, "reward.reward_kwargs.", config)[1]


# ---------------------------------------------------------------- batches


def _check_batches(config: PPOTrainerConfig, where: str, part: ActorConfig | CriticConfig) -> Iterator[str]:
    batch, mini, micro = config.data.train_batch_size, part.ppo_mini_batch_size, part.ppo_micro_batch_size_per_gpu
    samples = config.actor_rollout_ref.rollout.n
    if mini > batch:
        yield (
            f"{where}.ppo_mini_batch_size={mini} is more than data.train_batch_size={batch}; both count prompts over "
            f"all processes: set it to {batch} or a divisor of it"
        )
    elif batch % mini:
        yield (
            f"data.train_batch_size={batch} is not a multiple of {where}.ppo_mini_batch_size={mini} (prompts; each has "
            f"{_ROLLOUT}.n={samples} samples); nearest divisors: {_divisors(batch, mini)}"
        )
    if micro > min(mini, batch) * samples and micro != MICRO_BATCH_SIZE:
        yield (
            f"{where}.ppo_micro_batch_size_per_gpu={micro} is more than the {mini * samples} sequences of a mini-batch "
            f"({mini} prompts x {samples} samples)"
        )


def _divisors(number: int, near: int) -> str:
    """The divisors of `number` closest to `near`, below and above."""
    below = max(d for d in range(1, near + 1) if number % d == 0)
    above = min(d for d in range(near, number + 1) if number % d == 0)
    return f"{below}, {above}" if below != above else str(below)


def _check_lengths(config: PPOTrainerConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    rollout, actor, ref = policy.rollout, policy.actor, policy.ref
    yield from _check_same_lengths(rollout, config.data)
    for name, count in (
        (f"{_ACTOR}.rollout_n", actor.rollout_n),
        ("actor_rollout_ref.ref.rollout_n", ref.rollout_n),
        ("critic.rollout_n", config.critic.rollout_n),
    ):
        if count != rollout.n:
            yield f"{name}={count} and {_ROLLOUT}.n={rollout.n} are the same thing; set the latter, the former follows"
    total = rollout.prompt_length + rollout.response_length
    budgets = [
        (actor.use_dynamic_bsz, f"{_ACTOR}.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        (
            rollout.log_prob_use_dynamic_bsz,
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
            rollout.log_prob_max_token_len_per_gpu,
        ),
    ]
    if config.use_reference:
        where = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
        budgets.append((ref.log_prob_use_dynamic_bsz, where, ref.log_prob_max_token_len_per_gpu))
    if config.use_critic:
        critic = config.critic
        for name in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"):
            budgets.append((critic.use_dynamic_bsz, f"critic.{name}", critic[name]))
    reported: set[int] = set()
    for dynamic, where, tokens in budgets:
        if dynamic and tokens < total and tokens not in reported:  # the other keys follow the first
            reported.add(tokens)
            yield f"{where}={tokens} is less than one sequence of {total} tokens (prompt and response); raise it"


def _check_same_lengths(rollout: RolloutConfig, data: PromptConfig) -> Iterator[str]:
    for name, length, limit in (
        ("prompt", rollout.prompt_length, data.max_prompt_length),
        ("response", rollout.response_length, data.max_response_length),
    ):
        if length != limit:
            yield (
                f"{_ROLLOUT}.{name}_length={length} and data.max_{name}_length={limit} are the same thing; set the one "
                "of data, the other follows"
            )
    total = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and total > rollout.max_model_len:
        yield (
            f"data.max_prompt_length={rollout.prompt_length} and data.max_response_length={rollout.response_length} "
            f"are {total} tokens together, more than {_ROLLOUT}.max_model_len={rollout.max_model_len}"
        )


def _check_greedy(rollout: RolloutConfig, samples: int) -> Iterator[str]:
    if not rollout.do_sample and samples > 1:
        yield f"{_ROLLOUT}.do_sample=False with n={samples}: greedy samples are all alike; set do_sample=True"


def _check_trainable(rollout: RolloutConfig) -> Iterator[str]:
    """Check that the engine accepts weights, which training needs."""
    if is_endpoint(rollout.name):
        yield (
            f"{_ROLLOUT}.name={rollout.name} cannot train: the endpoint takes no weights from this run, and its "
            "tokens and log-probabilities are not ours. Use auto or hf here; it is for main_generation"
        )


def _check_sampling(rollout: RolloutConfig) -> Iterator[str]:
    yield from _check_greedy(rollout, rollout.n)
    check = rollout.val_kwargs
    if check.do_sample and check.temperature == 0:
        yield f"{_ROLLOUT}.val_kwargs.do_sample=True with temperature=0; set a temperature, 1.0 is usual"
    if check.n > 1 and not check.do_sample:
        yield (
            f"{_ROLLOUT}.val_kwargs.n={check.n} with do_sample=False: greedy samples are all alike; set "
            "val_kwargs.do_sample=True and a temperature"
        )


# ---------------------------------------------------------------- engines and run


def _check_engines(config: PPOTrainerConfig) -> Iterator[str]:
    policy, critic = config.actor_rollout_ref, config.critic
    if policy.rollout.nnodes and not has_replicas(policy.rollout.name):
        yield (
            f"{_ROLLOUT}.nnodes={policy.rollout.nnodes} with name={policy.rollout.name}: only engines have machines of "
            f"their own; set name to one of {', '.join(filter(has_replicas, INFERENCE_ENGINES.names()))}, or nnodes=0"
        )
    engines = [
        (f"{_ACTOR}", policy.actor.strategy, f"{_ACTOR}.fsdp_config", policy.actor.fsdp_config, False),
        (
            "actor_rollout_ref.ref",
            policy.ref.strategy,
            "actor_rollout_ref.ref.fsdp_config",
            policy.ref.fsdp_config,
            True,
        ),
        ("critic", critic.strategy, "critic.fsdp", critic.fsdp, False),
    ]
    for role, strategy, where, engine, frozen in engines:
        if engine.strategy != strategy:
            yield f"{where}.strategy={engine.strategy} and {role}.strategy={strategy} must agree; set the latter alone"
        if engine.forward_only != frozen:
            kind = "frozen" if frozen else "trained"
            yield f"{where}.forward_only={engine.forward_only}: {role} is {kind}; remove it"
    yield from _check_contents(f"{_ACTOR}.checkpoint", policy.actor.checkpoint, config.trainer)
    yield from _check_optimizer(f"{_ACTOR}.optim", policy.actor.optim)
    if config.use_critic:
        yield from _check_contents("critic.checkpoint", critic.checkpoint, config.trainer)
        yield from _check_optimizer("critic.optim", critic.optim)


def _check_optimizer(where: str, optim: OptimConfig) -> Iterator[str]:
    package = optim.optimizer_impl.split(".")[0]
    if package == "bitsandbytes":
        yield (
            f"{where}.optimizer_impl={optim.optimizer_impl}: its optimizers cannot work on sharded weights; use "
            "optimizer_impl=torchao.optim with optimizer=AdamW8bit"
        )
    elif importlib.util.find_spec(package) is None:
        mend = "; pip install 'hybridrl[torchao]'" if package == "torchao" else "; name a module that is installed"
        yield f"{where}.optimizer_impl={optim.optimizer_impl}: there is no package {package}{mend}"


def _check_contents(where: str, checkpoint: CheckpointConfig, trainer: RunConfig) -> Iterator[str]:
    missing = [name for name in checkpoint.load_contents if name not in checkpoint.save_contents]
    goes_back = trainer.resume_mode != "disable" or (isinstance(trainer, TrainerConfig) and _rollbacks(trainer))
    if missing:
        yield f"{where}.load_contents has {', '.join(missing)}, which {where}.save_contents does not write"
    elif "model" not in checkpoint.load_contents and goes_back:
        key = "save_contents" if "model" not in checkpoint.save_contents else "load_contents"
        yield (
            f"{where}.{key}={checkpoint[key]} lacks model (hf_model is for other programs and is never read), so "
            "no run could be resumed from such a checkpoint and no health check could roll back to it; add model, or "
            "set trainer.resume_mode=disable if none is to be"
        )


def _check_run(trainer: RunConfig) -> Iterator[str]:
    if trainer.resume_mode == "resume_path":
        if trainer.resume_from_path is None:
            yield "trainer.resume_mode=resume_path without trainer.resume_from_path"
        else:
            path = Path(trainer.resume_from_path).expanduser()
            if not path.is_dir():
                yield f"trainer.resume_from_path={trainer.resume_from_path}: no such folder (from {Path.cwd()})"
            elif not re.fullmatch(r"global_step_\d+", path.resolve().name):
                yield f"trainer.resume_from_path={trainer.resume_from_path}: must be a folder .../global_step_N"
    elif trainer.resume_from_path is not None:
        yield (
            f"trainer.resume_from_path={trainer.resume_from_path} acts with trainer.resume_mode=resume_path only, and "
            f"it is {trainer.resume_mode}"
        )
    if isinstance(trainer, TrainerConfig) and trainer.save_freq <= 0:
        for name in _rollbacks(trainer):
            yield f"trainer.health.{name}.action=rollback needs checkpoints to go back to; set trainer.save_freq"
    folder = Path(trainer.default_local_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        yield f"trainer.default_local_dir={folder}: is a file; name a folder"


def _rollbacks(trainer: TrainerConfig) -> list[str]:
    """Health checks that go back to a checkpoint."""
    checks = trainer.health
    return [name for name in checks.keys() if getattr(checks[name], "action", None) == "rollback"]


def _check_keep(config: PPOTrainerConfig) -> Iterator[str]:
    actor, critic = config.trainer.max_actor_ckpt_to_keep, config.trainer.max_critic_ckpt_to_keep
    if not config.use_critic and critic != actor:
        yield (
            f"trainer.max_critic_ckpt_to_keep={critic} without a critic (algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator}): remove it; max_actor_ckpt_to_keep says how many checkpoints are kept"
        )
    if config.use_critic and actor != critic:
        yield (
            f"trainer.max_actor_ckpt_to_keep={actor} and trainer.max_critic_ckpt_to_keep={critic}: actor and critic "
            "are one checkpoint here; set the former, the latter follows"
        )


def _check_placement(placement: PlacementConfig, trainer: JobConfig, roles: dict[str, bool]) -> Iterator[str]:
    """Check the pools; `roles` maps each role that may be placed to whether the run requires it."""
    pools, given = placement.pools, placement.roles
    shape = [trainer.n_gpus_per_node] * trainer.nnodes
    if "global" in pools and pools["global"] != shape:
        yield (
            f"placement.pools.global={pools['global']} and trainer.nnodes x n_gpus_per_node = {shape} are the same "
            "thing; set those of trainer, or name your pool otherwise"
        )
    for name, processes in pools.items():
        if not processes:
            yield f"placement.pools.{name} is empty; list the processes on each machine, e.g. [2]"
        if name != "global" and name not in given.values():
            yield f"placement.pools.{name} holds no role; map one to it in placement.roles, or remove it"
    for role, pool in given.items():
        if role not in roles:
            yield f"placement.roles.{role}: unknown role; there are {', '.join(roles)}"
        if pool not in pools:
            yield f"placement.roles.{role}={pool}: no such pool; placement.pools has {', '.join(pools) or 'none'}"
    for role, needed in roles.items():
        if needed and role not in given:
            yield f"placement.roles.{role} is missing; name the pool it lives in"


def _check_devices(trainer: JobConfig, ray_init: dict[str, Any]) -> Iterator[str]:
    """Check the devices of this machine without importing torch; a cluster's are checked once Ray is running."""
    address = ray_init.get("address") or os.environ.get("RAY_ADDRESS") or "local"  # "local" asks for a new Ray instance
    if address != "local" or trainer.nnodes > 1 or trainer.device == "cpu":
        return
    yield from check_gpus(trainer, visible_gpus())


def check_gpus(trainer: JobConfig, count: int | None) -> Iterator[str]:
    """Check that this machine's `count` GPUs (None: unknown) are enough for the requested processes."""
    if count is None:
        return
    if count == 0 and trainer.device == "cuda":
        yield "trainer.device=cuda, and no GPU is visible on this machine; use trainer.device=cpu, or auto"
    elif 0 < count < trainer.n_gpus_per_node:
        yield (
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, and {count} GPUs are visible on this machine; set it "
            f"to {count} at most"
        )


def visible_gpus(root: Path = Path("/")) -> int | None:
    """Number of NVIDIA GPUs visible here, from the driver's files and CUDA_VISIBLE_DEVICES; None if unknown."""
    if (root / "dev/kfd").exists():  # AMD: the number of GPUs cannot be read this simply
        return None
    driver = root / "proc/driver/nvidia/gpus"
    there = len(list(driver.iterdir())) if driver.is_dir() else len(list((root / "dev").glob("nvidia[0-9]*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or there == 0:
        return there
    return min(there, len([name for name in chosen.split(",") if name.strip() and name.strip() != "-1"]))
