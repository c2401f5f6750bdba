"""`verl.workers.config.rollout`."""

from hybridrl.config import PrometheusConfig, RolloutConfig, SamplingConfig, ServerConfig

__all__ = ["PrometheusConfig", "RolloutConfig", "SamplingConfig", "ServerConfig"]
