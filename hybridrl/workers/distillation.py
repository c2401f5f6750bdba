"""The distillation loss that the policy's worker hands to its engine, and what the engine computes for it.

Shapes: B sequences, T response tokens, K tokens of the vocabulary that the teacher finds most likely.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridrl.algorithms import agg_loss, call_policy_loss, get_policy_loss_prepare_fn
from hybridrl.algorithms.config_access import ConfigView
from hybridrl.algorithms.distillation import distillation_losses
from hybridrl.config import ActorConfig, ModelConfig, PPOTrainerConfig
from hybridrl.config.schema.distillation import DistillationConfig, DistillationLossConfig
from hybridrl.config.served import served_teachers
from hybridrl.config.teachers import LOG_PROBS, TOP_IDS, TOP_LOG_PROBS, teachers_of
from hybridrl.engine.capabilities import ComputesFromLogits, require
from hybridrl.engine.logits_functions import LogitsFunction, LogProbsAt, VocabularyLoss
from hybridrl.engine.train_engine import Engine
from hybridrl.errors import AlgorithmError, ModelError
from hybridrl.protocol import DataProto
from hybridrl.registry import TRAIN_ENGINES
from hybridrl.utils.metrics import Metric
from hybridrl.workers.losses import CountedLossFn, LossCounts

_MODE = "distillation.distillation_loss.loss_mode"


def check_distillation(config: PPOTrainerConfig) -> None:
    """Refuse a loss that the training engines of policy and teachers cannot compute, or that cannot be called.

    Raises:
        ModelError: naming the key.
        AlgorithmError: the policy loss needs a preliminary pass over the whole mini-batch.
    """
    settings = config.distillation
    if not settings.enabled:
        return
    loss, policy = settings.distillation_loss, config.actor_rollout_ref
    if loss.use_policy_gradient and get_policy_loss_prepare_fn(loss.policy_loss_mode, policy.actor) is not None:
        raise AlgorithmError(
            f"distillation.distillation_loss.policy_loss_mode={loss.policy_loss_mode} makes a pass over the "
            "whole mini-batch first, which distillation does not make; use vanilla"
        )
    if settings.reads == "tokens":
        return
    why = f"{_MODE}={loss.loss_mode} with"
    computed: list[tuple[str, DistillationConfig | ActorConfig]] = [("actor_rollout_ref.actor", policy.actor)]
    if not served_teachers(config):
        computed.insert(0, ("distillation", settings))
    for where, part in computed:
        engine = TRAIN_ENGINES.get(part.strategy)
        require(engine, ComputesFromLogits, f"{why} {where}.strategy={part.strategy}", f"set {_MODE}=k3")
    if settings.reads == "top" and policy.model.share_prefixes:
        raise ModelError(
            f"{why} actor_rollout_ref.model.share_prefixes=True: the teacher's tokens belong to single rows, and it "
            "computes tokens once that rows share; set it to False, or the loss to k3"
        )


def check_vocabulary_sizes(config: PPOTrainerConfig, size_of: Callable[[ModelConfig], int]) -> None:
    """Refuse a loss over the vocabulary of two models whose output layers differ in size.

    Args:
        size_of: returns the size of the vocabulary of a `ModelConfig`.

    Raises:
        ModelError: naming both sizes.
    """
    if config.distillation.reads != "vocabulary":
        return
    own = size_of(config.actor_rollout_ref.model)
    for teacher in teachers_of(config).teachers:
        other = size_of(teacher.model)
        if other != own:
            raise ModelError(
                f"{teacher.where}.model_path={teacher.model.path}: its output layer has {other} tokens and the "
                f"policy's {own}, and {_MODE}={config.distillation.distillation_loss.loss_mode} compares both "
                "vocabularies; use a loss over the teacher's most likely tokens, such as forward_kl_topk_tail"
            )


def computing(engine: Engine, function: LogitsFunction | None) -> contextlib.AbstractContextManager[None]:
    """Return `ComputesFromLogits.computing` of the engine; a context without effect if there is no function."""
    if function is None:
        return contextlib.nullcontext()
    assert isinstance(engine, ComputesFromLogits)  # checked at start-up
    return engine.computing(function)


@dataclass(frozen=True)
class Distillation:
    """The distillation of an update.

    Attributes:
        settings: `distillation.distillation_loss`.
        reads: what the loss reads; see `hybridrl.utils.entry_metadata.DistillationMetadata`.
        teacher_temperature: what a teacher's logits are divided by in a loss over the vocabulary; None: the policy's.
    """

    settings: DistillationLossConfig
    reads: str
    teacher_temperature: float | None = None

    @classmethod
    def of(cls, config: PPOTrainerConfig) -> "Distillation | None":
        """Return that of a run; None if it learns from no teacher."""
        distillation: DistillationConfig = config.distillation
        if not distillation.enabled:
            return None
        temperature = teachers_of(config).teachers[0].settings.inference.temperature
        return cls(distillation.distillation_loss, distillation.reads, temperature)

    def function(self, teachers: Sequence[Engine]) -> LogitsFunction | None:
        """Return what the policy's engine computes from its logits.

        Args:
            teachers: engines in the policy's process.
        """
        if self.reads == "top":
            return LogProbsAt(TOP_IDS)
        if self.reads == "vocabulary":
            if not teachers:
                raise RuntimeError(f"{_MODE}={self.settings.loss_mode} needs the teacher in the actor's own process")
            name, clamp = self.settings.loss_mode, self.settings.log_prob_min_clamp
            return VocabularyLoss(name, teachers[0], self.teacher_temperature, clamp)
        return None

    def loss_fn(self, task: CountedLossFn, actor: ActorConfig) -> CountedLossFn:
        """Return the policy's loss with distillation.

            L = L_task + distillation_loss_coef * L_d,  without task rewards L = L_d

        L_d is the aggregated loss of the tokens, or with `use_policy_gradient` a policy loss whose advantages are their
        negative losses.

        Args:
            task: the loss on rewards.
            actor: the actor's settings.
        """

        def loss_fn(
            outputs: dict[str, torch.Tensor], batch: DataProto, counts: LossCounts
        ) -> tuple[torch.Tensor, dict[str, Any]]:
            loss, metrics = self._loss(outputs, batch, counts, actor)
            metrics["distillation/loss"] = Metric(loss.detach(), kind="sum")
            if self.settings.use_task_rewards:
                task_loss, task_metrics = task(outputs, batch, counts)
                loss = task_loss + self.settings.distillation_loss_coef * loss
                metrics = task_metrics | metrics | {"distillation/loss_coef": self.settings.distillation_loss_coef}
            metrics["actor/loss"] = Metric(loss.detach(), kind="sum")
            return loss, metrics

        return loss_fn

    def _loss(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, counts: LossCounts, actor: ActorConfig
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return a micro-batch's share of the distillation loss, and metrics."""
        settings, mask = self.settings, batch.batch["response_mask"]
        valid = mask.bool()
        losses, metrics = self._losses(outputs, batch, valid)
        metrics |= {
            "distillation/token_loss": _token_mean(losses, valid),
            "distillation/abs_loss": _token_mean(losses.abs(), valid),
            "distillation/loss_max": Metric(torch.where(valid, losses, -torch.inf).detach().max(), kind="max"),
            "distillation/loss_min": Metric(torch.where(valid, losses, torch.inf).detach().min(), kind="min"),
        }
        if "entropy" in outputs and not settings.use_task_rewards:
            metrics["actor/entropy"] = _token_mean(outputs["entropy"], valid)
        limit = settings.loss_max_clamp
        if limit is not None:
            losses = losses.clamp(-limit, limit)
        normalisers = counts.for_aggregation(actor.loss_scale_factor, batch)
        if not settings.use_policy_gradient:
            return agg_loss(losses, mask, actor.loss_agg_mode, **normalisers), metrics
        log_prob = outputs["log_probs"]
        loss, policy_metrics = call_policy_loss(
            settings.policy_loss_mode,
            old_log_prob=batch.batch.get("old_log_probs", log_prob.detach()),
            log_prob=log_prob,
            advantages=-losses.detach(),
            response_mask=mask,
            loss_agg_mode=actor.loss_agg_mode,
            config=ConfigView(
                actor,
                clip_ratio=settings.clip_ratio,
                clip_ratio_low=settings.clip_ratio_low,
                clip_ratio_high=settings.clip_ratio_high,
            ),
            counts=normalisers,
            rollout_is_weights=batch.batch.get("rollout_is_weights", None),
        )
        named = {f"distillation/{name.removeprefix('actor/')}": value for name, value in policy_metrics.items()}
        return loss, metrics | {n: Metric(v, kind="max") if n.endswith("_max") else v for n, v in named.items()}

    def _losses(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, valid: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of each token [B, T], 0 outside of the mask, and metrics."""
        name = self.settings.loss_mode
        if self.reads == "vocabulary":
            return outputs["vocabulary_loss"], {}
        if self.reads == "tokens":
            # Outside the mask values are arbitrary, and the gradient there could be 0 times infinity.
            own, other = (torch.where(valid, x, 0.0) for x in (outputs["log_probs"], batch.batch[LOG_PROBS]))
            return distillation_losses(name, own, other), {}
        cells = valid[..., None]
        own, other = (torch.where(cells, x, 0.0) for x in (outputs["log_probs_at"], batch.batch[TOP_LOG_PROBS]))
        losses = distillation_losses(name, own, other, self.settings.log_prob_min_clamp)
        return torch.where(valid, losses, 0.0), {
            "distillation/student_mass": _token_mean(own.exp().sum(-1), valid),
            "distillation/teacher_mass": _token_mean(other.exp().sum(-1), valid),
        }


def _token_mean(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return torch.where(valid, values.detach(), 0.0).sum() / valid.sum().clamp(min=1)
