"""`python -m hybridrl.trainer.main_eval KEY=VALUE ...`: scores the responses in a file, by data source."""

from typing import TYPE_CHECKING

from hybridrl.config import cli

if TYPE_CHECKING:
    from hybridrl.config import EvaluationConfig


def run(config: "EvaluationConfig") -> None:
    """Score the file."""
    from hybridrl.trainer.evaluation import run_evaluation  # imports the data libraries, which `--help` does not need

    run_evaluation(config)


def main() -> None:
    """The command line."""
    cli("evaluation", run)


if __name__ == "__main__":
    main()
