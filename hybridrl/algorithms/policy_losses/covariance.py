"""Losses that restrain the tokens with the largest covariance of log-probability and advantage.

These tokens reduce entropy the most.

Legend: B sequences, T response tokens; rho = pi / pi_old of a token; N response tokens of the whole mini-batch.

Choosing the tokens needs the whole mini-batch: means, and the k largest of N. The choice is therefore made once per
mini-batch by a preliminary pass without gradients (`prepare_*`), and the loss of each micro-batch receives its rows of
the result as `prepared`. The random choice of clip_cov comes from a hash of (seed, row, position), so it does not
depend on the order of rows, on padding or on the split.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.config_access import read_settings
from hybridrl.algorithms.functional import masked_mean
from hybridrl.algorithms.policy_losses.tokens import ACTOR, GROUP, ClipRange, Metrics, Tokens, policy_loss, read_tokens
from hybridrl.errors import AlgorithmError
from hybridrl.settings import key


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64, whose products wrap; the right shift of a signed number needs the mask."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def token_noise(seed: int, row_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Draw 63 random bits for each token, which depend only on (seed, row id, index of the token in its row).

    Args:
        seed: differs between mini-batches.
        row_ids: [B] int64, which identify a row wherever it is placed.
        response_mask: [B, T]; only response tokens are counted, so padding does not change the result.

    Returns:
        [B, T] int64 in [0, 2^63); meaningless outside the mask.
    """
    golden = -0x61C8864680B583EB
    number_in_row = response_mask.bool().long().cumsum(-1)
    start = _mix(torch.tensor(seed, dtype=torch.int64, device=response_mask.device) + golden)
    rows = _mix(start + row_ids.to(torch.int64) * golden)
    return _mix(rows.unsqueeze(-1) + number_in_row * golden) & 0x7FFFFFFFFFFFFFFF


def _covariance(tokens: Tokens) -> Tensor:
    """(A - mean A)(log pi - mean log pi), with means over the given response tokens, [B, T]."""
    log_prob = tokens.log_prob.detach()
    centred = log_prob - masked_mean(log_prob, tokens.mask)
    return (tokens.advantages - masked_mean(tokens.advantages, tokens.mask)) * centred


