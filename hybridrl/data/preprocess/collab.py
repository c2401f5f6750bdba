r"""Conversations about competition problems (MATH) that only the user knows, for simulated users.

    python -m hybridrl.data.preprocess.collab --out DIR [--local_dir DIR]

The source is that of `hybridrl.data.preprocess.math`. The prompt is the beginning of a conversation, in which the user
says no more than the subject; `interaction_kwargs` has the whole problem, for the interaction `model`.
"""

from __future__ import annotations

from pathlib import Path

from hybridrl.data.preprocess import math
from hybridrl.data.preprocess.preprocessing import Row, command_line, convert

ROLE = (
    "A user wants help with a problem and tells it bit by bit. Ask for what you need to know, one question at a time, "
    "and say so when you guess. Once you can solve the problem, explain the solution and put the final answer within "
    "\\boxed{}."
)


def make_row(row: Row, split: str, number: int, where: str) -> Row:
    """Convert one problem to the trainers' schema.

    Raises:
        DataError: a column is missing, or the solution has no answer.
    """
    math_row = math.make_row(row, split, number, where)
    subject = str(row.get("type") or "mathematics").lower()
    task = f"You have to solve this problem, and do not know how:\n{math_row['extra_info']['question']}"
    math_row["prompt"] = [
        {"role": "system", "content": ROLE},
        {"role": "user", "content": f"Hi, I am stuck on a problem in {subject}. Can you help me?"},
    ]
    return {**math_row, "interaction_kwargs": {"name": "user", "task": task}}


def write_collab(out: Path, local_dir: Path | None = None) -> dict[str, int]:
    """Write `train.parquet` and `test.parquet` into `out`, and return the number of rows of each.

    Raises:
        DataError: the source cannot be read, or one of its rows is not as expected.
    """
    return convert(out, local_dir, (math.DATA_SOURCE, None), make_row)


if __name__ == "__main__":
    command_line("collab", (__doc__ or "").splitlines()[0], write_collab)
