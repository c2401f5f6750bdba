"""`verl.trainer.main_eval`."""

from hybridrl.trainer.main_eval import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
