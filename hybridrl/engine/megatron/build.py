"""A model of Megatron-core from a Hugging Face configuration: this rank's chunks of it, without weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hybridrl.config.convert import nearest
from hybridrl.engine.megatron.layers import CausalAttention, ParallelValueHead, ReplicatedLinear, RMSNorm
from hybridrl.engine.megatron.mapping import Family, family_of, padded_vocabulary, text_config
from hybridrl.engine.megatron.parallel import ParallelSizes, ParallelState
from hybridrl.errors import ModelError
from hybridrl.models import loading
from hybridrl.models.kinds import KINDS
from hybridrl.models.model_config import config_of
from hybridrl.notify import notify
from hybridrl.utils import device, distributed

_KEY = "megatron.override_transformer_config"
# Settings of Megatron-core that follow from others of the run, with the key that decides.
_DECIDED = {
    **{
        f"{name}_parallel_size": f"megatron.{name}_parallel_size"
        for name in (
            *("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor"),
        )
    },
    "sequence_parallel": "megatron.sequence_parallel",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16", "autocast_dtype"), "megatron.dtype"),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), "none: training and inference compute the same"),
    **dict.fromkeys(
        (
            *("calculate_per_token_loss", "variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm"),
            *("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func", "grad_scale_func"),
            *("init_method", "output_layer_init_method", "embedding_init_method", "perform_initialization"),
            *("use_cpu_initialization", "deallocate_pipeline_outputs"),
        ),
        "none: the engine needs its own value",
    ),
}
#: those of them whose value depends on the device
_BY_DEVICE = "params_dtype", "pipeline_dtype", "bf16", "autocast_dtype", "deallocate_pipeline_outputs"
#: fields that a family sets and that do not belong to the architecture
_FREE = "moe_router_dtype", "bias_activation_fusion", "moe_router_bias_update_rate"
#: fields that the engine does not honour, and why
_UNSUPPORTED = {
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff"), "no auxiliary loss of routers is added"),
    **dict.fromkeys(("fp8", "fp4", "fp8_param"), "parameters and computation are bfloat16 or float32"),
    **dict.fromkeys(("cpu_offloading", "fine_grained_activation_offloading"), "activations stay on the device"),
    **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"), "micro-batches differ in shape"),
    "mtp_num_layers": "layers that predict further tokens are not built",
    "qk_clip": "the optimizer does not scale the weights of queries and keys",
    "hybrid_context_parallel": "every micro-batch is cut over all ranks of context_parallel_size",
    "moe_router_load_balancing_type": "tokens choose experts as in the Hugging Face model, without an auxiliary loss",
    "moe_router_bias_update_rate": "the bias would change before the gradients are known to be finite",
    "use_kitchen": "layers are Megatron-core's own or Transformer Engine's",
}
#: what is recomputed by code of Transformer Engine alone
_RECOMPUTED_BY_ENGINE = "layernorm", "moe_act", "mla_up_proj"
_DDP_FIELDS = "overlap_grad_reduce", "bucket_size", "pad_buckets_for_high_nccl_busbw", "grad_reduce_in_fp32"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Description of a model before it is built.

    Attributes:
        family: how its architecture is built.
        hf_config: its Hugging Face configuration.
        model_type: `language_model` or `value_model`.
        model_fields: fields of Megatron-core's TransformerConfig that follow from the model and the user's overrides.
        decided: the overrides of fields that the engine decides, which must agree with it.
        here: whether this process has the devices of the ranks.
    """

    family: Family
    hf_config: PreTrainedConfig
    model_type: str
    model_fields: Mapping[str, Any]
    decided: Mapping[str, Any]
    here: bool

    @property
    def vocabulary(self) -> int:
        return int(text_config(self.hf_config).vocab_size)


def dtype_of(engine: Any) -> torch.dtype:
    """The dtype of a model's parameters and computation.

    Raises:
        ModelError: this engine does not support it.
    """
    dtype = loading.resolve_dtype(engine.dtype, "megatron.dtype")
    if dtype == torch.float16:
        raise ModelError(
            "float16 training scales the loss, which strategy=megatron does not support: set megatron.dtype to "
            "bfloat16, or train with strategy=fsdp2"
        )
    return dtype


