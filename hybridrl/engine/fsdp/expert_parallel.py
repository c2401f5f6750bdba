"""Expert parallelism: the experts of each layer are divided among ranks, and tokens travel to their experts.

The ranks of a copy of the model form a mesh `[efsdp, ep]`. Rank p of an `ep` group holds experts p G to (p + 1) G of
each layer, and FSDP2 shards these over `efsdp`. In a forward pass each rank sends the hidden states of its tokens to
the ranks with the experts that its router chose, and gets their outputs back; it applies the routing weights itself. So
a gradient of an expert is the sum over the tokens of the whole `ep` group.

Shapes: T tokens of a rank, K experts per token, E experts, P ranks of a group, G = E / P experts of a rank, R rows
that a rank receives, H hidden size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hybridrl.errors import ModelError
from hybridrl.layouts.slices import TensorSlice
from hybridrl.models.experts import BIASES, WEIGHTS, fused_experts, unfused_reason
from hybridrl.models.loading import build_language_model
from hybridrl.models.model_config import config_of
from hybridrl.utils import device

KEY = "fsdp_config.expert_parallel_size"
_IMPLEMENTATION = "hybridrl_expert_parallel"
_AXIS = "ep"


def check_expert_parallel(model: Any, engine: Any, ranks: int, optim: Any) -> None:
    """Refuse a size, a model or settings that expert parallelism cannot be combined with.

    The model is built without weights.

    Raises:
        ModelError: the message names the key and the remedy.
    """
    size = engine.expert_parallel_size
    shards = shards_of_copy(engine.fsdp_size, ranks)
    module = build_language_model(config_of(model), torch.float32, model.trust_remote_code)
    reason, remedy = undivided_reason(module, engine, optim) or (None, "")
    if reason is None and shards % size:
        reason = f"it does not divide the {shards} ranks that share a copy of the weights"
        remedy = f"use one of {_divisors(shards)}, or change fsdp_size or the number of ranks"
    for part in [] if reason is not None else fused_experts(module):
        if part.num_experts % size:
            reason = f"it does not divide the {part.num_experts} experts of a layer"
            remedy = f"use one of {[n for n in _divisors(part.num_experts) if shards % n == 0]}"
        elif uneven := [name for name, p in part.named_parameters() if _dimension(p, size, shards // size) is None]:
            shape = list(part.get_parameter(uneven[0]).shape)
            reason = f"{uneven[0]} {shape} does not divide by the {shards // size} ranks that share the same experts"
            remedy = "use a size for which it does, or set fsdp_size"
        if reason is not None:
            break
    if reason is not None:
        raise ModelError(f"{KEY}={size} with {model.path}: {reason}; {remedy}")


def undivided_reason(module: nn.Module, engine: Any, optim: Any) -> tuple[str, str] | None:
    """Return why a model's experts are not divided among ranks, whatever the size, and the remedy; None if they are.

    Args:
        module: the model, with or without weights.
        engine: settings of the training engine.
        optim: settings of the optimizer; None: the model is not updated.
    """
    if reason := unfused_reason(module):
        return reason, "set it to 1"
    if engine.use_torch_compile:
        return "use_torch_compile=True compiles layers, and tokens travel within them", "set one of the two"
    if optim is not None and optim.optimizer_impl.removeprefix("pkg://").startswith("torchao"):
        return (
            f"{optim.optimizer} keeps moments of whole rows in 8 bits, and experts are not cut by rows",
            "set optim.optimizer=AdamW and optim.optimizer_impl=torch.optim, or set it to 1",
        )
    return None


def shards_of_copy(fsdp_size: int, ranks: int) -> int:
    """Return how many of the ranks share one copy of the weights."""
    return ranks if fsdp_size in (-1, 0) else min(fsdp_size, ranks)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _dimension(parameter: torch.Tensor, size: int, shards: int) -> int | None:
    """Return the dimension along which FSDP2 cuts a rank's experts evenly: whole experts, or parts of each."""
    if parameter.shape[0] // size % shards == 0:
        return 0
    return 1 if parameter.shape[1] % shards == 0 else None


