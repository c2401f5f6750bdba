"""The memory that `FSDPEngine` will take: the model on the meta device, and one micro-batch through it."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from hybridrl.algorithms import functional, linear_statistics
from hybridrl.engine.fsdp.activations import check_activations, save_activations
from hybridrl.engine.fsdp.forward import SelectingHead, response_logits
from hybridrl.engine.fsdp.sharing import may_share
from hybridrl.engine.logit_change import LogitChange
from hybridrl.engine.microbatch import PREFERRED_CELLS, MicroBatchLayout
from hybridrl.engine.optim.muon import hidden_matrices
from hybridrl.engine.optim.optimizer import state_bytes
from hybridrl.engine.prefix_plan import PrefixPlan, TreeLayout
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.forecast.meta_tensors import fused_attention, layer_rows, logits_rows, peak_of
from hybridrl.forecast.sizes import Forecast, Workload
from hybridrl.models import attention, four_bit, loading, lora
from hybridrl.models.experts import fused_experts
from hybridrl.models.kinds import KINDS
from hybridrl.models.model_config import config_of
from hybridrl.models.prefix_tree import WORTHWHILE_SHARE
from hybridrl.models.work import work_of
from hybridrl.utils import device

# Attention whose memory is that of the fused kernels: no scores, and no mask.
_ATTENTION = "hybridrl_forecast"
_EVEN_ROUTING = "routing is assumed to give every rank's experts the same number of tokens"
_WITHOUT_LIGER = "activations are those without model.use_liger, which takes less"  # its kernels need values
# Activations and logits of an update, and the peak of a pass, of what this process has computed: which settings make a
# run fit is found by trying many, and most of them change none of these.
_PEAKS: dict[str, tuple[int, int, int]] = {}
# Of the micro-batch that is computed, if it is a prefix tree: keys are gathered along the paths of its rows.
_along_paths: ContextVar[torch.Tensor | None] = ContextVar("hybridrl_along_paths", default=None)
_REDUCED = 4  # bytes of an element while gradients are summed over ranks: float32


def forecast(model_type: str, model: Any, engine: Any, optim: Any, ranks: int, work: Workload) -> Forecast:
    """Return the forecast of the memory that one of `ranks` ranks needs.

    Args:
        model: a `ModelConfig`.
        engine: an `FSDPConfig`.
        optim: an `OptimConfig`; None for an engine that only computes.

    Raises:
        ModelError: the model's configuration cannot be read, or settings of activations do not go together.
    """
    optim = None if engine.forward_only else optim
    if optim is not None:
        check_activations(model, engine)
    compute = loading.resolve_dtype(engine.dtype, "fsdp_config.dtype")
    stored = loading.resolve_dtype(engine.model_dtype, "fsdp_config.model_dtype") if optim is not None else compute
    config = config_of(model)
    packed = bool(model.use_remove_padding) and attention.packing_unsupported_reason(config) is None
    packed = packed and attention.takes_boundaries(str(config._attn_implementation))
    shares = may_share(model, engine, config)
    config._attn_implementation = _ATTENTION
    module = KINDS[model_type].build(config, compute, model.trust_remote_code)
    if model.adapted:
        lora.attach(module, model, compute)
    if model.load_in_4bit:
        four_bit.convert(module)
    loading.disable_dropout(module)
    fused = bool(model.use_fused_kernels) and KINDS[model_type].predicts_tokens
    passes = _Passes(module, fused, packed, shares, work, engine)
    shards = 1 if ranks == 1 else (ranks if engine.fsdp_size in (-1, 0) else min(engine.fsdp_size, ranks))
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    whole = trained * stored.itemsize  # frozen weights have the dtype of the computation
    frozen = four_bit.stored_bytes(module) - trained * compute.itemsize
    weights, masters = (frozen + trained * compute.itemsize, whole) if ranks == 1 else (0, 0)
    if ranks > 1:
        weights = (whole + frozen) // shards
    elif compute == stored:
        masters = 0
    states = gradients = 0
    if optim is not None:
        states = _states(module, stored, optim) // shards
        gradients = whole // shards
    where = device.get_device_name(), device.runs_triton(), passes.sharers, passes.most_tokens
    key = repr((model_type, config.to_dict(), model, compute, packed, optim is None, work, where, passes.exchanged))
    if key not in _PEAKS:
        update = _of_update(module, passes, model, work.update) if optim is not None else (0, 0)
        _PEAKS[key] = *update, 0 if work.infer is None else passes.peak(work.infer, training=False)
    activations, logits, pass_activations = _PEAKS[key]
    gathered = _gathered(module, engine, compute, optim is not None) if ranks > 1 else 0
    if ranks > 1 and engine.offload_policy:  # FSDP2 keeps shards in main memory
        weights = states = gradients = 0
    return Forecast(
        parameters=four_bit.elements(module),
        weights=weights,
        masters=masters,
        states=states,
        gradients=gradients,
        gathered=gathered,
        activations=activations,
        logits=logits,
        pass_activations=pass_activations,
        kept_weights=0 if engine.param_offload else weights + masters,
        kept_states=0 if engine.optimizer_offload else states,
        notes=(
            *((_WITHOUT_LIGER,) if model.use_liger and device.runs_triton() else ()),
            *((_EVEN_ROUTING,) if engine.expert_parallel_size > 1 else ()),
        ),
    )


def _states(module: nn.Module, dtype: torch.dtype, optim: Any) -> int:
    """Bytes of the optimizer's state for all parameters, which it gets in this dtype."""
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    updated = {id(parameter): torch.empty_like(parameter, dtype=dtype) for parameter in named.values()}
    matrices = [updated[id(parameter)] for parameter in hidden_matrices(module, named)]
    return state_bytes(updated.values(), optim, matrices)


