"""A model that generates: one interface, in place or by engines of their own."""

from hybridrl.errors import RolloutError
from hybridrl.rollout.hf.rollout import HFRollout
from hybridrl.rollout.inference_engine import InferenceEngines
from hybridrl.rollout.rollout import InPlaceRollout, Rollout
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.select import resolve_rollout

__all__ = [
    "InferenceEngines",
    "HFRollout",
    "InPlaceRollout",
    "Rollout",
    "RolloutError",
    "SamplingParams",
    "resolve_rollout",
]
