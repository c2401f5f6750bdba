"""`verl.trainer.sft_trainer`."""

from hybridrl.trainer.main_sft import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
