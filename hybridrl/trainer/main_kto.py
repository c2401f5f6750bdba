"""`python -m hybridrl.trainer.main_kto KEY=VALUE ...`: preference optimisation on answers with a label."""

from hybridrl.programs import start


def main() -> None:
    """The command line."""
    start("kto", "python -m hybridrl.trainer.main_kto")


if __name__ == "__main__":
    main()
