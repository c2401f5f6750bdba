"""Batches as readable text: the columns of rollout and validation dumps."""

from pathlib import Path
from typing import Any

from hybridrl.observe.dump import dump_generations
from hybridrl.protocol import DataProto

_FIXED = ("input", "output", "gts", "score", "step", "uid", "data_source")


class Samples:
    """Decoded prompts and responses with their scores, gathered over batches.

    Args:
        tokenizer: decodes token ids, without special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.scores: list[float] = []
        self.ground_truths: list[Any] = []
        self.uids: list[str] = []
        self.sources: list[str] = []
        self.extra: dict[str, list[Any]] = {}

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

    def write(self, folder: Path, step: int) -> Path:
        """Write `<folder>/<step>.jsonl`, one line per sample."""
        columns: dict[str, list[Any]] = {"uid": self.uids, "data_source": self.sources}
        columns |= {name: values for name, values in self.extra.items() if name not in _FIXED}
        return dump_generations(folder, step, self.inputs, self.outputs, self.scores, self.ground_truths, columns)

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Return the first `count` samples, for a table."""
        columns = {"input": self.inputs, "output": self.outputs, "gts": self.ground_truths, "score": self.scores}
        return [{name: values[row] for name, values in columns.items()} for row in range(min(count, len(self)))]

    def _decode(self, ids: Any, mask: Any) -> list[str]:
        rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        texts: list[str] = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts


def _ground_truth(row: Any) -> Any:
    return row.get("ground_truth") if isinstance(row, dict) else None
