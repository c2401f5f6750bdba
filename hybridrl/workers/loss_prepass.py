"""The preliminary pass of a policy loss that must see the whole mini-batch, to choose tokens or to normalise.

Every rank computes the current log-probabilities of its rows. The ranks of its `Geometry.dp_group`, one per shard,
exchange them with the other inputs of the loss. Each makes the same choice over the whole mini-batch in its canonical
order and keeps its own rows. So the choice does not depend on the number of ranks, the order of rows or the
micro-batches.

Shapes: b rows of this rank, B of all shards, T response tokens.
"""

from dataclasses import dataclass

import torch

from hybridrl.engine.train_engine import Engine, MicroBatching
from hybridrl.protocol import DataProto
from hybridrl.utils import distributed
from hybridrl.workers.losses import PREPARED, PolicyLoss

ROW_IDS = "row_ids"  # [b] int64: identifies a row in any order of rows
FIELDS = ("old_log_probs", "log_probs", "advantages", "response_mask")


@dataclass(frozen=True)
class LossPrepass:
    """Runs a loss's preliminary pass.

    Attributes:
        loss: its `prepare` is called.
        micro: micro-batches in which the log-probabilities are computed.
    """

    loss: PolicyLoss
    micro: MicroBatching

    def add_to(self, mini_batch: DataProto, engine: Engine, seed: int, temperature: float) -> None:
        """Add `prepared` [b, T] to this rank's part of a mini-batch. All ranks call it together.

        Without `old_log_probs` the update is on-policy, and the current log-probabilities are used instead.

        Args:
            mini_batch: this rank's rows, with `row_ids`; copies that fill up a shard have an empty `response_mask`.
            seed: of this mini-batch, the same on every rank.
        """
        prepare = self.loss.prepare
        assert prepare is not None
        tensors = mini_batch.batch
        found = engine.infer(mini_batch, self.micro, temperature)
        if not found:  # an early stage of a pipeline, which computes no loss either
            return
        current = found["log_probs"]
        own = {
            "log_probs": current,
            "old_log_probs": tensors.get("old_log_probs", current),
            "advantages": tensors["advantages"],
            "response_mask": tensors["response_mask"],
        }
        geometry = engine.geometry
        ids, *whole = (
            torch.cat(distributed.all_gather(tensor, geometry.dp_group))
            for tensor in (tensors[ROW_IDS], *(own[name] for name in FIELDS))
        )
        # Copies that fill up a shard come after the row that they repeat, and hold no token to be chosen.
        is_copy = ~whole[-1].bool().any(dim=1)
        order = torch.argsort(ids * 2 + is_copy, stable=True)
        result = prepare(*(tensor[order] for tensor in whole), self.loss.settings, seed, row_ids=ids[order])
        back = torch.empty_like(result)
        back[order] = result
        tensors[PREPARED] = back.chunk(geometry.dp_size)[geometry.dp_rank]
