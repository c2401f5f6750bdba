"""Model and optimizer state that stays in main memory between the uses of an engine.

All host copies of a kind are views of one buffer per dtype. It is allocated once, is exactly as large as needed and is
page-locked for GPUs, which makes copies fast. A host copy stays valid while its tensors are on the device, so tensors
that did not change are freed there without being copied back.

Master weights and optimizer state arrive while the first micro-batches are computed. Their tensors are on the device
from the beginning of an update; their values are there after `FSDPOffload.wait_for_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hybridrl.engine.fsdp.master_weights import MasterWeights
from hybridrl.notify import notify
from hybridrl.utils import device

#: target and source of each copy
Copies = list[tuple[torch.Tensor, torch.Tensor]]


class HostCopies:
    """Host memory for tensors of the kinds and shapes of these; for shards, for this rank's part.

    Args:
        tensors: on any device. They are not copied yet.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = [part for tensor in tensors for part in plain_parts(tensor)]
        self.shapes = _shapes(tensors)
        sizes: dict[torch.dtype, int] = {}
        for part in parts:
            sizes[part.dtype] = sizes.get(part.dtype, 0) + part.numel()
        self._buffers = {dtype: device.host_memory(size, dtype) for dtype, size in sizes.items()}
        used = dict.fromkeys(sizes, 0)
        self._views: list[torch.Tensor] = []
        for part in parts:
            start = used[part.dtype]
            used[part.dtype] += part.numel()
            flat = self._buffers[part.dtype][start : start + part.numel()]
            strides = torch.empty_like(part, device="meta").stride()
            self._views.append(flat.as_strided(part.shape, strides, flat.storage_offset()))

    def store(self, tensors: Sequence[torch.Tensor], updated: Sequence[bool] | None = None) -> None:
        """Copy the tensors' present values; those that are views of this memory are left as they are.

        Args:
            updated: which of them may differ from the host copies; None: all.
        """
        flags = [True] * len(tensors) if updated is None else updated
        parts = [(part, flag) for tensor, flag in zip(tensors, flags, strict=True) for part in plain_parts(tensor)]
        device.Transfer(
            (view, part)
            for view, (part, flag) in zip(self._views, parts, strict=True)
            if flag and part.numel() and part.data_ptr() != view.data_ptr()
        ).wait()

    def on_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors like these that are views of the host copies."""
        views = iter(self._views)
        return [rebuilt_tensor(tensor, lambda _: next(views)) for tensor in tensors]

    def on_device(self, tensors: Sequence[torch.Tensor], target: torch.device) -> tuple[list[torch.Tensor], Copies]:
        """Tensors like these on a device, and the copies that give them the values of the host copies."""
        views = iter(self._views)
        new = [rebuilt_tensor(tensor, lambda _: torch.empty_like(next(views), device=target)) for tensor in tensors]
        parts = [part for tensor in new for part in plain_parts(tensor)]
        return new, list(zip(parts, self._views, strict=True))


class _Offloaded:
    """A group of tensors that move together.

    Args:
        tensors: returns the present ones, in the same order each time.
        replace: puts others in their place.
        trained: which of them an update changes; None: all.
    """

    def __init__(
        self,
        tensors: Callable[[], list[torch.Tensor]],
        replace: Callable[[list[torch.Tensor]], None],
        trained: Sequence[bool] | None = None,
    ) -> None:
        self._tensors, self._replace, self._trained = tensors, replace, trained
        self._host: HostCopies | None = None
        self._on_host = False

    def load(self, target: torch.device, transfer: type[device.Transfer], wait: bool) -> device.Transfer | None:
        """Put tensors on the device in place of the host copies.

        Args:
            target: the device.
            transfer: copies the values.
            wait: the tensors have their values before they are in their place.

        Returns:
            What gives them their values; None if they are on the device already.
        """
        if not self._on_host or self._host is None:
            return None
        new, copies = self._host.on_device(self._tensors(), target)
        begun = transfer(copies)
        if wait:
            begun.wait()
        self._replace(new)
        self._on_host = False
        return begun

    def unload(self, changed: bool, updated: bool) -> None:
        """Free the device memory.

        Args:
            changed: the values may differ from those of the host copies.
            updated: the values of what is trained may differ.
        """
        tensors = self._tensors()
        if self._on_host and not (changed or updated):
            return
        # An optimizer's state comes with its first step.
        if self._host is None or self._host.shapes != _shapes(tensors):
            self._host = None  # freed before the new memory is allocated
            self._host, changed = HostCopies(tensors), True
        if changed or updated:
            self._host.store(tensors, None if changed else self._trained)
        self._replace(self._host.on_host(tensors))
        self._on_host = True


class FSDPOffload:
    """Offloading of an engine's weights and optimizer state to main memory between its uses.

    Args:
        masters: master weights that only updates need.
        optimizer: None for an engine that only computes.
        parameters: whether module and master weights are offloaded.
        states: whether the optimizer's state is.
        transfer: what copies to the device.
    """

    def __init__(
        self,
        module: nn.Module,
        masters: MasterWeights | None,
        optimizer: torch.optim.Optimizer | None,
        parameters: bool,
        states: bool,
        transfer: type[device.Transfer] = device.Transfer,
    ) -> None:
        self.transfer = transfer
        self._arriving: list[device.Transfer] = []
        self._always: list[_Offloaded] = []
        self._for_updates: list[_Offloaded] = []
        self._loaded_for_updates = False
        if parameters:
            trained = [parameter.requires_grad for parameter in module.parameters()]
            self._always.append(
                _Offloaded(lambda: _parameters(module), lambda new: _replace_parameters(module, new), trained)
            )
            if masters is not None:
                self._for_updates.append(_Offloaded(masters.tensors, masters.replace))
        if states and optimizer is not None:
            self._for_updates.append(
                _Offloaded(
                    lambda: [state[name] for state, name in _state_tensors(optimizer)],
                    lambda new: _replace_states(optimizer, new),
                )
            )

    def load(self, updates: bool) -> None:
        """Bring everything that is needed to the device; see `wait_for_state`.

        Args:
            updates: whether the weights will be updated, and not only used.
        """
        self._loaded_for_updates = updates
        here = device.current_device()
        for group in self._always:
            # FSDP2 reads a parameter that is put in its place: it copies shards that need padding.
            group.load(here, self.transfer, wait=True)
        for group in self._for_updates if updates else []:
            if (begun := group.load(here, self.transfer, wait=False)) is not None:
                self._arriving.append(begun)

    def wait_for_state(self) -> None:
        """Wait for the values of master weights and optimizer state, which `load` only begins to copy.

        Whatever reads or changes them while they are loaded calls this first.
        """
        for begun in self._arriving:
            begun.wait()
        self._arriving.clear()

    def unload(self, changed: bool = False) -> None:
        """Free the device memory of everything.

        Args:
            changed: values changed although they were not loaded for updates.
        """
        self.wait_for_state()  # an update may have ended without a step
        updated, self._loaded_for_updates = self._loaded_for_updates, False
        for group in [*self._always, *self._for_updates]:
            group.unload(changed, updated)
        if self._always or self._for_updates:
            device.empty_cache()


def warn_unused_policy(engine: Any) -> None:
    """Tell that `offload_policy` of an `FSDPConfig`, which is a setting of FSDP2, has no effect on one rank."""
    if engine.offload_policy:
        notify(
            "fsdp_config.offload_policy=True has no effect on one rank, which does not use FSDP2; param_offload=True "
            "and optimizer_offload=True keep parameters and optimizer state in main memory between uses"
        )


def _parameters(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in module.parameters()]


@torch.no_grad()
def _replace_parameters(module: nn.Module, new: Sequence[torch.Tensor]) -> None:
    by_parameter = dict(zip(map(id, module.parameters()), new, strict=True))
    # `_apply` keeps the parameters' identity, tells FSDP2 that its shards moved, and passes buffers, too.
    module._apply(lambda tensor: by_parameter.get(id(tensor), tensor))


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str]]:
    """The optimizer's tensors, in an order that does not depend on whether a step or a checkpoint created them.

    A fused step counter is one of them; a plain one stays in main memory.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in sorted(state.items()):
                on_device = group.get("fused") or group.get("capturable")
                if isinstance(value, torch.Tensor) and (value.ndim > 0 or on_device):
                    yield state, name


def _replace_states(optimizer: torch.optim.Optimizer, new: Sequence[torch.Tensor]) -> None:
    for (state, name), tensor in zip(list(_state_tensors(optimizer)), new, strict=True):
        state[name] = tensor


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that this one consists of: this rank's shard, or the codes and scales of 8-bit state."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.detach()]
    fields = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for field in fields if isinstance(field, torch.Tensor) for part in plain_parts(field)]


def rebuilt_tensor(tensor: torch.Tensor, replaced: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the same kind, made of other plain parts in the order of `plain_parts`."""
    if not is_traceable_wrapper_subclass(tensor):
        return replaced(tensor)
    names, context = tensor.__tensor_flatten__()
    fields = {name: getattr(tensor, name) for name in names}  # a mesh may be among them
    new: Any = {
        name: rebuilt_tensor(field, replaced) if isinstance(field, torch.Tensor) else field
        for name, field in fields.items()
    }
    rebuilt: torch.Tensor = tensor.__tensor_unflatten__(new, context, tensor.size(), tensor.stride())
    return rebuilt


def _shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(part.dtype, part.shape) for tensor in tensors for part in plain_parts(tensor)]
