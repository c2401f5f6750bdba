"""`python -m hybridrl.trainer.main_generation KEY=VALUE ...`: writes responses to the prompts in a file to parquet."""

from typing import TYPE_CHECKING

from hybridrl.config import cli

if TYPE_CHECKING:
    from hybridrl.config import GenerationConfig


def run(config: "GenerationConfig") -> None:
    """Generate the missing parts of the output."""
    from hybridrl.trainer.generation.run_generation import run_generation  # imports torch, which `--help` does not need

    run_generation(config)


def main() -> None:
    """The command line."""
    cli("generation", run)


if __name__ == "__main__":
    main()
