"""`python -m hybridrl.trainer.main_ppo KEY=VALUE ...`: PPO, GRPO and their relatives."""

from hybridrl.programs import start


def main() -> None:
    """The command line."""
    start("ppo", "python -m hybridrl.trainer.main_ppo")


if __name__ == "__main__":
    main()
