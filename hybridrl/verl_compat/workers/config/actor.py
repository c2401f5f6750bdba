"""`verl.workers.config.actor`."""

from hybridrl.config import ActorConfig, PolicyLossConfig
from hybridrl.config import ActorConfig as FSDPActorConfig

__all__ = ["ActorConfig", "FSDPActorConfig", "PolicyLossConfig"]
