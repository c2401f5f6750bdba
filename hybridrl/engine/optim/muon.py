"""Muon for the hidden matrices of a model and AdamW for everything else, as one optimizer, also on shards.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; for language models arXiv 2502.16982): with the
momentum B <- mu B + (1 - mu) G and U = (1 - mu) G + mu B (Nesterov), a matrix W [m, n] moves by

    W <- (1 - lr wd) W - lr s(m, n) NS(U),      s = 0.2 sqrt(max(m, n)) ("match_rms_adamw")

where NS is the Newton-Schulz iteration, which brings all singular values of U near 1. NS needs the whole matrix; on a
shard it would orthogonalise the shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Muon, Optimizer

from hybridrl.utils import device

#: settings of `torch.optim.Muon` that affect the orthogonalised matrix
NEWTON_SCHULZ = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


def hidden_matrices(module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The parameters that Muon optimizes: matrices that are neither an embedding nor the output layer.

    Args:
        module: the model; its output layer is a language model's head or a value head.
        parameters: by their names in `module`.
    """
    head = module.get_output_embeddings()  # type: ignore[operator]
    ends = {id(part.weight) for part in [*module.modules(), head] if isinstance(part, nn.Embedding) or part is head}
    apart = {name for name, parameter in module.named_parameters() if id(parameter) in ends}
    return [parameter for name, parameter in parameters.items() if parameter.ndim == 2 and name not in apart]


class MuonAndAdamW(Optimizer):
    """A `ShardedMuon` and an AdamW with one list of groups and one state.

    Schedule, gradient clipping, checkpoints and offloading treat them as one optimizer.

    Args:
        muon: optimizes the hidden matrices; its group comes first.
        adamw: optimizes all other parameters; None if there are none.
    """

    def __init__(self, muon: ShardedMuon, adamw: AdamW | None):
        self.parts: list[Optimizer] = [muon] if adamw is None else [muon, adamw]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class ShardedMuon(Muon):
    """`torch.optim.Muon` on whole matrices, and the same update if parameters are shards of FSDP2.

    The ranks of a replica process as many matrices at a time as there are ranks. Each rank gathers one whole matrix,
    orthogonalises it and sends the shards back. So the ranks share the work, and no matrix is computed twice within a
    replica.
    """

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not any(isinstance(parameter, DTensor) for group in self.param_groups for parameter in group["params"]):
            super().step()
            return
        with torch.no_grad():
            for group in self.param_groups:
                self._step_on_shards(group)

    def _step_on_shards(self, group: Mapping[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        # Matrices of similar size in one round, so that its ranks finish together.
        parameters.sort(key=lambda parameter: -parameter.numel())
        ranks = _shard_group(parameters[0]).size() if parameters else 1
        for start in range(0, len(parameters), ranks):
            some = parameters[start : start + ranks]
            changes = _orthogonalised(some, [self._momentum(parameter, group) for parameter in some], group)
            for parameter, change in zip(some, changes, strict=True):
                local = parameter.to_local()
                local.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=group["lr"])

    def _momentum(self, parameter: DTensor, group: Mapping[str, Any]) -> torch.Tensor:
        """U of this rank's shard, after the momentum update."""
        assert isinstance(parameter.grad, DTensor)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, momentum = parameter.grad.to_local(), state["momentum_buffer"].to_local()
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """The ranks that hold the shards of one copy of the parameter, along the mesh dimension that splits rows."""
    for dimension, placement in enumerate(parameter.placements):
        if placement == Shard(0):
            return parameter.device_mesh.get_group(dimension)
    raise ValueError(f"Muon needs matrices split by rows (FSDP2); this one is {parameter.placements}")


def _orthogonalised(
    parameters: Sequence[DTensor], updates: Sequence[torch.Tensor], group: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """-s NS(U) of each matrix, this rank's rows. Rank i of the shard group computes matrix i, at most one per rank."""
    process_group = _shard_group(parameters[0])
    ranks, own = process_group.size(), process_group.rank()
    home, where = updates[0].device, device.current_device()
    sent = [update.numel() for update in updates] + [0] * (ranks - len(updates))
    shape = parameters[own].shape if own < len(parameters) else torch.Size([0, 0])
    received = [rows * shape[1] for rows in _rows(shape[0], ranks)]
    shards = torch.cat([update.reshape(-1) for update in updates]).to(where)
    whole = shards.new_empty(shape.numel())
    dist.all_to_all_single(whole, shards, received, sent, group=process_group)
    if whole.numel():
        whole = _newton_schulz(whole.view(shape), group).reshape(-1)
    dist.all_to_all_single(shards, whole, sent, received, group=process_group)
    for change, update in zip(shards.to(home).split(sent[: len(updates)]), updates, strict=True):
        yield change.view_as(update)


def _rows(rows: int, ranks: int) -> list[int]:
    """Return the number of rows that FSDP2 puts on each rank: as `torch.chunk`, so the last get fewer rows or none."""
    chunk = -(-rows // ranks)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(ranks)]


def _newton_schulz(update: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """-s NS(U): the step that `torch.optim.Muon` takes from 0 at lr 1 without momentum and decay."""
    step = nn.Parameter(torch.zeros_like(update))
    step.grad = update
    settings = {name: group[name] for name in NEWTON_SCHULZ}
    Muon([step], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, **settings).step()
    return step.detach()
