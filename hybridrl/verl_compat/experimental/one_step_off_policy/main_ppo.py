"""`verl.experimental.one_step_off_policy.main_ppo`: generation is one step ahead of training."""

from hybridrl.config.verl.tables import programs
from hybridrl.programs import start

_MODULE = "verl.experimental.one_step_off_policy.main_ppo"


def main() -> None:
    """The command line."""
    start("ppo", f"python -m {_MODULE}", defaults=programs()[_MODULE].defaults)


if __name__ == "__main__":
    main()
