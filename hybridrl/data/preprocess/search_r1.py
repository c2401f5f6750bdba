"""Questions for a search tool, as of Search-R1: Natural Questions and HotpotQA.

    python -m hybridrl.data.preprocess.search_r1 --out DIR [--local_dir DIR]

`--local_dir` holds `train` and `test` as .jsonl, .json or .parquet with the columns `question` and `golden_answers` (a
list of texts), and optionally `data_source`; without it the data comes from the hub (`PeterJinGo/nq_hotpotqa_train`).
The script writes `train.parquet` and `test.parquet` in the schema that `main_ppo` reads, with the data source
`searchR1_NAME`.
"""

from __future__ import annotations

from pathlib import Path

from hybridrl.data.preprocess.preprocessing import Row, command_line, convert, text_of
from hybridrl.errors import DataError, RewardError
from hybridrl.reward.score.search_r1 import references

HUB = "PeterJinGo/nq_hotpotqa_train"
PREFIX, USUAL = "searchR1_", "qa"
INSTRUCTION = (
    "Answer the question. You may call the tool search as often as you like, after thinking about what you do not know "
    "yet. Write the answer between <answer> and </answer>, without an explanation, for example "
    "<answer>Beijing</answer>. Question: "
)


def make_row(row: Row, split: str, number: int, where: str) -> Row:
    """Convert one question to the trainers' schema.

    Raises:
        DataError: a column is missing, or there is no answer.
    """
    question = text_of(row, "question", where).strip()
    try:
        answers = references(row.get("golden_answers"))
    except RewardError as error:
        raise DataError(f"{where}: column 'golden_answers': {error}") from error
    return {
        "data_source": f"{PREFIX}{row.get('data_source') or USUAL}",
        "prompt": [{"role": "user", "content": INSTRUCTION + question}],
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": split, "index": number, "question": question},
    }


def write_search_r1(out: Path, local_dir: Path | None = None) -> dict[str, int]:
    """Write `train.parquet` and `test.parquet` into `out`, and return the number of rows of each.

    Raises:
        DataError: the source cannot be read, or one of its rows is not as expected.
    """
    return convert(out, local_dir, (HUB, None), make_row)


if __name__ == "__main__":
    command_line("search_r1", (__doc__ or "").splitlines()[0], write_search_r1)
