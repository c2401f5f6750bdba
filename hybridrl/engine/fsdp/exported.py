"""Export of an FSDP2 engine's weights: whole tensors and shards under Hugging Face names.

With an adapter, whole tensors are those of the base with the adapter merged, and a checkpoint holds the adapter alone.
Weights of 4-bit layers are what their bytes stand for, in the dtype of the forward pass: the very values that training
computes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hybridrl.engine.fsdp.master_weights import MasterWeights
from hybridrl.engine.fsdp.sharding import ShardedModule
from hybridrl.layouts.module_slices import ModuleSlice, module_slices
from hybridrl.layouts.slices import whole
from hybridrl.models import four_bit, loading, lora
from hybridrl.utils import device
from hybridrl.utils.rounding import rounded_by_chance


class Exported:
    """The tensors of an engine.

    Args:
        module: the model.
        masters: the master weights next to it, if any.
        compute_dtype: dtype of the forward pass.
        adapter: of the module, if it has one.
        sharded: its shards under FSDP2.

    Attributes:
        parameters: master weights by their names in the module.
    """

    def __init__(
        self,
        module: nn.Module,
        masters: MasterWeights | None,
        compute_dtype: torch.dtype,
        adapter: lora.Adapter | None,
        sharded: ShardedModule | None = None,
    ) -> None:
        self.module, self._sharded = module, sharded
        self.adapter = adapter
        self.parameters: Mapping[str, torch.Tensor] = dict(masters.named if masters else module.named_parameters())
        self._copied_to = compute_dtype if masters else None
        self._computes_in, self._packed = compute_dtype, four_bit.layers_of(module)
        buffers = dict(module.named_buffers())
        # In the module's order, so that the tensors of a layer are exported together. Tied parameters occur once.
        self._names = [name for name in module.state_dict() if name in self.parameters or name in buffers]
        self._module_slices: dict[str, ModuleSlice] | None = None

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Engine.export_weights`."""
        yield from loading.to_checkpoint_names(self.module, self.whole_tensors(dtype, by_chance=True))

    def whole_tensors(
        self, dtype: torch.dtype | None = None, by_chance: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `weights`, with the names that the module has without an adapter.

        Weights of layers with an adapter are merged in float32, then rounded.

        Args:
            by_chance: round merged weights up or down by chance, or else to the nearest; see `rounded_by_chance`.
        """
        for name in self._names:
            if self.adapter is None:
                yield name, self._whole(name, dtype)
            elif not lora.is_own(name):
                parts = self.adapter.parts_of(name)
                tensor = self._whole(name, dtype if parts is None else None)
                if parts is not None:
                    merged = self.adapter.merged(name, tensor, *(self._whole(part, None) for part in parts))
                    tensor = merged if dtype is None else _rounded(merged, dtype, name if by_chance else None)
                yield lora.base_name(name), tensor

    def base(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `weights`, of the base without its adapter."""
        own = ((name, self._whole(name, dtype)) for name in self._names if not lora.is_own(name))
        yield from loading.to_checkpoint_names(self.module, ((lora.base_name(name), tensor) for name, tensor in own))

    def adapter_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapter's tensors, whole, by their names in PEFT's files."""
        assert self.adapter is not None
        for name in self.adapter.names:
            yield lora.file_name(name), self._whole(name, dtype)

    def own(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint by module name: master weights and saved buffers, or the adapter."""
        names = self._names if self.adapter is None else self.adapter.names
        return {name: self.tensor(name, None) for name in names}

    def module_slices(self) -> dict[str, ModuleSlice]:
        """Map each tensor of the checkpoint to a slice of one of the module's tensors.

        Raises:
            ModelError: one is computed from the module's tensors and is no part of them.
        """
        if self._module_slices is None:
            shapes = {name: tuple(tensor.shape) for name, tensor in self.own().items()}
            if self.adapter is None:
                self._module_slices = module_slices(
                    lambda named: loading.to_checkpoint_names(self.module, named), shapes
                )
            else:
                self._module_slices = {
                    lora.file_name(name): ModuleSlice(name, whole(shape), shape) for name, shape in shapes.items()
                }
        return self._module_slices

    def tensor(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        """A tensor of the module; of the copies that there are, that in the given dtype."""
        if name not in self.parameters:
            return self.module.get_buffer(name)
        # Master weights are on the device during updates only.
        computing = self._copied_to is not None and dtype is self._copied_to
        return (self.module.get_parameter(name) if computing else self.parameters[name]).detach()

    def bytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of everything that `weights` yields."""
        size = 0
        for name in self._names:
            tensor = self.tensor(name, None)
            if lora.is_own(name) and self.adapter is not None:
                continue
            merged = self.adapter is not None and self.adapter.parts_of(name) is not None
            layer = self._packed.get(name)
            count = tensor.numel() if layer is None else layer.out_features * layer.in_features
            own_dtype = torch.float32 if merged else (tensor.dtype if layer is None else self._computes_in)
            size += count * (own_dtype if dtype is None or name not in self.parameters else dtype).itemsize
        return size

    def _whole(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        tensor = self.tensor(name, dtype)
        if name not in self.parameters:
            return tensor
        if isinstance(tensor, DTensor):
            tensor = tensor.to(device.current_device())  # an offloaded shard has to be there to be gathered
        layer = self._packed.get(name)
        if dtype is not None and layer is None:
            tensor = tensor.to(dtype)  # before it is gathered, so that fewer bytes travel
        if isinstance(tensor, DTensor):
            assert self._sharded is not None
            tensor = self._sharded.full_tensor(tensor)
        if layer is None:
            return tensor
        values = four_bit.unpack(tensor, layer.in_features, self._computes_in)
        return values if dtype is None else values.to(dtype)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype, by_chance_of: str | None) -> torch.Tensor:
    return tensor.to(dtype) if by_chance_of is None else rounded_by_chance(tensor, dtype, by_chance_of)
