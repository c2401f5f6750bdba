"""`FSDPEngine`: language and value models on FSDP2, or as a plain module on a single rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hybridrl.engine.capabilities import GeneratesInPlace
from hybridrl.engine.fsdp import checkpoint
from hybridrl.engine.fsdp.forward import SelectingHead, compute_outputs, response_logits
from hybridrl.engine.fsdp.master_weights import MasterWeights
from hybridrl.engine.fsdp.sharding import ShardedModule
from hybridrl.engine.micro_batched import MicroBatchedEngine, ShareOfLoss, Wanted
from hybridrl.engine.microbatch import Layout
from hybridrl.engine.optim.muon import hidden_matrices
from hybridrl.engine.optim.optimizer import build_optimizer, build_schedule, move_optimizer
from hybridrl.engine.train_engine import Engine, Geometry, TrainEngines
from hybridrl.errors import ModelError
from hybridrl.models import loading, value
from hybridrl.utils import device, distributed

STRATEGIES = ("fsdp", "fsdp2")


@TrainEngines.register("language_model", STRATEGIES)
@TrainEngines.register("value_model", STRATEGIES)
class FSDPEngine(MicroBatchedEngine, GeneratesInPlace):
    """A Hugging Face causal language model, or a backbone with a value head.

    Args:
        model_type: `language_model` or `value_model`.
        model: A `ModelConfig`: path, override_config, trust_remote_code, enable_gradient_checkpointing,
            use_remove_padding, ...
        engine: An `FSDPConfig`: dtypes, sharding, offload.
        optim: An `OptimConfig`, or None for an engine that only computes.

    Attributes:
        module: The model; under FSDP2 with several ranks, its parameters are shards.
        config: Its Hugging Face configuration.
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
        self._masters: MasterWeights | None = None
        self.reference: FSDPEngine | None = None

    # ------------------------------------------------------------------ building

    def initialize(self) -> None:
        model, engine = self.model_config, self.engine_config
        self.compute_dtype = loading.resolve_dtype(engine.dtype, "fsdp_config.dtype")
        self.model_dtype = loading.resolve_dtype(engine.model_dtype, "fsdp_config.model_dtype")
        if torch.float16 in (self.compute_dtype, self.model_dtype):
            raise ModelError(
                "float16 training needs loss scaling, which this engine does not support; set "
                "fsdp_config.dtype to bfloat16"
            )
        if self.optim_config is None:
            self.model_dtype = self.model_dtype if distributed.get_world_size() > 1 else self.compute_dtype
        self._seed()
        loading.import_external_lib(model.external_lib)
        self.config = loading.load_model_config(
            model.hf_config_path or model.path, model.trust_remote_code, override=model.override_config
        )
        loading.check_weights(loading.checked_source(model.path))
        if self.compute_dtype == torch.float32 and "attn_implementation" not in model.override_config:
            self.config._attn_implementation = "sdpa"  # flash attention supports half precision only
        self.flash_attention = str(self.config._attn_implementation).startswith("flash_attention")
        self.packed = bool(model.use_remove_padding) and self.flash_attention
        if distributed.get_world_size() > 1:
            self._sharded = ShardedModule(self._prepare(self._build()), engine, self.compute_dtype)
            self._sharded.fill(lambda: self._load("auto"))
            self.module = self._sharded.module
        else:
            self.module = self._prepare(self._load(self.model_dtype)).to(device.current_device())
            if self.compute_dtype != self.model_dtype:
                self._masters = MasterWeights(self.module, self.compute_dtype)
        self._head = SelectingHead(self.module)
        self._parameters = dict(self._masters.named if self._masters else self.module.named_parameters())
        buffers = dict(self.module.named_buffers())
        # In the module's order, so that the tensors of a layer are exported together. Tied parameters occur once.
        self._exported = [name for name in self.module.state_dict() if name in self._parameters or name in buffers]
        self._trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        if self.optim_config is not None:
            self.optimizer = build_optimizer(
                self._trainable.values(), self.optim_config, hidden_matrices(self.module, self._trainable)
            )
            self.schedule = build_schedule(self.optimizer, self.optim_config)
        self.module.eval()
        self._offload()

    @property
    def geometry(self) -> Geometry:
        return Geometry(dp_rank=distributed.get_rank(), dp_size=distributed.get_world_size())

    def _seed(self) -> None:
        device.manual_seed(self.engine_config.seed + distributed.get_rank())
        if self.engine_config.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def _build(self) -> nn.Module:
        build = loading.build_language_model if self.model_type == "language_model" else value.build_value_model
        return build(self.config, self.model_dtype, self.model_config.trust_remote_code)

    def _load(self, dtype: torch.dtype | str) -> nn.Module:
        load: Any = loading.load_language_model if self.model_type == "language_model" else value.load_value_model
        return load(self.model_config.path, self.config, dtype, self.model_config.trust_remote_code)

    def _prepare(self, module: nn.Module) -> nn.Module:
        loading.disable_dropout(module)
        if self.optim_config is None:
            module.requires_grad_(False)
        elif self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        if self.engine_config.use_torch_compile:
            classes = loading.decoder_layer_classes(module)
            for part in module.modules():
                if type(part).__name__ in classes:
                    part.compile(dynamic=True)
        return module

    # ------------------------------------------------------------------ computing

    def forward_only(self, layouts: Sequence[Layout], wanted: Wanted) -> list[dict[str, torch.Tensor]]:
        self.module.eval()
        with torch.no_grad():
            computed = [self._forward(layout, wanted) for layout in layouts]
        if self._sharded:
            self._sharded.reshard()
        return computed

    def forward_backward(self, layouts: Sequence[Layout], wanted: Wanted, share_of_loss: ShareOfLoss) -> None:
        dp_size = self.geometry.dp_size
        self.module.train()
        for number, layout in enumerate(layouts):
            if self._sharded:
                self._sharded.before_backward(last=number == len(layouts) - 1)
            loss = share_of_loss(number, self._forward(layout, wanted))
            # FSDP averages gradients over the ranks; the shares of the loss are to be summed.
            (loss if dp_size == 1 else loss * dp_size).backward()
        self.module.eval()

    def _forward(self, layout: Layout, wanted: Wanted) -> dict[str, torch.Tensor]:
        layout = layout.to(device.current_device())
        reference = None
        if "ref_kl" in wanted.outputs:
            assert self.reference is not None
            reference = self.reference.response_logits(layout)
        logits = response_logits(self.module, self._head, layout, self.flash_attention)
        return compute_outputs(logits, layout, wanted.temperature, wanted.outputs, reference)

    def compare_with(self, reference: Engine) -> None:
        if not isinstance(reference, FSDPEngine) or reference.packed != self.packed:
            raise ModelError(
                "KL form full compares both policies on the same micro-batches, so both need the same strategy and "
                "attention: give actor_rollout_ref.ref.fsdp_config the dtype of actor_rollout_ref.actor.fsdp_config"
            )
        self.reference = reference

    @torch.no_grad()
    def response_logits(self, layout: Layout) -> torch.Tensor:
        """The logits `[N, V]` of this engine's model on another engine's micro-batch, without gradient."""
        logits = response_logits(self.module, self._head, layout, self.flash_attention)
        if self._sharded:
            self._sharded.reshard()
        return logits

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

    def apply_gradients(self, norm: torch.Tensor) -> None:
        assert self.optimizer is not None and self.optim_config is not None
        limit = self.optim_config.clip_grad
        if limit:
            torch.nn.utils.clip_grads_with_norm_(self._trainable.values(), limit, norm)
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
        self._move_parameters(device.current_device())
        if optimizer and self.optimizer is not None and self.engine_config.optimizer_offload:
            move_optimizer(self.optimizer, device.current_device())
        try:
            yield
        finally:
            self._offload()
            if optimizer:  # free activations and gradients, so that generation can use their memory
                device.empty_cache()

    def _offload(self) -> None:
        self._move_parameters(torch.device("cpu"))
        if self.optimizer is not None and self.engine_config.optimizer_offload and device.is_gpu():
            move_optimizer(self.optimizer, torch.device("cpu"))
            device.empty_cache()

    def _move_parameters(self, target: torch.device) -> None:
        if not self.engine_config.param_offload or self.engine_config.offload_policy or not device.is_gpu():
            return
        self.module.to(target)
        if self._masters:
            self._masters.move(target)
        device.empty_cache()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        self.module.eval()
        if self._sharded is None:
            yield self.module
            return
        with self._sharded.whole() as module:
            yield module

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from loading.to_checkpoint_names(self.module, self.whole_tensors(dtype))

    def whole_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `export_weights`, with the names of the module."""
        for name in self._exported:
            if name not in self._parameters:
                yield name, self.module.get_buffer(name)
                continue
            whole = self._parameters[name].detach()
            if isinstance(whole, DTensor):
                # An offloaded shard has to be on the device before it can be gathered.
                whole = cast(DTensor, whole.to(device.current_device())).full_tensor()
            yield name, whole if dtype is None else whole.to(dtype)

    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        size = sum(p.numel() * (dtype or p.dtype).itemsize for p in self._parameters.values())
        buffers = [self.module.get_buffer(name) for name in self._exported if name not in self._parameters]
        return size + sum(buffer.numel() * buffer.itemsize for buffer in buffers)

    # ------------------------------------------------------------------ checkpoints

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        checkpoint.save(self, Path(folder), contents)

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        checkpoint.load(self, Path(folder), contents)
        if self._masters:
            self._masters.copy_to_module()
        if dist.is_initialized():
            distributed.barrier()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
