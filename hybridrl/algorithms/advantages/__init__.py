"""Advantage estimators: they map rewards to (advantages, returns), both [B, T] and zero outside the response mask.

Importing this package imports all its modules and thereby registers the estimators (`algorithm.adv_estimator`).
"""

from hybridrl.algorithms.advantages.scan import rewards_to_go as rewards_to_go
from hybridrl.algorithms.algorithm_registry import import_modules

_functions = import_modules(__name__, __path__, "compute_")
globals().update(_functions)
__all__ = ["rewards_to_go", *sorted(_functions)]
