"""`python -m hybridrl.trainer.main_sft KEY=VALUE ...`: supervised fine-tuning."""

from hybridrl.programs import start


def main() -> None:
    """The command line."""
    start("sft", "python -m hybridrl.trainer.main_sft")


if __name__ == "__main__":
    main()
