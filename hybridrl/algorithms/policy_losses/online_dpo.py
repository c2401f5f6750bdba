"""Online DPO: the best and the worst sample of a prompt are a pair of answers, compared with the reference.

Legend: B rows of a mini-batch, T response tokens; k samples of a prompt; x_i = sum_t (log pi_t - log pi_ref,t) of
sample i. The two samples may be in different micro-batches and on different ranks, so a pass before the update computes
their weights. The loss is linear in log pi, and its gradient is that of DPO.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.config_access import read_settings
from hybridrl.algorithms.functional import keep
from hybridrl.algorithms.policy_losses.group_variance import SampleGroups
from hybridrl.algorithms.policy_losses.tokens import ACTOR, GROUP, Metrics, Tokens, policy_loss
from hybridrl.settings import key


@dataclass(frozen=True)
class OnlineDPOSettings:
    """Settings of the loss `online_dpo`."""

    online_dpo_beta: float = key(
        0.1, "online_dpo: scale of the implied rewards: larger values keep nearer to the reference", gt=0
    )


@torch.no_grad()
def prepare_online_dpo(
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
    """Compute the weight of each sample's log-probability in `online_dpo`, on all of its tokens:

        W_w = k beta s(-beta (x_w - x_l)),  W_l = -W_w

    of the best sample w and the worst sample l of a prompt, 0 of the others. Of samples that are equally good the first
    counts. Samples of a prompt that are all equally good have the weight 0.

    Args:
        log_prob, advantages, response_mask, ref_log_prob: [B, T] of the whole mini-batch; `log_prob` is that of the
            policy before the update, and the mean of a sample's advantages says how good it is.
        old_log_prob, seed, row_ids: not used.
        config: the actor's settings.
        sequence_ids: [B] the sequence of each row; None: each row is one.
        group_ids: [B] the prompt of each row.

    Returns:
        [B, T].
    """
    settings = read_settings(OnlineDPOSettings, config, who="policy loss online_dpo", root=ACTOR, group=GROUP)
    samples = SampleGroups(response_mask, group_ids, sequence_ids)
    best, worst = samples.best_and_worst(samples.mean(advantages))
    log_ratio = samples.total(log_prob - ref_log_prob)
    margin = settings.online_dpo_beta * (samples.of(best, log_ratio) - samples.of(worst, log_ratio))
    weight = settings.online_dpo_beta * samples.count * torch.sigmoid(-margin)
    return samples.spread(torch.where(best, weight, 0.0) - torch.where(worst, weight, 0.0), log_prob)


@policy_loss(
    "online_dpo",
    settings=OnlineDPOSettings,
    needs=("ref_log_prob",),
    prepare=prepare_online_dpo,
    loss_agg_mode="seq-mean-token-sum",
    whole_sequences=True,
    compares_samples=True,
)
def compute_policy_loss_online_dpo(tokens: Tokens, settings: OnlineDPOSettings) -> tuple[Tensor, Metrics]:
    """Online DPO (Guo et al. 2024, arXiv 2402.04792): l = -W_i log pi, with W_i of `prepare_online_dpo`.

    With `loss_agg_mode=seq-mean-token-sum` and k samples of each prompt, the gradient is that of

        mean over prompts of -log s(beta (x_w - x_l)).

    A score orders the samples in place of the paper's annotator. Settings: `policy_loss.online_dpo_beta`. Metrics:
    `actor/online_dpo_weight`, the mean of abs(W).
    """
    assert tokens.prepared is not None
    weight = keep(tokens.prepared, tokens.mask)
    return -weight * tokens.log_prob, {"actor/online_dpo_weight": weight.abs()}
