"""The programs in examples/ run, and what they train learns."""

import json
import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

# The example with another reward, one that a random model can learn in a few steps: to write digits.
PROGRAM = """
import json
import sys

import grpo_on_workers as example
import torch


def share_of_digits(batch, tokenizer):
    mask = batch.batch["response_mask"]
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    lengths = mask.sum(1)
    rewards = torch.zeros(mask.shape)
    shares = (torch.isin(batch.batch["responses"], digits) * mask).sum(1) / lengths
    rewards[torch.arange(len(batch)), lengths - 1] = shares.float()
    return rewards


example.score = share_of_digits
if __name__ == "__main__":
    print("REWARDS " + json.dumps(example.main(sys.argv[1:])))
"""


def test_grpo_on_workers_learns(micro_model, sort_data, tmp_path, finish) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(EXAMPLES), os.environ["PYTHONPATH"]])
    arguments = ["--model", str(micro_model), "--data", str(sort_data / "train.parquet"), "--workers", "2"]
    words = [*arguments, "--steps", "16", "--lr", "1e-2"]
    done = finish([sys.executable, str(program), *words], env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("REWARDS "))
    rewards = json.loads(line.removeprefix("REWARDS "))
    assert len(rewards) == 16
    assert sum(rewards[-3:]) / 3 > 4 * sum(rewards[:3]) / 3, rewards
