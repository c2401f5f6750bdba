"""Helpers of the rollout-correction modules: bounds of the log-ratio, parsing of thresholds, scalars.

Legend: B sequences, T response tokens; log rho = log pi_train - log pi_rollout of a token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridrl.errors import AlgorithmError

# exp(20) is 5e8: large enough to be rejected or truncated by any threshold, small enough to stay finite in float32.
SAFETY_BOUND = 20.0
ROOT = "algorithm.rollout_correction"


def safe(log_ratio: Tensor) -> Tensor:
    """log rho clamped to [-20, 20]."""
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)


def floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Convert scalars to Python numbers with a single transfer from the device."""
    if not metrics:
        return {}
    values = torch.stack([value.detach().to(torch.float64) for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def require_tokens(response_mask: Tensor) -> None:
    """Refuse a batch without a response token: its means are undefined."""
    if not bool(response_mask.any()):
        raise AlgorithmError("response_mask has no token set: there is nothing to correct in this batch.")


def check_same_shape(**tensors: Tensor) -> None:
    """Refuse tensors of different shapes, naming each."""
    if len({tuple(t.shape) for t in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise AlgorithmError(f"these must have the same shape [B, T]: {shapes}.")


def _positive(text: str, key: str, spec: object) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise AlgorithmError(f"{ROOT}.{key} is {spec!r}; {text.strip()!r} in it is not a number greater than 0.")
    return value


def _interval(text: str, key: str, spec: object) -> tuple[float, float]:
    low, high = (_positive(part, key, spec) for part in text.split("_", 1))
    if low > high:
        raise AlgorithmError(
            f"{ROOT}.{key} is {spec!r}; the lower bound {low:g} must not be above the upper one {high:g}."
        )
    return low, high


def parse_is_threshold(spec: str | float | None) -> tuple[float, float | None]:
    """Parse `rollout_is_threshold` to (upper, lower): a number truncates, "lower_upper" is IcePop's interval.

    Raises:
        AlgorithmError: a value is not a number above 0, or the interval's bounds are reversed.
    """
    if isinstance(spec, bool) or not isinstance(spec, (int, float, str)):
        raise AlgorithmError(
            f"{ROOT}.rollout_is_threshold is {spec!r}; it must be a number greater than 0 (truncation) or "
            "'lower_upper' (IcePop), for example 2.0 or 0.5_5.0."
        )
    text = str(spec)
    if "_" in text:
        low, high = _interval(text, "rollout_is_threshold", spec)
        return high, low
    return _positive(text, "rollout_is_threshold", spec), None


def parse_rs_thresholds(options: list[str], spec: str | float | None) -> dict[str, tuple[float | None, float]]:
    """Parse `rollout_rs_threshold` to {option: (lower, upper)}: one for all options, or one per option with commas.

    k1 options take "lower_upper", or x for the interval [1/x, x]; the others take an upper bound (lower is None).

    Raises:
        AlgorithmError: the threshold is missing, has the wrong form, or the numbers of thresholds and options differ.
    """
    if spec is None or isinstance(spec, bool) or not isinstance(spec, (int, float, str)):
        raise AlgorithmError(
            f"{ROOT}.rollout_rs_threshold is {spec!r}; rollout_rs={','.join(options)} needs a threshold: lower_upper "
            "for k1 options (0.5_2.0), an upper bound for the others (0.01), separated by commas."
        )
    parts = [part.strip() for part in str(spec).split(",") if part.strip()]
    if len(parts) not in (1, len(options)):
        raise AlgorithmError(
            f"{ROOT}.rollout_rs_threshold is {spec!r} with {len(parts)} entries for the {len(options)} options of "
            f"rollout_rs={','.join(options)}; give one for all or one each."
        )
    bounds: dict[str, tuple[float | None, float]] = {}
    for option, part in zip(options, parts * (len(options) if len(parts) == 1 else 1), strict=True):
        if not option.endswith("k1"):
            if "_" in part:
                raise AlgorithmError(
                    f"{ROOT}.rollout_rs_threshold has {part!r} for {option}, which takes an upper bound only."
                )
            bounds[option] = (None, _positive(part, "rollout_rs_threshold", spec))
        elif "_" in part:
            bounds[option] = _interval(part, "rollout_rs_threshold", spec)
        else:
            upper = _positive(part, "rollout_rs_threshold", spec)
            bounds[option] = (1.0 / upper, upper)
            if upper < 1.0:
                raise AlgorithmError(
                    f"{ROOT}.rollout_rs_threshold has {part!r} for {option}: a single number x stands for the interval "
                    "[1/x, x] and must be at least 1."
                )
    return bounds
