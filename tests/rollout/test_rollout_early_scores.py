"""A sample is scored while the engine still generates another, which waits for that score."""

from pathlib import Path

import numpy as np
import pytest
import torch
from plain_engine import WAITING

from hybridrl.config import PPOTrainerConfig
from hybridrl.models.tiny import build_tokenizer
from hybridrl.protocol import DataProto
from hybridrl.reward import create_reward_manager
from hybridrl.rollout.rollout import ReplicatedRollout
from hybridrl.trainer.ppo.early_scores import scored_early

FUNCTION = """
from pathlib import Path

def compute_score(solution_str, ground_truth):
    Path(__file__).with_name("scored").touch()
    return {"score": float(len(solution_str)), "text": solution_str}
"""


@pytest.fixture
def manager(tmp_path: Path):
    config = PPOTrainerConfig()
    config.reward.num_workers = 1
    config.reward.custom_reward_function.path = str(tmp_path / "mine.py")
    (tmp_path / "mine.py").write_text(FUNCTION)
    manager = create_reward_manager(config, build_tokenizer())
    yield manager
    manager.close()


def prompts(first_tokens: list[int]) -> DataProto:
    rows = len(first_tokens)
    ids = torch.tensor([[first, 7 + row, 8] for row, first in enumerate(first_tokens)])
    columns = {
        "uid": ["a"] * rows,
        "sample": list(range(rows)),
        "raw_prompt": [[{"role": "user", "content": "?"}]] * rows,
    }
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(3).expand(rows, 3).clone(),
        },
        non_tensors={name: np.array([*values, None], dtype=object)[:-1] for name, values in columns.items()},
        meta_info={"global_steps": 1},
    )


def test_the_engine_waits_for_the_score_of_a_sample_that_has_finished(make_pool, manager, tmp_path) -> None:
    pool = make_pool(replicas=1, waits=str(tmp_path / "scored"))
    rollout, asked = ReplicatedRollout(pool), prompts([6, WAITING, 6])
    with scored_early(manager, asked) as scores:
        batch = rollout.generate(asked, scores.on_finished)  # would wait for ever if samples were scored after it
    batch.non_tensor_batch["raw_prompt"] = asked.non_tensor_batch["raw_prompt"]
    early = scores(batch)
    assert early["metrics"]["perf/reward_scored_early"] > 0
    later = manager(batch, return_dict=True)
    assert torch.equal(early["reward_tensor"], later["reward_tensor"])
    assert early["reward_extra_info"] == later["reward_extra_info"]
