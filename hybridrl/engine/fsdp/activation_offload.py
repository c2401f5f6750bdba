"""Inputs of checkpointed layers in main memory until their backward pass, copied while other layers compute."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hybridrl.errors import ModelError
from hybridrl.utils import device

# The inputs of the last so many layers stay on the device: the backward pass needs them first. A copy may take as long
# as these layers until the next one waits for it.
_STAYING = 2


class ActivationOffload:
    """Calls checkpointed layers, and keeps what they are computed again from in main memory.

    In the forward pass a layer's inputs are copied to main memory while this layer and the next compute. In the
    backward pass the inputs of a layer come back while the layer after it computes. What has no gradient, such as masks
    and positions, stays where it is, and so does what the layer before has got, too.

    Args:
        transfer: the copies.
    """

    def __init__(self, transfer: type[device.Transfer] = device.ActivationTransfer) -> None:
        self.transfer = transfer
        # What is kept of each of the last layers, and all that the last one got. References are weak: the autograd
        # graph alone keeps what it needs, and frees it.
        self._staying: deque[list[weakref.ref[_SavedInput]]] = deque()
        self._inputs: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, compute_again: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        """Call `compute_again(function, ...)`, which checkpoints `function`.

        Raises:
            ModelError: the input of a layer before was changed in place, so its copy may be wrong.
        """
        before = self._staying[-1] if self._staying else []
        own: list[weakref.ref[_SavedInput]] = []
        inputs_before, self._inputs = self._inputs, []

        def keep(tensor: torch.Tensor) -> torch.Tensor | _SavedInput:
            self._inputs.append(weakref.ref(tensor))
            if not tensor.requires_grad or any(reference() is tensor for reference in inputs_before):
                return tensor
            saved = _SavedInput(tensor, self.transfer, before)
            own.append(weakref.ref(saved))
            return saved

        while len(self._staying) >= _STAYING:
            for saved in _alive(self._staying.popleft()):
                saved.leave()
        self._staying.append(own)
        with saved_tensors_hooks(keep, _restored):
            return compute_again(function, *arguments, **named)


def _alive(inputs: list[weakref.ref[_SavedInput]]) -> list[_SavedInput]:
    return [saved for reference in inputs if (saved := reference()) is not None]


def _restored(saved: torch.Tensor | _SavedInput) -> torch.Tensor:
    return saved.take() if isinstance(saved, _SavedInput) else saved


class _SavedInput:
    """A tensor that is on its way to main memory, there, or on its way back.

    Args:
        tensor: it.
        transfer: the copies.
        before: the inputs of the layer before, which the backward pass needs next.
    """

    def __init__(
        self, tensor: torch.Tensor, transfer: type[device.Transfer], before: list[weakref.ref[_SavedInput]]
    ) -> None:
        self._transfer, self._before = transfer, before
        self._home, self._version = tensor.device, tensor._version
        #: the tensor itself, until its copy is done
        self._tensor: torch.Tensor | None = tensor
        if tensor.is_meta:  # a forecast counts the tensors of this device: main memory is none of it
            self._host = tensor.new_empty(()).expand(tensor.shape)
        else:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=device.is_gpu())
        self._leaving = self._copy(self._host, tensor.detach())
        self._back: tuple[torch.Tensor, device.Transfer] | None = None

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> device.Transfer:
        return self._transfer(() if source.is_meta else [(target, source)])

    def leave(self) -> None:
        """Release the tensor's memory on the device once it is in main memory."""
        self._leaving.wait()
        self._check()
        self._tensor = None

    def _check(self) -> None:
        if self._tensor is not None and self._tensor._version != self._version:
            raise ModelError(
                "model.enable_activation_offload=True: the input of a checkpointed layer was changed in place after "
                "the layer was called, which changes what is computed again from it; set it to False"
            )

    def fetch(self) -> None:
        """Begin to copy the tensor back to the device, if it has left."""
        if self._tensor is None and self._back is None:
            target = torch.empty_like(self._host, device=self._home)
            self._back = target, self._copy(target, self._host)

    def take(self) -> torch.Tensor:
        """Return the tensor on the device, and start to fetch the inputs of the layer before."""
        self._check()
        self.fetch()
        for saved in _alive(self._before):
            saved.fetch()
        if self._tensor is not None:
            return self._tensor
        assert self._back is not None
        (tensor, arriving), self._back = self._back, None
        arriving.order()
        return tensor
