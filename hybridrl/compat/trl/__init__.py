"""TRL's trainers and configs, run by hybridrl: a script changes one import (docs/trl.md).

```python
from hybridrl.compat.trl import GRPOConfig, GRPOTrainer
```
"""

from __future__ import annotations

from typing import Any

from hybridrl.compat.trl.configs import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig
from hybridrl.compat.trl.trainers import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(f"hybridrl.compat.trl has no {name}; it has {', '.join(__all__)} (docs/trl.md)")
