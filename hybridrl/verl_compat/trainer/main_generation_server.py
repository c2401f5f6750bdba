"""`verl.trainer.main_generation_server`."""

from hybridrl.trainer.main_generation import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
