"""Losses that hold back the tokens with the largest covariance of log-probability and advantage, which drive entropy
down.

Legend: B sequences, T response tokens; rho = pi / pi_old of a token; N response tokens of the whole mini-batch.

Which tokens these are is a question to the whole mini-batch: means, and the k largest of N. It is therefore answered
once a mini-batch by a preliminary pass without gradients (``prepare_*``), and the loss of each micro-batch is handed
its rows of the answer as ``prepared``. The random choice of clip_cov comes from a hash of (seed, row, position), so
that neither the order of rows nor padding nor the split changes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import total_tokens_match
from hybridrl.algorithms.config_access import global_batch_info, number
from hybridrl.algorithms.functional import masked_mean
from hybridrl.algorithms.policy_losses.tokens import ACTOR, Metrics, Tokens, aggregate, clip_bounds, read_tokens
from hybridrl.algorithms.registry import register_policy_loss
from hybridrl.errors import AlgorithmError


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64, whose products wrap; a shift right of a signed number needs the mask."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def token_noise(seed: int, row_ids: Tensor, response_mask: Tensor) -> Tensor:
    """A number of 63 random bits for each token, a function of (seed, row id, number of the token in its row) alone.

    Args:
        seed: changes from mini-batch to mini-batch.
        row_ids: [B] int64, what names a row wherever it stands.
        response_mask: [B, T]; only response tokens are counted, so padding does not shift anything.

    Returns:
        [B, T] int64 in [0, 2^63); meaningless outside the mask.
    """
    golden = -0x61C8864680B583EB
    number_in_row = response_mask.bool().long().cumsum(-1)
    start = _mix(torch.tensor(seed, dtype=torch.int64, device=response_mask.device) + golden)
    rows = _mix(start + row_ids.to(torch.int64) * golden)
    return _mix(rows.unsqueeze(-1) + number_in_row * golden) & 0x7FFFFFFFFFFFFFFF


def _covariance(tokens: Tokens) -> Tensor:
    """(A - mean A)(log pi - mean log pi), means over the response tokens given, [B, T]."""
    log_prob = tokens.log_prob.detach()
    centred = log_prob - masked_mean(log_prob, tokens.mask)
    return (tokens.advantages - masked_mean(tokens.advantages, tokens.mask)) * centred


def _first(order_by: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Bool [B, T]: the ``count`` candidates with the smallest ``order_by``."""
    chosen = torch.zeros_like(candidates)
    where = candidates.flatten().nonzero().squeeze(-1)
    if count <= 0 or len(where) == 0:
        return chosen
    nearest = order_by.flatten()[where].topk(min(count, len(where)), largest=False).indices
    chosen.view(-1)[where[nearest]] = True
    return chosen


def _ratio_setting(config: Any, name: str, who: str) -> float:
    share = number(config, f"policy_loss.{name}", who=who, low=0.0)
    if share > 1.0:
        raise AlgorithmError(f"{ACTOR}.policy_loss.{name} is {share}; {who} needs a share of the tokens in [0, 1].")
    return share


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
    """Tokens that clip_cov detaches in this mini-batch: a random ``clip_cov_ratio`` N of those with cov in (lb, ub).

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T] of the whole mini-batch; ``log_prob`` of the policy
            before the update.
        config: the actor's settings.
        seed: of this mini-batch.
        row_ids: [B] what names each row; its number in the mini-batch when None.

    Returns:
        [B, T] bool.
    """
    who = "policy loss clip_cov"
    low, high = clip_bounds(config, who)
    share = _ratio_setting(config, "clip_cov_ratio", who)
    lower, upper = (number(config, f"policy_loss.{name}", who=who) for name in ("clip_cov_lb", "clip_cov_ub"))
    if not lower < upper:
        raise AlgorithmError(f"{ACTOR}.policy_loss.clip_cov_lb is {lower}; it must be below clip_cov_ub, {upper}.")
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, None)
    covariance, ratio = _covariance(tokens), tokens.log_ratio.exp()
    # Tokens that the ordinary clip holds back already are not candidates.
    clipped = -tokens.advantages * ratio.clamp(1.0 - low, 1.0 + high) > -tokens.advantages * ratio
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
    """Tokens that kl_cov penalises in this mini-batch: the ``kl_cov_ratio`` N with the largest covariance, [B, T] bool.

    Arguments as for `prepare_clip_cov`; the seed decides between equals.
    """
    share = _ratio_setting(config, "kl_cov_ratio", "policy loss kl_cov")
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, None)
    count = max(int(share * int(tokens.mask.sum())), 1) if share > 0 else 0
    # Rank by covariance, equals by noise: sort by the lesser key first, then stably by the greater one.
    where = tokens.mask.flatten().nonzero().squeeze(-1)
    noise = token_noise(seed, _row_ids(row_ids, tokens.mask), tokens.mask).flatten()[where]
    where = where[noise.argsort()]
    ranked = where[_covariance(tokens).flatten()[where].argsort(descending=True, stable=True)]
    chosen = torch.zeros_like(tokens.mask)
    chosen.view(-1)[ranked[:count]] = True
    return chosen


