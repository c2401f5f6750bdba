"""The workload that a model's memory is computed for, and its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridrl.engine.train_engine import MicroBatching


@dataclass(frozen=True, slots=True)
class Workload:
    """The largest batch that an engine gets.

    Attributes:
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
        rows: sequences per rank in an update or a pass.
        update: the limits of micro-batches in an update; None for an engine that is not trained.
        infer: the same for passes without gradients; None where there are none.
        entropy: whether the entropy of the predictions is computed besides log-probabilities.
        samples: so many sequences have the same prompt.
    """

    prompt: int
    response: int
    rows: int
    update: MicroBatching | None
    infer: MicroBatching | None
    entropy: bool = True
    samples: int = 1


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes on the device of one rank.

    Attributes:
        parameters: number of the whole model's parameters.
        weights: the module's parameters, or this rank's shards.
        masters: float32 copies that the optimizer updates.
        states: the optimizer's state, from the first step on.
        gradients: those that are summed over micro-batches.
        gathered: whole layers of a sharded model, and buffers of collectives.
        activations: the largest micro-batch's in an update, without its logits.
        logits: logits of that micro-batch, and what is computed from them.
        pass_activations: the largest micro-batch's of a pass without gradients, with its logits.
        kept_weights: what of `weights` and `masters` stays on the device between uses.
        kept_states: the same of `states`; also of `masters`, where they are kept with them.
        kept_gradients: the same of `gradients`.
        notes: what is not counted as the engine computes it.
    """

    parameters: int
    weights: int
    masters: int
    states: int
    gradients: int
    gathered: int
    activations: int
    logits: int
    pass_activations: int
    kept_weights: int
    kept_states: int
    kept_gradients: int = 0
    notes: tuple[str, ...] = ()

    @property
    def resident(self) -> int:
        """Bytes that stay on the device between uses."""
        return self.kept_weights + self.kept_states + self.kept_gradients

    @property
    def update(self) -> int:
        """The peak of an update."""
        model_states = self.weights + self.masters + self.states + self.gradients
        return model_states + self.gathered + self.activations + self.logits

    @property
    def without_gradients(self) -> int:
        """The peak of a pass without gradients."""
        weights = max(self.kept_weights, self.weights)
        return weights + self.kept_states + self.kept_gradients + self.gathered + self.pass_activations
