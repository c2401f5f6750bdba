"""`python -m hybridrl.trainer.main_ppo KEY=VALUE ...`: PPO, GRPO and their relatives from the command line."""

from typing import TYPE_CHECKING

from hybridrl.config import cli

if TYPE_CHECKING:
    from hybridrl.config import PPOTrainerConfig


def run(config: "PPOTrainerConfig") -> None:
    """Prepare everything that can fail cheaply while the worker processes start, then train."""
    from hybridrl.trainer.ppo.run_ppo import run_ppo  # imports torch, which `--help` and `--cfg` do not need

    run_ppo(config)


def main() -> None:
    """The command line."""
    cli("ppo_trainer", run)


if __name__ == "__main__":
    main()
