"""Proves on the first samples that can show it that the sampler used the adapter (LoRA) of the policy.

An engine that ignores the adapter samples from the base and reports nothing: rewards stay where they were. On sampled
tokens t, with the log-probabilities of the trainer with the adapter, of the trainer without it, and of the sampler,

    x_t = with_t - without_t,    y_t = sampler_t - without_t,    y_t = m + k x_t + e_t,

k is 1 if the sampler used the adapter and 0 if it did not; m and e are differences of rounding and truncation. The
estimate of k by least squares has the standard error s = sd(e) / (sd(x) sqrt(n)). It decides as soon as it is further
than 4 s from 1/2, which takes few tokens even if the adapter changed little.

Shapes: B sequences, T response tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.errors import RolloutError

_ERRORS = 4.0  # standard errors that the estimate has to be away from 1/2
_LEAST_TOKENS = 8


@dataclass(frozen=True)
class Evidence:
    """The share of the adapter's effect that is in the sampler's log-probabilities.

    Attributes:
        share: k, the estimate.
        error: its standard error.
    """

    share: float
    error: float

    @property
    def decides(self) -> bool:
        """Whether the estimate is away from 1/2 by more than chance."""
        return abs(self.share - 0.5) > _ERRORS * self.error


def measure(with_adapter: Tensor, without: Tensor, sampler: Tensor, mask: Tensor) -> Evidence | None:
    """Estimate k from log-probabilities [B, T] of tokens that were sampled.

    Args:
        mask: [B, T], 1 on the tokens.

    Returns:
        None where the adapter changes nothing (it starts at 0), or there are too few tokens.
    """
    sampled = mask.bool()
    base = without[sampled].double()
    x, y = with_adapter[sampled].double() - base, sampler[sampled].double() - base
    if len(x) < _LEAST_TOKENS:
        return None
    x, y = x - x.mean(), y - y.mean()
    spread = float(x.square().sum())
    if spread == 0.0:
        return None
    share = float((x * y).sum()) / spread
    rest = float((y - share * x).square().sum()) / (len(x) - 2)
    return Evidence(share, (rest / spread) ** 0.5)


class AdapterProbe:
    """Watches the steps of a run until one has decided.

    Attributes:
        done: whether a step has shown that the sampler uses the adapter.
    """

    def __init__(self) -> None:
        self.done = False

    def check(self, with_adapter: Tensor, without: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, float]:
        """Look at the samples of a step; see `measure`.

        Returns:
            `rollout_corr/adapter_share` (k), if the adapter has an effect.

        Raises:
            RolloutError: the samples follow the model without the adapter.
        """
        if not torch.isfinite(sampler[mask.bool()]).all():
            return {}  # another check says so
        evidence = measure(with_adapter, without, sampler, mask)
        if evidence is None:
            return {}
        if evidence.decides and evidence.share < 0.5:
            raise RolloutError(
                "the sampler does not use the adapter: its log-probabilities are those of the model without it (share "
                f"of the adapter's effect {evidence.share:.3f} +- {evidence.error:.3f}, expected 1). Every response "
                "would be sampled from the base, and nothing would be learned. Look for weights that were not "
                "transferred to the engine, or an engine that loses them when it sleeps "
                "(actor_rollout_ref.rollout.sleep_level=1 keeps them)"
            )
        self.done = evidence.decides
        return {"rollout_corr/adapter_share": evidence.share}
