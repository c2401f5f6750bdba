"""Metrics under TRL's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: hybridrl's names, and TRL's
METRICS = {
    "critic/score/mean": "reward",
    "response_length/mean": "completions/mean_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "health/groups_uniform": "frac_reward_zero_std",
    "actor/kl_loss": "kl",
    "actor/pg_loss": "loss",
    "actor/lr": "learning_rate",
    "actor/grad_norm": "grad_norm",
    "train/loss": "loss",
    "val/loss": "eval_loss",
    "train/lr": "learning_rate",
    "train/grad_norm": "grad_norm",
}


def with_trl_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics under TRL's names and their own."""
    return {**metrics, **{METRICS[name]: value for name, value in metrics.items() if name in METRICS}}
