"""Rewards on every token: a manager that rewards each digit of a sorted list when it is written.

    python -m hybridrl.trainer.main_ppo reward.reward_manager.source=importlib \\
        reward.reward_manager.module.path=examples/token_rewards.py reward.reward_manager.module.name=PrefixRewards ...

A manager may return rewards on any response token. The estimators that depend on time (`gae`, `reinforce_plus_plus`,
`remax`, `optimal_token_baseline`) credit each token with the rewards after it; the others sum the rewards.
"""

from collections.abc import Sequence
from typing import Any

import torch

from hybridrl.protocol import DataProto
from hybridrl.reward import RewardManager
from hybridrl.reward.positions import response_lengths

MARK = "####"


def prefix_rewards(tokens: Sequence[str], truth: str) -> list[float]:
    """One number per token: 1 / len(truth) for each correct digit after the mark, until the first error."""
    rewards, text, right = [0.0] * len(tokens), "", ""
    for place, token in enumerate(tokens):
        digits = token.strip() if MARK in text else ""
        text += token
        if not truth.startswith(right + digits):
            break  # nothing after an error is rewarded
        rewards[place] = len(digits) / len(truth)
        right += digits
    return rewards


class PrefixRewards(RewardManager):
    """The reward function's extra information (`acc`: all digits correct), and the reward spread over the digits."""

    def __call__(self, batch: DataProto, return_dict: bool = False) -> Any:
        result = super().__call__(batch, return_dict=True)
        rewards = torch.zeros_like(result["reward_tensor"])
        rows = zip(batch.batch["responses"].tolist(), response_lengths(batch).tolist(), strict=True)
        for row, (ids, length) in enumerate(rows):
            truth = batch.non_tensor_batch["reward_model"][row]["ground_truth"]
            tokens = [self.tokenizer.decode([token]) for token in ids[:length]]
            rewards[row, :length] = torch.tensor(prefix_rewards(tokens, truth))
        return {**result, "reward_tensor": rewards} if return_dict else rewards
