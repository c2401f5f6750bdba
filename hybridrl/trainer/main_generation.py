"""`python -m hybridrl.trainer.main_generation KEY=VALUE ...`: writes responses to the prompts in a file to parquet."""

from hybridrl.programs import start


def main() -> None:
    """The command line."""
    start("generate", "python -m hybridrl.trainer.main_generation")


if __name__ == "__main__":
    main()
