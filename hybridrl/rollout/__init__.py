"""A model that generates: one interface, in place or by engines of their own."""

from hybridrl.rollout.base import Rollout
from hybridrl.rollout.choice import IN_PLACE, resolve_rollout
from hybridrl.rollout.engine import EngineRegistry, RolloutError
from hybridrl.rollout.hf.rollout import HFRollout
from hybridrl.rollout.in_place import InPlaceRollout
from hybridrl.rollout.sampling import SamplingParams

__all__ = [
    "EngineRegistry",
    "HFRollout",
    "IN_PLACE",
    "InPlaceRollout",
    "Rollout",
    "RolloutError",
    "SamplingParams",
    "resolve_rollout",
]
