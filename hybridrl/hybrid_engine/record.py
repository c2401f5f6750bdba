"""Records which slice of each checkpoint tensor an inference engine's own loader copies where, and repeats the copies.

The loader is run once with tensors that have a shape and no memory. Whatever it does to find its slice of a tensor
(narrow, chunk, select, index, reshape) gives a view, and a view of a tensor without memory still knows its offset and
strides. Only the copies into the engine's parameters are intercepted, so that no model needs a table of names.

`LoadReplay` runs the loader again for each update, and gives every copy the elements that have arrived. The engine's
own code decides where they go, also where it loads into temporary tensors and repacks them for its kernels.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.exchange import SliceValues, assemble
from hybridrl.layouts.digest import digest
from hybridrl.layouts.module_slices import slice_of
from hybridrl.layouts.slices import TensorSlice, TensorSlices, whole


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """A slice of a checkpoint tensor that a loader copies into a slice of a parameter, elements in the same order."""

    source: str
    slice: TensorSlice
    parameter: str
    parameter_slice: TensorSlice


@dataclass(frozen=True, slots=True)
class _Whole:
    name: str
    shape: tuple[int, ...]
    offset: int


class LoadRecorder(TorchDispatchMode):
    """Within the context, copies from `sources` into parameters are recorded and not carried out.

    Args:
        parameters: the engine's parameters and buffers by name. They may have memory; it is not written. None: the
            places in parameters are not recorded, so that the loader may copy into temporary tensors.
        shapes: shape of each tensor of the checkpoint by name.
        dtype: of the checkpoint's tensors; where they differ, by name.

    Attributes:
        loaded: what the loader copied, if there are `parameters`.
        uses: how often the loader copied each slice of each tensor into a tensor that has memory.
        unplanned: checkpoint tensors that cannot be planned, with the reason: the loader computed something new from
            them, such as a transpose in memory, copied elements in an order that is not that of a slice, or changed a
            tensor with them by another operation than a copy.
        skipped: checkpoint tensors that the loader never copied, known once the context ends. Some it leaves out on
            purpose, e.g. what another rank holds, `rotary_emb.inv_freq`, or `lm_head` of a model with tied embeddings.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor] | None,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | Mapping[str, torch.dtype],
    ) -> None:
        super().__init__()
        self.loaded: list[LoadedSlice] = []
        self.uses: Counter[tuple[str, TensorSlice]] = Counter()
        self.unplanned: dict[str, str] = {}
        self.skipped: tuple[str, ...] = ()
        dtypes = dict.fromkeys(shapes, dtype) if isinstance(dtype, torch.dtype) else dtype
        self._tensors = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
        self._sources = {_storage(tensor): name for name, tensor in self._tensors.items()}
        self._shapes = dict(shapes)
        self._required: dict[str, dict[TensorSlice, None]] = defaultdict(dict)
        self._anywhere = parameters is None
        self._parameters: dict[int, list[_Whole]] = defaultdict(list)
        for name, tensor in (parameters or {}).items():
            if tensor.is_contiguous():
                parameter = _Whole(name, tuple(tensor.shape), int(tensor.storage_offset()))
                self._parameters[_storage(tensor)].append(parameter)
        self._derived: dict[int, tuple[torch.Tensor, str, set[str]]] = {}
        self._derived_has_memory = False

    def sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors without memory, for the loader."""
        yield from self._tensors.items()

    def required(self) -> dict[str, TensorSlices]:
        """Return the slices of each checkpoint tensor that this process holds once loaded. Equal slices count once."""
        return {name: tuple(slices) for name, slices in self._required.items()}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        recorded = self._required.keys() | self.unplanned.keys()
        self.skipped = tuple(name for name in self._tensors if name not in recorded)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Most operations of an update have nothing to do with the sources, which are all without memory.
        if not self._derived_has_memory and not _any_meta(args) and not (kwargs and _any_meta(kwargs.values())):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and self._names(args[1]):
            self._record(args[0], args[1])
            return args[0]
        if func is torch.ops.aten._to_copy.default and _storage(args[0]) in self._sources and _only_moves(args, kwargs):
            return args[0]  # to the engine's device, on which the copy then is
        if func in _NEED_VALUES and args[0].is_meta and (names := self._names(args[0])):
            return self._without_values(func, names, args, kwargs or {})
        names = {name for leaf in tree_leaves((args, kwargs)) for name in self._names(leaf)}
        if names and not self._may_change(func, args, kwargs or {}):
            self._give_up(names, f"the loader changes a tensor by {func}")
            changed = list(_changed(func, args, kwargs or {}))
            return (changed[0] if len(changed) == 1 else changed) if func._schema.returns else None
        out = func(*args, **(kwargs or {}))
        if names:
            storages = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and _storage(leaf) not in storages:
                    self._derive(leaf, func, names)
        return out

    def _derive(self, tensor: torch.Tensor, func: Any, names: set[str]) -> None:
        """Note that an operation has computed a tensor from sources."""
        self._derived[_storage(tensor)] = (tensor, str(func), names)
        self._derived_has_memory |= not tensor.is_meta

    def _without_values(self, func: Any, names: set[str], args: Any, kwargs: Any) -> Any:
        """Do in place of an operation that fails without memory what is nearest to it."""
        if func is torch.ops.aten._local_scalar_dense.default:
            self._give_up(names, f"the loader reads the value of an element by {func}")
            return torch.zeros((), dtype=args[0].dtype).item()
        if kwargs.get("device") not in (None, torch.device("meta")):
            self._give_up(names, f"the loader moves what it has computed by {func}")
        out = func(*args, **(kwargs | {"device": torch.device("meta")}))
        self._derive(out, func, names)
        return out

    def _may_change(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation with sources changes no tensor, or only the shape of a source, or what was computed."""
        changed = list(_changed(func, args, kwargs))
        if torch.Tag.inplace_view in func.tags:
            return all(self._names(tensor) for tensor in changed)
        return all(_storage(tensor) in self._derived for tensor in changed)

    def _names(self, value: Any) -> set[str]:
        """The checkpoint tensors that a value is a view of, or was computed from."""
        if not isinstance(value, torch.Tensor):
            return set()
        key = _storage(value)
        if key in self._sources:
            return {self._sources[key]}
        return self._derived[key][2] if key in self._derived else set()

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        key = _storage(source)
        if key in self._derived:
            _, operation, names = self._derived[key]
            self._give_up(names, f"the loader computes {operation} before it copies")
            return
        name = self._sources[key]
        if target.shape != source.shape:
            self._give_up({name}, f"the loader broadcasts {tuple(source.shape)} to {tuple(target.shape)}")
            return
        tensor_slice = slice_of(source, self._shapes[name])
        if tensor_slice is not None and self._place(name, tensor_slice, target):
            self._required[name][tensor_slice] = None
            if not target.is_meta:
                self.uses[name, tensor_slice] += 1
            return
        self._give_up(
            {name}, f"the loader copies {tuple(source.shape)} elements that are no slice, or into no parameter"
        )

    def _place(self, name: str, tensor_slice: TensorSlice, target: torch.Tensor) -> bool:
        """Note where a slice goes; False where that is unknown and has to be known."""
        for parameter in self._parameters.get(_storage(target), ()):
            there = slice_of(target, parameter.shape, parameter.offset)
            if there is not None and _extents(tensor_slice) == _extents(there):
                self.loaded.append(LoadedSlice(name, tensor_slice, parameter.name, there))
                return True
        return self._anywhere

    def _give_up(self, names: set[str], reason: str) -> None:
        for name in names:
            self.unplanned.setdefault(name, reason)


