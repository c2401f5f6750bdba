"""`verl.trainer.main_ppo`."""

import importlib
from typing import TYPE_CHECKING, Any

from hybridrl.trainer.main_ppo import main

if TYPE_CHECKING:
    from hybridrl.trainer.ppo.run_ppo import run_ppo
    from hybridrl.verl_compat.trainer.ppo.utils import create_rl_dataset, create_rl_sampler

# Imported on first use, because `--help` and `--cfg` need no torch.
_HOMES = {
    "create_rl_dataset": "hybridrl.verl_compat.trainer.ppo.utils",
    "create_rl_sampler": "hybridrl.verl_compat.trainer.ppo.utils",
    "run_ppo": "hybridrl.trainer.ppo.run_ppo",
}

__all__ = ["create_rl_dataset", "create_rl_sampler", "main", "run_ppo"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


if __name__ == "__main__":
    main()
