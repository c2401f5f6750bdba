"""Estimators for sessions of several turns, which give each turn an advantage of its own.

Legend: B samples, T response tokens, N turns; turn k of sample i is a run of response tokens without a hole, r_{i,k}
the sum of the rewards on its tokens; R_i = sum_k r_{i,k}; g the samples of one prompt (same `index`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.advantages.scan import reverse_scan, unit_interval
from hybridrl.algorithms.algorithm_registry import register_adv_est
from hybridrl.algorithms.config_access import number, setting
from hybridrl.algorithms.functional import keep, rounding_of
from hybridrl.algorithms.groups import Groups, group_samples, levelled_scores, outcome_scores, score_rounding
from hybridrl.errors import AlgorithmError


class BatchTurns:
    """The turns of a batch.

    Args:
        response_mask: [B, T].
        states: [B, T], above 0 at the last token of a turn, which then ends without a hole behind it; None: only holes
            end turns.

    Attributes:
        rows, places: [N], the sample of each turn and its number k in it.
    """

    def __init__(self, response_mask: Tensor, states: Tensor | None = None) -> None:
        self.mask = response_mask.bool()
        before = torch.zeros_like(self.mask)
        before[:, 1:] = self.mask[:, :-1]
        if states is not None:
            before[:, 1:] &= states[:, :-1] == 0
        starts = self.mask & ~before
        self._number = starts.flatten().long().cumsum(0).view_as(starts) - 1  # of each token, over the whole batch
        self.rows = starts.nonzero()[:, 0]
        firsts = starts.sum(-1).cumsum(0) - starts.sum(-1)
        self.places = torch.arange(len(self.rows), device=self.rows.device) - firsts[self.rows]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each turn: [B, T] -> [N]."""
        zeros = values.new_zeros(len(self.rows))
        return zeros.index_add_(0, self._number[self.mask], values[self.mask])

    def to_go(self, values: Tensor, gamma: float) -> Tensor:
        """G_k = v_k + gamma G_{k+1} within each sample: [N] -> [N]."""
        table = values.new_zeros((int(self.places.max()) + 1 if len(values) else 0, len(self.mask)))
        table[self.places, self.rows] = values
        return reverse_scan(table, gamma)[self.places, self.rows]

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        """Copy one number per turn to its tokens: [N] -> [B, T] in the dtype of `like`, zero elsewhere."""
        out = torch.zeros_like(like)
        out[self.mask] = values.to(like.dtype)[self._number[self.mask]]
        return out


@register_adv_est("grpo_turns", compares_samples=True)
@torch.no_grad()
def compute_grpo_turns_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    turn_states: Tensor | None = None,
    epsilon: float = 1e-6,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GRPO with process supervision (Shao et al. 2024, arXiv 2402.03300, section 4.1.3), with turns as the steps.

        z_{i,k} = (r_{i,k} - mean) / (std + epsilon)     mean and unbiased std over all turns of all samples of g
        A_{i,k} = sum_{l >= k} z_{i,l}                   on each token of turn k

    The mean is subtracted once per turn, so a sample with more turns differs from one with fewer of the same rewards.

    Args:
        token_level_rewards, response_mask: [B, T].
        index: [B], the prompts' uid.
        turn_states: [B, T], see `BatchTurns`.

    Returns:
        (advantages, returns) [B, T], which are equal.

    Raises:
        AlgorithmError: rewards are not finite.
    """
    outcome_scores(token_level_rewards, response_mask)
    turns, samples = BatchTurns(response_mask, turn_states), group_samples(index, token_level_rewards)
    tokens = keep(token_level_rewards, response_mask.bool()).double()
    groups = Groups(samples.ids[turns.rows], tokens.device)
    rewards = groups.levelled(turns.sum(tokens), rounding_of(turns.sum(tokens.abs()), token_level_rewards.dtype))
    normalised = (rewards - groups.mean(rewards)) / (groups.std(rewards) + epsilon)
    advantages = turns.spread(turns.to_go(normalised, 1.0), token_level_rewards)
    return advantages, advantages


@register_adv_est("gigpo", needs=("turn_states",), compares_samples=True)
@torch.no_grad()
def compute_gigpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    turn_states: Tensor,
    gamma: float | None = None,
    config: Any = None,
    epsilon: float = 1e-6,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GiGPO (Feng et al. 2025, arXiv 2505.10978): samples are compared, and turns that began in the same situation.

        G_{i,k} = sum_{l >= k} gamma^(l-k) r_{i,l}
        A_{i,k} = (R_i - mean_g R) / F(R) + w (G_{i,k} - mean_s G) / F(G)

    s are the turns of g with the state of turn k; a turn that is alone in its state, or has none, has no second term. F
    is 1 with `gigpo_mode=mean_norm`, and the unbiased standard deviation over g or s plus epsilon with
    `mean_std_norm`.

    Args:
        token_level_rewards, response_mask: [B, T].
        index: [B], the prompts' uid.
        turn_states: [B, T] integers, at the last token of a turn a number above 0 that identifies its situation.
        gamma: discount per turn; None: `algorithm.gamma`.
        config: `algorithm`: `gigpo_step_advantage_w` (w), `gigpo_mode`.

    Returns:
        (advantages, returns) [B, T], which are equal.

    Raises:
        AlgorithmError: rewards are not finite, or no turn of the batch has a state.
    """
    who = "adv_estimator=gigpo"
    gamma = unit_interval(number(config, "gamma", 1.0, who=who, root="algorithm") if gamma is None else gamma, "gamma")
    weight = number(config, "gigpo_step_advantage_w", 1.0, who=who, root="algorithm")
    by_std = setting(config, "gigpo_mode", "mean_norm", who=who, root="algorithm") == "mean_std_norm"
    samples = group_samples(index, token_level_rewards)
    scores = levelled_scores(token_level_rewards, response_mask, samples)
    turns = BatchTurns(response_mask, turn_states)
    states = turns.sum(turn_states.long())
    if len(states) and not bool(states.any()):
        raise AlgorithmError(
            "algorithm.adv_estimator=gigpo compares turns in the same situation, and no turn of the batch has a state; "
            "let the loop env_agent answer, or return turn_states from a loop of your own"
        )
    rewards = turns.sum(keep(token_level_rewards, response_mask.bool()).double())
    rounding = score_rounding(token_level_rewards, response_mask)[turns.rows]
    alone = torch.arange(len(states), device=states.device) + int(states.max() if len(states) else 0) + 1
    keys = torch.stack([samples.ids[turns.rows].long(), torch.where(states > 0, states, alone)], dim=1)
    situations = Groups(keys.unique(dim=0, return_inverse=True)[1], rewards.device)
    of_samples = _compared(scores, samples, by_std, epsilon)[turns.rows]
    of_turns = _compared(situations.levelled(turns.to_go(rewards, gamma), rounding), situations, by_std, epsilon)
    advantages = turns.spread(of_samples + weight * of_turns, token_level_rewards)
    return advantages, advantages


def _compared(values: Tensor, groups: Groups, by_std: bool, epsilon: float) -> Tensor:
    """(v - mean) / F over each group; 0 in a group of one."""
    centred = values - groups.mean(values)
    return centred / (groups.std(values) + epsilon) if by_std else centred
