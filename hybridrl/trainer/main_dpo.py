"""`python -m hybridrl.trainer.main_dpo KEY=VALUE ...`: preference optimisation on pairs of answers."""

from hybridrl.programs import start


def main() -> None:
    """The command line."""
    start("dpo", "python -m hybridrl.trainer.main_dpo")


if __name__ == "__main__":
    main()
