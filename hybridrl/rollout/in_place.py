"""Generation by the policy's own workers: `rollout.name=hf` as a trainer sees it."""

from typing import Any

import torch

from hybridrl.protocol import DataProto
from hybridrl.rollout.base import Rollout
from hybridrl.rollout.batch import NO_VERSION


class InPlaceRollout(Rollout):
    """The workers that train also generate, with the weights as they stand: nothing is ever out of date.

    Args:
        policy: a worker group with `generate_sequences`.
    """

    in_place = True

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def generate(self, prompts: DataProto) -> DataProto:
        batch: DataProto = self._policy.generate_sequences(prompts)
        mask = batch.batch["response_mask"].bool()
        batch.batch["weight_versions"] = torch.where(mask, self.version, NO_VERSION).to(torch.int32)
        return batch

    def update_weights(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def pause(self) -> None:
        """A call to the workers cannot be interrupted: what they are asked for, they finish."""

    def unpause(self) -> None:
        """See `pause`."""

    def abort(self) -> None:
        """See `pause`."""

    def health(self) -> list[str]:
        return ["ready"] * int(self._policy.world_size)
