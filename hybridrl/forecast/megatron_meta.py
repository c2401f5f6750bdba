"""Megatron-core on the meta device, for one rank of a layout whose other ranks do not exist.

Nothing is stored, computed or sent. What would be read from values is replaced by numbers of the right sum: the tokens
of a micro-batch go to all experts alike.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.engine.megatron.forward import Arranger, RankLayout, packed_parameters
from hybridrl.engine.megatron.layers import CausalAttention
from hybridrl.engine.megatron.pipeline import Schedule
from hybridrl.engine.microbatch import MicroBatchLayout
from hybridrl.forecast.meta_tensors import fused_attention
from hybridrl.utils import device

META = torch.device("meta")
_HOST = torch.device("cpu")


@contextlib.contextmanager
def rank_alone(rank: int, ranks: int) -> Iterator[None]:
    """Within the context, this process is a rank of a process group in which nothing is sent.

    Raises:
        RuntimeError: the process has a process group already.
    """
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("this process has a process group already")
    devices = dist.Backend.backend_capability["fake"]
    if META.type not in devices:
        devices.append(META.type)
    options: Any = FakeProcessGroup.Options
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks, pg_options=options())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def on_meta(experts_per_token: int) -> Iterator[None]:
    """Within the context, Megatron-core puts tensors on the meta device, and nothing is sent.

    Args:
        experts_per_token: 0 for a model without experts.
    """
    with device.computing_on(META), _Placed(), _Unsent(experts_per_token):
        yield


class _Placed(TorchFunctionMode):
    """Tensors that are made on a device are made on the meta device, and stay there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cpu, torch.Tensor.cuda) and args[0].device == META:
            return args[0]
        if not kwargs:
            return func(*args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        return func(*args, **kwargs)


class _Unsent(TorchDispatchMode):
    """Mode in which collectives return at once, and experts get as many tokens as with real values."""

    def __init__(self, experts_per_token: int) -> None:
        super().__init__()
        self._experts_per_token = experts_per_token

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            from torch._C._distributed_c10d import FakeWork

            returned = [str(value.type) for value in func._schema.returns]
            results = tuple(FakeWork().boxed() if "Work" in kind else args[0] for kind in returned)
            return results[0] if len(results) == 1 else results
        if func is torch.ops.aten.masked_select.default and args[0].device == META:
            # The mask of a router: for each of the experts, whether a token goes there.
            return args[0].new_empty(args[1].shape[-1] * self._experts_per_token)
        return func(*args, **(kwargs or {}))


class _Attention(CausalAttention):
    """Allocates what fused kernels do."""

    #: whether keys and values of other ranks come one part at a time, as in Transformer Engine, and are not gathered
    in_turn = False

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if self.cp_group.size() > 1 and not self.in_turn:
            return super().forward(query, key, value, packed_seq_params=packed_seq_params)
        if packed_seq_params is None:
            return self._attend(query, key, value, None)
        return self._attend(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), None).squeeze(1)

    def _kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        out: torch.Tensor = fused_attention(query, key, value)[0]
        return out


def prepare(chunks: Sequence[nn.Module], kernels: bool, engine: bool) -> None:
    """Let chunks of a model compute on the meta device.

    Args:
        kernels: whether attention to a window takes no mask.
        engine: as the layers of Transformer Engine do: keys and values of other ranks come in turn, and all experts of
            a rank are one product.
    """
    for module in (part for chunk in chunks for part in chunk.modules()):
        if type(module) is CausalAttention:
            module.__class__ = _Attention
            attention: Any = module
            attention.in_turn = engine
            attention.window = 0 if kernels else attention.window
        if engine and hasattr(module, "local_experts"):
            experts: Any = module
            experts.forward = functools.partial(_all_tokens, experts.local_experts[0])
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            _balance(dispatcher)


def _all_tokens(expert: nn.Module, tokens: torch.Tensor, counts: Any, probabilities: torch.Tensor) -> Any:
    return expert(tokens, probabilities)


def _balance(dispatcher: Any) -> None:
    """Let each expert get as many tokens as the others, from each rank."""
    experts, local, parts = dispatcher.num_experts, dispatcher.num_local_experts, dispatcher.tp_size
    order = torch.arange(experts * parts)
    dispatcher.sort_input_by_local_experts = order.reshape(-1, local).T.ravel()
    dispatcher.restore_output_by_local_experts = order.reshape(local, -1).T.ravel()

    def preprocess(routing_map: torch.Tensor) -> torch.Tensor:
        total = len(routing_map) * dispatcher.config.moe_router_topk
        dispatcher.num_out_tokens = total
        each = torch.full((experts,), total // experts)
        each[: total % experts] += 1
        own = each[dispatcher.local_expert_indices]
        if dispatcher.ep_size > 1 or parts > 1:
            from_ranks = own.expand(parts, dispatcher.ep_size, -1)
            dispatcher.input_splits = each.reshape(dispatcher.ep_size, local).sum(1)
            dispatcher.output_splits = from_ranks.sum(2)[dispatcher.tp_rank]
            dispatcher.output_splits_tp = from_ranks.sum((1, 2))
            dispatcher._maybe_update_cuda_sync_point("before_ep_alltoall")
        else:
            from_ranks = own
            dispatcher._maybe_update_cuda_sync_point("before_finish")
        if local > 1:
            dispatcher.num_global_tokens_per_local_expert = from_ranks.reshape(-1, local)
            dispatcher._maybe_update_cuda_sync_point("before_permutation_2")
        return from_ranks.reshape(-1, local).sum(0)

    dispatcher.preprocess = preprocess


class MetaLayout(RankLayout):
    """A micro-batch whose tokens are on the meta device."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.owned is None else tensor.new_empty(len(self.selected), *tensor.shape[1:])


class MetaArranger(Arranger):
    """Arranges micro-batches in main memory, and puts them on the meta device."""

    def arrange(self, layout: MicroBatchLayout, shape: tuple[int, int] | None = None) -> RankLayout:
        arranged = super().arrange(layout, shape)
        names = ("input_ids", "position_ids", "lengths", "selected", "labels", "owned", "inputs")
        return MetaLayout(**{name: getattr(arranged, name) for name in names})


class MetaSchedule(Schedule):
    """Runs micro-batches on the meta device. The boundaries of sequences stay in main memory, where they are read."""

    def _packed_parameters(self, layout: RankLayout) -> Any:
        return packed_parameters(layout, _HOST)
