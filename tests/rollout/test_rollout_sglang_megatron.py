"""SGLang engines beside Megatron-core workers at TP 2: equal log-probabilities, and the bytes that the layouts say."""

import importlib.util

import pytest
from policy_tools import assert_each_transfer_brings_the_trainers_weights, scaled_policy, settings

from hybridrl.layouts.topology import MegatronLayout

if importlib.util.find_spec("sglang") is None:
    pytest.skip("runs in the SGLang environment", allow_module_level=True)
# It is not imported here: on a CPU that takes the engine's own import hook.
if importlib.util.find_spec("megatron") is None:
    pytest.skip("Megatron-core is not installed: bash scripts/install.sh cpu megatron", allow_module_level=True)
pytestmark = pytest.mark.timeout(900)

WORDS = (
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.megatron.dtype=float32",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.checkpoint_engine.method=planned",
)


@pytest.fixture(scope="module")
def policy(ray_session, tiny_model):
    """Two ranks that share one copy of the model."""
    with scaled_policy(settings(tiny_model, *WORDS, engine="sglang"), 2) as group:
        yield group


@pytest.mark.parametrize("tp", [2, 1])
def test_log_probs_equal_the_trainers_after_each_transfer(policy, tiny_model, tmp_path, tp: int) -> None:
    words = (*WORDS, f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp}")
    config = settings(tiny_model, *words, engine="sglang")
    assert_each_transfer_brings_the_trainers_weights(policy, config, MegatronLayout(tp=2), tmp_path, transfers=2)
