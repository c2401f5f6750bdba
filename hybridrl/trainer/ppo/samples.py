"""Batches as readable text: the columns of rollout and validation dumps."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.observe.dump import dump_generations
from hybridrl.observe.report_samples import first_prompts, prompt_order
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import SESSION_LOG
from hybridrl.utils.token_text import TokenTexts

#: name of the column with what a row's session did; see `Samples.rollouts`
ROLLOUT = "rollout"
_FIXED = ("input", "output", "gts", "score", "step", "uid", "data_source")
_SAME = ("score",)  # a function's own score, of which the line has what the run made of it
#: columns of a batch -> their names in `ROLLOUT`
_OF_SESSION = {
    "sample": "sample",
    "session_id": "session_id",
    "trajectory_index": "trajectory_index",
    "agent_name": "agent_name",
    "__num_turns__": "num_turns",
    "turn_rewards": "turn_rewards",
    "tool_rewards": "tool_rewards",
    "tool_faults": "tool_faults",
}
#: fields [B, T] -> their names in `ROLLOUT`'s `tokens`
_OF_TOKENS = {"rollout_log_probs": "log_probs", "old_log_probs": "old_log_probs", "advantages": "advantages"}


class Samples:
    """Decoded prompts and responses with their scores, gathered over batches.

    Args:
        tokenizer: decodes token ids, without special tokens.
        with_tokens: most samples whose tokens are written (`trainer.dump_tokens`); -1: all.
    """

    def __init__(self, tokenizer: Any, with_tokens: int = 0) -> None:
        self.tokenizer = tokenizer
        self.with_tokens = with_tokens
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.scores: list[float] = []
        self.ground_truths: list[Any] = []
        self.uids: list[str] = []
        self.sources: list[str] = []
        self.extra: dict[str, list[Any]] = {}
        self._batches: list[DataProto] = []

    def __len__(self) -> int:
        return len(self.uids)

    def add(self, batch: DataProto, scores: list[float], extra: dict[str, list[Any]]) -> None:
        """Append a batch. A column of `extra` holds None for batches that lack it."""
        before, count = len(self), len(batch)
        tensors, objects = batch.batch, batch.non_tensor_batch
        width = tensors["responses"].shape[1]
        masks = tensors["attention_mask"].bool()
        self.inputs += self._decode(tensors["prompts"], masks[:, :-width])
        self.outputs += self._decode(tensors["responses"], masks[:, -width:])
        self.scores += scores
        self.ground_truths += [_ground_truth(row) for row in objects.get("reward_model", [None] * count)]
        self.uids += [str(uid) for uid in objects["uid"]]
        self.sources += [str(source) for source in objects.get("data_source", ["unknown"] * count)]
        for name in extra:
            self.extra.setdefault(name, [None] * before)
        for name, values in self.extra.items():
            values.extend(extra.get(name, [None] * count))
        self._batches.append(batch)

    def rollouts(self, detailed: Collection[int]) -> list[dict[str, Any]]:
        """Return the record of each row's session, as JSON data.

        `started` (seconds since the epoch), `seconds`, `messages` and `events` (`SessionLog`) are those of the whole
        session, at its first row. `tokens` has `prompt_ids`, and per token of the response `ids`, `texts`, `mask`,
        `log_probs` of the sampler, `old_log_probs` and `advantages` of the trainer, with `rewards` [(token, reward)]
        where a reward was placed, and `versions` [(version of the weights, tokens)].

        Args:
            detailed: numbers of the rows that have `tokens`.
        """
        texts = TokenTexts(self.tokenizer) if detailed else None
        records: list[dict[str, Any]] = []
        for batch in self._batches:
            objects = batch.non_tensor_batch
            columns = {name: objects[column] for column, name in _OF_SESSION.items() if column in objects}
            logs = objects.get(SESSION_LOG, [None] * len(batch))
            fields = _arrays(batch) if texts is not None else {}
            for row in range(len(batch)):
                record = {name: column[row] for name, column in columns.items() if column[row] is not None}
                record |= logs[row] or {}
                if texts is not None and len(records) in detailed:
                    record["tokens"] = _tokens(fields, row, texts)
                records.append(record)
        return records

    def write(self, folder: Path, step: int) -> Path:
        """Write `<folder>/<step>.jsonl`, one line per sample."""
        columns: dict[str, Sequence[Any]] = {"uid": self.uids, "data_source": self.sources}
        for name, values in self.extra.items():
            if name not in _SAME:
                columns[f"reward/{name}" if name in (*_FIXED, ROLLOUT) else name] = values
        columns[ROLLOUT] = self.rollouts(first_prompts(self.inputs, self.with_tokens))
        return dump_generations(folder, step, self.inputs, self.outputs, self.scores, self.ground_truths, columns)

    def traced(self, prompts: int | None) -> list[dict[str, Any]]:
        """Samples as dumps have them, with tokens: those of so many prompts; None: all."""
        names = set(sorted(set(self.inputs), key=prompt_order)[:prompts])
        numbers = {number for number, text in enumerate(self.inputs) if text in names}
        rollouts = self.rollouts(numbers)
        return [
            {
                "input": self.inputs[number],
                "output": self.outputs[number],
                "score": self.scores[number],
                "uid": self.uids[number],
                "data_source": self.sources[number],
                ROLLOUT: rollouts[number],
            }
            for number in sorted(numbers)
        ]

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Return the first `count` samples, for a table."""
        columns = {"input": self.inputs, "output": self.outputs, "gts": self.ground_truths, "score": self.scores}
        return [{name: values[row] for name, values in columns.items()} for row in range(min(count, len(self)))]

    def _decode(self, ids: Any, mask: Any) -> list[str]:
        rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        texts: list[str] = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts


def _arrays(batch: DataProto) -> dict[str, np.ndarray]:
    """Return the fields of which records have parts: rows of an array are cut in less time than those of a tensor."""
    names = {"prompts", "responses", "attention_mask", "response_mask", "token_level_scores", "weight_versions"}
    tensors = {name: batch.batch[name] for name in (*names, *_OF_TOKENS) if name in batch.batch.keys()}
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
        for name, tensor in tensors.items()
    }


def _tokens(fields: Mapping[str, np.ndarray], row: int, texts: TokenTexts) -> dict[str, Any]:
    """`tokens` of `Samples.rollouts`."""
    width = fields["responses"].shape[1]
    attended = fields["attention_mask"][row].astype(bool)
    real = attended[-width:]
    ids = fields["responses"][row][real].tolist()
    record: dict[str, Any] = {
        "prompt_ids": fields["prompts"][row][attended[:-width]].tolist(),
        "ids": ids,
        "texts": texts(ids),
    }
    if "response_mask" in fields:
        record["mask"] = fields["response_mask"][row][real].tolist()
    for field, name in _OF_TOKENS.items():
        if field in fields:
            record[name] = [_short(value) for value in fields[field][row][real].tolist()]
    if "token_level_scores" in fields:
        rewards = fields["token_level_scores"][row][real]
        record["rewards"] = [(place, _short(float(rewards[place]))) for place in rewards.nonzero()[0].tolist()]
    if "weight_versions" in fields:
        versions = fields["weight_versions"][row][real]
        begins = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
        counts = np.diff(begins, append=len(versions))
        record["versions"] = list(zip(versions[begins].tolist(), counts.tolist(), strict=True))
    return record


def _short(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")


def _ground_truth(row: Any) -> Any:
    return row.get("ground_truth") if isinstance(row, dict) else None
