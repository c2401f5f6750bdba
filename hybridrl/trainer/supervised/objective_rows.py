"""Batches of a loader as an objective's engine reads them.

Shapes: B rows, S tokens, T = S - 1 response columns; for rewards S grows by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridrl.data.loader import pad, position_ids
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import MULTI_MODAL_INPUTS
from hybridrl.workers.objectives import DESIRABLE, LOSS_WEIGHTS, MARGINS, NLL_WEIGHTS

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
    tensors |= {name: batch.batch[name] for name in (MARGINS, DESIRABLE) if name in columns}
    images = {name: values for name, values in batch.non_tensor_batch.items() if name == MULTI_MODAL_INPUTS}
    return DataProto.from_dict(tensors=tensors, non_tensors=images)


def mismatched(batch: DataProto, max_length: int, pad_token_id: int) -> DataProto | None:
    """Each prompt of a loader's batch with the answer to another prompt, as `as_responses` makes rows.

    It is that of the nearest row before it, of the last row for the first one, whose prompt is another one; if all rows
    have one prompt, that of the row before it. So the rows depend on the batch and on nothing else. A row that would
    be longer than `max_length` loses the beginning of its prompt.

    Args:
        batch: rows whose `loss_mask` covers one answer, the last part of a row that is read.

    Returns:
        As many rows, in this order; None if there are less than two with an answer.
    """
    prompts, answers = [], []
    for ids, mask in zip(batch.batch["input_ids"].tolist(), batch.batch["loss_mask"].tolist(), strict=True):
        if 1 in mask:
            first, end = mask.index(1), len(mask) - mask[::-1].index(1)
            prompts.append(ids[:first])
            answers.append((ids[first:end], mask[first:end]))
    count = len(prompts)
    if count < 2:
        return None
    rows, masks = [], []
    for number, prompt in enumerate(prompts):
        others = ((number - shift) % count for shift in range(1, count))
        other = next((row for row in others if prompts[row] != prompt), (number - 1) % count)
        answer, mask = answers[other]
        before = prompt[-max(max_length - len(answer), 1) :]
        rows.append([*before, *answer])
        masks.append([0] * len(before) + mask)
    ids, attention = pad(rows, pad_token_id, on_left=False)
    loss_mask, _ = pad(masks, 0, on_left=False)
    tensors = {"input_ids": ids, "attention_mask": attention, "position_ids": position_ids(attention)}
    return as_responses(DataProto.from_dict(tensors={**tensors, "loss_mask": loss_mask}))


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
