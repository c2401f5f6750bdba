"""`FSDPEngine`: language and value models on FSDP2, or as a plain module where there is one rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.tensor import DTensor

from hybridrl.engine.fsdp import checkpoint
from hybridrl.engine.fsdp.forward import (
    LANGUAGE_OUTPUTS,
    VALUE_OUTPUTS,
    SelectingHead,
    compute_outputs,
    response_logits,
)
from hybridrl.engine.fsdp.master_weights import MasterWeights
from hybridrl.engine.fsdp.sharding import ShardedModule
from hybridrl.engine.microbatch import BatchPlan, Layout, dummy_layout, fields
from hybridrl.engine.optim.muon import hidden_matrices
from hybridrl.engine.optim.optimizer import build_optimizer, build_schedule, move_optimizer
from hybridrl.engine.train_engine import Engine, LossFn, MicroBatching, NonFiniteError, TrainEngines
from hybridrl.errors import ModelError
from hybridrl.models import loading, value
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.utils import device, distributed
from hybridrl.utils.metrics import Metric, as_metrics, merge_metrics

STRATEGIES = ("fsdp", "fsdp2")
USUAL_CAUSES = "Usual causes: a NaN reward or advantage, log-probabilities of -inf, a learning rate too high"


@TrainEngines.register("language_model", STRATEGIES)
@TrainEngines.register("value_model", STRATEGIES)
class FSDPEngine(Engine):
    """A Hugging Face causal language model, or a backbone with a value head.

    Args:
        model_type: ``language_model`` or ``value_model``.
        model: A `ModelConfig`: path, override_config, trust_remote_code, enable_gradient_checkpointing,
        use_remove_padding, ... engine: An `FSDPConfig`: dtypes, sharding, offload.
        optim: An `OptimConfig`, or None for an engine that only computes.

    Attributes:
        module: The model; under FSDP2 with several ranks, its parameters are shards.
        config: Its Hugging Face configuration.
        packed: Whether micro-batches are packed into one row instead of padded.
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
                "float16 training would need loss scaling, which this engine does not do; set "
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
            self.config._attn_implementation = "sdpa"  # flash attention knows half precision only
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
        # In the module's order, so that what belongs to a layer comes together; of tied parameters one.
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
    def dp_rank(self) -> int:
        return distributed.get_rank()

    @property
    def dp_size(self) -> int:
        return distributed.get_world_size()

    @property
    def is_collect_rank(self) -> bool:
        return True

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

    def infer(
        self,
        batch: DataProto,
        micro: MicroBatching,
        temperature: float = 1.0,
        outputs: Collection[str] = ("log_probs",),
    ) -> dict[str, torch.Tensor]:
        self._check_outputs(outputs)
        plan = BatchPlan(fields(batch), micro, self.packed)
        found: dict[str, list[torch.Tensor]] = {name: [] for name in outputs}
        self.module.eval()
        with torch.no_grad():
            for rows in self._in_step(plan.groups):
                layout = plan.layout(rows) if rows else dummy_layout()
                computed = self._forward(layout, temperature, outputs)
                for name in outputs if rows else ():
                    found[name].append(computed[name])
        if self._sharded:
            self._sharded.reshard()
        positions = torch.cat([plan.token_positions(rows) for rows in plan.groups]) if plan.groups else None
        results = {}
        for name, parts in found.items():
            flat = torch.zeros(plan.batch_size * plan.response_width)
            if positions is not None:
                flat[positions] = torch.cat(parts).float().cpu()
            results[name] = flat.view(plan.batch_size, plan.response_width)
        return results

    def train_batch(
        self,
        batch: DataProto,
        micro: MicroBatching,
        loss_fn: LossFn,
        temperature: float = 1.0,
        entropy: bool = False,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        ref_kl: bool = False,
    ) -> dict[str, Metric]:
        if self.optimizer is None:
            raise RuntimeError(
                "this engine was made without an optimizer (optim=None or forward_only), so it cannot train"
            )
        plan = BatchPlan(fields(batch), micro, self.packed)
        outputs: tuple[str, ...] = ("values",)
        if self.model_type == "language_model":
            outputs = ("log_probs", *(["entropy"] if entropy else []), *(["ref_kl"] if ref_kl else []))
        losses: list[torch.Tensor] = []
        metrics: list[dict[str, Metric]] = []
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        groups = list(self._in_step(plan.groups))
        for number, rows in enumerate(groups):
            if self._sharded:
                self._sharded.before_backward(last=number == len(groups) - 1)
            if not rows:
                computed = self._forward(dummy_layout(), temperature, outputs)
                (sum(part.sum() for part in computed.values()) * 0.0).backward()  # type: ignore[union-attr]
                continue
            loss, values = self._loss(plan, rows, batch, loss_fn, temperature, outputs)
            # FSDP averages gradients over the ranks; the shares of the loss are to be summed.
            (loss if self.dp_size == 1 else loss * self.dp_size).backward()
            losses.append(loss.detach())
            metrics.append(as_metrics(values, sum(plan.token_counts[row] for row in rows)))
        self.module.eval()
        norm, problem = self._check_step(losses, plan.groups)
        lr = float(self.optimizer.param_groups[0]["lr"])
        if problem is not None:
            self.optimizer.zero_grad(set_to_none=True)
            if on_nonfinite == "raise":
                raise problem
            notify(f"step skipped: {problem}", "warning")
        else:
            self._step(norm)
        own = {
            "grad_norm": Metric(norm),
            "lr": Metric(lr),
            "skipped_steps": Metric(float(problem is not None), kind="max"),
        }
        return merge_metrics([*metrics, own])

    def _loss(
        self,
        plan: BatchPlan,
        rows: list[int],
        batch: DataProto,
        loss_fn: LossFn,
        temperature: float,
        outputs: Sequence[str],
    ) -> tuple[torch.Tensor, Any]:
        """The loss function's answer on one micro-batch."""
        target = device.current_device()
        computed = self._forward(plan.layout(rows), temperature, outputs)
        columns = plan.response_columns(rows)
        mask = plan.response_mask[torch.tensor(rows)][:, :columns].to(target, non_blocking=True)
        grids = {}
        for name, flat in computed.items():
            grids[name] = torch.zeros(mask.shape, device=target).masked_scatter(mask, flat)
        part = DataProto(
            batch=TensorDict(plan.slice_tensors(rows, columns, target), batch_size=[len(rows)]),
            non_tensor_batch={name: array[rows] for name, array in batch.non_tensor_batch.items()},
            meta_info={**batch.meta_info, "response_width": plan.response_width},
        )
        return loss_fn(grids, part)

    def _forward(self, layout: Layout, temperature: float, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        layout = layout.to(device.current_device())
        reference = None
        if "ref_kl" in outputs:
            assert self.reference is not None
            reference = self.reference.response_logits(layout)
        logits = response_logits(self.module, self._head, layout, self.flash_attention)
        return compute_outputs(logits, layout, temperature, outputs, reference)

    def compare_with(self, reference: Engine) -> None:
        if not isinstance(reference, FSDPEngine) or reference.packed != self.packed:
            raise ModelError(
                "KL form full compares both policies on the same micro-batches, so both need the same strategy and "
                "attention: give actor_rollout_ref.ref.fsdp_config the dtype of actor_rollout_ref.actor.fsdp_config"
            )
        self.reference = reference

    @torch.no_grad()
    def response_logits(self, layout: Layout) -> torch.Tensor:
        """``[N, V]`` without gradient: what this engine's model says of another engine's micro-batch."""
        logits = response_logits(self.module, self._head, layout, self.flash_attention)
        if self._sharded:
            self._sharded.reshard()
        return logits

    def _in_step(self, groups: list[list[int]]) -> Iterator[list[int]]:
        """The micro-batches, then empty ones until this rank has as many as the one with the most; at least one."""
        count = max(1, distributed.all_reduce_max(len(groups)))
        yield from groups
        yield from ([] for _ in range(count - len(groups)))

    def _check_outputs(self, outputs: Collection[str]) -> None:
        known = LANGUAGE_OUTPUTS if self.model_type == "language_model" else VALUE_OUTPUTS
        unknown = sorted(set(outputs) - set(known))
        if unknown or not outputs:
            raise ValueError(
                f"a {self.model_type} computes {', '.join(known)}; asked for {', '.join(unknown) or 'nothing'}"
            )

    # ------------------------------------------------------------------ stepping

    def _check_step(
        self, losses: list[torch.Tensor], groups: list[list[int]]
    ) -> tuple[torch.Tensor, NonFiniteError | None]:
        """Global norm of the gradients, and the error all ranks agree on if it or any rank's loss is not finite."""
        gradients = [p.grad for p in self._trainable.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        finite_losses = torch.isfinite(torch.stack(losses)).tolist() if losses else []
        bad_loss = bool(distributed.all_reduce_max(int(not all(finite_losses))))
        if not bad_loss and bool(torch.isfinite(norm)):
            return norm, None
        bad_rows = [row for rows, fine in zip(groups, finite_losses, strict=False) if not fine for row in rows]
        bad_names = [
            n
            for n, p in self._trainable.items()
            if p.grad is not None and not bool(torch.isfinite(_local(p.grad)).all())
        ]
        gathered = distributed.all_gather_object((bad_rows, bad_names))
        rows_by_rank = [rows for rows, _ in gathered]
        names = sorted({name for _, found in gathered for name in found})
        what = "loss" if bad_loss else "gradient"
        places = "; ".join(f"rank {rank}: sequences {_first(rows)}" for rank, rows in enumerate(rows_by_rank) if rows)
        message = f"the {what} of this step is not finite (gradient norm {float(norm)})"
        message += f", {places}" if places else f", first in {_first(names)}"
        message += ". Parameters and optimizer are unchanged. " + USUAL_CAUSES
        return norm, NonFiniteError(message, what, rows_by_rank, names[:16])

    def _step(self, norm: torch.Tensor) -> None:
        assert self.optimizer is not None and self.optim_config is not None
        limit = self.optim_config.clip_grad
        if limit:
            torch.nn.utils.clip_grads_with_norm_(self._trainable.values(), limit, norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._masters:
            self._masters.copy_to_module()

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
            if optimizer:  # activations and gradients: what generates is to have their memory
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
        """Like `export_weights`, by the names of the module."""
        for name in self._exported:
            if name not in self._parameters:
                yield name, self.module.get_buffer(name)
                continue
            whole = self._parameters[name].detach()
            if isinstance(whole, DTensor):
                # A shard that was offloaded has to be on the device before it can be gathered.
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


def _first(items: Sequence[Any], count: int = 8) -> str:
    shown = ", ".join(str(item) for item in items[:count])
    return shown + (f" and {len(items) - count} more" if len(items) > count else "")
