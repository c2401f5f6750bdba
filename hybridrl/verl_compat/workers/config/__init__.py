"""`verl.workers.config`: the settings' groups under verl's names."""

from hybridrl.config import CheckpointConfig
from hybridrl.verl_compat.workers.config.actor import ActorConfig, FSDPActorConfig, PolicyLossConfig
from hybridrl.verl_compat.workers.config.critic import CriticConfig, FSDPCriticConfig
from hybridrl.verl_compat.workers.config.engine import FSDPEngineConfig
from hybridrl.verl_compat.workers.config.model import HFModelConfig
from hybridrl.verl_compat.workers.config.optimizer import FSDPOptimizerConfig, OptimizerConfig
from hybridrl.verl_compat.workers.config.rollout import PrometheusConfig, RolloutConfig, SamplingConfig, ServerConfig

__all__ = [
    "CheckpointConfig",
    "ActorConfig",
    "FSDPActorConfig",
    "PolicyLossConfig",
    "CriticConfig",
    "FSDPCriticConfig",
    "FSDPEngineConfig",
    "HFModelConfig",
    "FSDPOptimizerConfig",
    "OptimizerConfig",
    "PrometheusConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ServerConfig",
]
