"""Checks everything that can fail cheaply before a model is loaded.

The user's modules, tokenizer, data, reward function and sampling, and the checkpoint to resume from, are checked here
while Ray and the worker processes start.
"""

from collections.abc import Mapping
from typing import Any

from hybridrl.config import ModelConfig, PPOTrainerConfig
from hybridrl.config.roles import POLICY, active_roles, pool_of, pools_of
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
    check_loggers(config.trainer.logger)
    check_algorithm(config)
    tokenizer = tokenizer_of(model)
    identity = checked_identity(model, tokenizer)
    _check_images(config)
    _check_tokenizers(config, tokenizer)
    check_models(config)
    check_kl_form(config)
    check_teachers(config, tokenizer)
    check_judge_model(config)
    reward = create_reward_manager(config, tokenizer)
    try:
        reward.start()
        trainer = _with_data(config, tokenizer, reward, role_worker_mapping, resource_pool_manager, identity)
        trainer.run.look_for_checkpoint()
        return trainer
    except BaseException:
        reward.close()
        raise


def check_rollout(config: PPOTrainerConfig, manager: ResourcePoolManager) -> None:
    """Refuse an engine, or a layout of its replicas, that cannot work, and engines that cannot serve fixed models.

    Args:
        manager: knows whether the slots of the pools are GPUs. Only the cluster does: this process may be on a node
            without.
    """
    policy, placement = config.actor_rollout_ref, config.placement
    for spec in active_roles(config):
        check_served(spec.served(config), manager.get_resource_pool(spec.name).use_gpu)
    name = resolve_rollout(policy, manager.get_resource_pool(POLICY).use_gpu)
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
    for spec in active_roles(config):
        settings, whole = spec.settings_of(config), spec.config_of(config)
        model = getattr(whole, "model", None)
        if hasattr(settings, "strategy") and isinstance(model, ModelConfig) and not spec.served(config):
            pool = pool_of(spec, config)
            if pool is not None:  # without one, `resource_pools` refuses the role
                ranks, optim = sum(pools_of(config)[pool]), getattr(settings, "optim", None)
                saved = settings.checkpoint if spec.saved is not None else None
                check_engine(spec.where, settings, model, ranks, optim, saved)
                if spec.passes or spec.update is not None:  # others read conversations
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


def _with_data(
    config: PPOTrainerConfig,
    tokenizer: Any,
    reward: RewardManager,
    role_worker_mapping: Mapping[str, Any] | None,
    resource_pool_manager: ResourcePoolManager | None,
    identity: Mapping[str, Any],
) -> RayPPOTrainer:
    """Read the data while the processes of the reward function start."""
    data = config.data
    processor = processor_of(config.actor_rollout_ref.model, data.mm_processor_kwargs)
    train = create_rl_dataset(data.train_files, data, tokenizer, data.train_max_samples, "data.train_files", processor)
    val = None
    if data.val_files:
        val = create_rl_dataset(data.val_files, data, tokenizer, data.val_max_samples, "data.val_files", processor)
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
        identity=identity,
    )
