"""Losses that regress the log-ratio of whole sequences to a preference.

Legend: B rows of a micro-batch, T response tokens; rho = pi / pi_old of a token. Sums over t are over all response
tokens of the sequence, which may have several rows (`algorithms.sessions`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridrl.algorithms.policy_losses.tokens import Metrics, Tokens, policy_loss
from hybridrl.settings import key


@dataclass(frozen=True)
class SPPOLossSettings:
    """Settings of the loss `sppo`."""

    sppo_eta: float = key(
        1.0, "sppo: step size; the log-ratio of a sequence moves towards eta times its advantage", gt=0
    )


@policy_loss("sppo", settings=SPPOLossSettings, weighs_itself=True, whole_sequences=True)
def compute_policy_loss_sppo(tokens: Tokens, settings: SPPOLossSettings) -> tuple[Tensor, Metrics]:
    """SPPO (Wu et al. 2024, arXiv 2405.00675, eq. 4.4): l = (sum_t log rho_t - eta A)^2, one value per sequence.

    A is the sequence's win rate minus 1/2 (`algorithm.adv_estimator=sppo`); of an estimator with other advantages per
    token, their mean. All response tokens of a sequence carry l, and `loss_agg_mode` averages them: seq-mean-token-mean
    is the paper's mean over sequences. Settings: `sppo_eta`. Metrics: `actor/sppo_error`, the mean of abs(sum_t
    log rho_t - eta A).
    """
    lengths = tokens.total(tokens.mask).clamp(min=1)
    error = tokens.total(tokens.log_ratio) - settings.sppo_eta * tokens.total(tokens.advantages) / lengths
    metrics = {"actor/sppo_error": error.detach().abs().expand_as(tokens.log_ratio)}
    return tokens.carry(error.square(), tokens.weights), metrics
