"""DataProto, the batch, and DataProtoItem, one row of it.

Methods that choose, join or repeat rows return a new batch; slices share the memory of the tensors they were cut from.
`to`, `pop`, `rename`, `union`, `reorder` and `padding` change the batch itself. meta_info dicts are never shared between batches
(their values are).

Legend: B rows of the batch.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from hybridrl.protocol import merge, rows, storage, transport


class DataProtoConfig:
    """Settings of all batches of this process.

    Attributes:
        auto_padding: batches may be cut into uneven chunks and are padded where a worker group needs even ones.
        auto_padding_key: the meta_info key that says the same of one batch.
    """

    auto_padding: bool = False
    auto_padding_key: str = "_auto_padding"


@dataclass(eq=False, repr=False)
class DataProtoItem:
    """One row of a batch: `batch` without its batch dimension, one value a key in `non_tensor_batch`."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        transport.check_fields(self.batch)
        state = (self.batch, self.non_tensor_batch, self.meta_info)
        return _load_row, (type(self), *transport.dumps(state, int(protocol)))

    def __repr__(self) -> str:
        fields = sorted(self.batch.keys()) if self.batch is not None else []
        return f"{type(self).__name__}(batch={fields}, non_tensor_batch={sorted(self.non_tensor_batch)})"