def plan_of(model: Any, engine: Any, model_type: str, trains: bool, here: bool = True) -> Blueprint:
    """The blueprint of a model with its settings; see `blueprint`."""
    if model.recompute_granularity != "full":
        raise ModelError(
            f"model.recompute_granularity={model.recompute_granularity} is for strategy=fsdp2; with strategy=megatron, "
            "set megatron.override_transformer_config.recompute_granularity and recompute_modules, and leave "
            "model.recompute_granularity at full"
        )
    config = config_of(model)
    recompute = trains and model.enable_gradient_checkpointing
    return blueprint(family_of(config), config, model_type, engine.override_transformer_config, recompute, here)


def blueprint(
    family: Family,
    hf_config: PreTrainedConfig,
    model_type: str,
    overrides: Mapping[str, Any],
    recompute: bool,
    here: bool = True,
) -> Blueprint:
    """Combine a model's model_fields with `override_transformer_config`.

    Args:
        recompute: whether the model learns with `model.enable_gradient_checkpointing`.
        here: whether this process has the devices of the ranks. Without, what depends on them is not refused.

    Raises:
        ModelError: a field is unknown or belongs to the architecture, or the engine cannot honour it.
    """
    model_fields, settings = family.transformer_kwargs(hf_config), dict(overrides)
    granularity, modules = settings.get("recompute_granularity"), settings.get("recompute_modules")
    if granularity != "selective" and list(modules or ["core_attn"]) != ["core_attn"]:
        raise ModelError(
            f"{_KEY}.recompute_modules={modules} has an effect with recompute_granularity=selective only, and it "
            f"is {granularity}; set it to selective, or remove recompute_modules"
        )
    if recompute and granularity is None:
        settings["recompute_granularity"] = "full"
        for name, default in (("recompute_method", "uniform"), ("recompute_num_layers", 1)):
            settings[name] = settings.get(name) or default
        settings.pop("recompute_modules", None)
    checked = _checked_overrides(model_fields, settings, here)
    decided = {name: checked.pop(name) for name in _DECIDED if name in checked}
    return Blueprint(family, hf_config, model_type, {**model_fields, **checked}, decided, here)


def _checked_overrides(model_fields: Mapping[str, Any], overrides: Mapping[str, Any], here: bool) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(_config_class(model_fields)) if field.init}
    for name, value in overrides.items():
        if name not in fields:
            kind = _config_class(model_fields).__name__
            raise ModelError(f"{_KEY}.{name}: Megatron-core's {kind} has no such field{nearest(name, sorted(fields))}")
        if name in _UNSUPPORTED and value not in (None, False, 0, "none"):
            raise ModelError(f"{_KEY}.{name}={value!r} is not supported: {_UNSUPPORTED[name]}; remove it")
        if (
            name in model_fields
            and name not in (*_DECIDED, *_FREE, *_UNSUPPORTED)
            and _plain(value) != _plain(model_fields[name])
        ):
            raise ModelError(
                f"{_KEY}.{name}={value!r} is not the model's {model_fields[name]!r}, which follows from config.json; "
                "remove it, or change the model with model.override_config and the names of config.json"
            )
    usable = {name: value for name, value in overrides.items() if value is not None or _may_be_none(model_fields, name)}
    if not has_transformer_engine():
        if here:
            _check_without_engine(usable)
        elif modules := usable.get("recompute_modules"):
            usable["recompute_modules"] = [name for name in modules if name not in _RECOMPUTED_BY_ENGINE]
    if isinstance(usable.get("attention_backend"), str):
        from megatron.core.transformer.enums import AttnBackend

        name = usable["attention_backend"]
        if name not in AttnBackend.__members__:
            raise ModelError(f"{_KEY}.attention_backend={name!r}: use one of {', '.join(AttnBackend.__members__)}")
        usable["attention_backend"] = AttnBackend[name]
    return usable


def _may_be_none(model_fields: Mapping[str, Any], name: str) -> bool:
    kind = typing.get_type_hints(_config_class(model_fields))[name]
    return kind is Any or type(None) in typing.get_args(kind)


