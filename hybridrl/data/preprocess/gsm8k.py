"""GSM8K: grade-school word problems whose answers are numbers.

    python -m hybridrl.data.preprocess.gsm8k --out DIR [--local_dir DIR]

`--local_dir` holds `train` and `test` as .jsonl, .json or .parquet with the columns `question` and `answer`;
without it the data comes from the hub (`openai/gsm8k`). The script writes `train.parquet` and `test.parquet` in the
schema that `main_ppo` reads.
"""

from __future__ import annotations

from pathlib import Path

from hybridrl.data.preprocess.preprocessing import Row, command_line, convert, text_of
from hybridrl.errors import DataError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def make_row(row: Row, split: str, number: int, where: str) -> Row:
    """Convert one problem to the trainers' schema.

    Raises:
        DataError: a column is missing, or the answer has no `####`.
    """
    question, answer = text_of(row, "question", where), text_of(row, "answer", where)
    _, mark, final = answer.rpartition("####")
    if not mark or not final.strip():
        raise DataError(f"{where}: column 'answer' has no final answer after '####': {answer[-60:]!r}.")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final.strip().replace(",", "")},
        "extra_info": {"split": split, "index": number, "answer": answer, "question": question},
    }


def write_gsm8k(out: Path, local_dir: Path | None = None) -> dict[str, int]:
    """Write `train.parquet` and `test.parquet` into `out`, and return the number of rows of each.

    Raises:
        DataError: the source cannot be read, or one of its rows is not as expected.
    """
    return convert(out, local_dir, (DATA_SOURCE, "main"), make_row)


if __name__ == "__main__":
    command_line("gsm8k", (__doc__ or "").splitlines()[0], write_gsm8k)
