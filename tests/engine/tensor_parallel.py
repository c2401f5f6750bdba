"""A training engine whose ranks hold parts of one model: a token MLP, column- and row-parallel, in two stages, on gloo.

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

from hybridrl.engine import Geometry, MicroBatchedEngine
from hybridrl.engine.fsdp.forward import compute_outputs
from hybridrl.engine.micro_batched import OutputRequest, ShareOfLoss
from hybridrl.engine.microbatch import MicroBatchLayout

VOCABULARY, HIDDEN, INNER, POSITIONS = 40, 16, 32, 64
SHARDED = {"up": 0, "down": 1}  # which dimension of the parameter the tensor-parallel ranks share
LAST_STAGE = ("head",)  # parameters of the last pipeline stage; the first has the others


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
    """Trains by plain SGD. Ranks are numbered as in Megatron-core.

    Args:
        tp: tensor parallel size.
        pp: pipeline stages, 1 or 2.
    """

    model_type = "language_model"

    def __init__(self, tp: int, lr: float, pp: int = 1) -> None:
        self.tp, self.pp, self.lr = tp, pp, lr

    def initialize(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        dp = world // (self.tp * self.pp)
        ranks = torch.arange(world).view(self.pp, dp, self.tp)
        self.tp_group, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, self.tp).tolist())
        self.pp_group, _ = dist.new_subgroups_by_enumeration(ranks.reshape(self.pp, -1).T.tolist())
        self.dp_group, _ = dist.new_subgroups_by_enumeration(ranks.transpose(1, 2).reshape(-1, dp).tolist())
        stage, shard, part = ((ranks == rank).nonzero()[0]).tolist()
        self._geometry = Geometry(
            shard, dp, self.dp_group, tp_rank=part, tp_size=self.tp, pp_rank=stage, pp_size=self.pp
        )
        self.stages = ranks[:, shard, part].tolist()
        self.parameters: dict[str, torch.Tensor] = {}
        for name in filter(self._is_mine, self.initial_weights()):
            self.parameters[name] = self._part(name, self.initial_weights()[name]).requires_grad_()

    def _is_mine(self, name: str) -> bool:
        return self._stage_of(name) == self._geometry.pp_rank

    def _stage_of(self, name: str) -> int:
        return self.pp - 1 if name in LAST_STAGE else 0

    def _part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        part = whole.chunk(self.tp, SHARDED[name])[self._geometry.tp_rank] if name in SHARDED else whole
        return part.clone()

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

    @property
    def _is_first(self) -> bool:
        return self._geometry.pp_rank == 0

    @property
    def _is_last(self) -> bool:
        return self._geometry.pp_rank == self.pp - 1

    def _hidden(self, layout: MicroBatchLayout) -> torch.Tensor:
        """What the first stage computes, `[rows, tokens, HIDDEN]`."""
        p = self.parameters
        hidden = p["embedding"][layout.input_ids] + p["position"][layout.position_ids]
        inner = torch.nn.functional.gelu(_Copy.apply(hidden, self.tp_group) @ p["up"].T)
        return hidden + _Sum.apply(inner @ p["down"].T, self.tp_group)

    def _received(self, layout: MicroBatchLayout) -> torch.Tensor:
        """The same on the last stage, from the first."""
        hidden = torch.empty(*layout.input_ids.shape, HIDDEN, dtype=torch.float64)
        dist.recv(hidden, self.stages[0])
        return hidden

    def _outputs(
        self, hidden: torch.Tensor, layout: MicroBatchLayout, request: OutputRequest
    ) -> dict[str, torch.Tensor]:
        logits = hidden.reshape(-1, HIDDEN)[layout.selected] @ self.parameters["head"].T
        return compute_outputs(logits.float(), layout, request.temperature, request.outputs)

    def forward_only(
        self, layouts: Sequence[MicroBatchLayout], request: OutputRequest
    ) -> list[dict[str, torch.Tensor]] | None:
        outputs = []
        with torch.no_grad():
            for layout in layouts:
                hidden = self._hidden(layout) if self._is_first else self._received(layout)
                if self._is_last:
                    outputs.append(self._outputs(hidden, layout, request))
                else:
                    dist.send(hidden, self.stages[-1])
        return outputs if self._is_last else None

    def forward_backward(
        self, layouts: Sequence[MicroBatchLayout], request: OutputRequest, share_of_loss: ShareOfLoss
    ) -> None:
        for number, layout in enumerate(layouts):
            hidden = self._hidden(layout) if self._is_first else self._received(layout).requires_grad_()
            if self._is_last:
                share_of_loss(number, self._outputs(hidden, layout, request)).backward()
                if not self._is_first:
                    assert hidden.grad is not None
                    dist.send(hidden.grad, self.stages[0])
            else:
                dist.send(hidden.detach(), self.stages[-1])
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, self.stages[-1])
                hidden.backward(gradient)
        for parameter in self.parameters.values():
            dist.all_reduce(parameter.grad, group=self.dp_group)

    def gradient_norm(self) -> torch.Tensor:
        squares = {name: p.grad.square().sum() for name, p in self.parameters.items()}  # type: ignore[union-attr]
        for name in SHARDED.keys() & squares.keys():
            squares[name] = _summed(squares[name], self.tp_group)
        return _summed(torch.stack(list(squares.values())).sum(), self.pp_group).sqrt()

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
        for name, initial in self.initial_weights().items():
            whole = torch.empty_like(initial)
            if self._is_mine(name):
                whole = self.parameters[name].detach()
                if name in SHARDED:
                    parts = [torch.empty_like(whole) for _ in range(self.tp)]
                    dist.all_gather(parts, whole.contiguous(), group=self.tp_group)
                    whole = torch.cat(parts, SHARDED[name])
            if self.pp > 1:
                whole = whole.clone()
                dist.broadcast(whole, self.stages[self._stage_of(name)], group=self.pp_group)
            yield name, whole.to(dtype or whole.dtype)

    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        return sum(tensor.nbytes for _, tensor in self.export_weights(dtype))

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        whole = dict(self.export_weights())
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(whole, folder / "weights.pt")
        dist.barrier()

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        whole = torch.load(folder / "weights.pt")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._part(name, whole[name]))
