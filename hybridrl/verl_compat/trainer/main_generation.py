"""`verl.trainer.main_generation`."""

from hybridrl.trainer.main_generation import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
