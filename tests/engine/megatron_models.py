"""Tiny Hugging Face models, and Megatron's chunks of the same models on gloo, without an optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybridrl.engine.megatron import build
from hybridrl.engine.megatron.hf_weights import Exporter
from hybridrl.engine.megatron.mapping import WeightMap, family_of
from hybridrl.engine.megatron.parallel import ParallelSizes, ParallelState
from hybridrl.models.loading import to_checkpoint_names

VOCABULARY, HIDDEN, HEADS, KV_HEADS, LAYERS = 300, 64, 8, 4, 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA: dict[str, Any] = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

#: name of a test case: model_type, and what its configuration has besides the common fields
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "llama": ("llama", {}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, **_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2-moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 48, "norm_topk_prob": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "deepseek-v2": (
        "deepseek_v2",
        {**_MLA, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_MLA,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 5, "head_dim": 16}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def tiny_config(case: str, **changes: Any) -> PreTrainedConfig:
    model_type, own = MODELS[case]
    return AutoConfig.for_model(model_type, **{**COMMON, **own, **changes})


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """In float32, with biases, norms and buffers that are not trivial."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model.eval()


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes."""
    tied = bool(model.config.tie_word_embeddings)
    state = {name: t for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    return {name: tensor.clone() for name, tensor in to_checkpoint_names(model, state.items())}


class Built:
    """This rank's chunks of a model in a layout, with weights that are all NaN, and their map.

    Args:
        config: of the Hugging Face model.
        value: with a value head.
        sizes: tp, pp, vpp, cp, ep, etp.
    """

    def __init__(self, config: PreTrainedConfig, value: bool = False, **sizes: int) -> None:
        self.config, self.model_type = config, "value_model" if value else "language_model"
        self.state = ParallelState(ParallelSizes(**{"etp": sizes.get("tp", 1), **sizes}))
        plan = build.blueprint(family_of(config), config, self.model_type, {}, recompute=False)
        with self.state.activate():
            settings = build.transformer_config(plan, self.state.sizes, True, torch.float32)
            self.chunks = build.build_chunks(plan, settings, self.state)
            for tensor in (one for chunk in self.chunks for one in chunk.parameters()):
                tensor.detach().fill_(float("nan"))
            self.map = WeightMap(plan.family, config, self.chunks, model_type=self.model_type)
            self.exporter = Exporter(self.map)

    def logits(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Of the whole padded vocabulary on the last stage, None elsewhere. One chunk per stage."""
        with self.state.activate(), torch.no_grad():
            return _forward(self.chunks, ids)


def _forward(chunks: list[torch.nn.Module], ids: torch.Tensor) -> torch.Tensor | None:
    """Logits `[B, S, V]` of the whole vocabulary on the last stage, None elsewhere. One chunk per stage."""
    from megatron.core import parallel_state as state
    from megatron.core import tensor_parallel

    (chunk,) = chunks
    rows, width = ids.shape
    positions = torch.arange(width).expand(rows, width)
    mask = torch.ones(width, width).tril().bool().logical_not()[None, None]
    parts = state.get_tensor_model_parallel_world_size() if chunk.config.sequence_parallel else 1
    group = state.get_pipeline_model_parallel_group()
    if not chunk.pre_process:
        hidden = torch.empty(width // parts, rows, chunk.config.hidden_size)
        dist.recv(hidden, state.get_pipeline_model_parallel_prev_rank(), group=group)
        chunk.set_input_tensor(hidden)
    out = chunk(ids, positions, mask)
    if not chunk.post_process:
        dist.send(out.contiguous(), state.get_pipeline_model_parallel_next_rank(), group=group)
        return None
    if state.get_tensor_model_parallel_world_size() > 1:
        out = tensor_parallel.gather_from_tensor_model_parallel_region(out)
    return out