def _chosen(prepared: Tensor | None, prepare: Any, args: tuple[Tensor, ...], config: Any, who: str) -> Tensor:
    """The rows of the preliminary pass; made here only where this call is the whole mini-batch."""
    if prepared is not None:
        return prepared.bool() & args[3].bool()
    if not total_tokens_match(args[3], global_batch_info(config).get("batch_num_tokens")):
        raise AlgorithmError(
            f"{who} chooses its tokens over the whole mini-batch, but this call holds a part of it and no choice was "
            "made. Run get_policy_loss_prepare_fn(name) on the mini-batch and pass each part its rows as prepared=."
        )
    return prepare(*args, config, 0)


@register_policy_loss("clip_cov", prepare=prepare_clip_cov)
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    prepared: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617): PPO's clipped loss without the chosen tokens.

        l = max(-A rho, -A clip(rho, 1 - low, 1 + high))      0 on tokens chosen by `prepare_clip_cov`

    Settings: ``policy_loss.clip_cov_ratio``, ``policy_loss.clip_cov_lb``, ``policy_loss.clip_cov_ub``;
    ``clip_ratio_low``, ``clip_ratio_high``, else ``clip_ratio``.

    Args:
        prepared: [B, T] this micro-batch's rows of `prepare_clip_cov`; without it the call must hold the mini-batch.

    Metrics: ``actor/pg_clipfrac``, tokens left out.
    """
    low, high = clip_bounds(config, "policy loss clip_cov")
    args = (old_log_prob, log_prob, advantages, response_mask)
    chosen = _chosen(prepared, prepare_clip_cov, args, config, "policy loss clip_cov")
    tokens = read_tokens(*args, rollout_is_weights)
    ratio = tokens.ratio()
    loss_mat = torch.maximum(-tokens.advantages * ratio, -tokens.advantages * ratio.clamp(1.0 - low, 1.0 + high))
    metrics = tokens.metrics(pg_clipfrac=chosen)
    return aggregate(torch.where(chosen, 0.0, loss_mat), tokens, loss_agg_mode, config), metrics


@register_policy_loss("kl_cov", prepare=prepare_kl_cov)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    prepared: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617): the unclipped surrogate, with a penalty on chosen
    tokens.

        l = -A rho + ppo_kl_coef |log rho|      the second term on tokens chosen by `prepare_kl_cov` only

    Settings: ``policy_loss.kl_cov_ratio``, ``policy_loss.ppo_kl_coef``.

    Args:
        prepared: [B, T] this micro-batch's rows of `prepare_kl_cov`; without it the call must hold the mini-batch.

    Metrics: ``actor/pg_clipfrac``, tokens penalised.
    """
    coefficient = number(config, "policy_loss.ppo_kl_coef", who="policy loss kl_cov", low=0.0)
    args = (old_log_prob, log_prob, advantages, response_mask)
    chosen = _chosen(prepared, prepare_kl_cov, args, config, "policy loss kl_cov")
    tokens = read_tokens(*args, rollout_is_weights)
    penalty = torch.where(chosen, coefficient * tokens.log_ratio.abs(), 0.0)
    metrics = tokens.metrics(pg_clipfrac=chosen)
    return aggregate(-tokens.advantages * tokens.ratio() + penalty, tokens, loss_agg_mode, config), metrics
