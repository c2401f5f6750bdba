"""The optimizer of the master weights, with its state split over the data-parallel ranks.

Megatron-core's `DistributedDataParallel` sums gradients into flat float32 buffers; with the distributed optimizer each
rank gets the sum of an equal range of each bucket, and gathers the updated parameters of the other ranks. In between,
the optimizer of the project's own settings updates this rank's ranges, so results are those of the other engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrl.engine.megatron.parallel import ParallelState
from hybridrl.engine.optim.optimizer import build_optimizer, build_schedule, state_bytes
from hybridrl.errors import ModelError

# Optimizers whose update of an element depends on that element alone, so they may see any part of a parameter.
_ELEMENTWISE = (
    *("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
)


# Settings of Megatron-core's own optimizer that verl passes here, and what to do in place of them.
_OF_MEGATRONS_OPTIMIZER = {
    **dict.fromkeys(
        ("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"),
        "remove it; megatron.optimizer_offload=True keeps the optimizer's state in host memory between updates",
    ),
    "use_precision_aware_optimizer": "remove it; the optimizer's state is float32, and megatron.optimizer_offload=True "
    "keeps it in host memory between updates",
}


def usable_settings(optim: Any) -> Any:
    """Return an `OptimConfig` without settings of Megatron-core's own optimizer that are off.

    Raises:
        ModelError: the optimizer needs whole matrices, or is Megatron-core's own.
    """
    if optim.optimizer_impl != "torch.optim" or optim.optimizer not in _ELEMENTWISE:
        raise ModelError(
            f"optim.optimizer={optim.optimizer} of optim.optimizer_impl={optim.optimizer_impl}: strategy=megatron "
            "updates parts of parameters, so the update of an element may depend on that element alone; choose one "
            f"of torch.optim: {', '.join(_ELEMENTWISE)}"
        )
    overrides = dict(optim.override_optimizer_config or {})
    for name, remedy in _OF_MEGATRONS_OPTIMIZER.items():
        if value := overrides.pop(name, None):
            raise ModelError(
                f"optim.override_optimizer_config.{name}={value!r} is a setting of Megatron-core's own optimizer, and "
                f"strategy=megatron uses torch.optim.{optim.optimizer}: {remedy}"
            )
    return replace(optim, override_optimizer_config=overrides)


@dataclass(slots=True)
class Shard:
    """The range of a parameter that this rank's optimizer updates.

    Attributes:
        chunk: number of the model chunk.
        name: of the parameter in its chunk.
        parameter: this rank's part of it, as the model computes with it.
        start, stop: the range in the flattened parameter.
        master: its values in float32; those of the parameter itself if that is float32.
        is_primary: whether norms and checkpoints take this copy of the range; False for the copies on other ranks.
    """

    chunk: int
    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    master: nn.Parameter
    is_primary: bool

    @property
    def gradient(self) -> torch.Tensor:
        """The range of the summed gradient, a view."""
        main: torch.Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        return main.view(-1)[self.start : self.stop]

    @property
    def values(self) -> torch.Tensor:
        """The range of the parameter, a view."""
        return self.parameter.detach().view(-1)[self.start : self.stop]


class ShardedOptimizer:
    """Updates this rank's ranges of all parameters.

    Args:
        wrapped: the model chunks in Megatron-core's `DistributedDataParallel`.
        state: the layout.
        optim: an `OptimConfig`.
        distributed: whether data-parallel ranks split the state; otherwise each updates whole parameters.

    Attributes:
        shards: this rank's ranges.
        optimizer: of PyTorch; its parameters are the shards' master weights.
        schedule: of the learning rate.

    Raises:
        ModelError: see `usable_settings`.
    """

    def __init__(self, wrapped: Sequence[Any], state: ParallelState, optim: Any, distributed: bool) -> None:
        optim = usable_settings(optim)
        self._wrapped, self._config, self._distributed = wrapped, optim, distributed
        self.shards = list(shards_of(wrapped, state, distributed))
        self.optimizer = build_optimizer([shard.master for shard in self.shards], optim)
        self.schedule = build_schedule(self.optimizer, optim)

    def gradient_norm(self) -> torch.Tensor:
        """The norm over all parameters of all ranks; each element counts once."""
        gradients = [shard.gradient for shard in self.shards if shard.is_primary]
        device = self.shards[0].gradient.device
        square = torch.zeros((), dtype=torch.float64, device=device)
        if gradients:
            square += torch.nn.utils.get_total_norm(gradients).to(torch.float64).square()
        dist.all_reduce(square)
        return square.sqrt().float()

    def nonfinite_gradients(self) -> list[tuple[int, str]]:
        """Chunk and name of parameters with a gradient on this rank that is not finite."""
        return [(shard.chunk, shard.name) for shard in self.shards if not bool(torch.isfinite(shard.gradient).all())]

    def discard_gradients(self) -> None:
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
            for parameter in chunk.module.parameters():
                parameter.grad = None  # that of an interrupted backward pass
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, norm: torch.Tensor) -> None:
        """Clip by the norm, update the parameters on all ranks, and advance the schedule."""
        for shard in self.shards:
            shard.master.grad = shard.gradient.to(shard.master.dtype)
        if self._config.clip_grad:
            masters = [shard.master for shard in self.shards]
            torch.nn.utils.clip_grads_with_norm_(masters, self._config.clip_grad, norm)
        self.optimizer.step()
        self.schedule.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the master weights into the parameters, on all ranks that hold them."""
        for shard in self.shards:
            if shard.master.dtype != shard.parameter.dtype:
                shard.values.copy_(shard.master)
        if self._distributed:
            for chunk in self._wrapped:
                chunk.start_param_sync(force_sync=True)

    def separate_masters(self) -> list[torch.Tensor]:
        """The master weights that do not share their memory with parameters."""
        return [shard.master.detach() for shard in self.shards if shard.master.dtype != shard.parameter.dtype]

    def state_tensors(self) -> list[torch.Tensor]:
        """The tensors of the optimizer's state, without counters of steps."""
        states = [self.optimizer.state.get(shard.master, {}) for shard in self.shards]
        return [
            item
            for state in states
            for _, item in sorted(state.items())
            if isinstance(item, torch.Tensor) and item.ndim
        ]

    def gradient_buffers(self) -> list[torch.Tensor]:
        return gradient_buffers(self._wrapped)

    def first_step_bytes(self) -> int:
        return state_bytes([shard.master for shard in self.shards], self._config)


