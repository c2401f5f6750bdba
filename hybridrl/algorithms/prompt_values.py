"""The value of each prompt over a run: how likely the policy is to solve it, from the rewards of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridrl.errors import AlgorithmError

PRIOR = (0.5, 0.5)  # of a prompt that was never seen: Jeffreys' prior, whose mean is 1/2
_ROUNDING = 1e-6  # of a reward that is summed over tokens


class PromptValues:
    """Tracks a Beta distribution of the reward of each prompt (SPO, Xu and Ding 2025, arXiv 2509.13232, section 3):

        v = alpha / (alpha + beta);   after its rewards r in [0, 1]:   alpha <- rho alpha + sum r,
                                                                       beta <- rho beta + sum (1 - r)

    The paper makes rho smaller the further the policy has moved since it last saw the prompt, between 0.875 and 0.96.
    Here it is a constant: to measure the distance, a run would have to keep each prompt's last response and compute its
    log-probabilities again.

    The distributions are state: `state_dict` belongs in the checkpoint.

    Args:
        rho: what remains of the evidence so far when new evidence arrives; 1 / (1 - rho) samples count in the long run.
    """

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._evidence: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        """The number of prompts that have been seen."""
        return len(self._evidence)

    def values(self, keys: Sequence[str]) -> Tensor:
        """Return v of the prompt of each row, [B] in float64."""
        evidence = [self._evidence.get(key, PRIOR) for key in keys]
        return torch.tensor([alpha / (alpha + beta) for alpha, beta in evidence], dtype=torch.float64)

    def update(self, keys: Sequence[str], rewards: Tensor) -> None:
        """Add the rewards of a step; several of one prompt are one update, whatever their order.

        Args:
            keys: of the prompt of each sample; the same in every run.
            rewards: [B] of each sample.

        Raises:
            AlgorithmError: a reward is not in [0, 1].
        """
        outside = (rewards < -_ROUNDING) | (rewards > 1 + _ROUNDING)
        if bool(outside.any()):
            rows = outside.nonzero().squeeze(-1)[:8].tolist()
            raise AlgorithmError(
                f"algorithm.adv_estimator tracks how often a prompt is solved, and the rewards of samples {rows} are "
                f"{[round(value, 6) for value in rewards[rows].tolist()]}. Have the reward function return 0 to 1, or "
                "use another estimator, such as reinforce_plus_plus."
            )
        by_prompt: dict[str, list[float]] = {}
        for key, reward in zip(keys, rewards.double().clamp(0.0, 1.0).tolist(), strict=True):
            by_prompt.setdefault(key, []).append(reward)
        for key, own in by_prompt.items():
            alpha, beta = self._evidence.get(key, PRIOR)
            own.sort()
            self._evidence[key] = (self.rho * alpha + sum(own), self.rho * beta + sum(1.0 - reward for reward in own))

    def state_dict(self) -> dict[str, list[float]]:
        return {key: list(evidence) for key, evidence in self._evidence.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        self._evidence = {key: (float(alpha), float(beta)) for key, (alpha, beta) in state.items()}
