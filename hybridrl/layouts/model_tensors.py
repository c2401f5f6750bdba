"""The tensors of a model and how layouts cut them, from its Hugging Face configuration alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from hybridrl.errors import ConfigError
from hybridrl.layouts.slices import Cut, TensorSpec
from hybridrl.models.loading import build_language_model

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def _query(config: Any, shape: tuple[int, ...]) -> Cut:
    return Cut(dim=0, heads=config.num_attention_heads)


def _key_value(config: Any, shape: tuple[int, ...]) -> Cut:
    return Cut(dim=0, heads=config.num_key_value_heads, kv=True)


def _expert_rows(config: Any, shape: tuple[int, ...]) -> Cut:
    return Cut(dim=1, sections=(shape[1] // 2, shape[1] // 2), expert_dim=0)


def _fused_query_key_value(config: Any, shape: tuple[int, ...]) -> Cut:
    return Cut(dim=0, sections=(shape[0] // 3,) * 3)


def _linear_attention(config: Any, shape: tuple[int, ...]) -> Cut:
    """The queries, keys and values of a layer with a state, one after the other."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return Cut(dim=0, sections=(keys, keys, shape[0] - 2 * keys))


def _key_heads(config: Any, shape: tuple[int, ...]) -> Cut:
    return Cut(dim=0, heads=config.linear_num_key_heads)


def _always(cut: Cut) -> Callable[[Any, tuple[int, ...]], Cut]:
    return lambda config, shape: cut


_WHOLE, _ROWS, _COLUMNS = _always(Cut()), _always(Cut(dim=0)), _always(Cut(dim=1))

#: How Megatron-core and the inference engines cut a tensor, by the end of its name. The first match decides.
_RULES: tuple[tuple[str, Callable[[Any, tuple[int, ...]], Cut]], ...] = (
    (r"experts\.gate_up_proj", _expert_rows),
    (r"experts\.down_proj", _always(Cut(dim=2, expert_dim=0))),
    (r"(q_proj|q_b_proj|kv_b_proj)\.(weight|bias)", _query),
    (r"(k_proj|v_proj)\.(weight|bias)", _key_value),
    (r"(gate_proj|up_proj)\.(weight|bias)", _ROWS),
    (r"(o_proj|down_proj)\.weight", _COLUMNS),
    (r"(o_proj|down_proj)\.bias", _WHOLE),
    (r"(embed_tokens|lm_head)\.weight", _always(Cut(dim=0, vocabulary=True))),
    (r"(q_a_proj|kv_a_proj_with_mqa|shared_expert_gate|mlp\.gate)\.(weight|bias)", _WHOLE),
    (r"e_score_correction_bias", _WHOLE),
    (r"norm\.weight", _WHOLE),
    # layers with a state (gated delta rule), as vLLM cuts them; Qwen3-Next has its projections by head of keys
    (r"linear_attn\.(in_proj_qkv|conv1d)\.weight", _linear_attention),
    (r"linear_attn\.(in_proj_qkvz|in_proj_ba)\.weight", _key_heads),
    (r"linear_attn\.(in_proj_z|in_proj_a|in_proj_b)\.weight", _ROWS),
    (r"linear_attn\.(A_log|dt_bias)", _ROWS),
    (r"linear_attn\.out_proj\.weight", _COLUMNS),
    # vision towers, as vLLM cuts them
    (r"visual\..*attn\.qkv\.(weight|bias)", _fused_query_key_value),
    (r"visual\..*(linear_fc1|merger\.mlp\.0)\.(weight|bias)", _ROWS),
    (r"visual\..*(attn\.proj|linear_fc2|merger\.mlp\.2)\.weight", _COLUMNS),
    (r"visual\..*", _WHOLE),
)


def model_tensors(config: PreTrainedConfig, trust_remote_code: bool = False) -> tuple[list[TensorSpec], int]:
    """Return the tensors of a causal language model, and how many decoder layers it has.

    The model is built without memory, on the meta device. Tied tensors are returned once, under their first name.

    Raises:
        ConfigError: a tensor for which there is no rule; the error names it.
    """
    text = config.get_text_config()
    plain = copy.deepcopy(config)
    plain._attn_implementation = "eager"  # every model has it, and the tensors are the same
    model = build_language_model(plain, torch.float32, trust_remote_code)
    tied = bool(getattr(text, "tie_word_embeddings", False))
    specs = []
    for name, tensor in model.state_dict().items():
        if tied and name.endswith("lm_head.weight"):
            continue
        rule = next((rule for ending, rule in _RULES if re.search(rf"{ending}$", name)), None)
        if rule is None:
            raise ConfigError(
                f"{name} of {type(config).__name__}: there is no rule how layouts cut it; add one to "
                "hybridrl/layouts/model_tensors.py"
            )
        shape = tuple(tensor.shape) or (1,)
        layer = _LAYER.search(name)
        is_embedding = name.endswith("embed_tokens.weight") or "visual." in name  # of the first stage
        specs.append(
            TensorSpec(
                name,
                shape,
                rule(text, shape),
                layer=int(layer.group(1)) if layer else None,
                first=layer is None and is_embedding,
                last=layer is None and (not is_embedding or (tied and "visual." not in name)),
            )
        )
    return specs, text.num_hidden_layers
