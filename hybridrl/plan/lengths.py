"""Lengths of responses of which the mean and the maximum are known."""

import functools
import math
from statistics import NormalDist

import numpy as np

POINTS = 256


@functools.cache
def quantiles(mean: int, most: int, sigma: float) -> np.ndarray:
    """Return `POINTS` quantiles [POINTS] of the lengths, in tokens, shortest first.

    The logarithm of a length is normal with standard deviation `sigma`, and lengths end at `most`: min(exp(m + sigma
    z), most). The center m is the one for which their mean is `mean`.
    """
    normal = NormalDist()
    z = np.array([normal.inv_cdf((point + 0.5) / POINTS) for point in range(POINTS)])
    low, high = math.log(max(mean, 1)) - 8, math.log(most) + 8
    for _ in range(50):
        center = (low + high) / 2
        if np.minimum(np.exp(center + sigma * z), most).mean() < mean:
            low = center
        else:
            high = center
    return np.minimum(np.exp(low + sigma * z), most)
