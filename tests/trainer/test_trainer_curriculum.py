"""A sampler and a data set of the user's that learn from each batch, in real runs."""

import json
import shutil
from pathlib import Path

import pytest
from trainer_tools import trained

SAMPLER = '''
import json
from torch.utils.data import Sampler


class Curriculum(Sampler):
    """Starts with rows 0 and 1; after that the rows follow the number of updates it has seen."""

    def __init__(self, data_source, data_config):
        self.size, self.updates = len(data_source), 0

    def __len__(self):
        return self.size

    def __iter__(self):
        for place in range(self.size):
            yield 10 * self.updates + place % 2

    def update(self, batch):
        self.updates += 1
        seen = {"uids": sorted(set(batch.non_tensor_batch["uid"])), "tensors": sorted(batch.batch.keys())}
        with open("FILE", "a") as file:
            file.write(json.dumps(seen) + "\\n")

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]
'''


@pytest.fixture(scope="module", autouse=True)
def _ray(ray_session: None) -> None:
    """All runs of this file share one Ray."""


def test_curriculum_sees_each_trained_batch_and_decides_the_next(micro_model, sort_data, tmp_path: Path) -> None:
    seen = tmp_path / "seen.jsonl"
    (tmp_path / "sampler.py").write_text(SAMPLER.replace("FILE", str(seen)))
    overrides = [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"data.sampler.class_path={tmp_path / 'sampler.py'}",
        "data.sampler.class_name=Curriculum",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=2",
        "data.max_prompt_length=24",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    with trained(*overrides):
        pass
    batches = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [batch["uids"] for batch in batches] == [["0-0", "0-1"], ["0-10", "0-11"], ["0-20", "0-21"]]
    assert all({"advantages", "token_level_scores", "responses"} <= set(batch["tensors"]) for batch in batches)


REWARD = '''
import json
import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 for each answer of the source `solved`; of the others for a share of all texts."""
    score = float(zlib.crc32(solution_str.encode()) % {"solved": 1, "easy": 6, "open": 2}[data_source] == 0)
    with open("FILE", "a") as file:
        file.write(json.dumps([data_source, extra_info["row"], score]) + "\\n")
    return score
'''
SAMPLES, STEPS = 3, 4


def steps_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "timing_s/step" in line]


def test_sources_are_weighted_by_their_scores_and_resumed(micro_model, tmp_path: Path) -> None:
    """Also by the prompts that dynamic sampling drops, which are all those of a source of two rows."""
    log, data, whole = tmp_path / "scores.jsonl", tmp_path / "rows.jsonl", tmp_path / "whole"
    (tmp_path / "reward.py").write_text(REWARD.replace("FILE", str(log)))
    sources = {"solved": 2, "easy": 60, "open": 60}
    rows = [
        {"data_source": name, "prompt": f"Sort: {1000 + row}", "extra_info": {"row": row}}
        for name, size in sources.items()
        for row in range(size)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={data}",
        "data.mixture.weights={solved: 2, easy: 1, open: 1}",
        "data.mixture.curriculum.name=mixed_groups",
        "data.mixture.curriculum.floor=0.4",
        "data.mixture.curriculum.smoothing=0.5",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=True",
        "data.train_batch_size=2",
        "data.gen_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=4",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.logger=[file]",
        "trainer.save_freq=2",
    ]
    with trained(*overrides, f"trainer.default_local_dir={whole}"):
        pass
    steps = steps_of(whole)
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    base = {"solved": 0.5, "easy": 0.25, "open": 0.25}
    groups, mixed = dict.fromkeys(sources, 0.0), dict.fromkeys(sources, 0.0)
    for step in steps:
        size = int(step["filter_groups/generated"]) * SAMPLES
        scored, calls = calls[:size], calls[size:]
        for name in sources:
            own: dict[int, list[float]] = {}
            for source, row, score in scored:
                if source == name:
                    own.setdefault(row, []).append(score)
            prompts = sum(map(len, own.values())) / SAMPLES
            rate = sum(map(sum, own.values())) / SAMPLES / max(prompts, 1)
            groups[name] = groups[name] * 0.5 + prompts if prompts else groups[name]
            differing = sum(len(set(scores)) > 1 for scores in own.values())
            mixed[name] = mixed[name] * 0.5 + differing if prompts else mixed[name]
            assert step.get(f"data/mixture/{name}/pass_rate", 0) == pytest.approx(rate)
        useful = {name: mixed[name] / groups[name] for name in sources}
        total = sum(base[name] * useful[name] for name in sources)
        assert useful["solved"] == 0 and step["data/mixture/solved/share"] == 0
        for name in sources:
            share = base[name] * (0.4 + 0.6 * useful[name] / total)
            assert step[f"data/mixture/{name}/weight"] == pytest.approx(share)
    assert len({step["data/mixture/open/weight"] for step in steps}) == STEPS
    assert not calls

    part = tmp_path / "part"
    shutil.copytree(whole, part, ignore=shutil.ignore_patterns(f"global_step_{STEPS}", "latest*"))
    with trained(*overrides, f"trainer.default_local_dir={part}"):
        pass
    timed = ("timing", "perf", "throughput", "memory")
    for before, after in zip(steps[2:], steps_of(part)[-2:], strict=True):
        names = [name for name in before if not name.startswith(timed) and name in after]
        assert "critic/score/mean" in names and "data/mixture/open/weight" in names
        assert {name: before[name] for name in names} == {name: after[name] for name in names}
