"""Parameters, gradients and optimizer state that leave the device between the uses of an engine.

Megatron-core's parameters and gradients are views of flat buffers, and master weights may be views of parameters. So
not tensors are replaced here, but the memory of their storages is released, and every view is valid again after it
was allocated again.

Master weights and optimizer state arrive while the first micro-batches are computed. Their memory is there from the
beginning of an update, their values after `MegatronOffload.wait_for_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hybridrl.utils import device

_ALIGNMENT = 256


class OffloadedStorages:
    """Storages whose values are in main memory while they are unloaded.

    Args:
        tensors: returns tensors on these storages, in the same order each time; there may be more from call to call.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._host: torch.Tensor | None = None
        #: for each storage: itself, its number of bytes and where they are in main memory
        self._places: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        self._unloaded = False

    def unload(self, changed: bool) -> None:
        """Release the memory on the device.

        Args:
            changed: the values may differ from those in main memory.
        """
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors()}
        if self._unloaded:
            if storages.keys() == self._places.keys():
                return
            if (begun := self.load()) is not None:  # a checkpoint brought further state
                begun.wait()
        if self._host is None or storages.keys() != self._places.keys():
            self._host = None  # released before the new memory is allocated
            self._host, changed = self._allocate(storages), True
        if changed:
            host = self._host
            device.Transfer(
                (host[start : start + size], _bytes_of(storage)) for storage, size, start in self._places.values()
            ).wait()
        for storage, _, _ in self._places.values():
            storage.resize_(0)
        self._unloaded = True

    def load(self, transfer: type[device.Transfer] = device.Transfer) -> device.Transfer | None:
        """Allocate the memory on the device, and begin to copy the values back.

        Args:
            transfer: copies them.

        Returns:
            What is to be awaited before the values are used; None if they are there.
        """
        if not self._unloaded or self._host is None:
            return None
        for storage, size, _ in self._places.values():
            storage.resize_(size)
        host = self._host
        begun = transfer(
            (_bytes_of(storage), host[start : start + size]) for storage, size, start in self._places.values()
        )
        self._unloaded = False
        return begun

    def readable(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The copy of an unloaded tensor in main memory, which may be written, too; None if it is not unloaded."""
        place = self._places.get(tensor.untyped_storage()._cdata) if self._unloaded else None
        if place is None or self._host is None:
            return None
        _, size, start = place
        flat = self._host[start : start + size].view(tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride(), flat.storage_offset() + tensor.storage_offset())

    def _allocate(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        self._places, used = {}, 0
        for key, storage in storages.items():
            self._places[key] = storage, storage.nbytes(), used
            used += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        return device.host_memory(used, torch.uint8)


class DiscardedStorages:
    """Storages of gradients, which are zero between updates, so nothing is kept of them."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._storages = [tensor.untyped_storage() for tensor in tensors()]
        self._sizes = [storage.nbytes() for storage in self._storages]

    def unload(self) -> None:
        for storage in self._storages:
            storage.resize_(0)

    def load(self) -> None:
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)
                _bytes_of(storage).zero_()


class MegatronOffload:
    """Offloading of an engine's weights, gradients and optimizer state between its uses.

    Args:
        parameters: None if they stay.
        gradients: None if they stay.
        states: master weights and optimizer state; None if they stay.
        transfer: what copies to the device.
    """

    def __init__(
        self,
        parameters: OffloadedStorages | None,
        gradients: DiscardedStorages | None,
        states: OffloadedStorages | None,
        transfer: type[device.Transfer] = device.Transfer,
    ) -> None:
        self.transfer = transfer
        self._arriving: device.Transfer | None = None
        self._parameters, self._gradients, self._states = parameters, gradients, states
        self._loaded_for_updates = False

    def load(self, updates: bool) -> None:
        """Bring to the device what computing needs, and for updates also gradients and optimizer state.

        See `wait_for_state`.
        """
        self._loaded_for_updates = updates
        if self._parameters is not None and (begun := self._parameters.load(self.transfer)) is not None:
            begun.wait()
        if updates and self._gradients is not None:
            self._gradients.load()
        if updates and self._states is not None and (begun := self._states.load(self.transfer)) is not None:
            self._arriving = begun

    def wait_for_state(self) -> None:
        """Wait for the values of master weights and optimizer state, which `load` only begins to copy.

        Whatever reads or changes them while they are loaded calls this first.
        """
        if self._arriving is not None:
            self._arriving.wait()
        self._arriving = None

    def unload(self, changed: bool = False) -> None:
        """Release the memory on the device.

        Args:
            changed: parameters and optimizer state changed although they were not loaded for updates.
        """
        self.wait_for_state()  # an update may have ended without a step
        changed, self._loaded_for_updates = changed or self._loaded_for_updates, False
        if self._gradients is not None:
            self._gradients.unload()
        for group in (self._parameters, self._states):
            if group is not None:
                group.unload(changed)
        device.empty_cache()

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or its copy in main memory while it is unloaded."""
        self.wait_for_state()
        for group in (self._parameters, self._states):
            host_copy = None if group is None else group.readable(tensor)
            if host_copy is not None:
                return host_copy
        return tensor

    @property
    def has_gradients(self) -> bool:
        """Whether the memory of gradients is there."""
        return self._gradients is None or self._loaded_for_updates


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
