"""The plan of an update call: which mini-batches a shard holds, and what applies to all of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridrl.config import RolloutCorrectionConfig
from hybridrl.protocol import DataProto

if TYPE_CHECKING:
    from hybridrl.workers.distillation import Distillation

PLAN_KEY = "update_plan"  # of a batch's meta_info


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step of an update call.

    Attributes:
        rows: rows on each data-parallel rank, including copies that only fill a rank up.
        tokens: response tokens over all ranks.
        sequences: sequences with at least one response token, over all ranks. The rows of a session are one.
        seed: decides the noise of a loss's preliminary pass.
    """

    rows: int
    tokens: int
    sequences: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """Plan of one update call. The trainer writes it, `ModelWorker.update` executes it.

    Attributes:
        mini_batches: in the order in which every shard holds their rows.
        dp_size: number of shards that the batch was arranged for.
        updates: optimizer steps of the whole training step, over which a loss is averaged.
        skip_nonfinite: skip a step whose loss or gradient is not finite, instead of raising an error.
        response_length: the limit of response lengths, by which `seq-mean-token-sum-norm` divides.
        temperature: what the logits are divided by.
        rollout_correction: `algorithm.rollout_correction`, which chooses the policy loss together with the actor's
            settings.
        distillation: what the policy learns from teachers; None: nothing.
    """

    mini_batches: tuple[MiniBatch, ...]
    dp_size: int
    updates: int
    skip_nonfinite: bool = False
    response_length: int | None = None
    temperature: float = 1.0
    rollout_correction: RolloutCorrectionConfig | None = None
    distillation: "Distillation | None" = None

    @classmethod
    def of(cls, batch: DataProto) -> "UpdatePlan":
        """The plan that came with a batch.

        Raises:
            ValueError: there is none.
        """
        plan = batch.meta_info.get(PLAN_KEY)
        if not isinstance(plan, cls):
            raise ValueError(
                f"meta_info[{PLAN_KEY!r}] of an update call is {plan!r}; it must be an UpdatePlan. "
                "spread_over_ranks arranges a batch, UpdatePlan.attach_to adds the plan"
            )
        return plan

    def attach_to(self, batch: DataProto) -> DataProto:
        """`batch` with this plan in its `meta_info`."""
        batch.meta_info = {**batch.meta_info, PLAN_KEY: self}
        return batch

    def check(self, rows: int, dp_size: int) -> None:
        """Compare the plan with the shard that a rank received.

        Raises:
            ValueError: the batch was arranged for another number of shards, or the mini-batches would leave rows of
                the shard unused or go beyond its end.
        """
        planned = sum(mini_batch.rows for mini_batch in self.mini_batches)
        if (planned, self.dp_size) != (rows, dp_size):
            raise ValueError(
                f"the batch of this update call was arranged for dp_size={self.dp_size} with {planned} rows in each "
                f"shard, but the engine has dp_size={dp_size} and this rank received {rows} rows, so rows would be "
                "lost or used twice. Arrange it with spread_over_ranks(..., dp_size=group.dp_size(mesh))"
            )
