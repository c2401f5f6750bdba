"""The loss functions that workers hand to an engine.

Each returns one micro-batch's share of the mini-batch's loss: it is normalised by the counts of the whole mini-batch,
over all ranks, so that shares add up to the same loss and gradient however the mini-batch was split.

Shapes: B sequences, T response tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hybridrl.algorithms import (
    agg_loss,
    call_policy_loss,
    compute_value_loss,
    effective_loss_mode,
    get_policy_loss_prepare_fn,
    kl_penalty,
)
from hybridrl.algorithms.algorithm_registry import reads_whole_sequences
from hybridrl.algorithms.config_access import ConfigView
from hybridrl.algorithms.sequences import Sequences, SplitSequences
from hybridrl.config import ActorConfig, CriticConfig, PPOTrainerConfig, RolloutCorrectionConfig
from hybridrl.config.entry_settings import engine_settings
from hybridrl.engine.capabilities import ComparesVocabulary, ReplaysRouting, require
from hybridrl.errors import ModelError
from hybridrl.protocol import DataProto
from hybridrl.registry import POLICY_LOSSES, TRAIN_ENGINES
from hybridrl.utils.metrics import Metric

FULL_KL = "full"  # the KL form that the engine computes, from the logits of both policies
GROUP_IDS = "group_ids"  # field [B]: the prompt of a row
SEQUENCE_IDS = "sequence_ids"  # field [B]: the sequence that a row is a part of
SEQUENCE_TOKENS = "sequence_tokens"  # field [B]: response tokens of that sequence
SEQUENCE_SUMS = "sequence_sums"  # field [B, k]: what the other rows of that sequence add to the loss's sums
PREPARED = "prepared"  # field with what a loss found out about the whole mini-batch before its update


def check_kl_form(config: PPOTrainerConfig) -> None:
    """Refuse the KL over the vocabulary with training engines that cannot compute it.

    Raises:
        ModelError: naming the key.
    """
    policy, algorithm = config.actor_rollout_ref, config.algorithm
    asking = {
        "algorithm.kl_penalty": algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL_KL,
        "actor_rollout_ref.actor.kl_loss_type": policy.actor.use_kl_loss and policy.actor.kl_loss_type == FULL_KL,
    }
    for key, asks in asking.items():
        for where, part in (("actor", policy.actor), ("ref", policy.ref)):
            if asks:
                why = f"{key}={FULL_KL} with actor_rollout_ref.{where}.strategy={part.strategy}"
                require(TRAIN_ENGINES.get(part.strategy), ComparesVocabulary, why, f"set {key}=low_var_kl")


def check_router_replay(config: PPOTrainerConfig) -> None:
    """Refuse router replay where it cannot be done, or would replay what was never recorded.

    Whether the rollout records the experts (R3) is checked with the rollout, by `resolve_rollout`.

    Raises:
        ModelError: naming the key.
    """
    policy, key = config.actor_rollout_ref, "actor_rollout_ref.actor.router_replay.mode"
    actor = policy.actor
    if actor.router_replay.mode == "disabled":
        return
    setting = f"{key}={actor.router_replay.mode}"
    engine, disable = TRAIN_ENGINES.get(actor.strategy), f"set {key}=disabled"
    require(engine, ReplaysRouting, f"{setting} with actor_rollout_ref.actor.strategy={actor.strategy}", disable)
    if actor.router_replay.records_in_pass and config.algorithm.rollout_correction.bypass_mode:
        raise ModelError(
            f"{setting} replays what the pass for old log-probabilities records, and "
            "algorithm.rollout_correction.bypass_mode=True leaves that pass out; set one of them otherwise, or "
            f"{key}=R3"
        )
    try:
        engine.check_replay(policy.model, engine_settings(actor, policy.model.external_lib))
    except ModelError as error:
        raise ModelError(f"{setting}: {error}, or {disable}") from error


@dataclass(frozen=True, slots=True)
class LossCounts:
    """Counts of a mini-batch by which its loss is normalised.

    Attributes:
        tokens: response tokens of the whole mini-batch, over all ranks.
        sequences: its sequences with at least one response token. The rows of a session are one sequence.
        response_length: the limit of response lengths.
    """

    tokens: int
    sequences: int
    response_length: int | None = None

    def for_aggregation(self, loss_scale_factor: float | None, batch: DataProto) -> dict[str, Any]:
        """The counts as `agg_loss` takes them, for a micro-batch.

        dp_size is 1: the engine undoes FSDP's averaging itself. `seq-mean-token-sum-norm` divides by the limit of
        response lengths where no factor is set, not by the width that a micro-batch happens to have.
        """
        normalisers = {
            "dp_size": 1,
            "batch_num_tokens": self.tokens,
            "global_batch_size": self.sequences,
            "loss_scale_factor": loss_scale_factor or self.response_length,
        }
        lengths = batch.batch.get(SEQUENCE_TOKENS, None)
        return normalisers if lengths is None else normalisers | {"sequence_lengths": lengths}


class CountedLossFn(Protocol):
    """One micro-batch's share of the mini-batch's loss, and metrics."""

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, counts: LossCounts
    ) -> tuple[torch.Tensor, dict[str, Any]]: ...


@dataclass(frozen=True)
class PolicyLoss:
    """Policy loss of a run's settings.

    Attributes:
        mode: its registered name: `policy_loss.loss_mode`, or `bypass_mode` if the rollout correction selects that.
        settings: the actor's settings with `policy_loss.rollout_correction`, which a loss gets as its config.
    """

    mode: str
    settings: Any

    @classmethod
    def of(cls, actor: ActorConfig, correction: RolloutCorrectionConfig | None) -> "PolicyLoss":
        policy_loss = ConfigView(actor.policy_loss, rollout_correction=correction)
        mode = effective_loss_mode(actor.policy_loss.loss_mode, correction)
        return cls(mode, ConfigView(actor, policy_loss=policy_loss))

    @property
    def needs(self) -> tuple[str, ...]:
        """Further fields that the loss is called with."""
        return tuple(name for name in POLICY_LOSSES.metadata(self.mode).needs if name != "old_log_probs")

    @property
    def samplers_old(self) -> bool:
        """Whether its old log-probabilities are the sampler's."""
        return POLICY_LOSSES.metadata(self.mode).samplers_old

    @property
    def compares_samples(self) -> bool:
        """Whether its preliminary pass reads the prompt of each row."""
        return POLICY_LOSSES.metadata(self.mode).compares_samples

    @property
    def reads_whole_sequences(self) -> bool:
        """Whether it reads sums over the tokens of whole sequences."""
        return reads_whole_sequences(self.mode, self.settings)

    def __call__(
        self,
        log_prob: torch.Tensor,
        batch: DataProto,
        loss_agg_mode: str,
        counts: Mapping[str, Any],
        sequences: Sequences | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss and its metrics. The fields of the batch are those of `policy_loss_fn`."""
        tensors = batch.batch
        more = {name: tensors[name] for name in (PREPARED, *self.needs) if name in tensors.keys()}
        return call_policy_loss(
            self.mode,
            old_log_prob=tensors.get("old_log_probs", log_prob.detach()),
            log_prob=log_prob,
            advantages=tensors["advantages"],
            response_mask=tensors["response_mask"],
            loss_agg_mode=loss_agg_mode,
            config=self.settings,
            counts=counts,
            rollout_is_weights=tensors.get("rollout_is_weights", None),
            sequences=sequences,
            **more,
        )

    @property
    def prepare(self) -> Callable[..., torch.Tensor] | None:
        """The preliminary pass over the whole mini-batch, if this loss needs one with these settings."""
        return get_policy_loss_prepare_fn(self.mode, self.settings)


def policy_loss_fn(config: ActorConfig, correction: RolloutCorrectionConfig | None = None) -> CountedLossFn:
    """Policy gradient loss, entropy bonus and KL loss of one micro-batch.

        L = L_pg - entropy_coeff * agg(H) + kl_loss_coef * agg(KL(pi || pi_ref))

    The batch holds `advantages`, `response_mask`, and where the setting needs them `old_log_probs`, `ref_log_prob`,
    `rollout_is_weights`, `prepared` (all [B, T]) and `sequence_sums` [B, k]. Without `old_log_probs` the update is
    on-policy by construction (one update per batch): the detached current log-probabilities stand for them. With
    `kl_loss_type=full` the outputs hold `ref_kl` in place of the batch's `ref_log_prob`.

    Args:
        config: the actor's settings.
        correction: `algorithm.rollout_correction`; None: none.
    """
    policy_loss = PolicyLoss.of(config, correction)

    def loss_fn(
        outputs: dict[str, torch.Tensor], batch: DataProto, counts: LossCounts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        tensors = batch.batch
        mask = tensors["response_mask"]
        log_prob = outputs["log_probs"]
        normalisers = counts.for_aggregation(config.loss_scale_factor, batch)
        metrics: dict[str, Any] = {}
        if "old_log_probs" not in tensors.keys() and "rollout_log_probs" in tensors.keys():
            metrics |= _mismatch(log_prob.detach(), tensors["rollout_log_probs"], mask)
        others = tensors.get(SEQUENCE_SUMS, None)
        sequences = None if others is None else SplitSequences(others)
        loss, policy_metrics = policy_loss(log_prob, batch, config.loss_agg_mode, normalisers, sequences)
        # Metrics of a policy loss are token means, except those whose name ends in `_max`.
        metrics |= {k: Metric(v, kind="max") if k.endswith("_max") else v for k, v in policy_metrics.items()}
        metrics["actor/pg_loss"] = Metric(loss.detach(), kind="sum")
        if "entropy" in outputs:
            entropy = outputs["entropy"]
            metrics["actor/entropy"] = _token_mean(entropy, mask)
            if config.entropy_coeff != 0:
                entropy_loss = agg_loss(entropy, mask, config.loss_agg_mode, **normalisers)
                metrics["actor/entropy_loss"] = Metric(entropy_loss.detach(), kind="sum")
                loss = loss - config.entropy_coeff * entropy_loss
        if config.use_kl_loss:
            if config.kl_loss_type == FULL_KL:
                divergence = outputs["ref_kl"]
            else:
                # Outside the mask values are arbitrary, and the gradient of k3 there could be 0 times infinity.
                masked = [torch.where(mask.bool(), part, 0.0) for part in (log_prob, tensors["ref_log_prob"])]
                divergence = kl_penalty(masked[0], masked[1], config.kl_loss_type)
            kl_loss = agg_loss(divergence, mask, config.loss_agg_mode, **normalisers)
            metrics["actor/kl_loss"] = Metric(kl_loss.detach(), kind="sum")
            metrics["actor/ref_kl"] = _token_mean(divergence, mask)
            metrics["actor/kl_coef"] = config.kl_loss_coef
            loss = loss + config.kl_loss_coef * kl_loss
        metrics["actor/loss"] = Metric(loss.detach(), kind="sum")
        return loss, metrics

    return loss_fn


def value_loss_fn(config: CriticConfig) -> CountedLossFn:
    """Clipped value loss of one micro-batch; it holds `values` (of before the update), `returns`, `response_mask`."""

    def loss_fn(
        outputs: dict[str, torch.Tensor], batch: DataProto, counts: LossCounts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        tensors = batch.batch
        mask = tensors["response_mask"]
        values = outputs["values"]
        loss, clipped = compute_value_loss(
            vpreds=values,
            returns=tensors["returns"],
            values=tensors["values"],
            response_mask=mask,
            cliprange_value=config.cliprange_value,
            loss_agg_mode=config.loss_agg_mode,
            **counts.for_aggregation(config.loss_scale_factor, batch),
        )
        metrics = {
            "critic/vf_loss": Metric(loss.detach(), kind="sum"),
            "critic/vf_clipfrac": clipped.detach(),
            "critic/vpred_mean": _token_mean(values, mask),
        }
        return loss, metrics

    return loss_fn


def _mismatch(log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """The difference between the sampler's and the trainer's probabilities of the same tokens.

    |pi - pi_rollout|, and of log rho = log pi - log pi_rollout the token means -log rho, rho - 1 - log rho, rho^2 - 1.
    The trainer computes further metrics if it has both log-probabilities of the whole batch.
    """
    with torch.no_grad():
        difference = torch.where(mask.bool(), (log_probs.exp() - rollout_log_probs.exp()).abs(), 0.0)
        log_rho = torch.where(mask.bool(), log_probs - rollout_log_probs, 0.0).clamp(-20.0, 20.0)
        return {
            "rollout_corr/kl": _token_mean(-log_rho, mask),
            "rollout_corr/k3_kl": _token_mean(log_rho.exp() - 1.0 - log_rho, mask),
            "rollout_corr/chi2_token": _token_mean(log_rho.exp().square() - 1.0, mask),
            "training/rollout_probs_diff_mean": _token_mean(difference, mask),
            "training/rollout_probs_diff_max": Metric(difference.max(), kind="max"),
        }


def _token_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    masked = torch.where(mask.bool(), values.detach(), 0.0)
    return masked.sum() / mask.sum().clamp(min=1)
