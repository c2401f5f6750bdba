"""`verl.trainer.ppo.core_algos`: the algorithms of hybridrl, which have verl's names."""

from hybridrl import algorithms
from hybridrl.algorithms import *  # noqa: F403 - the package's own __all__

__all__ = list(algorithms.__all__)
