"""Losses that fit the log-ratios of a prompt's samples to their rewards, both measured from the mean of the prompt.

Legend: B rows of a mini-batch, T response tokens; k samples of a prompt, mean_g over them; R_i the reward of sample i,
as its advantage tells it; x_i = sum_t (log pi_t - log pi'_t) of its sequence, with pi' the policy to stay near.

The mean of a prompt needs all of its samples, which may be in several micro-batches and on several ranks. A pass before
the update therefore computes a weight per sample from detached values, and the loss is linear in log pi. This is exact:
of sum_i c_i^2 / 2 with c_i = beta (x_i - mean_g x) - (R_i - mean_g R), the part of the gradient that leads through the
means is -mean_g(grad) sum_i c_i = 0, because the c_i of a prompt add up to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.config_access import read_settings
from hybridrl.algorithms.functional import keep, rounding_of
from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.policy_losses.tokens import ACTOR, GROUP, ClipRange, Metrics, Tokens, policy_loss
from hybridrl.algorithms.sequences import Sequences, WholeSequences
from hybridrl.settings import key


@dataclass(frozen=True)
class GVPOSettings:
    """Settings of the losses `gvpo` and `gvpo_ref`."""

    gvpo_beta: float = key(
        0.1, "gvpo, gvpo_ref: weight of the log-ratio of a sequence, in units of the reward; larger moves less", gt=0
    )


@dataclass(frozen=True, kw_only=True)
class FlowRLSettings(ClipRange):
    """Settings of the loss `flowrl_vargrad`."""

    flowrl_beta: float = key(
        15.0, "flowrl_vargrad: weight of the reward; samples are to be as likely as exp of it says", gt=0
    )


class SampleGroups:
    """The samples of a mini-batch and their prompts. Rows of one session are one sample.

    Args:
        response_mask: [B, T]; a sample without a response token does not count.
        group_ids: [B] the prompt of each row.
        sequence_ids: [B] the sample of each row; None: each row is one.
    """

    def __init__(self, response_mask: Tensor, group_ids: Tensor, sequence_ids: Tensor | None) -> None:
        self.mask = response_mask.bool()
        self._sequences = Sequences() if sequence_ids is None else WholeSequences(sequence_ids)
        self._groups = Groups(group_ids, response_mask.device)
        has_tokens = self.mask.any(-1, keepdim=True).double()
        self._share = (has_tokens / self._sequences.sum(has_tokens).clamp(min=1)).squeeze(-1)  # of a row in its sample
        self.lengths = self._sequences.sum(self.mask.double()).squeeze(-1)

    def total(self, values: Tensor) -> Tensor:
        """The sum over the response tokens of each row's sample: [B, T] -> [B] in float64."""
        return self._sequences.sum(keep(values, self.mask).double()).squeeze(-1)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the response tokens of each row's sample, [B, T] -> [B]; samples of a prompt whose means
        differ by rounding alone have equal ones.
        """
        length = self.lengths.clamp(min=1)
        rounding = rounding_of(self.total(values.abs()) / length, values.dtype)
        return self._groups.levelled(self.total(values) / length, rounding)

    def centred(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """The distance from the mean of the prompt's samples, weighted if weights are given, [B] -> [B]."""
        share = self._share if weights is None else self._share * weights
        return values - self._groups.mean(values, share)

    def best_and_worst(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the best and of the worst sample of each prompt, the first of equal ones: [B] -> ([B], [B]) bool.

        A prompt whose samples all have the same value has neither.
        """
        counts = self.lengths > 0
        smallest, largest = (torch.where(counts, sign * values, torch.inf) for sign in (1.0, -1.0))
        low, high = self._groups.smallest(smallest), -self._groups.smallest(largest)
        differ = (high > low)[self._groups.ids]
        first = (self._groups.best_and_second(-each)[0] & differ for each in (largest, smallest))
        best, worst = (self._sequences.sum(row[:, None].double()).squeeze(-1) > 0 for row in first)
        return best, worst

    def of(self, sample: Tensor, values: Tensor) -> Tensor:
        """The value of one sample of each prompt, on all rows of the prompt; 0 for prompts without it.

        Args:
            sample: [B] bool, the rows of that sample.
            values: [B], equal on all rows of a sample.
        """
        return self._groups.sum(torch.where(sample, values * self._share, 0.0))[self._groups.ids]

    @property
    def count(self) -> Tensor:
        """The number of samples of each row's prompt, [B] float64."""
        return self._groups.sum(self._share)[self._groups.ids]

    @property
    def bessel(self) -> Tensor:
        """k / (k - 1) of each row's prompt, [B]; 0 for a sample that is alone."""
        count = self.count
        return torch.where(count > 1.5, count / (count - 1).clamp(min=1), 0.0)

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        """A number of each row on its response tokens, 0 elsewhere: [B] -> [B, T] in the dtype of `like`."""
        return torch.where(self.mask, values.to(like.dtype)[:, None], 0.0)


@torch.no_grad()
def prepare_gvpo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    seed: int,
    row_ids: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    *,
    group_ids: Tensor,
    ref_log_prob: Tensor | None = None,
) -> Tensor:
    """Compute the weight of each sample's log-probability in `gvpo` and `gvpo_ref`, on all of its tokens:

        W_i = beta k / (k - 1) [(R_i - mean_g R) - beta (x_i - mean_g x)]

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T] of the whole mini-batch; `log_prob` is that of the
            policy before the update.
        config: the actor's settings.
        seed, row_ids: not used.
        sequence_ids: [B] the sequence of each row; None: each row is one.
        group_ids: [B] the prompt of each row.
        ref_log_prob: [B, T] of pi'; None: pi' is the old policy.

    Returns:
        [B, T]; 0 for a sample that is the only one of its prompt.
    """
    settings = read_settings(GVPOSettings, config, who="policy loss gvpo", root=ACTOR, group=GROUP)
    samples = SampleGroups(response_mask, group_ids, sequence_ids)
    log_ratio = samples.total(log_prob - (old_log_prob if ref_log_prob is None else ref_log_prob))
    error = samples.centred(samples.mean(advantages)) - settings.gvpo_beta * samples.centred(log_ratio)
    return samples.spread(settings.gvpo_beta * samples.bessel * error, log_prob)


