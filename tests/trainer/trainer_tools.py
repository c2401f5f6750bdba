"""The PPO program inside a test's process, on the session's Ray."""

from collections.abc import Iterator
from contextlib import contextmanager

from hybridrl.config import load_config
from hybridrl.protocol import DataProto
from hybridrl.rollout.rollout import InPlaceRollout
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.learner import StepResult
from hybridrl.trainer.ppo.run_ppo import started_trainer
from hybridrl.trainer.ppo.trainer import RayPPOTrainer


@contextmanager
def trained(*overrides: str) -> Iterator[tuple[RayPPOTrainer, StepResult]]:
    """Run the program to its end, for the trainer and its last step's result; workers and rollout live in the block."""
    config = load_config("ppo_trainer", ["trainer.report=False", "trainer.logger=[]", *overrides])
    with started_trainer(config) as trainer:
        result = trainer.fit()
        assert result is not None
        yield trainer, result


def lent(trainer: RayPPOTrainer, batch: DataProto) -> int:
    """How often a rollout with memory of its own is asked for its cache while a batch is scored."""

    class Lender(InPlaceRollout):
        gives_memory_back = True
        count = 0

        def lend_cache(self) -> None:
            self.count += 1

    rollout = Lender(trainer.groups["actor_rollout"], trainer.config.actor_rollout_ref.rollout)
    trainer.scorer.connect(trainer.groups, rollout)
    trainer.scorer(trainer.reward_fn, batch, PhaseTimer())
    return rollout.count
