"""`python -m hybridrl.trainer.main_eval KEY=VALUE ...`: scores the responses in a file, by data source."""

from hybridrl.programs import start


def main() -> None:
    """The command line."""
    start("eval", "python -m hybridrl.trainer.main_eval")


if __name__ == "__main__":
    main()
