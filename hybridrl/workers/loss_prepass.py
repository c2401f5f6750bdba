"""The preliminary pass of a policy loss that must see the whole mini-batch, to choose tokens or to normalise, or
whole sequences, whose rows may be in other micro-batches and on other ranks.

Every rank computes the current log-probabilities of its rows. The ranks of its `Geometry.dp_group`, one per shard,
exchange them with the other inputs of the loss. Each makes the same choice over the whole mini-batch in its canonical
order and keeps its own rows. So the choice does not depend on the number of ranks, the order of rows or the
micro-batches.

Shapes: b rows of this rank, B of all shards, T response tokens.
"""

from dataclasses import dataclass

import torch

from hybridrl.algorithms.sequences import RowTotals, other_rows
from hybridrl.engine.train_engine import Engine, Geometry, MicroBatching
from hybridrl.protocol import DataProto
from hybridrl.utils import distributed
from hybridrl.workers.losses import GROUP_IDS, PREPARED, SEQUENCE_IDS, SEQUENCE_SUMS, PolicyLoss

ROW_IDS = "row_ids"  # [b] int64: identifies a row in any order of rows
FIELDS = ("old_log_probs", "log_probs", "advantages", "response_mask")


@dataclass(frozen=True)
class LossPrepass:
    """Runs a loss's preliminary pass.

    Attributes:
        loss: its `prepare` is called, and the loss itself if it reads sums over sequences that have several rows.
        micro: micro-batches in which the log-probabilities are computed.
    """

    loss: PolicyLoss
    micro: MicroBatching

    @classmethod
    def of(cls, loss: PolicyLoss, micro: MicroBatching, batch: DataProto) -> "LossPrepass | None":
        """The pass that the loss needs for a batch; None if it needs none."""
        several_rows = SEQUENCE_IDS in batch.batch.keys()
        needed = loss.prepare is not None or (several_rows and loss.reads_whole_sequences)
        return cls(loss, micro) if needed else None

    def add_to(self, mini_batch: DataProto, engine: Engine, seed: int, temperature: float) -> None:
        """Add `prepared` [b, T] and `sequence_sums` [b, k] to this rank's part of a mini-batch, each if it is needed.

        All ranks call it together.

        Without `old_log_probs` the update is on-policy, and the current log-probabilities are used instead.

        Args:
            mini_batch: this rank's rows, with `row_ids` and `group_ids`; copies that fill up a shard have an empty
                `response_mask`.
            seed: of this mini-batch, the same on every rank.
        """
        outputs = engine.infer(mini_batch, self.micro, temperature)
        if not outputs:  # an early stage of a pipeline, which computes no loss either
            return
        if self.loss.prepare is not None:
            self._prepare(mini_batch, engine.geometry, outputs["log_probs"], seed)
        if SEQUENCE_IDS in mini_batch.batch.keys() and self.loss.reads_whole_sequences:
            self._sum_sequences(mini_batch, engine.geometry, outputs["log_probs"])

    def _prepare(self, mini_batch: DataProto, geometry: Geometry, current: torch.Tensor, seed: int) -> None:
        prepare, tensors = self.loss.prepare, mini_batch.batch
        assert prepare is not None
        own = {
            "log_probs": current,
            "old_log_probs": tensors.get("old_log_probs", current),
            "advantages": tensors["advantages"],
            "response_mask": tensors["response_mask"],
        }
        ids, *whole = (
            torch.cat(distributed.all_gather(tensor, geometry.dp_group))
            for tensor in (tensors[ROW_IDS], *(own[name] for name in FIELDS))
        )
        # Copies that fill up a shard come after the row that they repeat, and hold no token to be chosen.
        is_copy = ~whole[-1].bool().any(dim=1)
        order = torch.argsort(ids * 2 + is_copy, stable=True)
        further = [*self.loss.needs, *([GROUP_IDS] if self.loss.compares_samples else [])]
        if SEQUENCE_IDS in tensors.keys() and self.loss.reads_whole_sequences:
            further.append(SEQUENCE_IDS)
        more = {name: torch.cat(distributed.all_gather(tensors[name], geometry.dp_group))[order] for name in further}
        result = prepare(*(tensor[order] for tensor in whole), self.loss.settings, seed, row_ids=ids[order], **more)
        back = torch.empty_like(result)
        back[order] = result
        tensors[PREPARED] = back.chunk(geometry.dp_size)[geometry.dp_rank]

    @torch.no_grad()
    def _sum_sequences(self, mini_batch: DataProto, geometry: Geometry, current: torch.Tensor) -> None:
        tensors, totals = mini_batch.batch, RowTotals()
        self.loss(current, mini_batch, "token-sum", {}, totals)
        if not totals.partials:
            return
        own = torch.stack([column.double() for column in totals.partials], dim=1)
        ids, columns = (
            torch.cat(distributed.all_gather(tensor, geometry.dp_group)) for tensor in (tensors[SEQUENCE_IDS], own)
        )
        tensors[SEQUENCE_SUMS] = other_rows(columns, totals.kinds, ids).chunk(geometry.dp_size)[geometry.dp_rank]
