"""`verl.workers.config.model`."""

from hybridrl.config import ModelConfig as HFModelConfig

__all__ = ["HFModelConfig"]
