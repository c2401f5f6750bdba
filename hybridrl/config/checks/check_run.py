"""Cross-checks before anything starts: valid settings that conflict with each other or with this machine."""

import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hybridrl.config.checks.check_agents import check_agents
from hybridrl.config.checks.check_algorithm import (
    check_estimator,
    check_full_kl,
    check_names,
    check_rewards_to_advantages,
    check_tracked_values,
)
from hybridrl.config.checks.check_distillation import check_distillation, chosen_by_name
from hybridrl.config.checks.check_judge import check_judge
from hybridrl.config.checks.check_mappings import check_mappings
from hybridrl.config.checks.check_mixture import check_mixture
from hybridrl.config.checks.check_places import check_places
from hybridrl.config.checks.check_roles import (
    check_contents,
    check_hub,
    check_optimizer,
    check_placement,
    check_roles,
    rollbacks,
)
from hybridrl.config.checks.check_schedule import check_schedule
from hybridrl.config.checks.check_served import check_served
from hybridrl.config.checks.consequences import consequences
from hybridrl.config.checks.idle import check_idle
from hybridrl.config.checks.paths import check_class, check_files, check_functions, check_model, check_source_file
from hybridrl.config.checks.step_scores import check_step_scores
from hybridrl.config.checks.supervised import check_supervised
from hybridrl.config.convert import build, show
from hybridrl.config.data_names import KINDS, dataset_name, local_files
from hybridrl.config.entry_settings import read_reward_kwargs
from hybridrl.config.output import as_dict
from hybridrl.config.schema.data import PromptConfig
from hybridrl.config.schema.node import declared
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.root import (
    EvaluationConfig,
    GenerationConfig,
    PPOTrainerConfig,
    RootConfig,
    SuiteEvaluationConfig,
    SupervisedConfig,
)
from hybridrl.config.schema.trainer import JobConfig, RunConfig, TrainerConfig
from hybridrl.errors import ConfigError, RewardError
from hybridrl.notify import notify
from hybridrl.registry import (
    ADV_ESTIMATORS,
    CURRICULA,
    INFERENCE_ENGINES,
    OBJECTIVES,
    POLICY_LOSSES,
    REWARD_MANAGERS,
    TOOL_PARSERS,
    TRAIN_ENGINES,
    Registry,
    has_replicas,
    is_endpoint,
    may_have_replicas,
)
from hybridrl.utils.urls import is_remote, masked
from hybridrl.utils.user_code import load_object

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"


def validate(config: RootConfig) -> None:
    """Check a whole configuration against itself, the files it names and the devices of this machine.

    Settings whose consequence the user may not expect are reported as notices.

    Raises:
        ConfigError: the configuration has faults. The message lists all of them, each with its keys, their values and
            what to change.
    """
    for notice in check(config):
        notify(notice, once=True)


def check(config: RootConfig, elsewhere: bool = False) -> list[str]:
    """Do what `validate` does, and return the notices.

    Args:
        elsewhere: the run will have other devices than this machine's, which are not compared with the settings.
    """
    misfits = check_values(config)
    if misfits:  # the other checks rely on types
        raise ConfigError(misfits)
    faults = [fault for faults_of_check in _checks(config) for fault in faults_of_check]
    if not elsewhere and not isinstance(config, EvaluationConfig):
        faults += _check_devices(config.trainer, config.ray_kwargs.ray_init)
    idle, notices = check_idle(config, faults)
    faults += [*idle, *check_mappings(config)]
    faults += check_places(config, faults)
    if faults:
        raise ConfigError(faults)
    return [*notices, *consequences(config)]


def check_values(config: RootConfig) -> list[str]:
    """Find values that the command line would refuse or convert, which a program may have assigned."""
    faults: dict[str, str] = {}
    current = as_dict(config)
    fitted = as_dict(build(type(config), current, faults, {}))
    for name in declared(type(config)):
        value, expected = (functools.reduce(operator.getitem, name.split("."), tree) for tree in (current, fitted))
        if name not in faults and value != expected:
            faults[name] = f"{name}={show(value)}: must be {show(expected)}, a {type(expected).__name__}"
    return list(faults.values())


