"""Runs on two ranks: profiles of chosen steps and ranks, use of devices, and saves while training goes on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from raising import raises_with
from trainer_tools import trained

from hybridrl.checkpoint import verify
from hybridrl.config import load_config
from hybridrl.errors import UserError
from hybridrl.observe.timeline import rank_seconds, read_timeline
from hybridrl.trainer.supervised.run_supervised import run_supervised
from hybridrl.utils.spans import CONTROLLER

pytestmark = pytest.mark.usefixtures("ray_session")

REWARD = Path(__file__).parents[2] / "recipes" / "smoke_reward.py"
ACTOR = "actor_rollout_ref.actor"


def check_profile(folder: Path, name: str) -> None:
    """The second step of one rank is all that was profiled."""
    (file,) = [path for path in folder.rglob("*") if path.is_file()]
    assert file == folder / "step_2" / f"{name}.json.gz"
    with gzip.open(file) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names


def test_a_step_of_fine_tuning_is_profiled(micro_model: Path, sort_data: Path, tmp_path: Path) -> None:
    words = [
        f"model.path={micro_model}",
        f"data.train_files={sort_data / 'sft_train.parquet'}",
        "data.train_batch_size=4",
        "profiler.enable=True",
        "profiler.ranks=[1]",
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        f"global_profiler.save_path={tmp_path / 'profile'}",
        "trainer.total_training_steps=3",
        "trainer.save_last=False",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[]",
        "trainer.report=False",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    with raises_with(UserError, "profiler.ranks=[2]", 0, 1):
        run_supervised(load_config("sft_trainer", [*words, "profiler.ranks=[2]"]))
    run_supervised(load_config("sft_trainer", words))
    check_profile(tmp_path / "profile", "model_rank_1")


def test_profiles_timeline_and_saves_of_a_run(micro_model: Path, sort_data: Path, tmp_path: Path) -> None:
    words = [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={REWARD}",
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.checkpoint.async_save=True",
        "critic.checkpoint.async_save=True",
        f"{ACTOR}.profiler.enable=True",
        f"{ACTOR}.profiler.ranks=[1]",
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        f"global_profiler.save_path={tmp_path / 'profile'}",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.peak_tflops=0.5",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    for more, match in (
        (f"{ACTOR}.profiler.ranks=[2]", r"profiler\.ranks=\[2\].*0 to 1"),
        ("global_profiler.tool=nsys", r"global_profiler\.tool=nsys.*torch"),
    ):
        with pytest.raises(UserError, match=match), trained(*words, more):
            pass
    with trained(*words):
        pass
    check_profile(tmp_path / "profile", "actor_rollout_rank_1")
    for step in (1, 2, 3):
        verify(tmp_path / "run" / f"global_step_{step}")
    timeline = read_timeline(tmp_path / "run")
    assert sorted(timeline) == [1, 2, 3]
    for spans in timeline.values():
        assert {"gen", "reward", "update_actor"} <= {span.name for span in spans if span.rank == CONTROLLER}
        updates = {name: sorted(ranks) for name, ranks in rank_seconds(spans).items() if "/update_" in name}
        assert updates == {"actor_rollout/update_actor": [0, 1], "critic/update_critic": [0, 1]}
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for model in ("actor", "critic"):
            assert record[f"perf/mfu/{model}"] == pytest.approx(record[f"perf/tflops/{model}"] / 0.5)
            assert record[f"perf/tflops/{model}"] > 0
