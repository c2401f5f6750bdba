"""`verl.experimental.fully_async_policy.fully_async_main`: generation runs ahead of training on devices of its own."""

from hybridrl.config.verl.tables import programs
from hybridrl.programs import start

_MODULE = "verl.experimental.fully_async_policy.fully_async_main"


def main() -> None:
    """The command line."""
    start("ppo", f"python -m {_MODULE}", defaults=programs()[_MODULE].defaults)


if __name__ == "__main__":
    main()