def _check_without_engine(overrides: Mapping[str, Any]) -> None:
    """Refuse settings that only Transformer Engine supports if results depend on them, and warn of the others."""
    needing = [name for name in overrides.get("recompute_modules") or () if name in _RECOMPUTED_BY_ENGINE]
    if needing:
        raise ModelError(
            f"{_KEY}.recompute_modules: {', '.join(needing)} can be recomputed with Transformer Engine only, which "
            "cannot be imported here; use core_attn, mlp, moe or recompute_granularity=full"
        )
    if (softmax := overrides.get("softmax_type", "vanilla")) != "vanilla":
        raise ModelError(
            f"{_KEY}.softmax_type={softmax!r} is computed by Transformer Engine only, which cannot be imported here; "
            "use vanilla"
        )
    for name in ("attention_backend", "cp_comm_type"):
        value = overrides.get(name)
        if value is not None and distributed.get_rank() == 0:
            notify(
                f"{_KEY}.{name}={value} is a choice of Transformer Engine's attention, which cannot be imported here, "
                "and has no effect"
            )


def _check_decided(plan: Blueprint, settings: Mapping[str, Any]) -> None:
    """Refuse overrides that differ from what the engine decides."""
    defaults = {field.name: field.default for field in dataclasses.fields(_config_class(plan.model_fields))}
    for name, value in plan.decided.items():
        own = settings.get(name, defaults[name])
        if _plain(value) != _plain(own) and (plan.here or name not in _BY_DEVICE):
            raise ModelError(
                f"{_KEY}.{name}={value!r} cannot be set here: it is {_plain(own)!r}; what decides it is "
                f"{_DECIDED[name]}"
            )


def _plain(value: Any) -> Any:
    """A value as a configuration file has it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value


def _config_class(model_fields: Mapping[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    return MLATransformerConfig if model_fields.get("multi_latent_attention") else TransformerConfig


def transformer_fields() -> set[str]:
    """Names that `megatron.override_transformer_config` may have, for some model."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return {field.name for field in dataclasses.fields(MLATransformerConfig) if field.init}


