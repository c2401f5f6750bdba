"""The advice of runs that were really slow: a reward function, and one rank of the policy, that sleep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.observe.advisor import Advice, advise
from hybridrl.observe.run_history import load_history
from hybridrl.observe.timeline import read_timeline

#: both take longer than everything else of a step
SECONDS = 8.0
REWARD = f"""
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({SECONDS} / 4)
    return 0.0
"""
SLOW = f"""
import time
from torch.nn.modules.module import register_module_forward_pre_hook
from hybridrl.utils import distributed

def wait(module, arguments):
    if type(module).__name__.endswith("Qwen2ForCausalLM") and not module.training and distributed.get_rank() == 1:
        time.sleep({SECONDS} / 4)

register_module_forward_pre_hook(wait)
"""


@pytest.fixture
def advice_of(
    tmp_path: Path, finish: Callable[..., Any], joined: str, micro_model: Path, sort_data: Path
) -> Callable[..., Advice]:
    """The advice after two steps of GRPO on two ranks, with four samples per step and these settings."""

    def run(*settings: str) -> Advice:
        command = [
            *(joined, "-m", "hybridrl.trainer.main_ppo", f"data.train_files={sort_data}/train.parquet"),
            *(f"actor_rollout_ref.model.path={micro_model}", "algorithm.adv_estimator=grpo"),
            *("data.max_prompt_length=64", "data.max_response_length=4", "data.train_batch_size=2"),
            *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
            *("trainer.n_gpus_per_node=2", "trainer.total_training_steps=2", "trainer.val_before_train=False"),
            *("trainer.save_freq=-1", f"trainer.default_local_dir={tmp_path}/run", *settings),
        ]
        ended = finish(command, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        history = load_history(tmp_path / "run")
        found = advise(history.steps(), read_timeline(tmp_path / "run"), history.config)
        assert found is not None
        return found

    return run


@pytest.mark.slow
def test_a_reward_function_that_sleeps(tmp_path: Path, advice_of: Callable[..., Advice]) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    found = advice_of("reward.custom_reward_function.path=reward.py", "reward.num_workers=1")
    assert (found.phase, found.rank, found.override) == ("reward", None, "reward.num_workers=2")


@pytest.mark.slow
def test_a_rank_that_sleeps_while_it_generates(tmp_path: Path, advice_of: Callable[..., Advice]) -> None:
    """At each of four tokens. Where ranks wait for each other, as in an update, all are as slow (docs/observe.md)."""
    (tmp_path / "slow.py").write_text(SLOW)
    found = advice_of(f"actor_rollout_ref.model.external_lib={tmp_path}/slow.py")
    assert (found.phase, found.rank) == ("gen", "1 of actor_rollout/generate_sequences")
    assert "actor_rollout_ref.actor.profiler.ranks=[1]" in found.override