def _weighted_likelihood(tokens: Tokens, metric: str) -> tuple[Tensor, Metrics]:
    assert tokens.prepared is not None
    weight = keep(tokens.prepared, tokens.mask)
    return -weight * tokens.log_prob, {metric: weight.abs()}


@policy_loss(
    "gvpo",
    settings=GVPOSettings,
    prepare=prepare_gvpo,
    loss_agg_mode="seq-mean-token-sum",
    whole_sequences=True,
    compares_samples=True,
)
def compute_policy_loss_gvpo(tokens: Tokens, settings: GVPOSettings) -> tuple[Tensor, Metrics]:
    """GVPO (Zhang et al. 2025, arXiv 2504.19599): l = -W_i log pi, with W_i of `prepare_gvpo` and pi' = pi_old.

    With `loss_agg_mode=seq-mean-token-sum` and k samples of each prompt, the gradient is that of

        mean over prompts of 1 / (2 (k - 1)) sum_i [beta (x_i - mean_g x) - (R_i - mean_g R)]^2,

    whose only minimum is the policy with the largest E[R] - beta KL(pi || pi'). Neither ratio nor clip is needed, and
    samples may be of another policy. R_i is the mean advantage of the sample's tokens, which
    `algorithm.adv_estimator=grpo` with `norm_adv_by_std_in_grpo=False` gives in units of the reward.

    Settings: `policy_loss.gvpo_beta`. Metrics: `actor/gvpo_weight`, the mean of abs(W).
    """
    return _weighted_likelihood(tokens, "actor/gvpo_weight")


@policy_loss(
    "gvpo_ref",
    settings=GVPOSettings,
    needs=("ref_log_prob",),
    prepare=prepare_gvpo,
    loss_agg_mode="seq-mean-token-sum",
    whole_sequences=True,
    compares_samples=True,
)
def compute_policy_loss_gvpo_ref(tokens: Tokens, settings: GVPOSettings) -> tuple[Tensor, Metrics]:
    """`gvpo` with pi' = pi_ref: the KL of its optimum is from the reference, not from the policy of the last step."""
    return _weighted_likelihood(tokens, "actor/gvpo_weight")


@torch.no_grad()
def prepare_flowrl_vargrad(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    seed: int,
    row_ids: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    *,
    group_ids: Tensor,
    ref_log_prob: Tensor,
) -> Tensor:
    """Compute the weight of each sample's log-probability in `flowrl_vargrad`, on all of its tokens:

        W_i = 2 w_i / n_i (e_i - mean_g e),   e_i = beta R_i - x_i / n_i,   mean_g weighted by w

    n_i are the response tokens of the sample. w_i is the geometric mean of rho over them, clipped to [1 - lo, 1 + hi].

    Args:
        old_log_prob, log_prob, advantages, response_mask, ref_log_prob: [B, T] of the whole mini-batch; `log_prob` is
            that of the policy before the update.
        config: the actor's settings.
        seed, row_ids: not used.
        sequence_ids: [B] the sequence of each row; None: each row is one.
        group_ids: [B] the prompt of each row.

    Returns:
        [B, T]; 0 for a sample that is the only one of its prompt.
    """
    settings = read_settings(FlowRLSettings, config, who="policy loss flowrl_vargrad", root=ACTOR, group=GROUP)
    samples = SampleGroups(response_mask, group_ids, sequence_ids)
    length = samples.lengths.clamp(min=1)
    ratio = (samples.total(log_prob - old_log_prob) / length).exp().clamp(1.0 - settings.low, 1.0 + settings.high)
    error = settings.flowrl_beta * samples.mean(advantages) - samples.total(log_prob - ref_log_prob) / length
    return samples.spread(2.0 * ratio / length * samples.centred(error, ratio), log_prob)


@policy_loss(
    "flowrl_vargrad",
    settings=FlowRLSettings,
    needs=("ref_log_prob",),
    prepare=prepare_flowrl_vargrad,
    loss_agg_mode="seq-mean-token-sum",
    whole_sequences=True,
    compares_samples=True,
)
def compute_policy_loss_flowrl_vargrad(tokens: Tokens, settings: FlowRLSettings) -> tuple[Tensor, Metrics]:
    """FlowRL (Zhu et al. 2025, arXiv 2509.15207) without its network for log Z: l = -W_i log pi, W_i of
    `prepare_flowrl_vargrad`. With `loss_agg_mode=seq-mean-token-sum` the gradient is that of the mean over samples of

        w_i (log Z + x_i / n_i - beta R_i)^2,

    where log Z of a prompt is the number that makes the sum over its samples smallest (VarGrad, Richter et al. 2020,
    arXiv 2010.10436), and w_i is a constant. The paper learns log Z(x) by a network on the prompt's hidden states, next
    to the policy. R_i is the mean advantage of the sample's tokens: of `algorithm.adv_estimator=grpo`, the reward
    normalised over the group as in the paper.

    Settings: `policy_loss.flowrl_beta`; `clip_ratio_low`, `clip_ratio_high`, else `clip_ratio`. Metrics:
    `actor/flowrl_weight`, the mean of abs(W).
    """
    return _weighted_likelihood(tokens, "actor/flowrl_weight")
