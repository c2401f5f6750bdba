"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import agg_loss
from hybridrl.algorithms.functional import keep, masked_mean
from hybridrl.errors import AlgorithmError


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    sequence_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped squared error of the values (PPO's critic, as in the InstructGPT line of work):

        1/2 agg( max( (V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2 ) )

    Args:
        vpreds: V [B, T], values predicted now.
        returns: R [B, T], targets.
        values: V_old [B, T], values predicted before the update.
        response_mask: [B, T].
        cliprange_value: c > 0, half-width of the interval around V_old.
        loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor, sequence_lengths: see
            `agg_loss`.

    Returns:
        (loss, clipfrac): this call's share of the loss, and the fraction of its tokens where the clipped error is the
        larger one (a token mean, without gradient).

    Raises:
        AlgorithmError: `cliprange_value` is not positive.
    """
    if not cliprange_value > 0:
        raise AlgorithmError(f"critic.cliprange_value is {cliprange_value}; it must be greater than 0.")
    # Padding is masked before anything is squared, so that NaN there reaches neither the loss nor its gradient.
    vpreds, returns, values = (keep(x, response_mask) for x in (vpreds, returns, values))
    clipped = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    error, clipped_error = (vpreds - returns) ** 2, (clipped - returns) ** 2
    loss = 0.5 * agg_loss(
        torch.maximum(error, clipped_error),
        response_mask,
        loss_agg_mode,
        dp_size,
        batch_num_tokens,
        global_batch_size,
        loss_scale_factor,
        sequence_lengths,
    )
    clipfrac = masked_mean((clipped_error > error).detach().float(), response_mask)
    return loss, clipfrac
