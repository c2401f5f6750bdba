"""A model that generates: one interface, engines behind a registry."""

from hybridrl.rollout.base import Rollout, RolloutError, RolloutRegistry
from hybridrl.rollout.hf.rollout import HFRollout
from hybridrl.rollout.sampling import SamplingParams

__all__ = ["HFRollout", "Rollout", "RolloutError", "RolloutRegistry", "SamplingParams"]
