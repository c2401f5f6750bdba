"""What generates for a trainer: one interface, whether the training weights do it in place or engines of their own.

Shapes: B rows, P prompt width (left-padded), T response width (right-padded).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hybridrl.protocol import DataProto
from hybridrl.rollout.engine import MEMORY_TAGS


class Rollout(ABC):
    """Generates responses with the policy's weights, as they were when `update_weights` was last called.

    Attributes:
        version: of those weights: how many training steps they have seen; -1 before the first update.
        in_place: the training weights themselves generate, so there is nothing to move and nothing to release.
        gives_memory_back: `release` frees device memory.
    """

    version: int = -1
    in_place: bool = False
    gives_memory_back: bool = False

    @abstractmethod
    def generate(self, prompts: DataProto) -> DataProto:
        """One response a row, in the rows' order.

        Args:
            prompts: tensors `input_ids`, `attention_mask`, `position_ids` [B, P], left-padded; non-tensors `uid` (one a
                prompt) and, where a prompt has several rows, `sample` (which of them); meta `global_steps`, `validate`,
                `seeded` (every request draws from a seed of its own, so that what else is generated does not matter),
                and any field of `SamplingParams` to override.

        Returns:
            A batch of tensors in the prompts' order: `prompts` [B, P], `responses` [B, T], `input_ids`,
            `attention_mask`, `position_ids` [B, P + T], `response_mask` [B, T], `rollout_log_probs` [B, T] and
            `weight_versions` [B, T] (the `version` that each token was generated with); T is `rollout.response_length`.
        """

    @abstractmethod
    def update_weights(self, version: int) -> dict[str, float]:
        """Generate with the policy's present weights from now on.

        Responses in flight wait, keep their tokens, and go on under the new weights.

        Returns:
            Metrics of the transfer.
        """

    def release(self, tags: Sequence[str] = MEMORY_TAGS) -> None:  # noqa: B027  (in place there is nothing to do)
        """Give the device memory of generation back, so that training has it. Weights are lost with "weights"."""

    def resume(self, tags: Sequence[str] = MEMORY_TAGS) -> None:  # noqa: B027
        """Take that memory again."""

    @abstractmethod
    def pause(self) -> None:
        """Stop generating; what is in flight keeps its tokens."""

    @abstractmethod
    def unpause(self) -> None:
        """Go on."""

    @abstractmethod
    def abort(self) -> None:
        """End what is in flight: `generate` returns the tokens there are."""

    @abstractmethod
    def health(self) -> list[str]:
        """The state of each part that generates, in a word."""

    def metrics(self) -> dict[str, float]:
        """What there is to tell of the time since the last call."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End what was started for generating."""
