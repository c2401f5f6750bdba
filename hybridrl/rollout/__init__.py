"""Generation: one interface, by the training weights in place or by separate engines."""

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
