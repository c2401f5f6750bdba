"""`verl.workers.config.optimizer`."""

from hybridrl.config import OptimConfig as FSDPOptimizerConfig
from hybridrl.config import OptimConfig as OptimizerConfig
from hybridrl.engine.optim.optimizer import build_optimizer

__all__ = ["FSDPOptimizerConfig", "OptimizerConfig", "build_optimizer"]
