"""hybridrl: reinforcement-learning post-training of language models as HybridFlow describes it.

```python
import hybridrl

result = hybridrl.grpo(model="Qwen/Qwen2.5-0.5B-Instruct", reward=my_function, data=rows, total_epochs=3)
result.model_path
```
"""

import importlib
from typing import TYPE_CHECKING, Any

from hybridrl.version import __version__

if TYPE_CHECKING:
    from hybridrl.config import load_config, validate
    from hybridrl.protocol import DataProto, DataProtoFuture, DataProtoItem
    from hybridrl.trainer.api import Trainer, TrainingResult
    from hybridrl.trainer.callbacks import EarlyStopping, RunEvent
    from hybridrl.trainer.typed_calls import dpo, grpo, kto, ppo, rm, sft

# Lazy: `import hybridrl` (and with it the command line) must not import torch.
_HOMES = {
    **dict.fromkeys(("grpo", "ppo", "sft", "dpo", "kto", "rm"), "hybridrl.trainer.typed_calls"),
    **dict.fromkeys(("Trainer", "TrainingResult"), "hybridrl.trainer.api"),
    **dict.fromkeys(("EarlyStopping", "RunEvent"), "hybridrl.trainer.callbacks"),
    **dict.fromkeys(("load_config", "validate"), "hybridrl.config"),
    **dict.fromkeys(("DataProto", "DataProtoFuture", "DataProtoItem"), "hybridrl.protocol"),
}

__all__ = [
    "grpo",
    "ppo",
    "sft",
    "dpo",
    "kto",
    "rm",
    "Trainer",
    "TrainingResult",
    "EarlyStopping",
    "RunEvent",
    "load_config",
    "validate",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridrl' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
