"""`verl.workers.config.critic`."""

from hybridrl.config import CriticConfig
from hybridrl.config import CriticConfig as FSDPCriticConfig

__all__ = ["CriticConfig", "FSDPCriticConfig"]
