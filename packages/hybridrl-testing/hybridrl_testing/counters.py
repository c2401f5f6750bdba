"""Counts the bytes that a process receives and allocates, below everything that could forget to say so."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: operations of which a rank receives the whole of what they write, if it is not the root that sends it
_WHOLE = frozenset({"recv_", "recv_any_source_", "broadcast_", "scatter_", "allreduce_", "allreduce_coalesced_"})
#: operations whose output holds a part per rank of the group, one of which is the rank's own
_PARTS = frozenset(
    {"allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "alltoall_"}
    | {"alltoall_base_", "gather_"}
)
_SEND = frozenset({"send", "barrier", "monitored_barrier_"})


class ReceivedBytes(TorchDispatchMode):
    """Within the context, counts the bytes that each operation of `torch.distributed` brings to this rank.

    An all-to-all is counted as if all parts were of equal size, an all-reduce as one whole tensor.

    Attributes:
        by_operation: bytes by the operation's name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operation: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Return the sum of all bytes received."""
        return self.by_operation.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            self._count(name, args)
        elif space == "_c10d_functional" and name.startswith("all_gather_into_tensor"):
            inputs = sum(leaf.nbytes for leaf in _tensors(args))
            self.by_operation[name] += sum(leaf.nbytes for leaf in _tensors(out)) - inputs
        elif space == "_c10d_functional" and name != "wait_tensor":
            self.by_operation[name] += sum(leaf.nbytes for leaf in _tensors(out))
        return out

    def _count(self, name: str, args: Any) -> None:
        if name in _SEND:
            return
        size = sum(leaf.nbytes for leaf in _tensors(args[0]))
        if name in _PARTS:
            group = next(arg for arg in args if not isinstance(arg, (torch.Tensor, list, tuple)))
            ranks = dist.ProcessGroup.unbox(group).size()
            size -= size // ranks
        elif name == "broadcast_":
            group, root = args[1], args[2]
            if dist.ProcessGroup.unbox(group).rank() == root:
                size = 0
        elif name not in _WHOLE:
            raise NotImplementedError(f"no rule says how many bytes c10d::{name} brings")
        self.by_operation[name] += size


class AllocationCounter(TorchDispatchMode):
    """Within the context, counts the bytes of tensors that operations allocate and that are still alive.

    Memory that did not come from an operation is not counted, such as that of `torch.frombuffer`.

    Attributes:
        now: bytes that are alive, of those allocated within the context.
        peak: the largest value of `now`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        storages = {_storage(leaf)._cdata for leaf in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for leaf in _tensors(out):
            storage = _storage(leaf)
            if storage._cdata not in storages and leaf.device.type != "meta":
                storages.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, size: int) -> None:
        self.now -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
