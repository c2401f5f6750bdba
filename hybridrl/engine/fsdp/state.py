"""`FSDPState`: an engine's weights, what of them is trained, the optimizer, and where all of it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hybridrl.engine.capabilities import WeightShard
from hybridrl.engine.fsdp.exported import Exported
from hybridrl.engine.fsdp.master_weights import MasterWeights
from hybridrl.engine.fsdp.offload import FSDPOffload
from hybridrl.engine.fsdp.sharding import ShardedModule
from hybridrl.engine.optim.meshes import by_mesh, total_norm
from hybridrl.engine.optim.muon import hidden_matrices
from hybridrl.engine.optim.optimizer import build_optimizer, build_schedule, state_bytes
from hybridrl.engine.saved_slices import SavedSlice
from hybridrl.layouts.module_slices import ModuleSlice, within_shape
from hybridrl.layouts.slices import TensorSlice, whole
from hybridrl.layouts.topology import ShardedLayout
from hybridrl.models import lora
from hybridrl.utils import device


class FSDPState:
    """The weights of a model and the state of its optimizer.

    Args:
        module: the model, with its weights.
        sharded: its shards under FSDP2; None on a single rank.
        compute_dtype: dtype of the forward pass.
        master_dtype: dtype of the weights that are trained.
        adapter: what is trained in place of the weights, with LoRA.
        settings: an `FSDPConfig`.
        optim: an `OptimConfig`, or None for an engine that only computes.

    Attributes:
        masters: master weights next to those of the module; None: there are no others.
        exported: the tensors as they are saved and sent.
        trainable: what is trained, by name in the module.
        optimizer, schedule: of what is trained; None for an engine that only computes.
        offload: brings weights and optimizer state to the device and back to main memory.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded: ShardedModule | None,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        adapter: lora.Adapter | None,
        settings: Any,
        optim: Any,
    ) -> None:
        self.module, self.sharded, self.adapter = module, sharded, adapter
        self.compute_dtype = compute_dtype
        self._settings, self._optim = settings, optim
        separate = sharded is None and compute_dtype != master_dtype
        self.masters = MasterWeights(module, compute_dtype) if separate else None
        self.exported = Exported(module, self.masters, compute_dtype, adapter, sharded)
        self.trainable = {name: p for name, p in self.exported.parameters.items() if p.requires_grad}
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: Any = None
        if optim is not None:
            matrices = hidden_matrices(module, self.trainable)
            self.optimizer = build_optimizer(self.trainable.values(), optim, matrices)
            self.schedule = build_schedule(self.optimizer, optim)
        self.offload = FSDPOffload(
            module,
            self.masters,
            self.optimizer,
            parameters=settings.param_offload and not self._steps_in_main_memory,
            states=settings.optimizer_offload and not self._steps_in_main_memory,
        )

    @property
    def _steps_in_main_memory(self) -> bool:
        """Whether FSDP2 keeps shards and optimizer state in main memory, and updates them there."""
        return self.sharded is not None and bool(self._settings.offload_policy)

    @property
    def keeps_optimizer_in_main_memory(self) -> bool:
        """Whether the optimizer's state is in main memory between updates; parameters may be elsewhere."""
        return bool(self._settings.optimizer_offload) or self._steps_in_main_memory

    # ------------------------------------------------------------------ memory

    @contextlib.contextmanager
    def loaded(self, updates: bool) -> Iterator[None]:
        """Within the context, weights are on the device, and for updates the optimizer's state, too."""
        self.offload.load(updates=updates)
        try:
            yield
        finally:
            # After an error there are gradients, and parameters cannot leave the device without them.
            self.discard_gradients()
            self.reshard()
            self.offload.unload()
            device.empty_cache()  # free activations and gradients, so that other processes can use their memory

    def reshard(self) -> None:
        """Free parameters that a forward pass without a backward pass left gathered."""
        if self.sharded is not None:
            self.sharded.reshard()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        """Within the context, every rank holds every parameter."""
        if self.sharded is None:
            yield self.module
            return
        with self.sharded.whole() as module:
            yield module

    def values_changed(self) -> None:
        """Bring new values of weights and optimizer state to where they are used and kept."""
        if self.masters is not None:
            self.masters.copy_to_module()
        self.offload.unload(changed=True)

    def first_step_bytes(self) -> int:
        """Return the device memory that the first step takes for good."""
        if self.optimizer is None or self.keeps_optimizer_in_main_memory:
            return 0
        matrices = hidden_matrices(self.module, self.trainable)
        return state_bytes(self.trainable.values(), self._optim, matrices)

    # ------------------------------------------------------------------ stepping

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of all gradients, over all ranks."""
        return total_norm(p.grad for p in self.trainable.values() if p.grad is not None)

    def nonfinite_gradients(self) -> list[str]:
        """Return the names of parameters whose gradient on this rank is not finite."""
        gradients = ((name, p.grad) for name, p in self.trainable.items() if p.grad is not None)
        return [name for name, gradient in gradients if not bool(torch.isfinite(_local(gradient)).all())]

    def divide_gradients(self, scale: float) -> None:
        """Divide the gradients by the scale of the loss."""
        for parameter in self.trainable.values():
            if parameter.grad is not None:
                _local(parameter.grad).div_(scale)

    def discard_gradients(self) -> None:
        """Forget gradients, also those of an interrupted backward pass."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
            self.module.zero_grad(set_to_none=True)

    def step(self, norm: torch.Tensor) -> None:
        """Clip by the norm, take a step of the optimizer and one of the schedule, and discard the gradients."""
        assert self.optimizer is not None
        if limit := self._optim.clip_grad:
            for parameters in by_mesh(self.trainable.values()):
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        self.offload.wait_for_state()
        self.optimizer.step()
        self.schedule.step()
        self.discard_gradients()
        if self.masters is not None:
            self.masters.copy_to_module()

    # ------------------------------------------------------------------ shards

    @property
    def copy_of_model(self) -> int:
        """Number of the copy of the model that this rank's shards belong to."""
        return 0 if self.sharded is None else self.sharded.replica

    @property
    def layout(self) -> ShardedLayout:
        """Layout of the parameters on all ranks."""
        return ShardedLayout() if self.sharded is None else self.sharded.layout

    def shard(self, tensor: torch.Tensor) -> tuple[TensorSlice, torch.Tensor]:
        """Return this rank's slice of a tensor of the module, and its values."""
        if not isinstance(tensor, DTensor):
            return whole(tuple(tensor.shape)), tensor
        assert self.sharded is not None
        return self.sharded.tensor_slice(tensor), tensor.to_local()

    def shards(
        self, tensors: Mapping[str, torch.Tensor], module_slices: Mapping[str, ModuleSlice]
    ) -> Iterator[tuple[str, SavedSlice]]:
        """Yield what this rank holds of some of the module's tensors, by the names in `module_slices`.

        Yields:
            The name in `tensors`, and the slice, whose values are a view of the tensor.
        """
        for name, (source, tensor_slice, shape) in module_slices.items():
            if source not in tensors:
                continue
            own, values = self.shard(tensors[source])
            both = tensor_slice.intersect(own)
            if both is not None:
                start, sizes = within_shape(both, tensor_slice, shape)
                part = values[both.within(own)].view(sizes)
                yield source, SavedSlice(name, shape, TensorSlice.of_extents(start, sizes), part)

    def export_shards(self, dtype: torch.dtype | None) -> Iterator[WeightShard]:
        """See `ExportsShards.export_shards`."""
        self.offload.wait_for_state()
        tensors = {name: self.exported.tensor(name, dtype) for name in self.exported.own()}
        for source, shard in self.shards(tensors, self.exported.module_slices()):
            keeps = source not in self.exported.parameters
            yield WeightShard(shard.name, shard.shape, shard.slice.start, shard.values, keeps_dtype=keeps)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
