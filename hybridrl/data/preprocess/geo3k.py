r"""Geometry3K: geometry problems with a figure, whose answers are short.

    python -m hybridrl.data.preprocess.geo3k --out DIR [--local_dir DIR]

`--local_dir` holds `train` and `test` as .jsonl, .json or .parquet with the columns `images`, `problem` and `answer`;
without it the data comes from the hub (`hiyouga/geometry3k`). The script writes `train.parquet` and `test.parquet` in
the schema that `main_ppo` reads, with the images as they are. The reward wants reasoning in `<think>` and the answer in
`\boxed{}`.
"""

from __future__ import annotations

from pathlib import Path

from hybridrl.data.preprocess.preprocessing import Row, command_line, convert, text_of
from hybridrl.data.row_images import PLACEHOLDER
from hybridrl.errors import DataError

DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = (
    r"First think it through step by step between <think> and </think>. Then write the final answer in \boxed{}."
)


def make_row(row: Row, split: str, number: int, where: str) -> Row:
    """Convert one problem to the trainers' schema.

    Raises:
        DataError: a column is missing, or there are more or fewer images than `<image>` in the problem.
    """
    problem, answer = text_of(row, "problem", where), text_of(row, "answer", where)
    images = row.get("images")
    if not isinstance(images, list) or problem.count(PLACEHOLDER) != len(images):
        raise DataError(
            f"{where}: column 'images' must be a list with an image for each of the {problem.count(PLACEHOLDER)} "
            f"{PLACEHOLDER} of the problem; found {len(images) if isinstance(images, list) else type(images).__name__}."
        )
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.strip()},
        "extra_info": {"split": split, "index": number, "answer": answer, "question": problem},
    }


def write_geo3k(out: Path, local_dir: Path | None = None) -> dict[str, int]:
    """Write `train.parquet` and `test.parquet` into `out`, and return the number of rows of each.

    Raises:
        DataError: the source cannot be read, or one of its rows is not as expected.
    """
    return convert(out, local_dir, (DATA_SOURCE, None), make_row)


if __name__ == "__main__":
    command_line("geo3k", (__doc__ or "").splitlines()[0], write_geo3k)
