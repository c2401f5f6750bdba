"""The PPO program inside a test's process, on the session's Ray."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from hybridrl.config import load_config, validate
from hybridrl.trainer.ppo.build import prepare
from hybridrl.trainer.ppo.learner import StepResult
from hybridrl.trainer.ppo.roles import resource_pools, spawn_worker_groups
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.startup import workers_starting


@contextmanager
def trained(*overrides: str) -> Iterator[tuple[RayPPOTrainer, StepResult]]:
    """Run the program to its end, for the trainer and its last step's result; workers and rollout live in the block."""
    config = load_config("ppo_trainer", ["trainer.report=False", "trainer.logger=[]", *overrides])
    validate(config)
    manager = resource_pools(config)

    def spawn() -> dict:
        return spawn_worker_groups(config, None, manager)

    with workers_starting(config.ray_kwargs.ray_init, manager, config.trainer.device, spawn) as started:
        trainer = prepare(config, resource_pool_manager=manager)
        with closing(trainer.reward_fn):
            trainer.init_workers(started())
            with closing(trainer.rollout):
                result = trainer.fit()
                assert result is not None
                yield trainer, result
