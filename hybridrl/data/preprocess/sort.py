"""The sorting task: a synthetic dataset that a tiny model learns in a minute, without a hub.

    python -m hybridrl.data.preprocess.sort --out DIR [--seed 0]

A prompt is `Sort: 31524` and its answer is `#### 12345`. The reward (data source `hybridrl/sort`) is 1 for an exact
match. The script writes `train.parquet` and `test.parquet` for reinforcement learning (disjoint prompts), and
`sft_train.parquet` and `sft_val.parquet` for the supervised warm start: the same prompts with their answers as
`messages`. `pairs_train.parquet` and `pairs_val.parquet` are for DPO and reward models: the same prompts with the
answer as `chosen` and a wrong order of the digits as `rejected`; `margin` is the share of digits in a wrong place.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.errors import UserError

DATA_SOURCE = "hybridrl/sort"
DIGITS = "0123456789"


def make_prompts(train_size: int, test_size: int, length: int, seed: int) -> tuple[list[str], list[str]]:
    """Draw `train_size + test_size` different digit strings of `length` digits.

    Raises:
        UserError: there are fewer than that many different strings.
    """
    available = len(DIGITS) ** length
    if train_size + test_size > available:
        raise UserError(
            f"--train-size {train_size} and --test-size {test_size} ask for {train_size + test_size} different "
            f"prompts, but there are only {available} of {length} digits. Ask for fewer, or raise --length."
        )
    numbers = random.Random(seed).sample(range(available), train_size + test_size)
    prompts = [f"{number:0{length}d}" for number in numbers]
    return prompts[:train_size], prompts[train_size:]


def answer(digits: str) -> str:
    """Return the ground truth: the digits in ascending order."""
    return "".join(sorted(digits))


def rl_row(digits: str, split: str, index: int) -> dict[str, Any]:
    """Build one row of the RL files, in the schema that every preprocessing script writes."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"Sort: {digits}"}],
        "ability": "sort",
        "reward_model": {"style": "rule", "ground_truth": answer(digits)},
        "extra_info": {"split": split, "index": index},
    }


def sft_row(digits: str) -> dict[str, Any]:
    """Build one row of the supervised files: the prompt and the correct answer, as one conversation."""
    return {
        "messages": [
            {"role": "user", "content": f"Sort: {digits}"},
            {"role": "assistant", "content": f"#### {answer(digits)}"},
        ]
    }


def pair_row(digits: str, seed: int) -> dict[str, Any]:
    """Build one row of the pairs: the prompt, the correct answer, and the same digits in another order.

    A prompt whose digits are all equal has no other order; the last one is left out then.
    """
    right = answer(digits)
    draw, wrong = random.Random(f"{seed} {digits}"), right
    while wrong == right and len(set(right)) > 1:
        wrong = "".join(draw.sample(right, len(right)))
    if wrong == right:
        wrong = right[:-1]
    misplaced = sum(digit != expected for digit, expected in zip(right, wrong.ljust(len(right)), strict=True))
    return {
        "prompt": [{"role": "user", "content": f"Sort: {digits}"}],
        "chosen": [{"role": "assistant", "content": f"#### {right}"}],
        "rejected": [{"role": "assistant", "content": f"#### {wrong}"}],
        "margin": misplaced / len(right),
    }


def write_sort_data(
    out: str | Path, *, seed: int = 0, train_size: int = 8000, test_size: int = 256, length: int = 5
) -> Path:
    """Write the six files into `out` (created if missing). The same arguments give the same rows.

    Raises:
        UserError: fewer different prompts exist than requested.
    """
    train, test = make_prompts(train_size, test_size, length, seed)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.parquet", (rl_row(digits, "train", index) for index, digits in enumerate(train)))
    write_rows(folder / "test.parquet", (rl_row(digits, "test", index) for index, digits in enumerate(test)))
    write_rows(folder / "sft_train.parquet", map(sft_row, train))
    write_rows(folder / "sft_val.parquet", map(sft_row, test))
    write_rows(folder / "pairs_train.parquet", (pair_row(digits, seed) for digits in train))
    write_rows(folder / "pairs_val.parquet", (pair_row(digits, seed) for digits in test))
    return folder


def main(argv: list[str] | None = None) -> None:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.data.preprocess.sort", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", required=True, help="folder to write the parquet files into")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (0)")
    parser.add_argument("--train-size", type=int, default=8000, help="number of training prompts (8000)")
    parser.add_argument("--test-size", type=int, default=256, help="number of validation prompts (256)")
    parser.add_argument("--length", type=int, default=5, help="digits a prompt (5)")
    arguments = parser.parse_args(argv)
    try:
        folder = write_sort_data(**vars(arguments))
    except UserError as error:
        parser.error(str(error))
    print(f"{arguments.train_size} training and {arguments.test_size} validation prompts written to {folder}")


if __name__ == "__main__":
    main()
