"""Samples of a step as JSON lines: `rollouts/<step>.jsonl` and `validation/<step>.jsonl`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.observe import jsonl
from hybridrl.utils.files import replacing

_FILE = re.compile(r"(\d+)\.jsonl")


def dump_generations(
    folder: str | Path,
    step: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    scores: Sequence[float],
    gts: Sequence[Any] | None = None,
    extra: Mapping[str, Sequence[Any]] | None = None,
) -> Path:
    """Write the samples of one step atomically, one per line.

    A line holds `input`, `output`, `gts`, `score`, `step` and the columns of `extra` (`uid`, what the reward function
    returned, ...). Values that JSON does not support are written as lists, numbers or text.

    Args:
        folder: created if missing.
        inputs, outputs, scores, gts: one per sample; `gts` are the ground truths.
        extra: column -> one value per sample.

    Returns:
        The path of the file.

    Raises:
        ValueError: a column has another length, or one of the names above; the error names it.
    """
    columns: dict[str, Sequence[Any]] = {"input": inputs, "output": outputs}
    columns["gts"] = gts if gts is not None else [None] * len(inputs)
    columns["score"] = scores
    for name, values in (extra or {}).items():
        if name in columns or name == "step":
            raise ValueError(f"extra column {name!r} is one of the fixed columns; give it another name")
        columns[name] = values
    for name, values in columns.items():
        if len(values) != len(inputs):
            raise ValueError(f"column {name!r} has {len(values)} entries for {len(inputs)} samples")
    path = Path(folder) / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for row in zip(*columns.values(), strict=True):
            record = dict(zip(columns, row, strict=True))
            record["step"] = step
            file.write(jsonl.encode(record) + "\n")
    return path


def dumped_steps(folder: str | Path) -> list[int]:
    """Return the steps that have a file, ascending."""
    if not Path(folder).is_dir():
        return []
    matches = (_FILE.fullmatch(path.name) for path in Path(folder).iterdir())
    return sorted(int(match[1]) for match in matches if match)


def cut_dumps_after(folder: str | Path, step: int) -> None:
    """Remove the files of later steps, and what a killed run left of a file that it was writing."""
    for later in dumped_steps(folder):
        if later > step:
            (Path(folder) / f"{later}.jsonl").unlink()
    for unfinished in Path(folder).glob(".*.jsonl.*.tmp"):
        unfinished.unlink()