def _of_update(module: Any, passes: _Passes, model: Any, micro: MicroBatching | None) -> tuple[int, int]:
    """Activations of an update without logits, and what logits add to the peak."""
    assert micro is not None
    save_activations(module, model)
    for parameter in filter(lambda p: p.requires_grad, module.parameters()):
        # Gradients are counted apart. Until it is added to the others, that of a parameter is part of the peak.
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    everything = passes.peak(micro, training=True)
    body = min(passes.peak(micro, training=True, response=1), everything)
    return body, everything - body


class _Passes:
    """Passes of the largest micro-batch through a model on the meta device.

    Args:
        fused: whether statistics of tokens are computed without logits.
        packed: whether sequences share a row.
        shares: whether tokens that sequences share are computed once, where that saves enough.
        engine: an `FSDPConfig`.
    """

    def __init__(self, module: Any, fused: bool, packed: bool, shares: bool, work: Workload, engine: Any) -> None:
        self.module, self.packed, self.shares, self.work = module, packed, shares, work
        self.sharers, self.most_tokens = engine.ulysses_sequence_parallel_size, engine.most_tokens
        # Bytes per token of the rows that are sent and received, next to those that experts compute with.
        self.exchanged = 0
        if engine.expert_parallel_size > 1:
            text = module.config.get_text_config()
            width = text.num_experts_per_tok * text.hidden_size
            self.exchanged = 2 * width * next(module.parameters()).element_size()
        self.head = SelectingHead(module)
        self.fused = fused and self.head.is_linear

    def peak(self, micro: MicroBatching, training: bool, response: int | None = None) -> int:
        """Bytes of the pass, and if `training` of its backward pass.

        Args:
            response: response tokens per row whose outputs are computed; None for all.
        """
        response = self.work.response if response is None else response
        peak = self._peak_of(self._layout(micro, response), training)
        tree = self._tree(micro) if self.shares and self.work.samples > 1 else None
        if tree is None:
            return peak
        layout, rows = tree
        assert layout.paths is not None
        along = sum(run.before + run.stop - run.start for run in layout.paths.runs)
        token = _along_paths.set(torch.empty(along, dtype=torch.int64, device="meta"))
        try:
            return max(peak, self._peak_of(_on_meta(layout.input_ids.shape, rows * response), training))
        finally:
            _along_paths.reset(token)

    def _peak_of(self, layout: MicroBatchLayout, training: bool) -> int:
        self.module.train(training)

        def run() -> None:
            loss = torch.stack([part.sum() for part in self._outputs(layout)]).sum()
            if training:
                loss.backward()

        with torch.set_grad_enabled(training), _GroupedProducts():
            peak = peak_of(run, *self.module.parameters(), *self.module.buffers())
        return (peak + self.exchanged * layout.input_ids.numel()) // self.sharers

    def _layout(self, micro: MicroBatching, response: int) -> MicroBatchLayout:
        length = self.work.prompt + self.work.response
        most = self.work.rows * self.sharers  # ranks that share sequences have the rows of all of them
        rows = min(most, micro.size or most)
        if micro.max_tokens:
            rows = min(rows, micro.max_tokens * self.sharers // length)
        if not self.packed:
            rows = min(rows, PREFERRED_CELLS[device.get_device_name()] // length)
        rows = max(1, rows)
        return _on_meta((1, rows * length) if self.packed else (rows, length), rows * response)

    def _tree(self, micro: MicroBatching) -> tuple[TreeLayout, int] | None:
        """The largest micro-batch in which tokens of prompts are computed once, and its rows; None if it saves little.

        It has real tokens, of which the rows of a prompt share those of the prompt. The batch has as many rows as such
        a micro-batch may have.
        """
        prompt, response, samples = self.work.prompt, self.work.response, self.work.samples
        limits = [self.work.rows * self.sharers]
        if micro.max_tokens:
            budget = micro.max_tokens * self.sharers
            micro = replace(micro, max_tokens=budget)
            limits.append(samples * (2 + budget // (prompt + samples * response)))
        if micro.size:
            limits.append(micro.size + samples)
        rows = torch.arange(min(limits))[:, None]
        ids = torch.cat([(rows // samples).expand(-1, prompt), rows.expand(-1, response)], dim=1)
        ones = torch.ones_like(ids)
        fields = {"input_ids": ids, "attention_mask": ones, "response_mask": ones[:, prompt:]}
        plan = PrefixPlan(fields, micro, work_of(self.module.config))
        if plan.computed_tokens >= (1 - WORTHWHILE_SHARE) * plan.row_tokens:
            return None
        largest = max(plan.groups, key=plan.tokens)
        return plan.layout(largest), len(largest)

    def _outputs(self, layout: MicroBatchLayout) -> list[torch.Tensor]:
        kind = device.get_device_name()
        change = LogitChange.described(self.module.config) or LogitChange()

        def fused(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rows = layer_rows(kind, device.runs_triton(), weight.shape[0], self.most_tokens)
            statistics = linear_statistics.linear_token_statistics(
                hidden,
                weight,
                bias,
                layout.labels,
                entropy=self.work.entropy,
                chunk_size=rows,
                multiplier=change.multiplier,
                soft_cap=change.soft_cap,
            )
            return torch.stack(list(statistics.values()), dim=-1)

        if self.fused:
            with self.head.replaced_by(fused):
                return [response_logits(self.module, self.head, layout, takes_boundaries=False)]
        logits = response_logits(self.module, self.head, layout, takes_boundaries=False)
        if logits.shape[-1] == 1:
            return [logits.float()]
        rows = logits_rows(kind, device.runs_triton(), len(logits), logits.shape[1], self.most_tokens)
        statistics = functional.token_statistics(
            logits, layout.labels, entropy=self.work.entropy, inplace_backward=True, chunk_size=rows
        )
        return list(statistics.values())


def _on_meta(shape: Sequence[int], outputs: int) -> MicroBatchLayout:
    """A micro-batch whose tensors have no values, with so many predicted tokens."""
    with torch.device("meta"):
        ids, selected = torch.zeros(*shape, dtype=torch.int64), torch.zeros(outputs, dtype=torch.int64)
        positions = torch.arange(shape[1])[None].expand(*shape)
    return MicroBatchLayout(ids, positions, selected, selected, None)


class _GroupedProducts(TorchDispatchMode):
    """Shapes of products of experts on the meta device in every dtype; PyTorch takes only bfloat16 there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        first, second, offsets = args[:3]
        # A matrix has rows of all experts. Of two matrices, as for gradients of the weights, each expert has a product.
        experts = {4: offsets.shape, 5: (), 6: first.shape[:1]}[first.dim() + second.dim()]
        return first.new_empty((*experts, first.shape[-2], second.shape[-1]))


def _unsharded(part: nn.Module, engine: Any) -> int:
    """Bytes of a part of the model on a rank that holds it unsharded: of experts, those of its group."""
    experts = fused_experts(part) if engine.expert_parallel_size > 1 else []
    of_experts = sum(four_bit.stored_bytes(group) for group in experts)
    return four_bit.stored_bytes(part) - of_experts + of_experts // engine.expert_parallel_size


def _gathered(module: nn.Module, engine: Any, compute: torch.dtype, trains: bool) -> int:
    """Whole parameters that a rank of several holds at once, and the buffers that they are gathered and reduced in."""
    classes = loading.decoder_layer_classes(module, getattr(engine.wrap_policy, "transformer_layer_cls_to_wrap", None))
    layers = [_unsharded(part, engine) for part in module.modules() if type(part).__name__ in classes]
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()  # type: ignore[operator]
    total = _unsharded(module, engine)
    tied = getattr(head, "weight", None) is embedding.weight
    # Each is a unit, as each layer is, unless they are tied: then they belong to the rest, which stays gathered.
    ends = [] if tied else [four_bit.stored_bytes(embedding), four_bit.stored_bytes(head)]
    largest = max([*layers, *ends], default=0)
    rest = total - sum(layers) - sum(ends)
    unsharded = total if trains and not engine.reshard_after_forward else rest + sum(ends[1:]) + 2 * largest
    buffer = max(largest, rest)
    size = min(unsharded, total) + buffer
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    reduced = min(buffer // compute.itemsize, trained)  # elements
    return size + (reduced * (compute.itemsize + _REDUCED) if trains else 0)


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, head_value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    if (along := _along_paths.get()) is not None:
        key, head_value = (tensor.index_select(2, along) for tensor in (key, head_value))
    out = fused_attention(query, key, head_value)[0]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _attend)