def has_transformer_engine() -> bool:
    """Whether layers of Transformer Engine can be built."""
    return device.is_gpu() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(plan: Blueprint, sizes: ParallelSizes, sequence_parallel: bool, dtype: torch.dtype) -> Any:
    """Megatron-core's TransformerConfig.

    Raises:
        ModelError: Megatron-core refuses the settings, or Transformer Engine cannot compute with them.
    """
    split = sequence_parallel and sizes.tp > 1
    interleaved, fused = sizes.vpp > 1, has_transformer_engine()
    if fused and sizes.cp > 1 and dtype == torch.float32:
        raise ModelError(
            f"megatron.context_parallel_size={sizes.cp} with megatron.dtype=float32: Transformer Engine's attention "
            "over several ranks computes bfloat16 only; set dtype to bfloat16, or context_parallel_size to 1"
        )
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if interleaved else None,
        "context_parallel_size": sizes.cp,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
        "sequence_parallel": split,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Weights are loaded right after, so nothing is drawn at random.
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _leave),
        "calculate_per_token_loss": True,  # gradients are summed, not averaged: the loss is normalised already
        # Interleaved stages exchange tensors of one shape: with two stages, the messages with the shapes get mixed.
        "variable_seq_lengths": not interleaved,
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm": interleaved,
        "deallocate_pipeline_outputs": device.is_gpu(),
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": fused and bool(plan.model_fields.get("num_moe_experts")),
        "moe_permute_fusion": False,
    }
    settings |= plan.model_fields
    _check_decided(plan, settings)
    for setting, label in (("num_moe_experts", "experts"), ("multi_latent_attention", "multi-latent attention")):
        if settings.get(setting) and sizes.tp > 1 and not split:
            raise ModelError(
                f"megatron.sequence_parallel=False with tensor_model_parallel_size={sizes.tp}: a model with {label} "
                "needs both or neither; set sequence_parallel=True"
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fields that Megatron-core itself fills in
            return _config_class(plan.model_fields)(**settings)
    except (ValueError, AssertionError, TypeError) as error:
        raise ModelError(f"Megatron-core refuses the settings of this model and layout ({sizes}): {error}") from error


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def build_chunks(plan: Blueprint, config: Any, state: ParallelState) -> list[nn.Module]:
    """This rank's chunks of the model, in the order of their layers; weights are uninitialised.

    It is called while `state` is active.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel

    tensor_parallel.model_parallel_cuda_manual_seed(0)  # Megatron-core forks these generators while it builds
    language, split = KINDS[plan.model_type].predicts_tokens, state.sizes.tp > 1
    options = dict(plan.family.model_kwargs(plan.hf_config))
    if not language:
        options["share_embeddings_and_output_weights"] = False
    chunks: list[nn.Module] = []
    for number in range(state.sizes.vpp):
        stage = number if state.sizes.vpp > 1 else None
        if stage is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(config, stage),
            vocab_size=padded_vocabulary(plan.vocabulary, state.sizes.tp),
            pre_process=state.is_first_stage and number == 0,
            post_process=state.is_last_stage and number == state.sizes.vpp - 1,
            parallel_output=True,
            vp_stage=stage,
            **options,
        )
        if chunk.post_process and not language:
            chunk.output_layer = ParallelValueHead(config.hidden_size, 1, bias=True, dtype=torch.float32)
        if config.multi_latent_attention and split:
            if has_transformer_engine():
                mark_latents_replicated(chunk)
            else:
                _replicate_latents(chunk, config)
        plan.family.finish(plan.hf_config, chunk)
        chunks.append(chunk.to(device.current_device()))
    return chunks


def _replicate_latents(chunk: Any, config: Any) -> None:
    """Let every rank project to the latents of keys and values itself.

    Split over ranks as in Megatron-core's own layers, the positions that all heads share get the gradient of one rank's
    heads alone.
    """
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        attention.linear_kv_down_proj = ReplicatedLinear(
            config, config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim
        )


def mark_latents_replicated(chunk: Any) -> None:
    """Say of the projections to latents that every rank has all of them.

    Transformer Engine marks each of its weights as a part of a larger one when it initialises them.
    """
    for layer in chunk.decoder.layers:
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            projection = getattr(layer.self_attention, name, None)
            if projection is not None:
                projection.weight.tensor_model_parallel = False


def _layer_spec(config: Any, stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_latent_attention

    fused = has_transformer_engine()
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=fused, normalization=config.normalization, vp_stage=stage
    )
    if not fused:
        if config.normalization != "RMSNorm":
            raise ModelError(
                f"models with {config.normalization} need Transformer Engine, which cannot be imported here; train "
                "with strategy=fsdp2"
            )
        # True also where the package is missing, and Megatron-core then compares with classes that are None.
        multi_latent_attention.HAVE_TE = False
        _replace_modules(spec)
    return spec


def _replace_modules(spec: Any) -> None:
    """Put this package's norm and attention into a specification of Megatron-core's own layers."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    replaced = {WrappedTorchNorm: RMSNorm, DotProductAttention: CausalAttention}
    visited: set[int] = set()

    def visit(part: Any) -> None:
        if id(part) in visited:
            return
        visited.add(id(part))
        if isinstance(part, (list, tuple)):
            for item in part:
                visit(item)
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if isinstance(value, type) and value in replaced:
                    setattr(part, field.name, replaced[value])
                else:
                    visit(value)

    visit(spec)


def check_ddp_overrides(overrides: Mapping[str, Any]) -> None:
    """Refuse what the engine does not honour of `megatron.override_ddp_config`.

    Raises:
        ModelError: it names the field.
    """
    for name, value in overrides.items():
        if name not in _DDP_FIELDS:
            raise ModelError(
                f"megatron.override_ddp_config.{name}={value!r} is not supported; use {', '.join(_DDP_FIELDS)}"
            )


def wrap_chunks(
    chunks: Sequence[nn.Module], config: Any, distributed: bool, overrides: Mapping[str, Any]
) -> list[nn.Module]:
    """The chunks in Megatron-core's `DistributedDataParallel`, which sums their gradients.

    Args:
        distributed: whether data-parallel ranks split the optimizer's state.
        overrides: `megatron.override_ddp_config`.

    Raises:
        ModelError: a setting is not one that the engine honours.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    check_ddp_overrides(overrides)
    options = {"grad_reduce_in_fp32": True, **overrides}
    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **options)
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = lambda model, num_tokens=None, **rest: finalize_model_grads(model, None, **rest)
    if settings.overlap_grad_reduce:
        contexts = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
    return wrapped