class ExpertParallel:
    """The mesh of a model's experts, and the modules that hold them.

    Args:
        module: on the meta device; the parameters of its experts become shards of the `ep` groups.
        size: P.
        replicas, shards: copies of the model, and the ranks of each.

    Attributes:
        modules: that hold the experts of a layer; each is to be a unit of FSDP2 on `fsdp_mesh`.
        fsdp_mesh: the ranks that hold the same experts, in one dimension or with replicas in two.
    """

    def __init__(self, module: nn.Module, size: int, replicas: int, shards: int) -> None:
        if reason := unfused_reason(module):
            raise ModelError(f"{KEY}={size}: {reason}; set it to 1")
        sizes, names = (replicas, shards // size, size), ("ddp", "efsdp", _AXIS)
        first = 0 if replicas > 1 else 1
        self.mesh = init_device_mesh(device.get_device_name(), sizes[first:], mesh_dim_names=names[first:])
        self.fsdp_mesh: DeviceMesh = self.mesh[names[first:-1]]
        self.size, self._shards = size, shards // size
        # Of all ranks that hold a shard; sums and norms over them then take one collective.
        self._everyone = self.mesh[names[1:]]._flatten("experts").get_group()
        self.modules = fused_experts(module)
        for part in self.modules:
            for name, parameter in part.named_parameters():
                own = distribute_tensor(parameter.detach(), self.mesh[_AXIS], [Shard(0)], src_data_rank=None)
                setattr(part, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
            part.expert_exchange = _Exchange(self.mesh.get_group(_AXIS), part.num_experts)
            part.config = copy.copy(part.config)  # other models may share it
            part.config._experts_implementation = _IMPLEMENTATION

    def holds(self, tensor: DTensor) -> bool:
        """Whether a parameter of the module, or a tensor like it, is one of experts."""
        return _AXIS in (tensor.device_mesh.mesh_dim_names or ())

    def placement(self, parameter: torch.Tensor) -> Shard:
        """Return how FSDP2 cuts a parameter of a rank's experts."""
        return Shard(_dimension(parameter, self.size, self._shards) or 0)

    def tensor_slice(self, tensor: DTensor) -> TensorSlice:
        """Return the elements of a parameter of experts that are on this rank."""
        start, stop = [0] * tensor.ndim, list(tensor.shape)
        for dimension, parts, index in (
            (0, self.size, self.mesh.get_local_rank(_AXIS)),
            (self.placement(tensor).dim, self._shards, self.mesh.get_local_rank("efsdp")),
        ):
            extent = (stop[dimension] - start[dimension]) // parts
            start[dimension] += index * extent
            stop[dimension] = start[dimension] + extent
        return TensorSlice(tuple(start), tuple(stop))

    def full_tensor(self, tensor: DTensor) -> torch.Tensor:
        """Return the whole of a parameter of experts; the ranks of a copy of the model call it together."""
        local = tensor.to_local().contiguous()
        parts = local.new_empty(self._shards, self.size, *local.shape)
        dist.all_gather(list(parts.flatten(0, 1).unbind()), local, group=self._everyone)
        # Groups of experts follow each other; within a group, shards do so along the dimension that FSDP2 cut.
        cut = self.placement(tensor).dim
        return parts.movedim(0, 1 + cut).reshape(tensor.shape)

    def gather(self) -> None:
        """Have every rank compute all experts itself, until `release`; the parameters are unsharded by FSDP2."""
        for part in self.modules:
            part.expert_exchange.whole = {name: p.full_tensor().detach() for name, p in part.named_parameters()}

    def release(self) -> None:
        """Free what `gather` gathered."""
        for part in self.modules:
            part.expert_exchange.whole = {}


class _Exchange:
    """The ranks among which the experts of a layer are divided.

    Attributes:
        whole: parameters of all experts, where this rank computes them itself.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group, self.experts = group, experts
        self.whole: dict[str, torch.Tensor] = {}


def _forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of the outputs of each token's experts, `[T, H]`.

    Args:
        module: holds the experts.
        hidden_states: `[T, H]`.
        top_k_index, top_k_weights: `[T, K]`.
    """
    exchange: _Exchange = module.expert_exchange
    tokens, top_k = top_k_index.shape
    order = top_k_index.reshape(-1).argsort(stable=True)
    counts = torch.bincount(top_k_index.reshape(-1), minlength=exchange.experts)
    rows = hidden_states[order // top_k]
    if exchange.whole:
        outputs = _compute(module, exchange.whole, rows, counts)
    else:
        outputs = _on_owners(module, exchange, rows, counts)
    outputs = outputs * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    # A sum over K in a fixed order: adding rows in place would depend on the order of kernels.
    return outputs[back].view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _on_owners(module: Any, exchange: _Exchange, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The outputs for rows that are sorted by expert, computed on the ranks that own the experts.

    A rank takes part in every exchange, also with no row to send or to compute.

    Args:
        rows: `[T K, H]`.
        counts: `[E]` of rows.
    """
    ranks = dist.get_world_size(exchange.group)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=exchange.group)
    arriving = arriving.view(ranks, -1)  # [P, G]
    sizes = torch.stack([counts.view(ranks, -1).sum(1), arriving.sum(1)]).tolist()  # one wait for the device
    own = arriving.shape[1]
    received = _AllToAll.apply(rows, sizes[0], sizes[1], exchange.group)
    expert_ids = torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(arriving.reshape(-1))
    order = expert_ids.argsort(stable=True)
    parameters = {name: parameter.to_local() for name, parameter in module.named_parameters()}
    outputs = _compute(module, parameters, received[order], arriving.sum(0))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    result: torch.Tensor = _AllToAll.apply(outputs[back], sizes[1], sizes[0], exchange.group)
    return result


def _compute(
    module: Any, parameters: dict[str, torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """The outputs of experts for rows that are sorted by expert.

    Args:
        module: says which products and which activation an expert has.
        parameters: of the experts, by name; the first dimension counts the experts.
        rows: `[R, H]`.
        counts: rows of each expert.
    """
    up = WEIGHTS[0] if module.has_gate else WEIGHTS[1]
    segments = _Segments(counts)
    hidden = segments.linear(rows, parameters[up], parameters.get(f"{up}_bias"), module.is_transposed)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    return segments.linear(hidden, parameters[WEIGHTS[2]], parameters.get(BIASES[2]), module.is_transposed)


@dataclass(frozen=True)
class _Segments:
    """Rows that are sorted by expert.

    Attributes:
        counts: rows of each expert.
    """

    counts: torch.Tensor

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool
    ) -> torch.Tensor:
        """Each row times the matrix of its expert, plus its bias.

        Args:
            weight: `[experts, out, in]`, or `[experts, in, out]` where it is transposed.
            bias: `[experts, out]`.
        """
        matrices = weight if is_transposed else weight.transpose(-2, -1)
        products = grouped_product(rows.to(weight.dtype), matrices, self.counts)
        return products if bias is None else products + bias.repeat_interleave(self.counts, dim=0)


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each row times the matrix of its group, in one kernel where the device has it.

    Args:
        rows: `[R, I]`, those of a group next to each other.
        matrices: `[groups, I, O]`.
        counts: rows of each group.
    """
    if rows.shape[0] == 0 or not device.runs_grouped_products(rows.device):
        return product_by_segment(rows, matrices, counts)
    offsets = counts.cumsum(0, dtype=torch.int32)
    return torch.nn.functional.grouped_mm(rows, matrices, offs=offsets)


def product_by_segment(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The same as `grouped_product`, group by group; a group without rows gets a gradient of 0."""
    parts = rows.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices.unbind(), strict=True)])


class _AllToAll(torch.autograd.Function):
    """Sends rows to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchanged(gradient, received, sent, ctx.group), None, None, None


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _forward)
