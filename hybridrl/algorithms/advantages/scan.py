"""The one loop of this room: a linear recurrence run backwards over time, all rows at once.

Legend: B sequences, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.errors import AlgorithmError
from hybridrl.algorithms.functional import keep, masked_row_sum, row_blocks

# Rows of one block: wide enough for a step of the scan to be worth its call, small enough for the cache.
_ROWS = 2048


def unit_interval(value: float | Tensor, name: str) -> float:
    """A discount of ``algorithm.<name>``, refused outside [0, 1]."""
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise AlgorithmError(f"algorithm.{name} is {number}; it must lie in [0, 1].")
    return number


def check_finite(values: Tensor, response_mask: Tensor, name: str) -> None:
    """Refuse values of another shape than the mask, or NaN or infinite on a response token, naming the rows."""
    if values.shape != response_mask.shape:
        raise AlgorithmError(
            f"{name} have shape {tuple(values.shape)} and response_mask {tuple(response_mask.shape)}; both must be "
            "[B, T]."
        )
    bad = ~torch.isfinite(masked_row_sum(values, response_mask))
    if bool(bad.any()):
        rows = bad.nonzero().squeeze(-1)[:8].tolist()
        raise AlgorithmError(f"{name} are NaN or infinite in rows {rows}: look at where they come from.")


def reverse_scan(terms: Tensor, decay: float | Tensor) -> Tensor:
    """y_t = terms_t + decay_t y_{t+1} with y_T = 0; time is the first dimension, [T, B]; decay may be a number."""
    out = torch.empty_like(terms)
    y = terms.new_zeros(terms.shape[1:])
    steps = list(zip(terms.unbind(0), out.unbind(0), strict=True))
    if isinstance(decay, Tensor):
        for (term, place), d in zip(reversed(steps), reversed(decay.unbind(0)), strict=True):
            y = torch.addcmul(term, d, y, out=place)
    else:
        for term, place in reversed(steps):
            y = torch.add(term, y, alpha=decay, out=place)
    return out


def _time_first(block: Tensor) -> Tensor:
    """The transpose, in memory: a strided operand would slow every operation after it."""
    return block.t().contiguous()


def backwards(rewards: Tensor, values: Tensor | None, response_mask: Tensor, gamma: float, decay: float) -> Tensor:
    """y_t = r_t + gamma V_{t+1} - V_t + decay y_{t+1} over response tokens, [B, T]; finite but undefined elsewhere.

    t + 1 is the next response token: V and y are carried unchanged over holes in the mask. Without ``values`` V is 0.
    Done in blocks of rows with time along the rows, so that each step reads contiguous memory that is in the cache.
    """
    out = torch.empty_like(rewards)
    step = _ROWS if rewards.device.type == "cpu" else max(len(rewards), 1)
    for start in range(0, len(rewards), step):
        block = slice(start, start + step)
        mask = _time_first(response_mask[block].bool())
        terms = keep(_time_first(rewards[block]), mask)
        # Where no row has a hole, everything after its last token is zero by itself and the scan needs no mask.
        holes = bool((mask[1:] & ~mask[:-1]).any())
        if values is not None:
            v = keep(_time_first(values[block]), mask)
            terms -= v
            # The value of the next response token is a scan too: v_t where there is one, else what comes later.
            upcoming = reverse_scan(v, (~mask).to(v.dtype)) if holes else v
            terms[:-1].add_(upcoming[1:] * mask[:-1], alpha=gamma)
        scanned = reverse_scan(terms, 1.0 + (decay - 1.0) * mask.to(terms.dtype) if holes else decay)
        out[block] = _time_first(scanned)
    return out


def rewards_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over response tokens, carried unchanged over holes: [B, T] -> [B, T], zero outside.

    Raises:
        AlgorithmError: rewards that are not finite.
    """
    check_finite(token_level_rewards, response_mask, "token_level_rewards")
    returns = backwards(token_level_rewards, None, response_mask, gamma, gamma)
    for block in row_blocks(returns):
        returns[block] = keep(returns[block], response_mask[block])
    return returns
