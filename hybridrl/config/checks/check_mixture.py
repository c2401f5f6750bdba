"""Cross-checks of `data.mixture`, as far as they need no data."""

import math
from collections.abc import Iterator
from typing import Any

from hybridrl.config.schema.data import DataConfig, SupervisedDataConfig

_WEIGHTS = "data.mixture.weights"


def check_mixture(data: DataConfig | SupervisedDataConfig) -> Iterator[str]:
    """Check that the weights are numbers, of which one is above 0, and that nothing else orders the rows."""
    weights = data.mixture.weights
    if not weights:
        return
    wrong = {name: weight for name, weight in weights.items() if not _is_weight(weight)}
    for name, weight in wrong.items():
        yield f"{_WEIGHTS}.{name}={weight}: a weight is a finite number of at least 0"
    if not wrong and not any(weights.values()):
        yield f"{_WEIGHTS}={weights}: all weights are 0, so that nothing is drawn; give one source a weight above 0"
    sampler = data.get("sampler")
    if sampler is not None and sampler.class_path is not None:
        yield (
            f"{_WEIGHTS} and data.sampler.class_path={sampler.class_path} both decide which rows are drawn; remove one"
        )


def _is_weight(weight: Any) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight) and weight >= 0
