r"""MATH: competition problems whose answers are in `\boxed{}`.

    python -m hybridrl.data.preprocess.math --out DIR [--local_dir DIR]

`--local_dir` holds `train` and `test` as .jsonl, .json or .parquet with the columns `problem` and `solution`;
without it the data comes from the hub (`DigitalLearningGmbH/MATH-lighteval`). The script writes `train.parquet` and
`test.parquet` in the schema that `main_ppo` reads.
"""

from __future__ import annotations

from pathlib import Path

from hybridrl.data.preprocess.preprocessing import Row, command_line, convert, text_of
from hybridrl.errors import DataError
from hybridrl.reward.score.answers import last_boxed

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def make_row(row: Row, split: str, number: int, where: str) -> Row:
    r"""Convert one problem to the trainers' schema.

    Raises:
        DataError: a column is missing, or the solution has no `\boxed{}`.
    """
    problem, solution = text_of(row, "problem", where), text_of(row, "solution", where)
    answer = last_boxed(solution)
    if not answer:
        raise DataError(f"{where}: column 'solution' has no answer in \\boxed{{}}: ...{solution[-60:]!r}.")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": number, "answer": solution, "question": problem},
    }


def write_math(out: Path, local_dir: Path | None = None) -> dict[str, int]:
    """Write `train.parquet` and `test.parquet` into `out`, and return the number of rows of each.

    Raises:
        DataError: the source cannot be read, or one of its rows is not as expected.
    """
    return convert(out, local_dir, (DATA_SOURCE, None), make_row)


if __name__ == "__main__":
    command_line("math", (__doc__ or "").splitlines()[0], write_math)
