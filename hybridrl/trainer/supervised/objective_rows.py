"""Batches of a loader as an objective's engine reads them.

Shapes: B rows, S tokens, T = S - 1 response columns; for rewards S grows by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridrl.protocol import DataProto
from hybridrl.protocol.names import MULTI_MODAL_INPUTS
from hybridrl.workers.objectives import LOSS_WEIGHTS, MARGINS, NLL_WEIGHTS

_SEQUENCE = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True)
class Totals:
    """Normalisers of the loss of some rows.

    Attributes:
        tokens: trained tokens.
        sequences: rows with trained tokens.
        weight: sum of the weights of trained tokens; of pairs, trained tokens of chosen answers.
    """

    tokens: int = 0
    sequences: int = 0
    weight: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.tokens + other.tokens, self.sequences + other.sequences, self.weight + other.weight)

    @classmethod
    def of(cls, batch: DataProto) -> Totals:
        """Those of a batch that `as_responses` made."""
        tensors = batch.batch
        mask = tensors["response_mask"]
        counts = mask.sum(1)
        weight = counts[::2].sum() if NLL_WEIGHTS in tensors.keys() else counts.sum()
        if LOSS_WEIGHTS in tensors.keys():
            weight = (tensors[LOSS_WEIGHTS].double() * mask).sum()
        return cls(int(counts.sum()), int((counts > 0).sum()), float(weight))


def as_responses(batch: DataProto, pairs: bool = False) -> DataProto:
    """Convert conversations to an engine's inputs: every token but the first is a response to the ones before it.

    `loss_mask` [B, S] becomes `response_mask` [B, S - 1]. The first token of a sequence has nothing before it and
    never enters the loss. `loss_weight` [B, S] becomes `loss_weights` [B, S - 1].

    Args:
        pairs: rows are pairs, the chosen one first; `nll_weights` [B] are 1 for it.
    """
    tensors = {name: batch.batch[name] for name in _SEQUENCE}
    tensors["response_mask"] = batch.batch["loss_mask"][:, 1:].contiguous()
    columns = batch.batch.keys()
    if "loss_weight" in columns:
        tensors[LOSS_WEIGHTS] = batch.batch["loss_weight"][:, 1:].contiguous()
    if pairs:
        tensors[NLL_WEIGHTS] = torch.tensor([1.0, 0.0]).repeat(len(batch) // 2)
    if MARGINS in columns:
        tensors[MARGINS] = batch.batch[MARGINS]
    images = {name: values for name, values in batch.non_tensor_batch.items() if name == MULTI_MODAL_INPUTS}
    return DataProto.from_dict(tensors=tensors, non_tensors=images)


def as_scored(batch: DataProto, pad_token_id: int) -> DataProto:
    """Convert pairs to inputs of a reward model, whose output at the last token of a conversation is the reward.

    An engine's `values` are those of the state before a response token. So a token is added after the last one, which
    nothing attends to, and is the only one in `response_mask`.
    """
    ids, attention = batch.batch["input_ids"], batch.batch["attention_mask"]
    rows, last = torch.arange(len(ids)), attention.sum(1)
    wide = {
        "input_ids": torch.cat([ids, ids.new_full((len(ids), 1), pad_token_id)], dim=1),
        "attention_mask": torch.cat([attention, attention.new_zeros(len(ids), 1)], dim=1),
    }
    wide["attention_mask"][rows, last] = 1
    wide["position_ids"] = (wide["attention_mask"].cumsum(1) - 1).clamp(min=0)
    mask = torch.zeros_like(ids)
    mask[rows, last - 1] = 1  # the response columns begin with the second token
    tensors = {**wide, "response_mask": mask}
    if MARGINS in batch.batch.keys():
        tensors[MARGINS] = batch.batch[MARGINS]
    return DataProto.from_dict(tensors=tensors)


def normalise(batch: DataProto, totals: Totals) -> DataProto:
    """Divide the weights of a batch by their sum over all rows of a step, or of the validation data."""
    for name in (LOSS_WEIGHTS, NLL_WEIGHTS):
        if name in batch.batch.keys():
            batch.batch[name] = batch.batch[name] / totals.weight
    return batch
