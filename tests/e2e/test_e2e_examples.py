"""The programs in examples/ run, and what they train learns."""

import json
import os
import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

# The example with another reward, one that a random model can learn in a few steps: to write digits.
PROGRAM = """
import json
import sys
from pathlib import Path

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
    Path("rewards.json").write_text(json.dumps(example.main(sys.argv[1:])))
"""


def test_grpo_on_workers_learns(micro_model, sort_data, tmp_path, finish, forked) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(EXAMPLES), os.environ["PYTHONPATH"]])
    arguments = ["--model", str(micro_model), "--data", str(sort_data / "train.parquet"), "--workers", "2"]
    words = [*arguments, "--steps", "16", "--lr", "1e-2"]
    done = finish([forked, str(program), *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    rewards = json.loads((tmp_path / "rewards.json").read_text())
    assert len(rewards) == 16
    assert sum(rewards[-3:]) / 3 > 4 * sum(rewards[:3]) / 3, rewards


# A notebook's cells are run one after the other in one namespace, inside an event loop that already runs.
NOTEBOOK = """
import asyncio
import json
import sys


async def run_cells(cells):
    for cell in cells:
        exec(compile("".join(cell["source"]), "<cell>", "exec"), sys.modules["__main__"].__dict__)


notebook = json.load(open(sys.argv[1]))
asyncio.run(run_cells([cell for cell in notebook["cells"] if cell["cell_type"] == "code"]))
"""


def test_the_notebook_runs_from_its_first_cell_to_its_last_and_learns(tmp_path, finish, forked) -> None:
    (tmp_path / "cells.py").write_text(NOTEBOOK)
    done = finish([forked, "cells.py", str(EXAMPLES / "getting_started.ipynb")], cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    scores = next(line for line in lines if line.startswith("mean reward, step by step:")).split(":")[1].split()
    assert len(scores) == 15 and float(scores[0]) < 0.2 and float(scores[-1]) > 0.5, scores
    answer = next(line for line in lines if line.startswith("Write 3 digits ->")).split("->")[1].strip()
    assert answer.isdigit(), answer


def test_the_notebook_is_kept_without_outputs_and_links_to_pages() -> None:
    notebook = json.loads((EXAMPLES / "getting_started.ipynb").read_text())
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
    text = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((EXAMPLES / link).is_file() for link in links)
