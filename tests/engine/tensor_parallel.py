"""A training engine whose ranks hold parts of one model: a token MLP, column- and row-parallel, on gloo.

It is what an engine of one's own looks like on `MicroBatchedEngine`, and shows that nothing above an engine takes the
number of ranks for the number of shards of a batch. Its weights are float64, so that layouts differ by less than 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.engine import Engine, Geometry, MicroBatchedEngine
from hybridrl.engine.fsdp.forward import compute_outputs
from hybridrl.engine.micro_batched import ShareOfLoss, Wanted
from hybridrl.engine.microbatch import Layout

VOCABULARY, HIDDEN, INNER, POSITIONS = 40, 16, 32, 64
SHARDED = {"up": 0, "down": 1}  # which dimension of the parameter the tensor-parallel ranks share


class _Copy(torch.autograd.Function):
    """Identity whose gradient is summed over the group: the entry of a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum over the group whose gradient is the identity: the exit of a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _summed(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    tensor = tensor.contiguous().clone()
    dist.all_reduce(tensor, group=group)
    return tensor


class TensorParallelEngine(MicroBatchedEngine):
    """Trains by plain SGD. The ranks 0 .. tp - 1 hold the first copy of the model, and so on."""

    model_type = "language_model"

    def __init__(self, tp: int, lr: float) -> None:
        self.tp, self.lr = tp, lr

    def initialize(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tp_rank, dp_size = rank % self.tp, world // self.tp
        ranks = torch.arange(world).view(dp_size, self.tp)
        self.tp_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
        self.dp_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
        self._geometry = Geometry(rank // self.tp, dp_size, self.dp_group, collects=self.tp_rank == 0)
        self.parameters: dict[str, torch.Tensor] = {}
        for name, whole in self.initial_weights().items():
            part = whole.chunk(self.tp, SHARDED[name])[self.tp_rank].clone() if name in SHARDED else whole
            self.parameters[name] = part.requires_grad_()

    @staticmethod
    def initial_weights() -> dict[str, torch.Tensor]:
        """Whole, by name."""
        generator = torch.Generator().manual_seed(0)
        shapes = {"embedding": (VOCABULARY, HIDDEN), "position": (POSITIONS, HIDDEN), "head": (VOCABULARY, HIDDEN)}
        shapes |= {"up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
        return {n: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 for n, shape in shapes.items()}

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def _forward(self, layout: Layout, wanted: Wanted) -> dict[str, torch.Tensor]:
        p = self.parameters
        hidden = p["embedding"][layout.input_ids] + p["position"][layout.position_ids]
        inner = torch.nn.functional.gelu(_Copy.apply(hidden, self.tp_group) @ p["up"].T)
        hidden = hidden + _Sum.apply(inner @ p["down"].T, self.tp_group)
        logits = hidden.reshape(-1, HIDDEN)[layout.selected] @ p["head"].T
        return compute_outputs(logits.float(), layout, wanted.temperature, wanted.outputs)

    def forward_only(self, layouts: Sequence[Layout], wanted: Wanted) -> list[dict[str, torch.Tensor]]:
        with torch.no_grad():
            return [self._forward(layout, wanted) for layout in layouts]

    def forward_backward(self, layouts: Sequence[Layout], wanted: Wanted, share_of_loss: ShareOfLoss) -> None:
        for number, layout in enumerate(layouts):
            share_of_loss(number, self._forward(layout, wanted)).backward()
        for parameter in self.parameters.values():
            dist.all_reduce(parameter.grad, group=self.dp_group)

    def gradient_norm(self) -> torch.Tensor:
        squares = {name: p.grad.square().sum() for name, p in self.parameters.items()}  # type: ignore[union-attr]
        for name in SHARDED:
            squares[name] = _summed(squares[name], self.tp_group)
        return torch.stack(list(squares.values())).sum().sqrt()

    def discard_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def apply_gradients(self, norm: torch.Tensor) -> None:
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter -= self.lr * parameter.grad
        self.discard_gradients()

    def learning_rate(self) -> float:
        return self.lr

    def loaded(self, optimizer: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters.items():
            whole = parameter.detach()
            if name in SHARDED:
                parts = [torch.empty_like(whole) for _ in range(self.tp)]
                dist.all_gather(parts, whole.contiguous(), group=self.tp_group)
                whole = torch.cat(parts, SHARDED[name])
            yield name, whole.to(dtype or whole.dtype)

    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        return sum(tensor.nbytes for _, tensor in self.export_weights(dtype))

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        raise NotImplementedError

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        raise NotImplementedError

    def compare_with(self, reference: Engine) -> None:
        raise NotImplementedError