def _checks(config: RootConfig) -> Iterator[Iterable[str]]:
    if isinstance(config, SupervisedConfig):
        return _supervised_checks(config)
    if isinstance(config, GenerationConfig):
        return _generation_checks(config)
    if isinstance(config, EvaluationConfig):
        return _evaluation_checks(config)
    return _ppo_checks(config)


def _ppo_checks(config: PPOTrainerConfig) -> Iterator[Iterable[str]]:
    policy, trainer = config.actor_rollout_ref, config.trainer
    yield check_names("actor_rollout_ref.", policy.model.external_lib, _named_entries(config))  # also registers roles
    yield check_roles(config)
    yield check_hub("actor_rollout_ref.actor.checkpoint", policy.actor.checkpoint, trainer)
    yield _check_prompts(config)
    yield check_mixture(config.data)
    yield _check_reward(config)
    yield check_estimator(config)
    yield check_rewards_to_advantages(config)
    yield check_tracked_values(config)
    yield check_full_kl(config)
    yield check_distillation(config)
    yield check_served(config)
    yield check_schedule(config)
    yield _check_same_lengths(policy.rollout, config.data)
    yield _check_sampling(policy.rollout)
    yield check_agents(policy.rollout)
    yield _check_trainable(policy.rollout)
    yield _check_replicas(policy.rollout)
    yield _check_transfer(policy.rollout, policy.model.adapted)
    yield _check_run(trainer)
    yield _check_keep(config)


def _named_entries(config: PPOTrainerConfig) -> dict[str, tuple[Registry[Any], str]]:
    """Everything that the run chooses by name: for each key, the registry and the name."""
    policy, manager = config.actor_rollout_ref, config.reward.reward_manager
    choices: dict[str, tuple[Registry[Any], str]] = {
        "algorithm.adv_estimator": (ADV_ESTIMATORS, config.algorithm.adv_estimator),
        f"{_ACTOR}.policy_loss.loss_mode": (POLICY_LOSSES, policy.actor.policy_loss.loss_mode),
        f"{_ROLLOUT}.multi_turn.format": (TOOL_PARSERS, policy.rollout.multi_turn.format),
    }
    if (curriculum := config.data.mixture.curriculum.name) != "fixed":
        choices["data.mixture.curriculum.name"] = (CURRICULA, curriculum)
    if manager.source == "register":
        choices["reward.reward_manager.name"] = (REWARD_MANAGERS, manager.name)
    return choices | chosen_by_name(config) | _chosen_rollout(policy.rollout)


def _chosen_rollout(rollout: RolloutConfig) -> dict[str, tuple[Registry[Any], str]]:
    return {} if rollout.name == "auto" else {f"{_ROLLOUT}.name": (INFERENCE_ENGINES, rollout.name)}


def _supervised_checks(config: SupervisedConfig) -> Iterator[Iterable[str]]:
    choices: dict[str, tuple[Registry[Any], str]] = {
        "engine.strategy": (TRAIN_ENGINES, config.engine.strategy),
        f"{config.objective_group}.loss_type": (OBJECTIVES, config.objective.loss_type),
    }
    yield check_model("model", config.model, config.trainer.device)
    yield check_names("", config.model.external_lib, choices)
    yield check_supervised(config)
    yield check_contents("checkpoint", config.checkpoint, config.trainer)
    yield check_hub("checkpoint", config.checkpoint, config.trainer)
    yield check_optimizer("optim", config.optim)
    yield _check_run(config.trainer)
    yield check_placement(config.placement, config.trainer, [("model",)], [("model",)])


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
    places = [("actor_rollout_ref",)]
    yield check_placement(config.placement, config.trainer, places, places)
    if isinstance(config, SuiteEvaluationConfig):
        yield check_functions(config.reward, config)


