"""`python -m hybridrl.trainer.main_rm KEY=VALUE ...`: training of a reward model on pairs of answers."""

from hybridrl.programs import start


def main() -> None:
    """The command line."""
    start("rm", "python -m hybridrl.trainer.main_rm")


if __name__ == "__main__":
    main()
