"""`FSDPEngine`: language and value models on FSDP2, or as a plain module on a single rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridrl.engine.batch_images import BatchImages
from hybridrl.engine.capabilities import (
    ComparesVocabulary,
    ComputesFromLogits,
    CopiesState,
    ExportsShards,
    GeneratesInPlace,
    HasAdapters,
    KeepsFourBits,
    ReplaysRouting,
    WeightShard,
)
from hybridrl.engine.fsdp import adapted, checkpoint
from hybridrl.engine.fsdp.activations import check_activations, save_activations
from hybridrl.engine.fsdp.comparing import check_function, check_same_batches
from hybridrl.engine.fsdp.expert_parallel import check_expert_parallel
from hybridrl.engine.fsdp.forward_pass import ForwardPass
from hybridrl.engine.fsdp.offload import warn_unused_policy
from hybridrl.engine.fsdp.packing import check_attention, check_windows, keeps_rows_apart, may_pack
from hybridrl.engine.fsdp.router_loss import RouterLoss, check_router_loss
from hybridrl.engine.fsdp.routing import Routing, check_routing
from hybridrl.engine.fsdp.sequence_parallel import SequenceParallel, check_sequence_parallel, of_settings
from hybridrl.engine.fsdp.sharding import ShardedModule
from hybridrl.engine.fsdp.sharing import check_sharing, sharing_of
from hybridrl.engine.fsdp.source import ModuleSource, check_four_bit
from hybridrl.engine.fsdp.state import FSDPState
from hybridrl.engine.fsdp.vision_models import check_vision, prepare_vision
from hybridrl.engine.logits_functions import FullKL, LogitsFunction
from hybridrl.engine.loss_scale import LossScale
from hybridrl.engine.micro_batched import MicroBatchedEngine, OutputRequest, ShareOfLoss
from hybridrl.engine.microbatch import BatchPlan, MicroBatchLayout
from hybridrl.engine.saved_parts import HFModel, Parts, State
from hybridrl.engine.train_engine import Engine, Geometry, MicroBatching, register_train_engine
from hybridrl.errors import ModelError
from hybridrl.layouts.topology import ShardedLayout
from hybridrl.models import attention, loading
from hybridrl.models.kinds import KINDS
from hybridrl.models.liger import apply_liger, check_liger, runs_liger
from hybridrl.models.model_config import checked_source, config_of
from hybridrl.models.rope import check_length
from hybridrl.models.vision import is_vision_model
from hybridrl.models.work import work_of
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import ROUTED_EXPERTS
from hybridrl.utils import device, distributed
from hybridrl.utils.metrics import Metric


@register_train_engine(
    "fsdp2",
    model_types=("language_model", "value_model", "reward_model", "step_model"),
    settings="hybridrl.config.schema.engine:FSDPConfig",
    layout="hybridrl.layouts.topology:ShardedLayout",
)
class FSDPEngine(
    MicroBatchedEngine,
    CopiesState,
    ComparesVocabulary,
    ComputesFromLogits,
    GeneratesInPlace,
    ExportsShards,
    HasAdapters,
    KeepsFourBits,
    ReplaysRouting,
):
    """A Hugging Face causal language model, or a backbone with a value head.

    Args:
        model_type: `language_model`, `value_model`, `reward_model` or `step_model`.
        model: A `ModelConfig`: path, override_config, trust_remote_code, enable_gradient_checkpointing,
            use_remove_padding, ...
        engine: An `FSDPConfig`: dtypes, sharding, offload.
        optim: An `OptimConfig`, or None for an engine that only computes.

    Attributes:
        module: The model; under FSDP2 with several ranks, its parameters are shards.
        config: Its Hugging Face configuration.
        model_state: Its weights, what is trained of them, and the optimizer.
        forward_pass: Computes the outputs of micro-batches.
    """

    def __init__(self, model_type: str, model: Any, engine: Any, optim: Any = None):
        self.model_type = model_type
        self.model_config = model
        self.engine_config = engine
        self.optim_config = None if getattr(engine, "forward_only", False) else optim
        self.module: nn.Module
        self.model_state: FSDPState
        self.forward_pass: ForwardPass
        self.reference: FSDPEngine | None = None
        self._sequences: SequenceParallel | None = None
        self._router_loss: RouterLoss | None = None

    # ------------------------------------------------------------------ building

    @classmethod
    def check(cls, model: Any, engine: Any, ranks: int, optim: Any = None) -> None:
        check_activations(model, engine)
        check_attention(model, engine)
        check_router_loss(model, engine)
        check_vision(model, engine)
        if model.use_liger:
            check_liger(config_of(model))
        if model.adapted:
            adapted.check(model, engine, optim)
        if model.load_in_4bit:
            check_four_bit(model, engine, optim)
        if optim is not None:
            cls.check_optimizer(optim)
        if model.share_prefixes:
            check_sharing(model, engine)
        if engine.ulysses_sequence_parallel_size > 1:
            check_sequence_parallel(engine.ulysses_sequence_parallel_size, ranks, model, config_of(model))
        if engine.expert_parallel_size > 1:
            check_expert_parallel(model, engine, ranks, optim)

    @classmethod
    def check_replay(cls, model: Any, engine: Any) -> None:
        check_routing(model, engine)

    def initialize(self) -> None:
        model, engine = self.model_config, self.engine_config
        self.compute_dtype = loading.resolve_dtype(engine.dtype, "fsdp_config.dtype")
        self.model_dtype = loading.resolve_dtype(engine.model_dtype, "fsdp_config.model_dtype")
        if self.optim_config is not None and self.model_dtype == torch.float16:
            raise ModelError(
                "master weights in float16 would lose most updates: set fsdp_config.model_dtype to float32; "
                "fsdp_config.dtype=float16 computes in float16"
            )
        if self.optim_config is not None and self.compute_dtype == torch.float16:
            self.loss_scale = LossScale()
        if self.optim_config is None:  # nothing accumulates in these weights, so they need no more precision
            self.model_dtype = self.compute_dtype
        device.manual_seed(engine.seed + distributed.get_rank())
        if engine.full_determinism:
            device.compute_deterministically()
        self.config = config_of(model)
        loading.check_weights(checked_source(model.path))
        check_vision(model, engine)
        self._sees_images = is_vision_model(self.config)
        self._sequences = of_settings(engine.ulysses_sequence_parallel_size, model, self.config)
        if self._sequences is not None:
            self.config._attn_implementation = attention.VARLEN
        elif self.compute_dtype == torch.float32 and "attn_implementation" not in model.override_config:
            # flash attention supports half precision only
            self.config._attn_implementation = attention.plain_attention(self.config)
        self.shares_prefixes = sharing_of(model, engine, self.config)
        self.packed = bool(model.use_remove_padding) and self.shares_prefixes is not True
        self.packed = self.packed and may_pack(model.path, self.config, self.compute_dtype)
        if self.packed or self.shares_prefixes is not False:
            self.work = work_of(self.config, value_model=not KINDS[self.model_type].predicts_tokens)
        self._build()
        self.module.eval()
        self._check_packing()
        self.model_state.offload.unload(changed=True)
        device.empty_cache()  # what loading and converting left would count as used while an engine is started

    def _build(self) -> None:
        """Load the model and make what trains and computes with it."""
        model, engine = self.model_config, self.engine_config
        source = ModuleSource(self.model_type, model, self.config, self.model_dtype, self.compute_dtype, engine.seed)
        sharded: ShardedModule | None = None
        if self._is_sharded():
            sharded = ShardedModule(self._prepare(source.build()), engine, self.compute_dtype)
            sharded.fill(source.open)
            self.module = sharded.module
        else:
            warn_unused_policy(engine)
            self.module = self._prepare(source.load()).to(device.current_device())
        self.model_state = FSDPState(
            self.module,
            sharded,
            self.compute_dtype,
            self.model_dtype,
            source.adapter,
            engine,
            self.optim_config,
        )
        self.forward_pass = ForwardPass(self.model_state, self.config, self._sequences, self.model_type, model, engine)
        if engine.router_aux_loss_coef and self.optim_config is not None:
            check_router_loss(model, engine)
            top_k = int(self.config.get_text_config().num_experts_per_tok)
            self._router_loss = RouterLoss(self.module, engine.router_aux_loss_coef, top_k, self._sequences)

    def _check_packing(self) -> None:
        """Try whether the model keeps the rows of packed micro-batches apart."""
        compute = self.forward_pass.response_logits
        check_windows(self.module, compute)
        if self.packed and self._sequences is None:  # ranks that share sequences find out in each pass
            self.packed = keeps_rows_apart(self.model_config.path, self.module, compute, self.compute_dtype)

    @property
    def geometry(self) -> Geometry:
        if self._sequences is not None:
            return self._sequences.geometry
        return Geometry(dp_rank=distributed.get_rank(), dp_size=distributed.get_world_size())

    def _is_sharded(self) -> bool:
        """Whether FSDP2 is used; one rank alone computes faster without it."""
        return distributed.get_world_size() > 1

    def _prepare(self, module: nn.Module) -> nn.Module:
        loading.disable_dropout(module)
        if self.model_config.use_liger and runs_liger():
            apply_liger(module, self.config)
        if self._sees_images:
            prepare_vision(module, self.engine_config)
        if self.optim_config is None:
            module.requires_grad_(False)
        else:
            save_activations(module, self.model_config)
        if self.engine_config.use_torch_compile:
            classes = loading.decoder_layer_classes(module)
            for part in module.modules():
                if type(part).__name__ in classes:
                    part.compile(dynamic=True)
        return module

    # ------------------------------------------------------------------ computing

    def forward_only(
        self, layouts: Sequence[MicroBatchLayout], request: OutputRequest
    ) -> list[dict[str, torch.Tensor]]:
        self.module.eval()
        functions = self._functions(request)
        self.forward_pass.fuses(functions)  # before what a micro-batch sets
        with torch.no_grad():
            computed = [self._inferred(layout, request, functions) for layout in layouts]
        self.model_state.reshard()
        return computed

    def forward_backward(
        self, layouts: Sequence[MicroBatchLayout], request: OutputRequest, share_of_loss: ShareOfLoss
    ) -> None:
        ranks = distributed.get_world_size()
        functions, sharded = self._functions(request), self.model_state.sharded
        self.forward_pass.fuses(functions)
        self.module.train()
        if self._router_loss is not None:
            self._router_loss.begin(layouts, self.geometry.dp_group)
        for number, layout in enumerate(layouts):
            if sharded is not None:
                sharded.before_backward(last=number == len(layouts) - 1)
            with (
                self.forward_pass.attention_for(layout),
                self._replaying(layout),
            ):  # also while layers are computed again
                with contextlib.nullcontext() if self._router_loss is None else self._router_loss.watching():
                    computed = self.forward_pass.outputs(layout, request, functions)
                loss = share_of_loss(number, computed)
                if self._router_loss is not None:
                    loss = loss + self._router_loss.share(layout)
                # FSDP averages gradients over the ranks; the shares of the loss are to be summed, and where ranks
                # share sequences, the gradients of their parts.
                factor = ranks if self.loss_scale is None else self.loss_scale.value
                (loss if factor == 1 else loss * factor).backward()
        if self.loss_scale is not None:  # and multiply by the ranks, where nothing overflows any more
            self.model_state.divide_gradients(self.loss_scale.value / ranks)
        self.module.eval()

    @functools.cached_property
    def _routing(self) -> Routing:
        self.check_replay(self.model_config, self.engine_config)
        return Routing(self.module, self.config)

    def recorded_routing(self) -> contextlib.AbstractContextManager[list[torch.Tensor]]:
        return self._routing.recorded()

    def _replaying(self, layout: MicroBatchLayout) -> contextlib.AbstractContextManager[None]:
        """Within the context, tokens use the experts of the layout, if it has any."""
        if layout.experts is None:
            return contextlib.nullcontext()
        return self._routing.replayed(layout.experts.to(device.current_device(), non_blocking=True))

    def _inferred(
        self, layout: MicroBatchLayout, request: OutputRequest, functions: Sequence[LogitsFunction]
    ) -> dict[str, torch.Tensor]:
        """The outputs of a micro-batch without gradients; `routed_experts` of its real tokens, in main memory."""
        with self.forward_pass.attention_for(layout), self._replaying(layout):
            if ROUTED_EXPERTS not in request.outputs:
                return self.forward_pass.outputs(layout, request, functions)
            with self._routing.recorded() as experts_by_layer:
                computed = self.forward_pass.outputs(layout, request, functions)
        assert layout.origins is not None  # checked when routing was set up
        experts = torch.stack(experts_by_layer, dim=1).cpu()
        return {**computed, ROUTED_EXPERTS: experts[layout.origins >= 0]}

    def update_metrics(self) -> dict[str, Metric]:
        return {} if self._router_loss is None else self._router_loss.metrics(self.geometry.dp_group)

    def plan_batch(self, batch: DataProto, micro: MicroBatching, tree: bool = True) -> BatchPlan:
        plan = super().plan_batch(batch, micro, tree)
        check_length(self.config, max(plan.lengths, default=0), f"{self.model_config.path}: the longest of a batch")
        if self._sees_images:
            plan.images = BatchImages(batch, self.config)
        return plan

    def _layouts(self, plan: BatchPlan, function: LogitsFunction | None) -> list[MicroBatchLayout]:
        return [self.forward_pass.for_all_ranks(layout) for layout in super()._layouts(plan, function)]

    def _functions(self, request: OutputRequest) -> list[LogitsFunction]:
        """Return the functions of logits that the request needs besides the statistics of tokens."""
        functions: list[LogitsFunction] = [FullKL(self.reference)] if "ref_kl" in request.outputs else []
        return functions if request.function is None else [*functions, request.function]

    def follows_paths(self) -> bool:
        return self.forward_pass.follows_paths

    @contextlib.contextmanager
    def computing(self, function: LogitsFunction) -> Iterator[None]:
        check_function(self, function)
        self._function = function
        try:
            yield
        finally:
            self._function = None

    def compare_with(self, reference: Engine) -> None:
        check_same_batches(self, reference, "KL form full", "actor_rollout_ref.ref.fsdp_config")
        assert isinstance(reference, FSDPEngine)
        self.reference = reference

    # ------------------------------------------------------------------ stepping

    def gradient_norm(self) -> torch.Tensor:
        return self.model_state.gradient_norm()

    def nonfinite_gradients(self) -> list[str]:
        return self.model_state.nonfinite_gradients()

    def discard_gradients(self) -> None:
        self.model_state.discard_gradients()

    def apply_gradients(self, norm: torch.Tensor) -> None:
        self.model_state.step(norm)

    def learning_rate(self) -> float | None:
        optimizer = self.model_state.optimizer
        return None if optimizer is None else float(optimizer.param_groups[0]["lr"])

    # ------------------------------------------------------------------ weights

    def loaded(self, optimizer: bool = False) -> contextlib.AbstractContextManager[None]:
        return self.model_state.loaded(updates=optimizer)

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        self.module.eval()
        with self.forward_pass.attention_of_padded_rows(), self.model_state.whole_weights() as module:
            yield module

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        self.model_state.offload.wait_for_state()
        return self.model_state.exported.weights(dtype)

    def export_shards(self, dtype: torch.dtype | None = None) -> Iterator[WeightShard]:
        if self.model_state.adapter is not None:
            raise ModelError("an adapter is merged into whole tensors, so there are no shards to send")
        yield from self.model_state.export_shards(dtype)

    def without_adapter(self) -> contextlib.AbstractContextManager[None]:
        return adapted.required_adapter(self.model_state.adapter).off()

    def adapter_config(self) -> str:
        return adapted.config_text(adapted.required_adapter(self.model_state.adapter))

    def export_adapter(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        adapted.required_adapter(self.model_state.adapter)
        self.model_state.offload.wait_for_state()
        return self.model_state.exported.adapter_tensors(dtype)

    @property
    def copy_of_model(self) -> int:
        return self.model_state.copy_of_model

    @property
    def training_layout(self) -> ShardedLayout:
        return self.model_state.layout

    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        return self.model_state.exported.bytes(dtype)

    def first_step_bytes(self) -> int:
        return self.model_state.first_step_bytes()

    # ------------------------------------------------------------------ checkpoints

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        self._parts().state(contents, copy=False).write(Path(folder))
        distributed.barrier()

    def copy_state(self, contents: Sequence[str]) -> State:
        return self._parts().state(contents, copy=True)

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        self._parts().load(Path(folder), contents)
        self.model_state.values_changed()
        distributed.barrier()

    def _parts(self) -> Parts:
        model = HFModel(self.model_type, self.model_config, self.config)
        return checkpoint.parts(self.model_state, model, self.engine_config.seed, self.loss_scale)