@dataclass(eq=False, repr=False)
class DataProto:
    """A batch of B rows.

    Attributes:
        batch: tensors by name, each with first dimension B; None where there are none.
        non_tensor_batch: NumPy arrays by name, each of length B; Python values stand in arrays of dtype object.
        meta_info: what belongs to the batch as a whole.

    Raises:
        TypeError, ValueError: the parts do not fit together (see `check_consistency`).
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    # ---- making one -------------------------------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, torch.Tensor | np.ndarray | Sequence[Any]],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """Make a batch from one dict: tensors go to `batch`, arrays and lists to `non_tensor_batch`.

        Raises:
            TypeError: a value is neither a tensor, nor an array, nor a list.
        """
        tensors, non_tensors = {}, {}
        for key, value in data.items():
            if isinstance(value, (torch.Tensor, TensorDictBase)):
                tensors[key] = value
            elif isinstance(value, (np.ndarray, list, tuple)):
                non_tensors[key] = value
            else:
                raise TypeError(f"field '{key}' must be a tensor, a NumPy array or a list, found {type(value).__name__}")
        return cls.from_dict(tensors, non_tensors, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Make a batch from tensors and from arrays or lists (a list becomes an object array with one entry a row).

        Args:
            num_batch_dims: how many leading dimensions of the tensors belong to the batch; above 1 only without non-tensors.
            auto_padding: the batch may be cut into uneven chunks and is padded where even ones are needed.

        Raises:
            TypeError, ValueError: a value of the wrong type, or fields of different lengths, by name.
        """
        if num_batch_dims < 1:
            raise ValueError(f"num_batch_dims must be at least 1, found {num_batch_dims}")
        if non_tensors and num_batch_dims != 1:
            raise ValueError(f"non-tensors have one batch dimension, found num_batch_dims={num_batch_dims}")
        batch = _tensordict(tensors, num_batch_dims) if tensors else None
        arrays = {}
        for key, value in (non_tensors or {}).items():
            if not isinstance(value, (np.ndarray, list, tuple)):
                raise TypeError(f"non-tensor field '{key}' must be a NumPy array or a list, found {type(value).__name__}")
            arrays[key] = rows.as_array(value)
        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """Make a batch from a TensorDict: stacks of non-tensor data become arrays, single non-tensor data goes to meta_info."""
        tensors, arrays, meta = {}, {}, dict(meta_info or {})
        for key in tensor_dict.keys():
            value = tensor_dict.get(key)
            if isinstance(value, NonTensorData):
                meta[key] = value.data
            elif isinstance(value, NonTensorStack):
                arrays[key] = rows.object_array(value.tolist())
            else:
                tensors[key] = value
        batch_size = tensor_dict.batch_size[:num_batch_dims]
        batch = TensorDict(tensors, batch_size=batch_size, device=tensor_dict.device) if tensors else None
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    def to_tensordict(self) -> TensorDict:
        """Return all three parts as one TensorDict; the inverse of `from_tensordict`.

        Raises:
            ValueError: a name stands in more than one part.
        """
        names = [*(self.batch.keys() if self.batch is not None else ()), *self.non_tensor_batch, *self.meta_info]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"to_tensordict: {twice} stand in more than one of batch, non_tensor_batch and meta_info")
        device = None if self.batch is None else self.batch.device
        batch_size = [len(self)] if self.batch is None else self.batch.batch_size
        result = TensorDict({} if self.batch is None else dict(self.batch.items()), batch_size=batch_size, device=device)
        for key, array in self.non_tensor_batch.items():
            result.set(key, NonTensorStack(*(NonTensorData(value) for value in array)))
        for key, value in self.meta_info.items():
            result.set(key, NonTensorData(value, batch_size=batch_size))
        return result

    # ---- looking at it ----------------------------------------------------------------------------------------------

    def check_consistency(self) -> None:
        """Check that all fields have the same number of rows.

        Raises:
            TypeError: `batch` is no TensorDict, or a non-tensor field is no NumPy array.
            ValueError: a field has another number of rows, or `batch` has no batch dimension.
        """
        length = None
        if self.batch is not None:
            if not isinstance(self.batch, TensorDictBase):
                raise TypeError(f"batch must be a TensorDict, found {type(self.batch).__name__}; use DataProto.from_dict")
            if not self.batch.batch_size:
                raise ValueError("batch must have at least one batch dimension")
            length = self.batch.batch_size[0]
        for key, value in self.non_tensor_batch.items():
            if not isinstance(value, np.ndarray):
                raise TypeError(
                    f"non-tensor field '{key}' must be a NumPy array, found {type(value).__name__}; "
                    "use DataProto.from_dict, which converts lists"
                )
            if value.ndim == 0 or value.shape[0] != (value.shape[0] if length is None else length):
                raise ValueError(f"non-tensor field '{key}' has shape {value.shape}, but the batch has {length} rows")
            length = value.shape[0]

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        for value in self.non_tensor_batch.values():
            return value.shape[0]
        return 0

    def __repr__(self) -> str:
        fields = sorted(self.batch.keys()) if self.batch is not None else []
        return (
            f"{type(self).__name__}(rows={len(self)}, batch={fields}, non_tensor_batch={sorted(self.non_tensor_batch)}, "
            f"meta_info={sorted(map(str, self.meta_info))})"
        )

    def get_data_info(self) -> str:
        """Return one line a field: its type, dtype and shape."""
        lines = [f"{type(self).__name__} of {len(self)} rows"]
        for key, value in self.batch.items() if self.batch is not None else ():
            lines.append(f"  batch.{key}: {_describe(value)}")
        for key, array in self.non_tensor_batch.items():
            entry = f" of {type(array.flat[0]).__name__}" if array.dtype == object and array.size else ""
            lines.append(f"  non_tensor_batch.{key}: ndarray {array.dtype}{list(array.shape)}{entry}")
        lines += [f"  meta_info.{key}: {type(value).__name__}" for key, value in self.meta_info.items()]
        return "\n".join(lines)

    def print_size(self, prefix: str = "") -> None:
        """Print the memory that the tensors and the arrays take, in GB (1024^3 bytes; objects count as pointers)."""
        tensors = 0 if self.batch is None else self.batch.bytes()
        arrays = sum(value.nbytes for value in self.non_tensor_batch.values())
        text = f"Size of tensordict: {tensors / 1024**3} GB, size of non_tensor_batch: {arrays / 1024**3} GB"
        print(f"{prefix}, {text}" if prefix else text)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def __getitem__(self, item: Any) -> Any:
        """Return a row (int), a view (slice) or a copy of rows chosen by a list, an array, a tensor or a mask."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (list, np.ndarray, torch.Tensor)) and np.ndim(item) > 0:
            return self.select_idxs(item)
        if isinstance(item, bool) or not isinstance(item, (int, np.integer, np.ndarray, torch.Tensor)):
            raise TypeError(f"a batch is indexed by an int, slice, list, array or mask, found {type(item).__name__}")
        index = int(item)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} is outside a batch of {len(self)} rows")
        batch = None if self.batch is None else self.batch[index]
        values = {key: value[index] for key, value in self.non_tensor_batch.items()}
        return DataProtoItem(batch=batch, non_tensor_batch=values, meta_info=dict(self.meta_info))

    def _rows(self, of_tensor: Callable[[Any], Any], of_array: Callable[[np.ndarray], np.ndarray], count: int) -> DataProto:
        batch = self.batch
        if batch is not None:
            fields = {key: of_tensor(batch.get(key)) for key in batch.keys()}
            batch = TensorDict(fields, batch_size=[count, *batch.batch_size[1:]], device=batch.device)
        arrays = {key: of_array(value) for key, value in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=dict(self.meta_info))

    def select_idxs(self, idxs: Any) -> DataProto:
        """Return a copy of the rows given by a list, array or tensor of row numbers, or by a mask of length B.

        Raises:
            IndexError: a row that does not exist, or a mask of another length.
        """
        chosen = rows.row_indices(idxs, len(self))
        index, memo = torch.from_numpy(chosen), rows.Memo()
        return self._rows(lambda t: rows.index_tensor(t, index, memo), lambda a: a[chosen], len(chosen))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Return the rows of `[start:end:step]`; with a step of 1 they share memory with this batch."""
        first, last, stride = slice(start, end, step).indices(len(self))
        if stride != 1:
            return self.select_idxs(np.arange(first, last, stride))
        last, memo = max(first, last), rows.Memo()
        return self._rows(lambda t: rows.slice_tensor(t, first, last, memo), lambda a: a[first:last], last - first)

    @staticmethod
    def chunk_bounds(length: int, chunks: int, uneven: bool) -> list[tuple[int, int]]:
        """Return `(start, stop)` of each of `chunks` parts of `length` rows; the first ones are longer by one if uneven.

        Raises:
            ValueError: `chunks` is below 1, or the rows do not divide evenly and `uneven` is not allowed.
        """
        if chunks < 1:
            raise ValueError(f"chunks must be at least 1, found {chunks}")
        size, longer = divmod(length, chunks)
        if longer and not uneven:
            raise ValueError(
                f"a batch of {length} rows does not divide into {chunks} equal chunks; pad it with "
                "pad_dataproto_to_divisor, or make it with auto_padding=True"
            )
        stops = [(i + 1) * size + min(i + 1, longer) for i in range(chunks)]
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cut the batch into `chunks` parts that share its memory. Uneven parts only where padding is enabled.

        Raises:
            ValueError: the rows do not divide evenly and padding is not enabled, or `chunks` is below 1.
        """
        bounds = self.chunk_bounds(len(self), chunks, self.is_padding_enabled())
        return [self.slice(start, stop) for start, stop in bounds]

    def split(self, split_size: int) -> list[DataProto]:
        """Cut the batch into parts of `split_size` rows that share its memory; the last one may be shorter."""
        if split_size < 1:
            raise ValueError(f"split_size must be at least 1, found {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: list[DataProto]) -> DataProto:
        """Join batches with the same fields, row after row, into new memory.

        meta_info: `metrics` dicts become one dict of lists; every other key must agree between the parts that have it.

        Raises:
            ValueError: no parts, different fields, dtypes or widths (by name), or conflicting meta_info (by key).
        """
        if not data:
            raise ValueError("concat needs at least one DataProto")
        _check_same_keys([set() if d.batch is None else set(d.batch.keys()) for d in data], "batch")
        _check_same_keys([set(d.non_tensor_batch) for d in data], "non_tensor_batch")
        first, batch, memo = data[0], None, rows.Memo()
        if first.batch is not None:
            fields = {}
            for key in first.batch.keys():
                tensors = [d.batch.get(key) for d in data if d.batch is not None]
                rows.check_alike(key, tensors)
                fields[key] = rows.cat_tensors(tensors, memo)
            count = sum(map(len, data))
            batch = TensorDict(fields, batch_size=[count, *first.batch.batch_size[1:]], device=first.batch.device)
        arrays = {key: rows.cat_arrays([d.non_tensor_batch[key] for d in data]) for key in first.non_tensor_batch}
        return type(first)(batch=batch, non_tensor_batch=arrays, meta_info=DataProto.merged_meta_info(data))

    @staticmethod
    def merged_meta_info(data: Sequence[DataProto]) -> dict[str, Any]:
        """Return the meta_info that `concat` gives to the joined batch."""
        return merge.merge_meta_info([d.meta_info for d in data])

    def reorder(self, indices: Any) -> None:
        """Put the rows, in place, in the order of `indices` (B row numbers, or any choice of rows)."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Return every row `repeat_times` times: the copies side by side (interleave) or batch after batch."""
        if repeat_times < 0:
            raise ValueError(f"repeat_times must not be negative, found {repeat_times}")
        order = np.arange(len(self))
        return self.select_idxs(np.repeat(order, repeat_times) if interleave else np.tile(order, repeat_times))

    def sample_level_repeat(self, repeat_times: Any) -> DataProto:
        """Return row b `repeat_times[b]` times, the copies side by side.

        Args:
            repeat_times: list, array or tensor of B counts.
        """
        counts = repeat_times.cpu().numpy() if isinstance(repeat_times, torch.Tensor) else np.asarray(repeat_times)
        if counts.shape != (len(self),):
            raise ValueError(f"repeat_times must have one count for each of {len(self)} rows, found shape {counts.shape}")
        return self.select_idxs(np.repeat(np.arange(len(self)), counts.astype(np.int64)))

    def unfold_column_chunks(self, n_split: int, split_keys: list[str] | None = None) -> DataProto:
        """Cut the second dimension of the fields `split_keys` into `n_split` parts and put them below each other as rows.

        A field `[B, C, ...]` becomes `[B * n_split, C / n_split, ...]`; fields not named are repeated `n_split` times a row.

        Raises:
            KeyError: a key that the batch lacks.
            ValueError: C is not a multiple of `n_split`.
        """
        wanted = list(split_keys or [])
        self._require(wanted, [*(self.batch.keys() if self.batch is not None else ()), *self.non_tensor_batch], "field")
        repeated = self.repeat(n_split)
        for key in wanted:
            part: Any = self.batch if self.batch is not None and key in self.batch else self.non_tensor_batch
            value = part[key]
            if value.ndim < 2 or value.shape[1] % n_split:
                raise ValueError(f"field '{key}' of shape {tuple(value.shape)} has no second dimension of {n_split} parts")
            target: Any = repeated.batch if part is self.batch else repeated.non_tensor_batch
            target[key] = value.reshape(len(self) * n_split, value.shape[1] // n_split, *value.shape[2:])
        return repeated

    # ---- fields -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _require(keys: Sequence[str], present: Any, what: str) -> None:
        missing = [key for key in keys if key not in present]
        if missing:
            raise KeyError(f"{what} {missing} not in the batch; it has {sorted(map(str, present))}")

    def _keys(self, batch_keys: Any, non_tensor_keys: Any, meta_keys: Any, everything: bool) -> list[list[str]]:
        present = [list(self.batch.keys()) if self.batch is not None else [], self.non_tensor_batch, self.meta_info]
        names = ["batch keys", "non_tensor_batch keys", "meta_info keys"]
        chosen = []
        for keys, there, name in zip([batch_keys, non_tensor_keys, meta_keys], present, names, strict=True):
            keys = (list(there) if everything else []) if keys is None else [keys] if isinstance(keys, str) else list(keys)
            self._require(keys, there, name)
            chosen.append(keys)
        return chosen

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return a batch with the fields named only; None keeps all of that part. Values are shared unless `deepcopy`.

        Raises:
            KeyError: a key that the batch lacks.
        """
        keys, array_keys, meta_keys = self._keys(batch_keys, non_tensor_batch_keys, meta_info_keys, everything=True)
        chosen = type(self)(
            batch=None if self.batch is None else self.batch.select(*keys),
            non_tensor_batch={key: self.non_tensor_batch[key] for key in array_keys},
            meta_info={key: self.meta_info[key] for key in meta_keys},
        )
        return copy.deepcopy(chosen) if deepcopy else chosen

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Take the fields named out of this batch and return them as one.

        Raises:
            KeyError: a key that the batch lacks; nothing is taken then.
        """
        keys, array_keys, meta_keys = self._keys(batch_keys, non_tensor_batch_keys, meta_info_keys, everything=False)
        batch = None
        if self.batch is not None and keys:
            fields = {key: self.batch.pop(key) for key in keys}
            batch = TensorDict(fields, batch_size=self.batch.batch_size, device=self.batch.device)
        arrays = {key: self.non_tensor_batch.pop(key) for key in array_keys}
        return type(self)(batch, arrays, {key: self.meta_info.pop(key) for key in meta_keys})

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> DataProto:
        """Rename fields, in place: one name or a list of names each. Returns this batch.

        Raises:
            KeyError: a key that the batch lacks.
            ValueError: lists of different lengths, or a new name that is taken.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or [])
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or [])
        if len(old) != len(new):
            raise ValueError(f"rename: {len(old)} old names {old} but {len(new)} new names {new}")
        names = [*(self.batch.keys() if self.batch is not None else ()), *self.non_tensor_batch]
        self._require(old, names, "field")
        left = [name for name in names if name not in old] + new
        taken = sorted({name for name in new if left.count(name) > 1})
        if taken:
            raise ValueError(f"rename: the new names {taken} are taken; pop those fields first")
        # All old names are taken out before new ones are set, so that names can be exchanged.
        values = [self._take(key) for key in old]
        for key, (part, value) in zip(new, values, strict=True):
            part[key] = value
        return self

    def _take(self, key: str) -> tuple[Any, Any]:
        part: Any = self.batch if self.batch is not None and key in self.batch.keys() else self.non_tensor_batch
        return part, part.pop(key)

    def union(self, other: DataProto) -> DataProto:
        """Add the fields and meta_info of `other`, in place, and return this batch.

        Raises:
            ValueError: different numbers of rows, or a key that both have with different values; nothing is changed then.
        """
        if self.batch is not None and other.batch is not None:
            merge.check_tensor_union(self.batch, other.batch)
        has_rows = [d for d in (self, other) if d.batch is not None or d.non_tensor_batch]
        if len(has_rows) == 2 and len(self) != len(other):
            raise ValueError(f"union: a batch of {len(self)} rows and one of {len(other)} cannot be joined by field")
        for part in ("non_tensor_batch", "meta_info"):
            merge.refuse_differing(part, merge.differing_keys(getattr(self, part), getattr(other, part)))
        if other.batch is not None:
            if self.batch is None:
                self.batch = TensorDict({}, batch_size=other.batch.batch_size, device=other.batch.device)
            for key in other.batch.keys():
                if key not in self.batch.keys():
                    self.batch[key] = other.batch.get(key)
        self.non_tensor_batch = {**other.non_tensor_batch, **self.non_tensor_batch}
        self.meta_info = {**other.meta_info, **self.meta_info}
        return self

    def to(self, device: Any) -> DataProto:
        """Move the tensors to `device`, in place, and return this batch."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # ---- padding and mini-batches -----------------------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """Tell whether this batch may be cut unevenly, and padded where a worker group needs even parts."""
        return DataProtoConfig.auto_padding or bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of one row, in place.

        Args:
            padding_candidate: "first" or "last", the row to copy; empty means the last.

        Raises:
            ValueError: an unknown candidate, a negative size, or an empty batch.
        """
        if padding_candidate not in ("", "first", "last"):
            raise ValueError(f"padding_candidate must be 'first' or 'last', found {padding_candidate!r}")
        if padding_size < 0 or (padding_size and not len(self)):
            raise ValueError(f"cannot append {padding_size} padding rows to a batch of {len(self)} rows")
        if padding_size:
            row = 0 if padding_candidate == "first" else len(self) - 1
            self.reorder(np.concatenate([np.arange(len(self)), np.full(padding_size, row)]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Iterate over mini-batches, `epochs` times over the batch.

        Args:
            mini_batch_size: rows of a mini-batch; must divide B.
            seed: makes the order of a shuffled run repeatable; the epochs differ from each other.
            dataloader_kwargs: `{"shuffle": bool}` (default False).

        Raises:
            ValueError: B is not a multiple of `mini_batch_size`, or an option that does not exist.
        """
        options = dict(dataloader_kwargs or {})
        shuffle = bool(options.pop("shuffle", False))
        if options:
            raise ValueError(f"make_iterator: unknown dataloader_kwargs {sorted(options)}; only 'shuffle' is known")
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"mini_batch_size {mini_batch_size} does not divide the {len(self)} rows of the batch")
        generator = None if seed is None else torch.Generator().manual_seed(seed)

        def iterate() -> Iterator[DataProto]:
            for _ in range(epochs):
                whole = self.select_idxs(torch.randperm(len(self), generator=generator)) if shuffle else self
                yield from whole.split(mini_batch_size)

        return iterate()

    # ---- disk and wire ----------------------------------------------------------------------------------------------

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write the batch to one safetensors file that holds data only, no code.

        Raises:
            StorageError: naming field and row of an object that cannot be stored; nothing is written then.
        """
        storage.save(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> DataProto:
        """Read a batch that `save_to_disk` wrote; no code of the file is run.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the file is damaged or something else.
        """
        return DataProto(*storage.load(filepath))

    def __reduce_ex__(self, protocol: Any) -> Any:
        transport.check_fields(self.batch)
        state = (self.batch, self.non_tensor_batch, self.meta_info)
        return _load_row, (type(self), *transport.dumps(state, int(protocol)))

    def __copy__(self) -> DataProto:
        batch = None if self.batch is None else self.batch.copy()
        return type(self)(batch, dict(self.non_tensor_batch), dict(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        batch = None if self.batch is None else self.batch.clone()
        return type(self)(batch, copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo))


def _load_row(kind: type, stream: Any, buffers: list[Any], foreign: list[Any]) -> Any:
    return kind(*transport.loads(stream, buffers, foreign))


def _tensordict(tensors: Mapping[str, torch.Tensor], num_batch_dims: int) -> TensorDict:
    batch_size, first = None, ""
    for key, value in tensors.items():
        if not isinstance(value, (torch.Tensor, TensorDictBase)):
            raise TypeError(f"field '{key}' must be a tensor, found {type(value).__name__}; lists belong to non_tensors")
        if value.ndim < num_batch_dims:
            raise ValueError(f"field '{key}' has {value.ndim} dimensions, fewer than num_batch_dims={num_batch_dims}")
        size = tuple(value.shape[:num_batch_dims])
        if batch_size is None:
            batch_size, first = size, key
        elif size != batch_size:
            raise ValueError(f"field '{key}' has batch size {size}, but field '{first}' has {batch_size}")
    return TensorDict(dict(tensors), batch_size=batch_size)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        layout = " jagged" if value.is_nested else ""
        return f"Tensor{layout} {str(value.dtype).removeprefix('torch.')}{[str(s) for s in value.shape]} {value.device}"
    return f"{type(value).__name__} {list(getattr(value, 'batch_size', []))}"


def _check_same_keys(keys: list[set[str]], part: str) -> None:
    for position, other in enumerate(keys[1:], start=1):
        if other != keys[0]:
            raise ValueError(
                f"concat: {part} differs between the parts: part 0 has {sorted(keys[0] - other)} that part {position} "
                f"lacks, part {position} has {sorted(other - keys[0])} that part 0 lacks"
            )
