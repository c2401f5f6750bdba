"""The PPO program, from a configuration to the last step.

What can fail cheaply fails first: the user's own modules, tokenizer, data, reward function, sampling and the checkpoint
to resume from are checked here while Ray and the worker processes start in a thread beside it, and no model is loaded
before all of that is well.
"""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.data import create_rl_dataset
from hybridrl.models.facts import checked_identity, tokenizer_of
from hybridrl.models.loading import check_weights, import_external_lib
from hybridrl.observe.tracking import check_loggers
from hybridrl.reward import RewardManager, create_reward_manager
from hybridrl.single_controller.ray import RayWorkerGroup
from hybridrl.trainer.ppo.roles import Role, needs_critic, resource_pools, spawn_worker_groups
from hybridrl.trainer.ppo.settings import check_algorithm
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.start import workers_starting
from hybridrl.workers.actor_rollout_ref import check_rollout


def run_ppo(config: PPOTrainerConfig, role_worker_mapping: Mapping[Role, Any] | None = None) -> None:
    """Train as `config` says.

    Args:
        role_worker_mapping: worker classes of one's own; the library's where None.
    """
    manager = resource_pools(config)

    def spawn() -> dict[Role, RayWorkerGroup]:
        return spawn_worker_groups(config, role_worker_mapping, manager)

    with workers_starting(config.ray_kwargs.ray_init, manager, config.trainer.device, spawn) as started:
        trainer = prepare(config, role_worker_mapping)
        with closing(trainer.reward_fn):
            trainer.init_workers(started())
            trainer.fit()


def prepare(config: PPOTrainerConfig, role_worker_mapping: Mapping[Role, Any] | None = None) -> RayPPOTrainer:
    """The trainer with everything that lives on the controller.

    Raises:
        UserError: a setting, file or function of the user's cannot work; nothing was loaded yet.
    """
    model = config.actor_rollout_ref.model
    rollout = config.actor_rollout_ref.rollout
    engine_name = check_rollout(rollout)
    if engine_name != rollout.name:
        print(f"actor_rollout_ref.rollout.name={rollout.name}: generating with {engine_name}")
    check_loggers(config.trainer.logger)
    import_external_lib(model.external_lib)  # estimators run here; losses and model classes in the workers
    check_algorithm(config)
    tokenizer = tokenizer_of(model)
    identity = checked_identity(model, tokenizer)
    if needs_critic(config):
        check_weights(config.critic.model.path)
    reward = create_reward_manager(config, tokenizer)
    try:
        reward.start()
        trainer = _with_data(config, tokenizer, reward, role_worker_mapping, identity)
        trainer.run.look_for_checkpoint()
        return trainer
    except BaseException:
        reward.close()
        raise


def _with_data(
    config: PPOTrainerConfig,
    tokenizer: Any,
    reward: RewardManager,
    role_worker_mapping: Mapping[Role, Any] | None,
    identity: Mapping[str, Any],
) -> RayPPOTrainer:
    """Read the data while the reward function's processes start."""
    data = config.data
    train = create_rl_dataset(data.train_files, data, tokenizer, data.train_max_samples, key="data.train_files")
    val = None
    if data.val_files:
        val = create_rl_dataset(data.val_files, data, tokenizer, data.val_max_samples, key="data.val_files")
    reward.check(train, val)
    return RayPPOTrainer(
        config,
        tokenizer,
        role_worker_mapping,
        reward_fn=reward,
        train_dataset=train,
        val_dataset=val,
        identity=identity,
    )
