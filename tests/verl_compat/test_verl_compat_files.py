"""Files that a user names in the configuration and that import verl, in a real run without the alias switched on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

Finish = Callable[..., "subprocess.CompletedProcess[str]"]

REWARD = """
from verl.utils.reward_score import default_compute_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    from verl.utils.reward_score.gsm8k import extract_solution

    assert extract_solution("#### 7") == "7"
    return 0.25 + default_compute_score(data_source, solution_str, ground_truth, extra_info)
"""

DATA = """
from verl.utils.dataset.rl_dataset import RLHFDataset


class Reversed(RLHFDataset):
    def __init__(self, data_files, tokenizer, config, processor, max_samples=-1):
        super().__init__(
            data_files=data_files, tokenizer=tokenizer, config=config, processor=processor, max_samples=max_samples
        )

    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = self.dataframe.select(range(len(self.dataframe) - 1, -1, -1))
"""

SAMPLER = """
import json
from pathlib import Path

from verl import DataProto
from verl.experimental.dataset.sampler import AbstractCurriculumSampler


class Same(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.size = len(data_source)
        self.seen = []

    def __iter__(self):
        return iter(range(self.size))

    def __len__(self):
        return self.size

    def update(self, batch: DataProto):
        self.seen.append(sorted(set(batch.non_tensor_batch["extra_info"][row]["index"] for row in range(len(batch)))))
        Path("seen.json").write_text(json.dumps(self.seen))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
"""

LOSS = """
import os

import torch
import verl.utils.torch_functional as verl_F
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss


@register_policy_loss("plain_gradient")
def plain_gradient(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
                   rollout_is_weights=None):
    losses = -advantages * log_prob
    loss = agg_loss(
        loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    return loss, {"actor/mine": verl_F.masked_mean(log_prob.detach(), response_mask).item()}


@register_adv_est("score_minus_mean")
def score_minus_mean(token_level_rewards, response_mask, index, **kwargs):
    scores = token_level_rewards.sum(-1)
    advantages = (scores - scores.mean()).unsqueeze(-1) * response_mask
    return advantages, advantages
"""


def write(folder: Path) -> None:
    for name, text in {"reward": REWARD, "data": DATA, "sampler": SAMPLER, "loss": LOSS}.items():
        (folder / f"my_{name}.py").write_text(text)


def test_run_with_a_reward_data_set_sampler_loss_and_estimator_written_for_verl(
    tmp_path: Path, micro_model: Path, sort_data: Path, finish: Finish, forked: str
) -> None:
    write(tmp_path)
    rows = pd.read_parquet(sort_data / "train.parquet")
    last = [info["index"] for info in rows["extra_info"]][::-1]
    done = finish(
        [
            forked,
            "-m",
            "hybridrl.trainer.main_ppo",
            f"actor_rollout_ref.model.path={micro_model}",
            f"data.train_files={sort_data / 'train.parquet'}",
            "data.train_batch_size=4",
            "data.max_response_length=4",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "algorithm.adv_estimator=score_minus_mean",
            "actor_rollout_ref.actor.policy_loss.loss_mode=plain_gradient",
            "actor_rollout_ref.model.external_lib=my_loss.py",
            "reward.custom_reward_function.path=my_reward.py",
            "data.custom_cls.path=my_data.py",
            "data.custom_cls.name=Reversed",
            "data.sampler.class_path=my_sampler.py",
            "data.sampler.class_name=Same",
            "trainer.total_training_steps=2",
            "trainer.n_gpus_per_node=1",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "actor/mine" in step]
    assert [step["step"] for step in trained] == [1, 2]
    assert all(step["critic/score/mean"] >= 0.25 for step in trained)
    # the data set turns the rows around, and the sampler draws them in order and sees each batch
    assert json.loads((tmp_path / "seen.json").read_text()) == [sorted(last[:4]), sorted(last[4:8])]


def test_installed_verl_is_left_alone(tmp_path: Path, finish: Finish) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("WHO = 'the installed one'")
    (tmp_path / "verl" / "own.py").write_text("")
    (tmp_path / "mine.py").write_text("import verl, verl.own\nprint(verl.WHO)\nimport verl.protocol\n")
    text = "from hybridrl.utils.user_code import load_module\nload_module('mine.py', 'key')"
    done = finish([sys.executable, "-c", text], cwd=tmp_path)
    assert "the installed one" in done.stdout
    assert "No module named 'verl.protocol'" in done.stderr  # not ours beside another's


@pytest.mark.parametrize("config", ["dict", "omegaconf"])
def test_data_set_built_with_the_configuration_that_verl_has(config: str, micro_model: Path, sort_data: Path) -> None:
    from omegaconf import OmegaConf

    from hybridrl.models.tokenizer import load_tokenizer
    from hybridrl.verl_compat.utils.dataset.rl_dataset import RLHFDataset

    values = {"max_prompt_length": 64, "prompt_key": "prompt", "my_own": 3}
    settings = values if config == "dict" else OmegaConf.create(values)
    data = RLHFDataset(str(sort_data / "train.parquet"), load_tokenizer(micro_model), settings, None, 5)
    assert len(data) == 5 and len(data[0]["input_ids"]) <= 64
    assert data.config.my_own == 3 and data.config.truncation == "error"
    assert data.config.get("no_such_key", "default") == "default"
