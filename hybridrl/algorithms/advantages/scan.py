"""The one loop of this room: a linear recurrence run backwards over time, all rows at once.

Legend: B sequences, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.errors import AlgorithmError
from hybridrl.algorithms.functional import keep


def unit_interval(value: float | Tensor, name: str) -> float:
    """A discount of ``algorithm.<name>``, refused outside [0, 1]."""
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise AlgorithmError(f"algorithm.{name} is {number}; it must lie in [0, 1].")
    return number


def check_finite(values: Tensor, response_mask: Tensor, name: str) -> None:
    """Refuse values that are NaN or infinite on a response token, naming the rows."""
    if values.shape != response_mask.shape:
        raise AlgorithmError(
            f"{name} have shape {tuple(values.shape)} and response_mask {tuple(response_mask.shape)}; both must be "
            "[B, T]."
        )
    bad = ~torch.isfinite(keep(values, response_mask).sum(-1))
    if bool(bad.any()):
        rows = bad.nonzero().squeeze(-1)[:8].tolist()
        raise AlgorithmError(f"{name} are NaN or infinite in rows {rows}: look at where they come from.")


def reverse_scan(terms: Tensor, decay: Tensor) -> Tensor:
    """y_t = terms_t + decay_t y_{t+1} with y_T = 0; time is the first dimension, [T, B] all three."""
    out = torch.empty_like(terms)
    y = terms.new_zeros(terms.shape[1:])
    for t in range(terms.shape[0] - 1, -1, -1):
        y = torch.addcmul(terms[t], decay[t], y, out=out[t])
    return out


def rewards_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over response tokens, carried unchanged over holes: [B, T] -> [B, T], zero outside.

    Raises:
        AlgorithmError: rewards that are not finite.
    """
    check_finite(token_level_rewards, response_mask, "token_level_rewards")
    rewards = keep(token_level_rewards, response_mask)
    if gamma == 1.0:
        # A reverse cumulative sum as total minus what came before would lose digits; flipping keeps the small end
        # exact.
        return keep(rewards.flip(-1).cumsum(-1).flip(-1), response_mask)
    # Time runs along the rows during the scan: one step then reads contiguous memory.
    mask = response_mask.bool().t().contiguous()
    decay = torch.where(mask, gamma, 1.0).to(rewards.dtype)
    return keep(reverse_scan(rewards.t().contiguous(), decay).t(), response_mask)