def _first(order_by: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Bool [B, T]: the `count` candidates with the smallest `order_by`."""
    selected = torch.zeros_like(candidates)
    where = candidates.flatten().nonzero().squeeze(-1)
    if count <= 0 or len(where) == 0:
        return selected
    nearest = order_by.flatten()[where].topk(min(count, len(where)), largest=False).indices
    selected.view(-1)[where[nearest]] = True
    return selected


@dataclass(frozen=True, kw_only=True)
class ClipCov(ClipRange):
    """The choice of the tokens that clip_cov leaves out."""

    clip_cov_ratio: float = key(MISSING, "share of the tokens that is left out", path=GROUP, ge=0, le=1)
    clip_cov_lb: float = key(MISSING, "they are drawn from those with a covariance above this", path=GROUP)
    clip_cov_ub: float = key(MISSING, "and below this", path=GROUP)


@dataclass(frozen=True)
class KLCovChoice:
    """The choice of the tokens that kl_cov penalises."""

    kl_cov_ratio: float = key(MISSING, "share of the tokens, those of largest covariance", ge=0, le=1)


@dataclass(frozen=True)
class KLCov(KLCovChoice):
    """The choice of the tokens that kl_cov penalises, and the weight of the penalty."""

    ppo_kl_coef: float = key(MISSING, "weight of the penalty", ge=0)


def _row_ids(row_ids: Tensor | None, mask: Tensor) -> Tensor:
    return torch.arange(len(mask), device=mask.device) if row_ids is None else row_ids


@torch.no_grad()
def prepare_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    seed: int,
    row_ids: Tensor | None = None,
) -> Tensor:
    """Choose the tokens that clip_cov detaches in this mini-batch.

    They are a random `clip_cov_ratio` N of the tokens with cov in (lb, ub).

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T] of the whole mini-batch; `log_prob` is that of the
            policy before the update.
        config: the actor's settings.
        seed: the seed of this mini-batch.
        row_ids: [B] identifiers of the rows; their indices in the mini-batch if None.

    Returns:
        [B, T] bool.
    """
    settings = read_settings(ClipCov, config, who="policy loss clip_cov", root=ACTOR, group=GROUP)
    share, lower, upper = settings.clip_cov_ratio, settings.clip_cov_lb, settings.clip_cov_ub
    if not lower < upper:
        raise AlgorithmError(f"{ACTOR}.policy_loss.clip_cov_lb is {lower}; it must be below clip_cov_ub, {upper}.")
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, None)
    covariance, ratio = _covariance(tokens), tokens.log_ratio.exp()
    # Tokens that the ordinary clip already restrains are not candidates.
    clipped = -tokens.advantages * ratio.clamp(1.0 - settings.low, 1.0 + settings.high) > -tokens.advantages * ratio
    candidates = tokens.mask & ~clipped & (covariance > lower) & (covariance < upper)
    count = max(int(share * int(tokens.mask.sum())), 1) if share > 0 else 0
    return _first(token_noise(seed, _row_ids(row_ids, tokens.mask), tokens.mask), candidates, count)


@torch.no_grad()
def prepare_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    seed: int,
    row_ids: Tensor | None = None,
) -> Tensor:
    """Choose the tokens that kl_cov penalises: the `kl_cov_ratio` N of the mini-batch with the largest covariance.

    The arguments are those of `prepare_clip_cov`; the seed breaks ties.

    Returns:
        [B, T] bool.
    """
    settings = read_settings(KLCovChoice, config, who="policy loss kl_cov", root=ACTOR, group=GROUP)
    share = settings.kl_cov_ratio
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, None)
    count = max(int(share * int(tokens.mask.sum())), 1) if share > 0 else 0
    # Rank by covariance and break ties by noise: sort by the minor key first, then stably by the major one.
    where = tokens.mask.flatten().nonzero().squeeze(-1)
    noise = token_noise(seed, _row_ids(row_ids, tokens.mask), tokens.mask).flatten()[where]
    where = where[noise.argsort()]
    ranked = where[_covariance(tokens).flatten()[where].argsort(descending=True, stable=True)]
    selected = torch.zeros_like(tokens.mask)
    selected.view(-1)[ranked[:count]] = True
    return selected


@policy_loss("clip_cov", settings=ClipCov, prepare=prepare_clip_cov)
def compute_policy_loss_clip_cov(tokens: Tokens, settings: ClipCov) -> tuple[Tensor, Metrics]:
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617): PPO's clipped loss without the chosen tokens.

        l = max(-A rho, -A clip(rho, 1 - low, 1 + high))      0 on tokens chosen by `prepare_clip_cov`

    Settings: `policy_loss.clip_cov_ratio`, `policy_loss.clip_cov_lb`, `policy_loss.clip_cov_ub`;
    `clip_ratio_low`, `clip_ratio_high`, else `clip_ratio`.

    Metrics: `actor/pg_clipfrac`, tokens left out.
    """
    selected, ratio = _selected_tokens(tokens), tokens.ratio()
    loss_mat = torch.maximum(
        -tokens.advantages * ratio, -tokens.advantages * ratio.clamp(1.0 - settings.low, 1.0 + settings.high)
    )
    return torch.where(selected, 0.0, loss_mat), {"actor/pg_clipfrac": selected}


@policy_loss("kl_cov", settings=KLCov, prepare=prepare_kl_cov)
def compute_policy_loss_kl_cov(tokens: Tokens, settings: KLCov) -> tuple[Tensor, Metrics]:
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617): the unclipped surrogate, with a penalty on the chosen tokens.

        l = -A rho + ppo_kl_coef |log rho|      the second term on tokens chosen by `prepare_kl_cov` only

    Settings: `policy_loss.kl_cov_ratio`, `policy_loss.ppo_kl_coef`.

    Metrics: `actor/ppo_kl`, which is, as in verl, the token mean of |log rho|; `actor/kl_cov_frac`, tokens penalised.
    """
    selected, distance = _selected_tokens(tokens), tokens.log_ratio.abs()
    penalty = torch.where(selected, settings.ppo_kl_coef * distance, 0.0)
    loss_mat = -tokens.advantages * tokens.ratio() + penalty
    return loss_mat, {"actor/ppo_kl": distance, "actor/kl_cov_frac": selected}


def _selected_tokens(tokens: Tokens) -> Tensor:
    """Return the micro-batch's rows of the preliminary pass."""
    assert tokens.prepared is not None
    return tokens.prepared.bool() & tokens.mask
