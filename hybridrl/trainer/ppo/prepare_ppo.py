"""Checks everything that can fail cheaply before a model is loaded.

The user's modules, tokenizer, data, reward function and sampling, and the checkpoint to resume from, are checked here
while Ray and the worker processes start.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from hybridrl.config import ModelConfig, PPOTrainerConfig
from hybridrl.config.roles import POLICY, RoleSpec, active_roles, pool_of, pools_of
from hybridrl.data import create_rl_dataset
from hybridrl.data.ground_truth import report_missing
from hybridrl.errors import ModelError
from hybridrl.models.info import check_files, check_same_tokenizer, checked_identity, tokenizer_of
from hybridrl.models.model_config import checked_source, config_of
from hybridrl.models.rope import check_length
from hybridrl.models.vision import is_vision_model, processor_of
from hybridrl.notify import notify
from hybridrl.observe.tracking import check_loggers
from hybridrl.registry import INFERENCE_ENGINES, import_external_lib
from hybridrl.reward import RewardManager, create_reward_manager
from hybridrl.rollout.start_replicas import check_layout, devices_per_replica, resolve_rollout
from hybridrl.single_controller import ResourcePoolManager
from hybridrl.trainer.ppo.run_requirements import check_algorithm
from hybridrl.trainer.ppo.served_judge import check_judge_model
from hybridrl.trainer.ppo.served_role import check_served
from hybridrl.trainer.ppo.teacher_rows import check_rows, check_teachers
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.startup import check_engine
from hybridrl.workers.losses import check_kl_form, check_router_replay


def prepare(
    config: PPOTrainerConfig,
    role_worker_mapping: Mapping[str, Any] | None = None,
    resource_pool_manager: ResourcePoolManager | None = None,
) -> RayPPOTrainer:
    """Build the trainer, with everything that lives on the controller.

    Raises:
        UserError: a setting, file or function cannot work. No model has been loaded yet.
    """
    model = config.actor_rollout_ref.model
    import_external_lib(model.external_lib)  # estimators run here; losses, engines and model classes in other processes
    for check in checks_without_model(config):
        check()
    tokenizer = tokenizer_of(model)
    for check in checks_of_models(config, tokenizer):
        check()
    reward = create_reward_manager(config, tokenizer)
    try:
        reward.start()
        train, val = read_data(config, tokenizer)
        trainer = trainer_of(config, tokenizer, reward, (train, val), role_worker_mapping, resource_pool_manager)
        trainer.run.look_for_checkpoint()
        return trainer
    except BaseException:
        reward.close()
        raise


def checks_without_model(config: PPOTrainerConfig) -> tuple[Callable[[], object], ...]:
    """Return the checks of a run that read no file of a model; each raises a `UserError`, whatever the others do."""
    return partial(check_loggers, config.trainer.logger), partial(check_algorithm, config)


def checks_of_models(
    config: PPOTrainerConfig, tokenizer: Any, *, weights: bool = True
) -> Iterator[Callable[[], object]]:
    """Yield the checks of settings against the models that they name, which do not depend on each other either.

    Args:
        weights: whether the files of weights are on this machine.
    """
    yield partial(checked_identity, config.actor_rollout_ref.model, tokenizer)
    yield partial(_check_images, config)
    yield partial(_check_tokenizers, config, tokenizer)
    yield from _checks_of_engines(config, weights)
    yield partial(check_router_replay, config)
    yield partial(check_kl_form, config)
    yield partial(check_teachers, config, tokenizer)
    yield partial(check_judge_model, config)


def check_rollout(config: PPOTrainerConfig, manager: ResourcePoolManager) -> None:
    """Refuse an engine, or a layout of its replicas, that cannot work, and engines that cannot serve fixed models.

    Args:
        manager: knows whether the slots of the pools are GPUs. Only the cluster does: this process may be on a node
            without.
    """
    for check in checks_of_rollout(config, lambda role: manager.get_resource_pool(role).use_gpu):
        check()


def checks_of_rollout(config: PPOTrainerConfig, on_gpu: Callable[[str], bool | None]) -> Iterator[Callable[[], object]]:
    """Yield the checks of engines that generate and that serve fixed models.

    Args:
        on_gpu: returns whether the slots of a role are GPUs; None: whether this machine has one.
    """
    for spec in active_roles(config):
        yield partial(check_served, spec.served(config), bool(on_gpu(spec.name)))
    yield partial(_check_generation, config, on_gpu(POLICY))


def _check_generation(config: PPOTrainerConfig, on_gpu: bool | None) -> None:
    policy, placement = config.actor_rollout_ref, config.placement
    name = resolve_rollout(policy, on_gpu)
    if name != policy.rollout.name:
        notify(f"actor_rollout_ref.rollout.name={policy.rollout.name}: generating with {name}")
    if INFERENCE_ENGINES.metadata(name).in_place:
        return
    rollout = policy.rollout
    shared = placement.pools[placement.roles["actor_rollout_ref"]]
    check_layout(devices_per_replica(policy), [rollout.n_gpus_per_node] * rollout.nnodes or list(shared))


def _check_images(config: PPOTrainerConfig) -> None:
    """Refuse roles that would read prompts without their images."""
    policy = config.actor_rollout_ref.model
    seeing = is_vision_model(config_of(policy))
    for spec in active_roles(config):
        model = getattr(spec.config_of(config), "model", None)
        if isinstance(model, ModelConfig) and is_vision_model(config_of(model)) != seeing:
            raise ModelError(
                f"{spec.model_path}.path={model.path} and actor_rollout_ref.model.path={policy.path}: one reads "
                "images and the other does not; use models of one kind for all roles"
            )
    if seeing and config.use_critic:
        raise ModelError(
            f"actor_rollout_ref.model.path={policy.path} is a vision-language model, and critics of images are not "
            "built: set algorithm.adv_estimator to one without a critic, such as grpo"
        )


def check_models(config: PPOTrainerConfig) -> None:
    """Refuse settings that do not fit the models of the roles."""
    check_engines(config)
    check_router_replay(config)


def check_engines(config: PPOTrainerConfig) -> None:
    """Refuse settings of training engines that do not fit their processes or models, and models without weights."""
    for check in _checks_of_engines(config):
        check()


def _checks_of_engines(config: PPOTrainerConfig, weights: bool = True) -> Iterator[Callable[[], object]]:
    """Yield the checks of the training engine of each role."""
    for spec in active_roles(config):
        settings, model = spec.settings_of(config), getattr(spec.config_of(config), "model", None)
        if hasattr(settings, "strategy") and isinstance(model, ModelConfig) and not spec.served(config):
            pool = pool_of(spec, config)
            if pool is not None:  # without one, `resource_pools` refuses the role
                ranks, optim = sum(pools_of(config)[pool]), getattr(settings, "optim", None)
                saved = settings.checkpoint if spec.saved is not None else None
                yield partial(check_engine, spec.where, settings, model, ranks, optim, saved, weights=weights)
                if spec.passes or spec.update is not None:  # others read conversations
                    yield partial(_check_role_length, spec, model, config)


def _check_role_length(spec: RoleSpec, model: ModelConfig, config: PPOTrainerConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    tokens = rollout.prompt_length + rollout.response_length
    subject = f"{spec.where}: {model.path} with data.max_prompt_length + data.max_response_length"
    check_length(config_of(model), tokens, subject)


def _check_tokenizers(config: PPOTrainerConfig, tokenizer: Any) -> None:
    """Refuse models of roles that would read the policy's token ids as other text, and copies without weights."""
    for spec in active_roles(config):
        if not spec.passes and spec.update is None:  # one that only scores reads conversations
            continue
        model, copy = getattr(spec.config_of(config), "model", None), spec.copy(spec.settings_of(config))
        if isinstance(model, ModelConfig):
            check_same_tokenizer(model, tokenizer, f"{spec.where}.model")
        if copy is not None:
            key, frozen = copy
            checked_source(frozen.path, f"{spec.where}.{key}")
            check_files(frozen)
            check_same_tokenizer(frozen, tokenizer, spec.where, path=key)