def _evaluation_checks(config: EvaluationConfig) -> Iterator[Iterable[str]]:
    if not config.data.path:
        yield [f"data.path is not set; give the files ({KINDS}) that hold responses"]
    elif config.data.output_path is None and not _is_local(first := config.data.path[0]):
        yield [f"data.path={masked(first)} is not a local file; set data.output_path to the file for the metrics"]
    yield check_files("data.path", config.data.path)
    yield check_functions(config.reward, config)


def _is_local(entry: str) -> bool:
    return not is_remote(entry) and dataset_name(entry) is None


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
        yield f"data.train_files is not set; give files with prompts ({KINDS})"
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
        yield f"data.path is not set; give files with prompts ({KINDS})"
    if data.custom_cls.path is None:
        yield from check_files("data.path", data.path)
    output = Path(data.output_path).expanduser()
    if is_remote(data.output_path):
        return  # refused with the other places
    if not data.output_path:
        yield "data.output_path is not set; name the parquet file that the responses go to"
    elif output.suffix != ".parquet" or output.is_dir():
        yield f"data.output_path={data.output_path}: must name a file that ends in .parquet"
    elif output.resolve() in [Path(file).expanduser().resolve() for name in data.path for file in local_files(name)]:
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


def _check_reward(config: PPOTrainerConfig) -> Iterator[str]:
    manager = config.reward.reward_manager
    yield from check_functions(config.reward, config)
    yield from _check_reward_model(config)
    if manager.source == "importlib":
        where, module = "reward.reward_manager.module", manager.module
        faults = list(check_class(where, module.path, module.name, "path", "name"))
        if module.path is None:
            faults.append("reward.reward_manager.source=importlib without reward.reward_manager.module.path")
        elif Path(module.path).expanduser().is_file():
            faults += check_source_file(f"{where}.path", module.path)
        yield from faults
        if module.path and module.name and not faults:
            names = module.path, module.name, f"{where}.path", f"{where}.name"
            yield from _check_own_reward_kwargs(lambda: load_object(*names, RewardError), config)
        return
    yield from _check_reward_kwargs(config)


def _check_reward_kwargs(config: PPOTrainerConfig) -> Iterator[str]:
    """Check the settings of the manager, as it reads them."""
    name = config.reward.reward_manager.name
    if REWARD_MANAGERS.is_builtin(name):
        yield from read_reward_kwargs(REWARD_MANAGERS.settings(name), name, config)[1]
    else:
        yield from _check_own_reward_kwargs(lambda: REWARD_MANAGERS.get(name), config)


def _check_own_reward_kwargs(load: Callable[[], Any], config: PPOTrainerConfig) -> Iterator[str]:
    """Check the settings of a user's manager, as it reads them."""
    try:
        manager = load()
    except RewardError:
        return  # another check reports it, or whoever makes the manager
    try:
        # Otherwise it is no reward manager, which is reported when it is made.
        if inspect.ismethod(getattr(manager, "read_settings", None)):
            manager.read_settings(config)
    except RewardError as error:
        yield str(error)


def _check_reward_model(config: PPOTrainerConfig) -> Iterator[str]:
    where, part, placed = "reward.reward_model", config.reward.reward_model, config.placement.roles
    if not part.enable:
        return
    if not math.isfinite(part.weight):
        yield f"{where}.weight={part.weight}: must be finite"
    yield from check_step_scores(config)
    if part.is_judge:
        yield from check_judge(config)
    if part.is_judge and not part.serves_judge:
        return
    if part.model.adapted:
        yield (
            f"{where}.model.lora_rank={part.model.lora_rank}, lora_adapter_path={part.model.lora_adapter_path}: the "
            "reward model is frozen and read without an adapter; merge the adapter into the model that path names"
        )
    if part.model.load_in_4bit and part.rollout.name:
        yield (
            f"{where}.model.load_in_4bit=True with {where}.rollout.name={part.rollout.name}: an inference engine reads "
            "the model as it is; leave rollout.name out, or set load_in_4bit=False"
        )
    if part.enable_resource_pool and not part.nnodes:
        yield f"{where}.enable_resource_pool=True without {where}.nnodes; set it, and n_gpus_per_node"
    if part.own_pool and "reward_model" in placed:
        yield (
            f"{where}.enable_resource_pool=True and placement.roles.reward_model={placed['reward_model']} both say "
            "where the reward model runs; set one of them"
        )


