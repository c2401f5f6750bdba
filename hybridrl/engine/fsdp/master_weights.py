"""Mixed precision on one rank, with the same semantics as FSDP2 on several.

The module holds its parameters in the compute dtype, and float32 master weights are kept next to it. Each backward
pass adds the low-precision gradients to float32 gradients of the master weights. The optimizer updates the master
weights, and their values are copied back after a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hybridrl.models.value import ValueHead


class MasterWeights:
    """Master weights of a module, whose parameters are converted to `compute_dtype`.

    A value head stays in float32 and is its own master weight. So are frozen parameters, in which nothing accumulates.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype):
        self.module = module
        value_head_ids = {id(p) for m in module.modules() if isinstance(m, ValueHead) for p in m.parameters()}
        self.named: dict[str, nn.Parameter] = {}
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in module.named_parameters():
            self.named[name] = parameter
            if id(parameter) in value_head_ids:
                continue
            master = nn.Parameter(parameter.detach().clone()) if parameter.requires_grad else None
            parameter.data = parameter.detach().to(compute_dtype)
            if master is None:
                continue
            self.named[name] = master
            self._pairs.append((parameter, master))
            parameter.register_post_accumulate_grad_hook(self._collector(master))

    def copy_to_module(self) -> None:
        """Copy the master weights into the module."""
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)

    def tensors(self) -> list[torch.Tensor]:
        """The values of the master weights, without those that are the module's own parameters."""
        return [master.detach() for _, master in self._pairs]

    def replace(self, new: Sequence[torch.Tensor]) -> None:
        """Use these tensors as the values, such as copies on another device, in the order of `tensors`."""
        for (_, master), tensor in zip(self._pairs, new, strict=True):
            master.data = tensor

    @staticmethod
    def _collector(master: nn.Parameter):  # type: ignore[no-untyped-def]
        def collect(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return collect