class LoadReplay(LoadRecorder):
    """Within the context, copies from `sources` bring the elements that have arrived.

    Args:
        shapes, dtypes: of each tensor of the checkpoint by name, as the loader was recorded with.
        uses: `LoadRecorder.uses` of the recorded load. What has been copied as often is not kept any longer.
        unplanned: tensors that could not be planned. The loader gets them with their elements, all of them.

    Attributes:
        wrong: tensors of which the digest of a piece differs, once it is where the loader copies it.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        uses: Mapping[tuple[str, TensorSlice], int],
        unplanned: Iterable[str] = (),
    ) -> None:
        super().__init__(None, shapes, dtypes)
        self._whole = frozenset(unplanned)
        self._remaining = Counter({use: number for use, number in uses.items() if use[0] not in self._whole})
        self._by_name: dict[str, list[TensorSlice]] = defaultdict(list)
        for name, tensor_slice in self._remaining:
            self._by_name[name].append(tensor_slice)
        self.wrong: list[str] = []
        self._arrived: dict[str, list[SliceValues]] = {}
        self._digests: dict[str, Mapping[TensorSlice, int]] = {}
        self._cloned: set[str] = set()

    def arrive(
        self, name: str, pieces: Sequence[SliceValues], digests: Mapping[TensorSlice, int] | None = None
    ) -> None:
        """Take the pieces of a tensor.

        Args:
            name: of the tensor.
            pieces: they may be views of memory that is valid until `keep_the_rest`.
            digests: of each piece; None: they are not checked.
        """
        self._arrived[name] = list(pieces)
        self._digests[name] = digests or {}
        if digests and any(
            digest(values, tensor_slice, self._shapes[name] or (1,)) != digests[tensor_slice]
            for tensor_slice, values in pieces
        ):
            self.wrong.append(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return what the loader gets for a tensor that has arrived."""
        if name not in self._whole:
            return self._tensors[name]
        pieces = self._arrived.pop(name)
        tensor_slice = whole(self._shapes[name] or (1,))
        value = torch.empty(tensor_slice.extents, dtype=pieces[0][1].dtype, device=pieces[0][1].device)
        assemble(value, tensor_slice, pieces, name)
        self._check(name, tensor_slice, value)
        return value.view(self._shapes[name])

    def keep_the_rest(self) -> None:
        """Copy what has arrived and still waits for the rest of its layer."""
        for name, pieces in self._arrived.items():
            if name not in self._cloned:
                self._arrived[name] = [(tensor_slice, values.clone()) for tensor_slice, values in pieces]
                self._cloned.add(name)

    def faults(self) -> list[str]:
        """Return what went wrong, each as a sentence: tensors that were not loaded, or not as they were sent."""
        missing = sorted({name for name, _ in +self._remaining})
        faults = []
        if missing:
            faults.append(
                f"tensors that were not loaded as they were recorded ({len(missing)}): {', '.join(missing[:3])}"
            )
        if self.wrong:
            wrong = sorted(set(self.wrong))
            faults.append(f"tensors that differ from those of training ({len(wrong)}): {', '.join(wrong[:3])}")
        return faults

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.is_meta:
            return  # a layer that is not complete only counts its elements
        key = _storage(source)
        if key in self._derived:
            _, operation, names = self._derived[key]
            self._give_up(names, f"the loader computes {operation} before it copies")
        name = self._sources[key]
        tensor_slice = slice_of(source, self._shapes[name])
        if tensor_slice is None or target.shape != source.shape or name not in self._arrived:
            self._give_up({name}, f"the loader copies {tuple(source.shape)} elements once more, or other ones")
            return
        self._write(target, name, tensor_slice)
        self._remaining[name, tensor_slice] -= 1
        if not any(self._remaining[name, other] > 0 for other in self._by_name[name]):
            del self._arrived[name], self._digests[name]
            self._cloned.discard(name)

    def _write(self, target: torch.Tensor, name: str, tensor_slice: TensorSlice) -> None:
        pieces = self._arrived[name]
        exact = next((values for at, values in pieces if at == tensor_slice), None)
        if exact is not None:
            target.copy_(exact.reshape(target.shape))
        else:
            try:
                assemble(target.view(tensor_slice.extents), tensor_slice, pieces, name)
            except RuntimeError:  # the target's strides do not allow the slice's shape
                value = torch.empty(tensor_slice.extents, dtype=pieces[0][1].dtype, device=pieces[0][1].device)
                assemble(value, tensor_slice, pieces, name)
                target.copy_(value.reshape(target.shape))
        if self._digests[name] and target.dtype == pieces[0][1].dtype:
            self._check(name, tensor_slice, target.reshape(tensor_slice.extents))

    def _check(self, name: str, tensor_slice: TensorSlice, values: torch.Tensor) -> None:
        """Compare the digests of the pieces that lie in a slice with those of the elements that are there now."""
        shape = self._shapes[name] or (1,)
        for at, expected in self._digests[name].items():
            if tensor_slice.intersect(at) == at and digest(values[at.within(tensor_slice)], at, shape) != expected:
                self.wrong.append(name)

    def _give_up(self, names: set[str], reason: str) -> None:
        raise ModelError(
            f"{', '.join(sorted(names))}: {reason}, which it did not when it was recorded; set "
            "actor_rollout_ref.rollout.checkpoint_engine.method=streamed"
        )


#: operations that fail for tensors without memory
_NEED_VALUES = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default)


def _any_meta(values: Iterable[Any]) -> bool:
    """Whether a tensor without memory is among the values, or in a list of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                return True
        elif isinstance(value, (list, tuple)) and _any_meta(value):
            return True
    return False


def _only_moves(args: Any, kwargs: Any) -> bool:
    """Whether a conversion keeps the dtype."""
    return (kwargs or {}).get("dtype") in (None, args[0].dtype)


def _changed(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes into."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _extents(tensor_slice: TensorSlice) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(tensor_slice.start, tensor_slice.stop, strict=True) if b - a > 1)


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
