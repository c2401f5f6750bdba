"""The only loop over time in this package: a linear recurrence computed backwards, for all rows at once.

Legend: B sequences, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.functional import keep, row_blocks
from hybridrl.errors import AlgorithmError

# Rows per block: enough to amortise the call of a scan step, few enough to fit the cache.
_ROWS = 2048


def unit_interval(value: float | Tensor, name: str) -> float:
    """Return the value of `algorithm.<name>`, refused outside [0, 1]."""
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise AlgorithmError(f"algorithm.{name} is {number}; it must lie in [0, 1].")
    return number


def check_same_shape(response_mask: Tensor, **tensors: Tensor) -> None:
    """Refuse tensors whose shape differs from the mask's."""
    for name, tensor in tensors.items():
        if tensor.shape != response_mask.shape:
            raise AlgorithmError(
                f"{name} have shape {tuple(tensor.shape)} and response_mask {tuple(response_mask.shape)}; both must be "
                "[B, T]."
            )


def check_finite(values: Tensor, response_mask: Tensor, name: str) -> None:
    """Refuse values whose shape differs from the mask's, or that are NaN or infinite on a response token.

    The message names the rows.
    """
    check_same_shape(response_mask, **{name: values})
    # Not by their sum, which is infinite for numbers near the largest of their dtype.
    bad = torch.cat([~torch.isfinite(keep(values[b], response_mask[b])).all(-1) for b in row_blocks(values)])
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
    """Return the transpose in contiguous memory: a strided operand would slow down every later operation."""
    return block.t().contiguous()


def backwards(rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, decay: float) -> Tensor:
    """y_t = r_t + gamma V_{t+1} - V_t + decay y_{t+1} over response tokens, [B, T]; finite but undefined elsewhere.

    t + 1 is the next response token: V and y are carried unchanged over holes in `mask` (bool). Without `values`, V
    is 0. It is computed in float64: small differences of large values are not lost, and the rounding of thousands of
    sums does not add up. The rows are processed in blocks that stay in the cache. Each block is transposed to put time
    first, so that every step of the scan reads contiguous memory.
    """
    out = torch.empty_like(rewards)
    step = _ROWS if rewards.device.type == "cpu" else max(len(rewards), 1)
    for start in range(0, len(rewards), step):
        block = slice(start, start + step)
        m = mask[block]
        # If no row has a hole, everything after its last token is already zero and the mask is not needed.
        holes = bool((m[:, 1:] & ~m[:, :-1]).any())
        terms = keep(rewards[block], m).double()
        if values is not None:
            v = keep(values[block], m).double()
            terms = terms - v
            if holes:
                # The value of the next response token is a scan too: v_t on a response token, else the later value.
                upcoming = reverse_scan(_time_first(v), _time_first((~m).to(v.dtype))).t()
                terms[:, :-1].add_(upcoming[:, 1:] * m[:, :-1], alpha=gamma)
            else:
                terms[:, :-1].add_(v[:, 1:], alpha=gamma)
        factor = _time_first(1.0 + (decay - 1.0) * m.to(terms.dtype)) if holes else decay
        out[block] = _time_first(reverse_scan(_time_first(terms), factor))
    return out


def rewards_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over response tokens, carried unchanged over holes: [B, T] -> [B, T], zero outside.

    Raises:
        AlgorithmError: rewards are not finite.
    """
    mask = response_mask.bool()
    check_finite(token_level_rewards, mask, "token_level_rewards")
    returns = backwards(token_level_rewards, None, mask, gamma, gamma)
    for block in row_blocks(returns):
        returns[block] = keep(returns[block], mask[block])
    return returns
