"""`verl.workers.config.engine`."""

from hybridrl.config import FSDPConfig as FSDPEngineConfig

__all__ = ["FSDPEngineConfig"]
