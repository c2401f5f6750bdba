"""Functions of the logits of response tokens, computed in addition to an engine's own outputs (`ComputesFromLogits`).

Shapes: N response tokens of a micro-batch, K tokens of the vocabulary, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hybridrl.algorithms.distillation import log_probs_at, top_log_probs, vocabulary_losses
from hybridrl.algorithms.functional import full_kl_from_logits


class LogitsFunction(ABC):
    """Computes outputs of a micro-batch from its logits. It never sees more than one micro-batch.

    Attributes:
        outputs: names of what it returns.
        fields: fields of the batch, `[B, T, ...]`, that it reads.
        other: another engine on the same ranks, whose logits of the same micro-batch it compares with; loaded at the
            same time.
    """

    outputs: ClassVar[tuple[str, ...]]
    fields: tuple[str, ...] = ()
    other: Any = None

    @abstractmethod
    def __call__(
        self,
        logits: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        temperature: float,
        other_logits: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Return the outputs, `[N, ...]`; with gradient where the caller differentiates them.

        Args:
            logits: `[N, V]`; they are read only.
            inputs: the `fields`, `[N, ...]`.
            temperature: what the logits are to be divided by.
            other_logits: `[N, V]` of the other engine, without gradient.
        """


class TopTokens(LogitsFunction):
    """The most likely tokens: `top_log_probs` and `top_ids`, `[N, K]`."""

    outputs = ("top_log_probs", "top_ids")

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(
        self,
        logits: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        temperature: float,
        other_logits: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        return dict(zip(self.outputs, top_log_probs(logits, self.count, temperature), strict=True))


class LogProbsAt(LogitsFunction):
    """The log-probabilities of tokens that a field names: `log_probs_at`, `[N, K]`.

    Args:
        field: integers `[B, T, K]`.
    """

    outputs = ("log_probs_at",)

    def __init__(self, field: str) -> None:
        self.fields = (field,)

    def __call__(
        self,
        logits: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        temperature: float,
        other_logits: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        return {"log_probs_at": log_probs_at(logits, inputs[self.fields[0]], temperature)}


class VocabularyLoss(LogitsFunction):
    """A distillation loss over the vocabulary: `vocabulary_loss`, `[N]`.

    Args:
        name: the loss.
        teacher: the engine to learn from.
        teacher_temperature: what its logits are divided by; None: what this engine's are.
        log_prob_min_clamp: see `hybridrl.algorithms.distillation.distillation_losses`.
    """

    outputs = ("vocabulary_loss",)

    def __init__(
        self, name: str, teacher: Any, teacher_temperature: float | None, log_prob_min_clamp: float | None
    ) -> None:
        self.name, self.other = name, teacher
        self.teacher_temperature, self.log_prob_min_clamp = teacher_temperature, log_prob_min_clamp

    def __call__(
        self,
        logits: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        temperature: float,
        other_logits: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        assert other_logits is not None
        other_temperature = temperature if self.teacher_temperature is None else self.teacher_temperature
        losses = vocabulary_losses(
            self.name, logits, other_logits, temperature, other_temperature, self.log_prob_min_clamp
        )
        return {"vocabulary_loss": losses}


class FullKL(LogitsFunction):
    """KL(pi || pi_ref) over the vocabulary: `ref_kl`, `[N]`.

    Args:
        reference: the engine of pi_ref.
    """

    outputs = ("ref_kl",)

    def __init__(self, reference: Any) -> None:
        self.other = reference

    def __call__(
        self,
        logits: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        temperature: float,
        other_logits: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        assert other_logits is not None
        return {"ref_kl": full_kl_from_logits(logits, other_logits, temperature=temperature)}