def shards_of(wrapped: Sequence[Any], state: ParallelState, distributed: bool) -> Iterator[Shard]:
    """The ranges of all parameters that this rank updates; see `ShardedOptimizer`."""
    for number, chunk in enumerate(wrapped):
        names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
        for buffers, expert in ((chunk.buffers, False), (chunk.expert_parallel_buffers, True)):
            for buffer in buffers:
                for bucket in buffer.buckets:
                    for parameter in bucket.params_list:
                        bounds: tuple[int, int] | None = (0, parameter.numel())
                        if distributed:
                            bounds = _own_range(parameter, bucket, buffer)
                        if bounds is not None:
                            is_primary = _is_primary(parameter, expert, buffer.data_parallel_group, state, distributed)
                            yield _make_shard(number, names[id(parameter)], parameter, *bounds, is_primary)


def gradient_buffers(wrapped: Sequence[Any]) -> list[torch.Tensor]:
    """The flat gradients of chunks in `DistributedDataParallel`, whose memory all views of gradients share."""
    return [buffer.grad_data for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _own_range(parameter: nn.Parameter, bucket: Any, buffer: Any) -> tuple[int, int] | None:
    """The range of the flattened parameter that this rank updates; None if it updates nothing of it."""
    group = buffer.data_parallel_group
    # Not `bucket.param_to_index`, which does not count the gaps that align parameters.
    begin, end = (index - bucket.offset for index in buffer.param_index_map[parameter][:2])
    share = bucket.grad_data.numel() // group.size()
    start, stop = max(begin, share * group.rank()), min(end, share * (group.rank() + 1))
    return (start - begin, stop - begin) if start < stop else None


def _is_primary(parameter: Any, expert: bool, group: Any, state: ParallelState, distributed: bool) -> bool:
    if getattr(parameter, "shared", False):  # the last stage's copy of the first stage's embedding
        return False
    if not distributed and group.rank() > 0:
        return False
    return expert or bool(getattr(parameter, "tensor_model_parallel", False)) or state.tp_rank == 0


def _make_shard(chunk: int, name: str, parameter: nn.Parameter, start: int, stop: int, is_primary: bool) -> Shard:
    values = parameter.detach().view(-1)[start:stop]
    master = values if parameter.dtype == torch.float32 else values.float()
    return Shard(chunk, name, parameter, start, stop, nn.Parameter(master), is_primary)
