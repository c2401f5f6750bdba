"""A sampler and a data set of the user's that learn from each batch, in real runs."""

import json
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
