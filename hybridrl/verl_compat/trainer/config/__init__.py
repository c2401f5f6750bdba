"""`verl.trainer.config`."""

from hybridrl.config import CheckpointConfig
from hybridrl.verl_compat.trainer.config.algorithm import (
    AlgoConfig,
    FilterGroupsConfig,
    KLControlConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)

__all__ = [
    "CheckpointConfig",
    "AlgoConfig",
    "FilterGroupsConfig",
    "KLControlConfig",
    "PFPPOConfig",
    "RolloutCorrectionConfig",
]