# ---------------------------------------------------------------- lengths and sampling


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
    if rollout.temperature == 0:
        yield (
            f"{_ROLLOUT}.temperature=0: must be greater than 0. For greedy responses set {_ROLLOUT}.do_sample=False "
            "(in training only with n=1; validation is greedy by itself, see val_kwargs)"
        )
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


# ---------------------------------------------------------------- run


def _check_replicas(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.nnodes and not may_have_replicas(rollout.name):
        yield (
            f"{_ROLLOUT}.nnodes={rollout.nnodes} with name={rollout.name}: only engines have machines of their own; "
            f"set name to one of {', '.join(filter(has_replicas, INFERENCE_ENGINES.names()))}, or nnodes=0"
        )


def _check_transfer(rollout: RolloutConfig, adapted: bool) -> Iterator[str]:
    where, transfer = f"{_ROLLOUT}.checkpoint_engine", rollout.checkpoint_engine
    if adapted and (transfer.check_weights or transfer.delta or transfer.method == "planned"):
        yield (
            f"{where}.method={transfer.method}, check_weights={transfer.check_weights} and delta={transfer.delta} with "
            "an adapter (actor_rollout_ref.model.lora_rank or lora_adapter_path), which is merged into whole tensors "
            "that cannot be sent by a plan; set method to auto or streamed, and the others to false"
        )
    if transfer.check_weights and transfer.method == "streamed":
        yield (
            f"{where}.check_weights=True with method=streamed: only weights that are sent by a plan are compared; set "
            "method to auto or planned, or check_weights=false"
        )
    if transfer.delta and transfer.method == "streamed":
        yield (
            f"{where}.delta=True with method=streamed: changes are sent by a plan only; set method to auto or planned, "
            "or delta=false"
        )
    if transfer.delta and not rollout.nnodes:
        yield (
            f"{where}.delta=True with {_ROLLOUT}.nnodes=0: replicas on the devices of training read the new weights "
            "from memory, so that there is nothing to save; set nnodes to the nodes of the replicas' own devices, or "
            "delta=false"
        )
    in_place = INFERENCE_ENGINES.knows(rollout.name) and INFERENCE_ENGINES.metadata(rollout.name).in_place
    if in_place and (transfer.check_weights or transfer.method != "auto"):
        yield (
            f"{where}.method={transfer.method} and check_weights={transfer.check_weights} with name={rollout.name}, "
            "which generates with the training weights in place, so that none are sent; set method=auto and "
            f"check_weights=false, or name to one of {', '.join(filter(has_replicas, INFERENCE_ENGINES.names()))}"
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
    if isinstance(trainer, TrainerConfig) and trainer.save_freq <= 0:
        for name in rollbacks(trainer):
            yield f"trainer.health.{name}.action=rollback needs checkpoints to go back to; set trainer.save_freq"
    folder = Path(trainer.default_local_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        yield f"trainer.default_local_dir={folder}: is a file; name a folder"


def _check_keep(config: PPOTrainerConfig) -> Iterator[str]:
    actor, critic = config.trainer.max_actor_ckpt_to_keep, config.trainer.max_critic_ckpt_to_keep
    if config.use_critic and actor != critic:
        yield (
            f"trainer.max_actor_ckpt_to_keep={actor} and trainer.max_critic_ckpt_to_keep={critic}: actor and critic "
            "are one checkpoint here; set the former, the latter follows"
        )


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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or there == 0:
        return there
    return min(there, len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"]))