def read_data(config: PPOTrainerConfig, tokenizer: Any, rows: int | None = None) -> tuple[Any, Any]:
    """Return the training data and those of validation; the latter are None if there are none.

    Args:
        rows: at most so many rows of either; None: as the settings say.
    """
    data = config.data
    processor = processor_of(config.actor_rollout_ref.model, data.mm_processor_kwargs)

    def read(files: list[str], most: int, key: str) -> Any:
        count = most if rows is None else rows if most < 0 else min(rows, most)
        return create_rl_dataset(files, data, tokenizer, count, key, processor)

    train = read(data.train_files, data.train_max_samples, "data.train_files")
    return train, read(data.val_files, data.val_max_samples, "data.val_files") if data.val_files else None


def trainer_of(
    config: PPOTrainerConfig,
    tokenizer: Any,
    reward: RewardManager,
    data: tuple[Any, Any],
    role_worker_mapping: Mapping[str, Any] | None = None,
    resource_pool_manager: ResourcePoolManager | None = None,
) -> RayPPOTrainer:
    """Return the trainer of these data, after checking that the roles and the reward function can read them.

    Args:
        reward: has been started, so that its processes started while the data were read.
        data: see `read_data`.
    """
    train, val = data
    check_rows(train, config)
    reward.check(train, val)
    if config.reward.runs_functions and reward.takes_ground_truth:
        report_missing(train, "data.train_files")
        if val is not None:
            report_missing(val, "data.val_files")
    return RayPPOTrainer(
        config,
        tokenizer,
        role_worker_mapping,
        resource_pool_manager,
        reward_fn=reward,
        train_dataset=train,
        val_dataset=val,
        identity=checked_identity(config.actor_rollout_ref.model, tokenizer),
    )
