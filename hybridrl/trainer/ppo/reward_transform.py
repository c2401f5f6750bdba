"""Transforms scores before the estimator sees them: normalisation over a batch or a run, and clipping.

Shapes: B sequences, T response tokens.
"""

from typing import Any

import torch

from hybridrl.algorithms.functional import rounding_of, without_rounding
from hybridrl.config import AlgorithmConfig

EPSILON = 1e-6


class RewardTransform:
    """R -> clip((R - mean) / (std + 1e-6), -c, c) of a sequence's summed score R.

    `normalize_rewards=batch` uses the mean and (unbiased) standard deviation of the batch. `running` uses those of
    every sequence of the run so far, including the batch (Welford's recurrence, merged batch by batch). `none` leaves R
    as it is. c is `clip_rewards`, if it is set. The change is added to the response's last token; the scores of earlier
    tokens do not change.

    The running statistics are state: `state_dict` belongs in the checkpoint.
    """

    def __init__(self, settings: AlgorithmConfig) -> None:
        self.mode = settings.normalize_rewards
        self.limit = settings.clip_rewards
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def __call__(self, scores: torch.Tensor, mask: torch.Tensor, baselines: torch.Tensor | None = None) -> Any:
        """Return the transformed token-level scores [B, T], and the transformed baselines [B] or None.

        Args:
            scores: token-level scores [B, T].
            mask: response tokens [B, T].
            baselines: rewards that advantages are computed against (ReMax). They get the same transform.
        """
        if self.mode == "none" and self.limit is None:
            return scores, baselines
        before = torch.where(mask.bool(), scores, 0.0).double().sum(dim=-1)
        mean, std = self._statistics(before)
        after = self._change(before, mean, std)
        last = (torch.arange(1, mask.shape[1] + 1) * mask.bool()).argmax(dim=1, keepdim=True)
        ends = scores.gather(1, last).double() + (after - before)[:, None]  # in float64: a small one may remain
        moved = scores.scatter(1, last, ends.to(scores.dtype))
        return moved, None if baselines is None else self._change(baselines.double(), mean, std).to(baselines.dtype)

    def _change(self, values: torch.Tensor, mean: float, std: float) -> torch.Tensor:
        difference = values - mean
        rounding = float(rounding_of(torch.tensor(mean), torch.float32))
        if std <= rounding:  # the scores do not vary
            difference = without_rounding(difference, rounding)
        values = difference / (std + EPSILON) if self.mode != "none" else values
        return values if self.limit is None else values.clamp(-self.limit, self.limit)

    def _statistics(self, values: torch.Tensor) -> tuple[float, float]:
        if self.mode == "none":
            return 0.0, 1.0
        count, first = len(values), float(values[0])
        mean = first + float((values - first).mean())
        squares = float((values - mean).square().sum())
        if self.mode == "running":
            total, difference = self.count + count, mean - self.mean
            squares += self.squares + difference**2 * self.count * count / total
            mean = self.mean + difference * count / total
            self.count, self.mean, self.squares, count = total, mean, squares, total
        return mean, (squares / max(count - 1, 1)) ** 0.5

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
