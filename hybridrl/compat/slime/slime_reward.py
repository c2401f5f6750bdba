"""Reward functions for runs that come from slime: its own of mathematics, and those in its form."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.score.math_reward import compute_score
from hybridrl.utils.user_code import load_object

#: what a function may read of its sample
ATTRIBUTES = ("response", "label", "metadata")


@functools.cache
def _loaded(path: str, name: str) -> Any:
    prefix = "reward.custom_reward_function.reward_kwargs"
    return load_object(path, name, f"{prefix}.path", f"{prefix}.name", RewardError)


async def score_sample(
    solution_str: str,
    ground_truth: Any,
    metadata: Any = None,
    *,
    path: str,
    name: str,
    key: str | None = None,
) -> Any:
    """Return what the function returns for a response.

    Args:
        solution_str: `sample.response`.
        ground_truth: `sample.label`.
        metadata: `sample.metadata`, the column of this name.
        path: the file of the function.
        name: the function.
        key: the entry of a dict that is the score.
    """
    sample = SimpleNamespace(response=solution_str, label=ground_truth, metadata={} if metadata is None else metadata)
    score = _loaded(path, name)(SimpleNamespace(), sample)
    if inspect.isawaitable(score):
        score = await score
    return {**score, "score": score[key]} if isinstance(score, dict) and key is not None else score


def score_after_thinking(solution_str: str, ground_truth: Any) -> float:
    r"""Return 1 if the last `\boxed{}` after the thoughts equals the ground truth mathematically, else 0.

    A response without `</think>` or `###Response` scores 0, as with slime's `--rm-type deepscaler`.
    """
    for mark, part in (("</think>", -1), ("###Response", 1)):
        if mark in solution_str:
            return compute_score(solution_str.split(mark)[part], ground_truth)
    return 0.0
