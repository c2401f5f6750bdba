"""hybridrl: reinforcement-learning post-training of language models as HybridFlow describes it."""

from typing import Any

__version__ = "0.1.0"

_PROTOCOL = ("DataProto", "DataProtoFuture", "DataProtoItem")


def __getattr__(name: str) -> Any:
    # Lazy: `import hybridrl` (and with it the command line) must not import torch.
    if name in _PROTOCOL:
        from hybridrl import protocol

        return getattr(protocol, name)
    raise AttributeError(f"module 'hybridrl' has no attribute '{name}'")
