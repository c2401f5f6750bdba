"""A model under FSDP2: the mesh, the shards, loading them from one rank, gathering them for generation."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hybridrl.engine.fsdp.expert_parallel import ExpertParallel
from hybridrl.errors import ModelError
from hybridrl.layouts.slices import TensorSlice
from hybridrl.layouts.topology import ShardedLayout
from hybridrl.models.loading import decoder_layer_classes
from hybridrl.models.stored import Specs, named_tensors
from hybridrl.models.value import ValueModel
from hybridrl.utils import device, distributed


class Weights(Protocol):
    """Weights that are read one after the other, such as `StoredWeights`."""

    def specs(self) -> Specs:
        """Return the specs of the tensors that `tensors` yields, without reading them."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, by its name in the module that is filled."""


def build_mesh(fsdp_size: int) -> DeviceMesh:
    """The mesh of all ranks: one dimension that shards, or replicas of groups of `fsdp_size` ranks that shard (HSDP).

    Raises:
        ModelError: the world does not divide into groups of that size.
    """
    world = distributed.get_world_size()
    if fsdp_size in (-1, 0) or fsdp_size >= world:
        return init_device_mesh(device.get_device_name(), (world,), mesh_dim_names=("fsdp",))
    if world % fsdp_size:
        raise ModelError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world} ranks; use one of its divisors, or "
            "-1 for all"
        )
    return init_device_mesh(device.get_device_name(), (world // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))


class ShardedModule:
    """A module under FSDP2.

    Each decoder layer is one unit, as are the embedding and the head unless they are tied. The root holds the rest.
    With expert parallelism, the experts of a layer are a unit of their own on another mesh.

    Args:
        module: On the meta device; `fill` gives it its weights.
        compute_dtype: Dtype of parameters and activations in forward and backward; gradients are reduced in float32.
    """

    def __init__(self, module: nn.Module, engine: Any, compute_dtype: torch.dtype):
        self.module = module
        self.mesh = build_mesh(engine.fsdp_size)
        self.replicated = self.mesh.ndim == 2
        self._reshard: dict[nn.Module, bool] = {}
        offload: OffloadPolicy = (
            CPUOffloadPolicy(pin_memory=device.is_gpu()) if engine.offload_policy else OffloadPolicy()
        )
        self.parameter_device = torch.device("cpu") if engine.offload_policy else device.current_device()
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        head_policy = policy
        if isinstance(module, ValueModel):
            head_policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        again = bool(engine.reshard_after_forward)

        def shard(part: Any, after_forward: bool, mixed: MixedPrecisionPolicy = policy, **options: Any) -> None:
            arguments = {"mesh": self.mesh, "mp_policy": mixed, "offload_policy": offload, **options}
            fully_shard(part, reshard_after_forward=after_forward, **arguments)
            self._reshard[part] = after_forward

        self.experts: ExpertParallel | None = None
        if engine.expert_parallel_size > 1:
            replicas = self.mesh.size(0) if self.replicated else 1
            self.experts = ExpertParallel(module, engine.expert_parallel_size, replicas, self.mesh.size(-1))
            # Weights of the routing keep their precision: the experts' function converts what it computes with.
            uncast = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            for part in self.experts.modules:
                own = {"mesh": self.experts.fsdp_mesh, "shard_placement_fn": self.experts.placement}
                shard(part, again, uncast, **own)
                # The tokens of all ranks contribute to its gradient, which FSDP2 would divide by the ranks of its mesh.
                part.set_gradient_divide_factor(float(distributed.get_world_size()))
                part.set_force_sum_reduction_for_comms(self.experts.fsdp_mesh.size(-1) > 1)  # gloo has no other
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()  # type: ignore[operator]
        ends = [] if head is None or head is embedding else [embedding, head]
        tied = bool(ends) and getattr(head, "weight", None) is getattr(embedding, "weight", 0)
        # Tied weights must be in one unit: the root.
        units = self._units(module, engine, apart=[*ends, *(self.experts.modules if self.experts else [])])
        for unit in units:
            shard(unit, again)
        if ends and not tied:
            shard(embedding, again)
            # Its backward follows immediately, so resharding would only gather it again.
            shard(head, False, head_policy)
        shard(module, False)
        if engine.forward_prefetch:
            for unit, following in itertools.pairwise(units):
                unit.set_modules_to_forward_prefetch([following])

    def fill(self, open_weights: Callable[[], Weights]) -> None:
        """Distribute the weights that `open_weights` returns. It is called on rank 0 only.

        A device holds one whole parameter at a time, and rank 0 holds one decoder layer in main memory. Weights are
        sent in the dtype in which they were read.

        Raises:
            ModelError: on every rank, if rank 0 cannot read the model, or reads another one than was built here.
        """
        message: list[Any] = [None, None]

        def described() -> Weights | None:
            try:
                source = open_weights()
                message[0] = source.specs()
                return source
            except Exception as error:  # all ranks must see the error, or the others would wait forever
                message[1] = error
                return None

        source = distributed.on_rank_0(described)
        dist.broadcast_object_list(message, src=0)
        if message[1] is not None:
            raise message[1]
        dtypes = {name: (dtype, shape) for name, dtype, shape in message[0]}
        self._allocate()
        if hasattr(self.module, "tie_weights"):
            self.module.tie_weights()  # type: ignore[operator]  # `_allocate` separates tied parameters
        targets = dict(named_tensors(self.module))
        expected = {name: tuple(t.shape) for name, t in targets.items()}
        if {name: shape for name, (_, shape) in dtypes.items()} != expected:
            differing = sorted(set(dtypes) ^ set(expected)) or [n for n in expected if expected[n] != dtypes[n][1]]
            raise ModelError(
                f"the loaded model and the one built from its configuration differ in {', '.join(differing[:5])}"
            )
        with torch.no_grad():
            for name, value in _announced(source):
                self._receive(targets.pop(name), value, *dtypes[name])
        if targets:
            raise ModelError(f"the weight files lack {', '.join(sorted(targets)[:5])}")

    def _allocate(self) -> None:
        """Give parameters and buffers memory. FSDP2 brings parameters to the device that computes, but no buffers."""
        here = device.current_device()
        self.module._apply(
            lambda tensor: torch.empty_like(
                tensor, device=self.parameter_device if isinstance(tensor, nn.Parameter) else here
            )
        )

    def _receive(
        self, target: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        where = device.current_device()
        whole = (
            torch.empty(shape, dtype=dtype, device=where) if value is None else value.detach().to(where).contiguous()
        )
        dist.broadcast(whole, src=0)
        if isinstance(target, DTensor) and self.experts is not None and self.experts.holds(target):
            every = TensorSlice((0,) * len(shape), shape)
            target.to_local().copy_(whole[self.experts.tensor_slice(target).within(every)])
        elif isinstance(target, DTensor):
            shard = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None).to_local()
            target.to_local().copy_(shard)
        else:
            target.copy_(whole)

    def before_backward(self, last: bool) -> None:
        """With replicas, sum gradients over the replicas only after the last micro-batch.

        Within a replica they are summed immediately, so that no rank keeps whole gradients.
        """
        if self.replicated:
            self.module.set_requires_all_reduce(last)  # type: ignore[operator]

    def reshard(self) -> None:
        """Free parameters that a forward pass without a backward pass left gathered."""
        for part in self._reshard:
            part.reshard()  # type: ignore[operator]

    @property
    def layout(self) -> ShardedLayout:
        """Return the layout of the parameters on all ranks."""
        experts = 1 if self.experts is None else self.experts.size
        return ShardedLayout(self.mesh.size(-1), self.mesh.size(0) if self.replicated else 1, experts)

    @property
    def replica(self) -> int:
        """Number of the replica that this rank's shards belong to."""
        return int(self.mesh.get_local_rank(0)) if self.replicated else 0

    def tensor_slice(self, tensor: DTensor) -> TensorSlice:
        """Return the elements of a parameter that are on this rank: FSDP2 cuts the first dimension as `torch.chunk`."""
        if self.experts is not None and self.experts.holds(tensor):
            return self.experts.tensor_slice(tensor)
        rows, shards, index = tensor.shape[0], self.mesh.size(-1), self.mesh.get_local_rank(self.mesh.ndim - 1)
        size = -(-rows // shards)
        begin, end = min(index * size, rows), min((index + 1) * size, rows)
        if not tensor.placements[-1].is_shard(0) or tuple(tensor.to_local().shape) != (end - begin, *tensor.shape[1:]):
            raise ModelError(f"a parameter has placements {tensor.placements}, and only rows can be exported")
        return TensorSlice((begin, *(0 for _ in tensor.shape[1:])), (end, *tensor.shape[1:]))

    def full_tensor(self, tensor: DTensor) -> torch.Tensor:
        """Return a whole parameter, or a whole tensor like it. All ranks call it together."""
        if self.experts is not None and self.experts.holds(tensor):
            return self.experts.full_tensor(tensor)
        return tensor.full_tensor()

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Within the context, every rank holds every parameter, and forward passes need no collective."""
        try:
            for part in self._reshard:
                part.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
                part.unshard()  # type: ignore[operator]
            if self.experts is not None:
                self.experts.gather()
            yield self.module
        finally:
            if self.experts is not None:
                self.experts.release()
            for part, again in self._reshard.items():
                part.reshard()  # type: ignore[operator]
                part.set_reshard_after_forward(again, recurse=False)  # type: ignore[operator]

    @staticmethod
    def _units(module: nn.Module, engine: Any, apart: list[nn.Module]) -> list[Any]:
        """Modules that become units, children before parents: decoder layers, or those selected by `min_num_params`."""
        policy = getattr(engine, "wrap_policy", None)
        least = getattr(policy, "min_num_params", 0) or 0
        if least:
            selected: list[Any] = []
            _collect_by_size(module, least, selected, {id(part) for part in apart})
            return [unit for unit in selected if unit is not module]
        classes = decoder_layer_classes(module, getattr(policy, "transformer_layer_cls_to_wrap", None))
        units = [m for m in module.modules() if type(m).__name__ in classes]
        if not units:
            raise ModelError(
                f"{type(module).__name__} does not say which of its modules are decoder layers (looked for "
                f"{', '.join(sorted(classes)) or 'nothing'}); set fsdp_config.wrap_policy.min_num_params to "
                "shard by size"
            )
        return units


def _collect_by_size(module: nn.Module, least: int, units: list[Any], skipped: set[int]) -> int:
    """Append modules with at least `least` parameters outside of units below them; return how many remain."""
    if id(module) in skipped:
        return 0
    remaining = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    remaining += sum(_collect_by_size(child, least, units, skipped) for child in module.children())
    if remaining < least or isinstance(module, nn.ModuleList):
        return remaining
    units.append(module)
    return 0


def _announced(source: Weights | None) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield on every rank the name of the next tensor in rank 0's order, and on rank 0 its value.

    Raises:
        ModelError: on every rank, if rank 0 cannot read one.
    """
    values = None if source is None else source.tensors()
    while True:
        message: list[Any] = [None, None]
        value = None
        if values is not None:
            try:
                message[0], value = next(values, (None, None))
            except Exception as error:  # see `fill`
                message[1] = error
        dist.broadcast_object_list(message, src=0)
        if message[1] is not None:
            raise message[1]
        if message[0] is None:
            return
        yield message[0], value
