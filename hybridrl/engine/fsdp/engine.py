"""`FSDPEngine`: language and value models on FSDP2, or as a plain module on a single rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

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
from hybridrl.engine.chunked_function import Hidden
from hybridrl.engine.fsdp import adapted, checkpoint
from hybridrl.engine.fsdp.activations import check_activations, save_activations
from hybridrl.engine.fsdp.comparing import check_function, check_same_batches
from hybridrl.engine.fsdp.exported import Exported
from hybridrl.engine.fsdp.forward import SelectingHead, compute_outputs, response_logits
from hybridrl.engine.fsdp.fusing import Fusing
from hybridrl.engine.fsdp.master_weights import MasterWeights
from hybridrl.engine.fsdp.offload import FSDPOffload, warn_unused_policy
from hybridrl.engine.fsdp.packing import check_attention, check_windows, keeps_rows_apart, may_pack
from hybridrl.engine.fsdp.router_loss import RouterLoss, check_router_loss
from hybridrl.engine.fsdp.routing import Routing, check_routing
from hybridrl.engine.fsdp.sequence_parallel import SequenceParallel, check_sequence_parallel, of_settings
from hybridrl.engine.fsdp.sharding import ShardedModule
from hybridrl.engine.fsdp.sharing import check_sharing, sharing_of, with_attention
from hybridrl.engine.fsdp.source import ModuleSource, check_four_bit
from hybridrl.engine.fsdp.vision import check_vision, prepare_vision
from hybridrl.engine.images import BatchImages, with_some_image
from hybridrl.engine.logits_functions import FullKL, LogitsFunction
from hybridrl.engine.micro_batched import MicroBatchedEngine, ShareOfLoss, Wanted
from hybridrl.engine.microbatch import BatchPlan, MicroBatchLayout, dummy_layout
from hybridrl.engine.optim.muon import hidden_matrices
from hybridrl.engine.optim.optimizer import build_optimizer, build_schedule, state_bytes
from hybridrl.engine.prefix_plan import TreeLayout, small_tree
from hybridrl.engine.saved_parts import State
from hybridrl.engine.train_engine import Engine, Geometry, MicroBatching, TrainEngines
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.shards import Box, whole
from hybridrl.hybrid_engine.topology import ShardedLayout
from hybridrl.models import attention, loading, lora, tree_attention
from hybridrl.models.info import config_of
from hybridrl.models.kinds import KINDS
from hybridrl.models.liger import apply_liger, check_liger, runs_liger
from hybridrl.models.rope import check_length
from hybridrl.models.vision import is_vision_model
from hybridrl.models.work import work_of
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import ROUTED_EXPERTS
from hybridrl.utils import device, distributed
from hybridrl.utils.metrics import Metric


@TrainEngines.register(
    "fsdp2",
    model_types=("language_model", "value_model", "reward_model", "step_model"),
    settings="hybridrl.config.schema.engine:FSDPConfig",
    layout="hybridrl.hybrid_engine.topology:ShardedLayout",
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
        adapter: What is trained in place of the weights, with LoRA; else None.
        exported: Its tensors as they are saved and sent.
    """

    def __init__(self, model_type: str, model: Any, engine: Any, optim: Any = None):
        self.model_type = model_type
        self.model_config = model
        self.engine_config = engine
        self.optim_config = None if getattr(engine, "forward_only", False) else optim
        self.module: nn.Module
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: Any = None
        self._sharded: ShardedModule | None = None
        self._sequences: SequenceParallel | None = None
        self._fuses = False
        self._masters: MasterWeights | None = None
        self.adapter: lora.Adapter | None = None
        self._router_loss: RouterLoss | None = None
        self.reference: FSDPEngine | None = None

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

    @classmethod
    def check_replay(cls, model: Any, engine: Any) -> None:
        check_routing(model, engine)

    def initialize(self) -> None:
        model, engine = self.model_config, self.engine_config
        self.compute_dtype = loading.resolve_dtype(engine.dtype, "fsdp_config.dtype")
        self.model_dtype = loading.resolve_dtype(engine.model_dtype, "fsdp_config.model_dtype")
        if torch.float16 in (self.compute_dtype, self.model_dtype):
            raise ModelError(
                "float16 training needs loss scaling, which this engine does not support; set "
                "fsdp_config.dtype to bfloat16"
            )
        if self.optim_config is None:  # nothing accumulates in these weights, so they need no more precision
            self.model_dtype = self.compute_dtype
        device.manual_seed(engine.seed + distributed.get_rank())
        if engine.full_determinism:
            device.compute_deterministically()
        self.config = config_of(model)
        loading.check_weights(loading.checked_source(model.path))
        check_vision(model, engine)
        self._sees_images = is_vision_model(self.config)
        self._sequences = of_settings(engine.ulysses_sequence_parallel_size, model, self.config)
        if self._sequences is not None:
            self.config._attn_implementation = attention.VARLEN
        elif self.compute_dtype == torch.float32 and "attn_implementation" not in model.override_config:
            # flash attention supports half precision only
            self.config._attn_implementation = attention.plain_attention(self.config)
        self._takes_boundaries = attention.takes_boundaries(str(self.config._attn_implementation))
        self.shares_prefixes = sharing_of(model, engine, self.config)
        self.packed = bool(model.use_remove_padding) and self.shares_prefixes is not True
        self.packed = self.packed and may_pack(model.path, self.config, self.compute_dtype)
        if self.packed or self.shares_prefixes is not False:
            self.work = work_of(self.config, value_model=not KINDS[self.model_type].predicts_tokens)
        source = ModuleSource(self.model_type, model, self.config, self.model_dtype, self.compute_dtype, engine.seed)
        if self._is_sharded():
            self._sharded = ShardedModule(self._prepare(source.build()), engine, self.compute_dtype)
            self._sharded.fill(source.open)
            self.module = self._sharded.module
        else:
            warn_unused_policy(engine)
            self.module = self._prepare(source.load()).to(device.current_device())
            if self.compute_dtype != self.model_dtype:
                self._masters = MasterWeights(self.module, self.compute_dtype)
        self._head = SelectingHead(self.module)
        self._fusing = Fusing(self.module, self._head, self._logits, engine.most_tokens)
        self._fuses = self._may_fuse()
        if engine.router_aux_loss_coef and self.optim_config is not None:
            check_router_loss(model, engine)
            top_k = int(self.config.get_text_config().num_experts_per_tok)
            self._router_loss = RouterLoss(self.module, engine.router_aux_loss_coef, top_k, self._sequences)
        self.adapter = source.adapter
        self.exported = Exported(self.module, self._masters, self.compute_dtype, self.adapter)
        self._trainable = {name: p for name, p in self.exported.parameters.items() if p.requires_grad}
        if self.optim_config is not None:
            self.optimizer = build_optimizer(
                self._trainable.values(), self.optim_config, hidden_matrices(self.module, self._trainable)
            )
            self.schedule = build_schedule(self.optimizer, self.optim_config)
        self.module.eval()
        check_windows(self.module, self.response_logits)
        if self.packed and self._sequences is None:  # ranks that share sequences find out in each pass
            self.packed = keeps_rows_apart(model.path, self.module, self.response_logits, self.compute_dtype)
        self._offload = FSDPOffload(
            self.module,
            self._masters,
            self.optimizer,
            parameters=engine.param_offload and not self._steps_in_main_memory,
            states=engine.optimizer_offload and not self._steps_in_main_memory,
        )
        self._offload.unload(changed=True)
        device.empty_cache()  # what loading and converting left would count as used while an engine is started

    @property
    def geometry(self) -> Geometry:
        if self._sequences is not None:
            return self._sequences.geometry
        return Geometry(dp_rank=distributed.get_rank(), dp_size=distributed.get_world_size())

    def _is_sharded(self) -> bool:
        """Whether FSDP2 is used; one rank alone computes faster without it."""
        return distributed.get_world_size() > 1

    @property
    def _steps_in_main_memory(self) -> bool:
        """Whether FSDP2 keeps shards and optimizer state in main memory, and updates them there."""
        return self._sharded is not None and bool(self.engine_config.offload_policy)

    @property
    def _keeps_state_in_main_memory(self) -> bool:
        """Whether the optimizer's state is in main memory between updates."""
        return bool(self.engine_config.optimizer_offload) or self._steps_in_main_memory

    def _may_fuse(self) -> bool:
        """Whether to compute without logits where the head allows it (`use_fused_kernels`); warn if not."""
        fused = bool(self.model_config.use_fused_kernels)
        if KINDS[self.model_type].predicts_tokens:
            return fused
        if fused:
            self._warn_idle("a value model has no logits")
        if self.engine_config.most_tokens is not None:
            self._warn_idle("a value model has no logits", "entropy_from_logits_with_chunking")
        return False

    def _warn_idle(self, reason: str, setting: str = "model.use_fused_kernels") -> None:
        if distributed.get_rank() == 0:
            notify(f"{self.model_config.path}: {setting} has no effect, because {reason}")

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

    def forward_only(self, layouts: Sequence[MicroBatchLayout], request: Wanted) -> list[dict[str, torch.Tensor]]:
        self.module.eval()
        self._fuses_all(request)  # before what a micro-batch sets
        with torch.no_grad():
            computed = [self._inferred(layout, request) for layout in layouts]
        if self._sharded:
            self._sharded.reshard()
        return computed

    def forward_backward(
        self, layouts: Sequence[MicroBatchLayout], request: Wanted, share_of_loss: ShareOfLoss
    ) -> None:
        ranks = distributed.get_world_size()
        self._fuses_all(request)
        self.module.train()
        if self._router_loss is not None:
            self._router_loss.begin(layouts, self.geometry.dp_group)
        for number, layout in enumerate(layouts):
            if self._sharded:
                self._sharded.before_backward(last=number == len(layouts) - 1)
            with self._attention_for(layout), self._replaying(layout):  # also while layers are computed again
                with contextlib.nullcontext() if self._router_loss is None else self._router_loss.watching():
                    computed = self._forward(layout, request)
                loss = share_of_loss(number, computed)
                if self._router_loss is not None:
                    loss = loss + self._router_loss.share(layout)
                # FSDP averages gradients over the ranks; the shares of the loss are to be summed, and where ranks
                # share sequences, the gradients of their parts.
                (loss if ranks == 1 else loss * ranks).backward()
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

    def _inferred(self, layout: MicroBatchLayout, request: Wanted) -> dict[str, torch.Tensor]:
        """The outputs of a micro-batch without gradients; `routed_experts` of its real tokens, in main memory."""
        with self._attention_for(layout), self._replaying(layout):
            if ROUTED_EXPERTS not in request.outputs:
                return self._forward(layout, request)
            with self._routing.recorded() as experts_by_layer:
                computed = self._forward(layout, request)
        assert layout.origins is not None  # checked when routing was set up
        experts = torch.stack(experts_by_layer, dim=1).cpu()
        return {**computed, ROUTED_EXPERTS: experts[layout.origins >= 0]}

    def update_metrics(self) -> dict[str, Metric]:
        return {} if self._router_loss is None else self._router_loss.metrics(self.geometry.dp_group)

    def _plan(self, batch: DataProto, micro: MicroBatching, tree: bool = True) -> BatchPlan:
        plan = super()._plan(batch, micro, tree)
        check_length(self.config, max(plan.lengths, default=0), f"{self.model_config.path}: the longest of a batch")
        if self._sees_images:
            plan.images = BatchImages(batch, self.config)
        return plan

    def _layouts(self, plan: BatchPlan, function: LogitsFunction | None) -> list[MicroBatchLayout]:
        return [self._for_all_ranks(layout) for layout in super()._layouts(plan, function)]

    def _for_all_ranks(self, layout: MicroBatchLayout) -> MicroBatchLayout:
        """The micro-batch with what every rank has to compute where any does."""
        return with_some_image(layout, self.config) if self._sees_images and self._sharded else layout

    @functools.cached_property
    def has_plain_head(self) -> bool:
        """Whether logits are a linear layer's output or a supported change of it; warn if not. Collective trial."""
        layout, _ = self._own_part(self._for_all_ranks(dummy_layout()))
        reason = self._fusing.why_not(layout.to(device.current_device()))
        if reason is not None:
            self._warn_idle(reason)
        return reason is None

    def _fuses_all(self, request: Wanted) -> bool:
        """Whether the request is computed without logits. The first call is collective."""
        if not self._fuses or not self.has_plain_head:
            return False
        others = [function.other for function in self._functions(request)]
        return all(other is None or other.has_plain_head for other in others)

    def _functions(self, request: Wanted) -> list[LogitsFunction]:
        """Return the functions of logits that the request needs besides the statistics of tokens."""
        functions: list[LogitsFunction] = [FullKL(self.reference)] if "ref_kl" in request.outputs else []
        return functions if request.function is None else [*functions, request.function]

    def follows_paths(self) -> bool:
        return self._follows_paths

    @functools.cached_property
    def _follows_paths(self) -> bool:
        """Whether the model attends along the paths of a prefix tree, tried on two rows of two tokens; warn if not."""
        layout, _ = self._own_part(small_tree())
        with attention.trial() as problems:
            self.response_logits(layout.to(device.current_device()))
        if problems and distributed.get_rank() == 0:
            notify(
                f"{self.model_config.path}: prefixes that rows share are computed for each row, because {problems[0]}"
            )
        return not problems

    def _forward(self, layout: MicroBatchLayout, request: Wanted) -> dict[str, torch.Tensor]:
        part, owned = self._own_part(layout)
        part = part.to(device.current_device())
        computed = self._compute(part, request)
        if self._sequences is not None:
            computed = self._sequences.join(computed, owned)
        return part.of_rows(computed) if isinstance(part, TreeLayout) else computed

    def _own_part(self, layout: MicroBatchLayout) -> tuple[MicroBatchLayout, torch.Tensor]:
        """Return this rank's tokens of a micro-batch, and the mask of its outputs."""
        if self._sequences is None:
            return layout, torch.ones_like(layout.selected, dtype=torch.bool)
        part, owned = self._sequences.split(layout)
        return layout.part(part) if isinstance(layout, TreeLayout) else part, owned

    def _compute(self, layout: MicroBatchLayout, request: Wanted) -> dict[str, torch.Tensor]:
        """The outputs of this rank's tokens."""
        functions = self._functions(request)

        def of_other(read: Callable[[FSDPEngine, MicroBatchLayout], Any], function: LogitsFunction) -> Any:
            if function.other is None:
                return None
            with self.without_adapter() if function.other is self else contextlib.nullcontext():
                return read(function.other, layout)

        if self._fuses_all(request):
            compared = [(function, of_other(FSDPEngine.hidden, function)) for function in functions]
            return self._fusing.outputs(layout, request.temperature, request.outputs, compared)
        others = [of_other(FSDPEngine.response_logits, function) for function in functions]
        logits = self._logits(layout)
        outputs = compute_outputs(
            logits, layout, request.temperature, request.outputs, bool(functions), self.engine_config.most_tokens
        )
        for function, other in zip(functions, others, strict=True):
            outputs |= function(logits, layout.inputs or {}, request.temperature, other)
        return outputs

    def _logits(self, layout: MicroBatchLayout) -> torch.Tensor:
        return response_logits(self.module, self._head, layout, self._takes_boundaries, self._sequence_group)

    @property
    def _sequence_group(self) -> ProcessGroup | None:
        return None if self._sequences is None else self._sequences.group

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

    @torch.no_grad()
    def response_logits(self, layout: MicroBatchLayout) -> torch.Tensor:
        """The logits `[N, V]` of this engine's model on another engine's micro-batch, without gradient.

        Where ranks share sequences, `layout` has this rank's tokens.
        """
        with self._attention_for(layout):
            logits = self._logits(layout)
        if self._sharded:
            self._sharded.reshard()
        return logits

    @torch.no_grad()
    def hidden(self, layout: MicroBatchLayout) -> Hidden:
        """Return the inputs of the output layer from which `response_logits` would be computed."""
        with self._attention_for(layout):
            hidden = self._fusing.hidden(layout, copies=self._sharded is not None)
        if self._sharded:
            self._sharded.reshard()
        return hidden

    # ------------------------------------------------------------------ stepping

    def gradient_norm(self) -> torch.Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._trainable.values() if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def nonfinite_gradients(self) -> list[str]:
        return [
            name
            for name, p in self._trainable.items()
            if p.grad is not None and not bool(torch.isfinite(_local(p.grad)).all())
        ]

    def discard_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
            self.module.zero_grad(set_to_none=True)  # those of an interrupted backward pass

    def apply_gradients(self, norm: torch.Tensor) -> None:
        assert self.optimizer is not None and self.optim_config is not None
        if limit := self.optim_config.clip_grad:
            torch.nn.utils.clip_grads_with_norm_(self._trainable.values(), limit, norm)
        self._offload.wait_for_state()
        self.optimizer.step()
        self.schedule.step()
        self.discard_gradients()
        if self._masters:
            self._masters.copy_to_module()

    def learning_rate(self) -> float | None:
        return None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    # ------------------------------------------------------------------ weights

    @contextlib.contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        self._offload.load(updates=optimizer)
        try:
            yield
        finally:
            # After an error there are gradients, and parameters cannot leave the device without them.
            self.discard_gradients()
            if self._sharded:
                self._sharded.reshard()
            self._offload.unload()
            device.empty_cache()  # free activations and gradients, so that other processes can use their memory

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        self.module.eval()
        with self._attention_of_padded_rows():
            if self._sharded is None:
                yield self.module
                return
            with self._sharded.whole() as module:
                yield module

    @contextlib.contextmanager
    def _attention_of_padded_rows(self) -> Iterator[None]:
        """Within the context, plain attention: flash attention would copy the whole cache for each token."""
        config: Any = self.module.config
        if not attention.is_flash_attention(str(config._attn_implementation)):
            yield
            return
        with with_attention(self.module, attention.plain_attention(config)):
            yield

    def _attention_for(self, layout: MicroBatchLayout) -> contextlib.AbstractContextManager[None]:
        """Within the context, the attention that this micro-batch needs."""
        if not isinstance(layout, TreeLayout):
            return contextlib.nullcontext()
        return with_attention(self.module, tree_attention.TREE)

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        self._offload.wait_for_state()
        return self.exported.weights(dtype)

    def export_shards(self, dtype: torch.dtype | None = None) -> Iterator[WeightShard]:
        if self.adapter is not None:
            raise ModelError("an adapter is merged into whole tensors, so there are no shards to send")
        self._offload.wait_for_state()
        views = self.exported.views()
        tensors = {name: self.exported.tensor(name, dtype) for name in self.exported.own()}
        for source, part in checkpoint.parts_of(self, tensors, views):
            keeps = source not in self.exported.parameters
            yield WeightShard(part.name, part.shape, part.box.start, part.values, keeps_dtype=keeps)

    def without_adapter(self) -> contextlib.AbstractContextManager[None]:
        return adapted.adapter_of(self).off()

    def adapter_config(self) -> str:
        return adapted.config_text(self)

    def export_adapter(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        adapted.adapter_of(self)
        self._offload.wait_for_state()
        return self.exported.adapter_tensors(dtype)

    @property
    def copy_of_model(self) -> int:
        return 0 if self._sharded is None else self._sharded.replica

    @property
    def training_layout(self) -> ShardedLayout:
        return ShardedLayout() if self._sharded is None else self._sharded.layout

    def _shard(self, tensor: torch.Tensor) -> tuple[Box, torch.Tensor]:
        """Return this rank's box of a tensor of the module, and its elements."""
        if not isinstance(tensor, DTensor):
            return whole(tuple(tensor.shape)), tensor
        assert self._sharded is not None
        return self._sharded.box(tensor), tensor.to_local()

    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        return self.exported.bytes(dtype)

    def first_step_bytes(self) -> int:
        if self.optimizer is None or self._keeps_state_in_main_memory:
            return 0
        matrices = hidden_matrices(self.module, self._trainable)
        return state_bytes(self._trainable.values(), self.optim_config, matrices)

    # ------------------------------------------------------------------ checkpoints

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        checkpoint.parts(self).state(contents, copy=False).write(Path(folder))
        distributed.barrier()

    def copy_state(self, contents: Sequence[str]) -> State:
        return checkpoint.parts(self).state(contents, copy=True)

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        checkpoint.parts(self).load(Path(folder), contents)
        if self._masters:
            self._masters.copy_to_module()
        self._offload.unload(changed=True)
        distributed.barrier()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
