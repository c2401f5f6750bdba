"""The PPO program, from the configuration to the last step."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from hybridrl.config import PPOTrainerConfig, validate
from hybridrl.config.roles import POLICY, ROLES
from hybridrl.errors import WorkerUserError
from hybridrl.notify import notify
from hybridrl.programs import ProgramResult
from hybridrl.registry import import_external_lib
from hybridrl.single_controller.ray import RayWorkerGroup
from hybridrl.trainer.hub_upload import open_repository, upload_result
from hybridrl.trainer.own_folder import settle_folder
from hybridrl.trainer.planning import with_plan
from hybridrl.trainer.ppo.role_groups import resource_pools, spawn_worker_groups
from hybridrl.trainer.startup import depends_on_model, workers_starting

if TYPE_CHECKING:
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer


def run_ppo(config: PPOTrainerConfig, role_worker_mapping: Mapping[str, Any] | None = None) -> ProgramResult:
    """Train as `config` says. Where one of several ranks runs out of memory, see `hybridrl.trainer.repeating`.

    Args:
        role_worker_mapping: worker classes by role, in place of the library's classes.

    Raises:
        ConfigError: `validate` finds faults in the configuration.
    """
    validate(config)
    config = with_plan(config)
    open_repository(config.trainer.hub)
    result = _fit(config, role_worker_mapping)
    upload_result(config.trainer.hub, result, str(ROLES[POLICY].saved))
    return result


def _fit(config: PPOTrainerConfig, role_worker_mapping: Mapping[str, Any] | None) -> ProgramResult:
    while True:
        with started_trainer(config, role_worker_mapping) as trainer:
            try:
                trainer.fit()
                return trainer.run.outcome
            except WorkerUserError as error:
                from hybridrl.trainer.repeating import settings_to_repeat

                rollout = config.actor_rollout_ref.rollout
                longest = rollout.prompt_length + rollout.response_length
                config = settings_to_repeat(config, longest, trainer.run, error)


@contextmanager
def started_trainer(
    config: PPOTrainerConfig, role_worker_mapping: Mapping[str, Any] | None = None
) -> Iterator["RayPPOTrainer"]:
    """Start everything that `fit` needs, also for a `fit` of one's own: models are loaded, and the rollout is running.

    Workers, rollout and reward function end with the block. Arguments and errors are those of `run_ppo`.
    """
    validate(config)
    if config is not (planned := with_plan(config)):
        config = planned
        validate(config)
    import_external_lib(config.actor_rollout_ref.model.external_lib)  # may register roles; their workers start first
    if depends_on_model(config):
        from hybridrl.trainer.ppo.prepare_ppo import check_models

        check_models(config)
    settle_folder(config)
    manager = resource_pools(config)

    def spawn() -> dict[str, RayWorkerGroup]:
        return spawn_worker_groups(config, role_worker_mapping, manager)

    with workers_starting(config.ray_kwargs, manager, config.trainer.device, spawn) as started:
        # takes seconds (transformers, datasets), as Ray's start does
        from hybridrl.trainer.ppo.prepare_ppo import check_rollout, prepare
        from hybridrl.trainer.ppo.served_role import ServedRole

        trainer = prepare(config, role_worker_mapping, manager)
        with closing(trainer.reward_fn):
            groups = started()
            check_rollout(config, manager)
            notify(f"{trainer.sizes()}; loading the model {config.actor_rollout_ref.model.path}")
            with ExitStack() as stack:
                for group in groups.values():
                    if isinstance(group, ServedRole):
                        stack.enter_context(closing(group))
                trainer.init_workers(groups)
                stack.enter_context(closing(trainer.rollout))
                stack.enter_context(closing(trainer.sampler))
                yield trainer
