"""Aggregation of per-token losses into one number that does not depend on how the mini-batch is split.

Legend: B sequences of this call, T response tokens; D data-parallel ranks.

A loss sees one micro-batch on one rank. It returns the micro-batch's share of the whole mini-batch's loss: the sum over
its tokens divided by counts of the whole mini-batch. The shares add up to the same loss for every split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.functional import entropy_from_logits, keep
from hybridrl.errors import AlgorithmError

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def global_counts(response_mask: Tensor) -> dict[str, int]:
    """Return `batch_num_tokens` and `global_batch_size` of a whole mini-batch, as `agg_loss` takes them.

    `response_mask [B, T]` is that of the whole mini-batch. Sequences without any response token (rejected or aborted)
    are not counted, so they do not dilute a mean over sequences.
    """
    mask = response_mask.bool()
    return {"batch_num_tokens": int(mask.sum()), "global_batch_size": int(mask.any(dim=-1).sum())}


def _denominator(count: float | Tensor | None, local: Tensor, dp_size: int, name: str, mode: str) -> float | Tensor:
    """Return the global count, or this call's own if none was given and there is only one rank.

    The result is at least 1, so that an empty batch gives 0 instead of 0 / 0.
    """
    if count is None:
        if dp_size > 1:
            raise AlgorithmError(
                f"loss_agg_mode={mode} over dp_size={dp_size} ranks needs {name} of the whole mini-batch, for "
                f"a mean over ranks of local means is another loss. Pass {name} to agg_loss, or set "
                f"config.global_batch_info[{name!r}]."
            )
        return local.clamp(min=1)
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    sequence_lengths: Tensor | None = None,
) -> Tensor:
    r"""Compute this call's share of the mini-batch loss from per-token losses.

    A sequence is a row, or the rows of one session (`algorithms.sessions`), which count as if they were one long row.
    With n_i tokens in the sequence that row i belongs to, M = `batch_num_tokens` and G = `global_batch_size`:

    | mode                    | value                                         |
    |-------------------------|-----------------------------------------------|
    | token-mean              | D / M sum_i sum_t m_it l_it                    |
    | token-sum               | D sum_i sum_t m_it l_it                        |
    | seq-mean-token-sum      | D / G sum_i sum_t m_it l_it                    |
    | seq-mean-token-sum-norm | the same, / `loss_scale_factor`             |
    | seq-mean-token-mean     | D / G sum_i (sum_t m_it l_it) / n_i            |

    token-mean is DAPO's (arXiv 2503.14476, eq. 8), seq-mean-token-mean GRPO's (arXiv 2402.03300, eq. 3),
    seq-mean-token-sum-norm Dr. GRPO's (arXiv 2503.20783).

    Args:
        loss_mat: [B, T] loss of each token. Entries under a zero mask are ignored, NaN included.
        loss_mask: [B, T], 1 where a token contributes.
        loss_agg_mode: one of `LOSS_AGG_MODES`.
        dp_size: D. It multiplies the share, for an engine that averages gradients over ranks and does not compensate
            for that.
        batch_num_tokens: M, tokens of the whole mini-batch over all ranks; those of this call if None and D = 1.
        global_batch_size: G, sequences of the whole mini-batch with at least one token; those of this call if None and
            D = 1.
        loss_scale_factor: constant of seq-mean-token-sum-norm, usually the maximum response length; T if None.
        sequence_lengths: [B] n_i, where a sequence may have several rows, on other ranks too; G counts sequences then.
            None: each row is a sequence, and n_i = sum_t m_it.

    Returns:
        A scalar. It is 0 for an empty mini-batch.

    Raises:
        AlgorithmError: the mode is unknown, or D > 1 without the count that the mode divides by.
    """
    if loss_agg_mode == "token-sum":
        return keep(loss_mat, loss_mask).sum() * dp_size
    if loss_agg_mode == "token-mean":
        tokens = _denominator(batch_num_tokens, loss_mask.bool().sum(), dp_size, "batch_num_tokens", loss_agg_mode)
        return keep(loss_mat, loss_mask).sum() / tokens * dp_size
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise AlgorithmError(f"loss_agg_mode is {loss_agg_mode!r}; choose from {', '.join(LOSS_AGG_MODES)}.")
    lengths = loss_mask.bool().sum(dim=-1)
    if sequence_lengths is not None and global_batch_size is None:
        raise AlgorithmError(
            f"loss_agg_mode={loss_agg_mode}: sequence_lengths says that a sequence may have several rows, so pass "
            "global_batch_size, the number of sequences, too."
        )
    sequences = _denominator(global_batch_size, (lengths > 0).sum(), dp_size, "global_batch_size", loss_agg_mode)
    per_sequence = keep(loss_mat, loss_mask).sum(dim=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        whole = lengths if sequence_lengths is None else sequence_lengths
        per_sequence = per_sequence / whole.clamp(min=1)
    loss = per_sequence.sum() / sequences * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        factor = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
        if not factor > 0:
            raise AlgorithmError(f"loss_scale_factor is {factor}; it must be a positive number of tokens.")
        loss = loss / factor
    return loss


def compute_entropy_loss(
    logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean", **counts: Any
) -> Tensor:
    """Compute the aggregated entropy of the policy, agg(H(softmax(logits))): [B, T, V] and [B, T] -> scalar.

    The actor's loss subtracts `entropy_coeff` times this. `counts` are `agg_loss`'s global counts.
    """
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, **counts)


def total_tokens_match(response_mask: Tensor, batch_num_tokens: float | Tensor | None) -> bool:
    """Whether this call holds the whole mini-batch: the global count is unknown or equals the local one."""
    return batch_num_tokens is None or int(response_mask.bool().sum()) == int(torch.as_tensor(batch_num_tokens))
