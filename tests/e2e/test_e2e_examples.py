"""The programs in examples/ run, and what they train learns."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

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


ASYNC = """
import json
import sys
from pathlib import Path

import async_grpo

if __name__ == "__main__":
    Path("steps.json").write_text(json.dumps(async_grpo.main(sys.argv[1:])))
"""


@pytest.mark.parametrize("staleness", [0, 2])
def test_async_grpo_holds_its_bound_and_uses_every_row_once(
    micro_model, sort_data, tmp_path, finish, forked, staleness
) -> None:
    program = tmp_path / "program.py"
    program.write_text(ASYNC)
    (tmp_path / "letters.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(char < 'm' for char in solution_str) / max(len(solution_str), 1)\n"
    )
    steps, prompts, samples = 5, 4, 3
    words = [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={tmp_path / 'letters.py'}",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        f"actor_rollout_ref.rollout.n={samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.report=False",
        "trainer.logger=[file]",
    ]
    path = os.pathsep.join([str(EXAMPLES), os.environ["PYTHONPATH"]])
    environment = os.environ | {"PYTHONPATH": path}
    done = finish([forked, str(program), str(staleness), *words], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "steps.json").read_text())
    ages = [step["rollout/staleness/max"] for step in found]
    assert len(found) == steps and all(0 <= age <= staleness for age in ages), ages
    rows = [tuple(row) for step in found for row in step["rows"]]
    assert len(rows) == len(set(rows)) == steps * prompts * samples
    assert len({uid for uid, _ in rows}) == steps * prompts
    trained = load_file(next((tmp_path / "run" / "final" / "actor" / "hf_model").glob("*.safetensors")))
    before = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32).state_dict()
    assert any((trained[name] - before[name]).abs().max() > 1e-3 for name in trained)


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
