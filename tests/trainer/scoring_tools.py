"""What plain transformers models say of the batches of a run: a classifier's scores, a teacher's log-probabilities."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybridrl.protocol import DataProto


def scores_of(reward_model: Path, conversations: list[torch.Tensor]) -> list[float]:
    """What transformers' classifier makes of token ids."""
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(input_ids=ids[None]).logits.item() for ids in conversations]


def as_generated(reward_model: Path, batch: Any) -> list[torch.Tensor]:
    """The tokens of prompt and response, and what the tokenizer's template writes after them."""
    end, newline = AutoTokenizer.from_pretrained(reward_model)("<|im_end|>\n")["input_ids"]
    found = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        row = ids[mask].tolist()
        found.append(torch.tensor([*row, *([] if row[-1] == end else [end]), newline]))
    return found


def said_by(path: Path, batch: DataProto, row: int, temperature: float) -> torch.Tensor:
    """A plain model's log-probabilities `[t, V]` at the response tokens of a row."""
    fields = batch.batch
    attention, mask = fields["attention_mask"][row].bool(), fields["response_mask"][row].bool()
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        logits = model(fields["input_ids"][row][attention][None]).logits[0] / temperature
    return logits.log_softmax(-1)[-int(mask.sum()) - 1 : -1]
