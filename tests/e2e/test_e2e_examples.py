"""The programs in examples/ run, and what they train learns."""

import json
import os
import sys
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


ASYNC = """
import json
import sys

import async_grpo

if __name__ == "__main__":
    print("STEPS " + json.dumps(async_grpo.main(sys.argv[1:])))
"""


@pytest.mark.parametrize("staleness", [0, 2])
def test_async_grpo_holds_its_bound_and_uses_every_row_once(
    micro_model, sort_data, tmp_path, finish, staleness
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
    done = finish([sys.executable, str(program), str(staleness), *words], env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("STEPS "))
    found = json.loads(line.removeprefix("STEPS "))
    ages = [step["rollout/staleness/max"] for step in found]
    assert len(found) == steps and all(0 <= age <= staleness for age in ages), ages
    rows = [tuple(row) for step in found for row in step["rows"]]
    assert len(rows) == len(set(rows)) == steps * prompts * samples
    assert len({uid for uid, _ in rows}) == steps * prompts
    trained = load_file(next((tmp_path / "run" / "final" / "actor" / "hf_model").glob("*.safetensors")))
    before = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32).state_dict()
    assert any((trained[name] - before[name]).abs().max() > 1e-3 for name in trained)
