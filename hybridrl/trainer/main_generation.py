"""`python -m hybridrl.trainer.main_generation KEY=VALUE ...`: responses to the prompts of a file, into parquet."""

from typing import TYPE_CHECKING

from hybridrl.config import cli

if TYPE_CHECKING:
    from hybridrl.config import GenerationConfig


def run(config: "GenerationConfig") -> None:
    """Generate what is missing of the output."""
    from hybridrl.trainer.generation.run_generation import run_generation  # imports torch: not for `--help` and `--cfg`

    run_generation(config)


def main() -> None:
    """The command line."""
    cli("generation", run)


if __name__ == "__main__":
    main()
