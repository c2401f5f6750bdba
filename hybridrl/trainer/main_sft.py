"""`python -m hybridrl.trainer.main_sft KEY=VALUE ...`: supervised fine-tuning from the command line."""

from typing import TYPE_CHECKING

from hybridrl.config import cli

if TYPE_CHECKING:
    from hybridrl.config import SFTTrainerConfig


def run(config: "SFTTrainerConfig") -> None:
    """Read the data while the worker processes start, then train."""
    from hybridrl.trainer.sft.run_sft import run_sft  # imports torch, which `--help` and `--cfg` do not need

    run_sft(config)


def main() -> None:
    """The command line."""
    cli("sft_trainer", run)


if __name__ == "__main__":
    main()
