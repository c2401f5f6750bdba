"""Presets of the rollout correction, which verl provides as class methods of its `RolloutCorrectionConfig`.

decoupled: three policies; the update's ratio is relative to recomputed old log-probabilities, and the correction is a
    weight.
bypass: two policies; the sampler's log-probabilities are used as the old ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import AlgorithmError


@dataclass(frozen=True)
class RolloutCorrection:
    """The keys of `algorithm.rollout_correction`."""

    rollout_is: str | None = None
    rollout_is_threshold: str | float = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: str | float | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"


_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_TOKEN = {"rollout_is": "token"}
_SEQUENCE = {"rollout_is": "sequence"}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_BYPASS_PPO = {"bypass_mode": True, "loss_type": "ppo_clip"}
_BYPASS_PG = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": {**_SEQUENCE, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": {**_GEO, **_SEQUENCE},
    "decoupled_geo_rs_token_tis": {**_GEO, **_TOKEN},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": {**_K3, **_SEQUENCE},
    "decoupled_k3_rs_token_tis": {**_K3, **_TOKEN},
    "bypass_ppo_clip": _BYPASS_PPO,
    "bypass_ppo_clip_geo_rs": {**_BYPASS_PPO, **_GEO},
    "bypass_ppo_clip_k3_rs": {**_BYPASS_PPO, **_K3},
    "bypass_pg_is": {**_BYPASS_PG, **_SEQUENCE},
    "bypass_pg_token_icepop": {**_BYPASS_PG, **_ICEPOP},
    "bypass_pg_geo_rs": {**_BYPASS_PG, **_GEO},
    "bypass_pg_geo_rs_seq_tis": {**_BYPASS_PG, **_GEO, **_SEQUENCE},
    "bypass_pg_geo_rs_token_tis": {**_BYPASS_PG, **_GEO, **_TOKEN},
}


def rollout_correction_preset(name: str, make: Callable[..., Any] = RolloutCorrection, **overrides: Any) -> Any:
    """Build a preset's settings: `rollout_correction_preset("decoupled_geo_rs", rollout_rs_threshold="0.99_1.01")`.

    Args:
        name: one of `PRESETS`.
        make: called with the keys; `RolloutCorrection` or another class with the same fields.
        overrides: keys to set to other values.

    Raises:
        AlgorithmError: a name or key is unknown.
    """
    if name not in PRESETS:
        raise AlgorithmError(f"rollout-correction preset {name!r} is unknown; choose from {', '.join(PRESETS)}.")
    unknown = sorted(set(overrides) - set(RolloutCorrection.__dataclass_fields__))
    if unknown:
        raise AlgorithmError(
            f"rollout-correction settings {unknown} are unknown; choose from "
            f"{', '.join(RolloutCorrection.__dataclass_fields__)}."
        )
    return make(**{**PRESETS[name], **overrides})
