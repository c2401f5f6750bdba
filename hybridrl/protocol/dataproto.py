"""DataProto, the batch, and DataProtoItem, one row of it.

Methods that choose, join or repeat rows return a new batch; slices share the memory of the tensors they come from.
`to`, `pop`, `rename`, `union`, `reorder` and `padding` change the batch itself. A meta_info dict is never shared
between batches, but its values are.

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
from tensordict import TensorDict, TensorDictBase

from hybridrl.errors import BatchError
from hybridrl.protocol import rows, storage, tensordicts, transport, union
from hybridrl.protocol.cached import ColumnCache


class DataProtoConfig:
    """Settings of all batches of this process.

    Attributes:
        auto_padding: batches may be cut into uneven chunks and are padded where a worker group needs even ones.
        auto_padding_key: the meta_info key that enables the same for a single batch.
    """

    auto_padding: bool = False
    auto_padding_key: str = "_auto_padding"


@dataclass(eq=False, repr=False)
class DataProtoItem:
    """One row of a batch: `batch` without its batch dimension, one value per key in `non_tensor_batch`."""

    batch: TensorDict = None  # type: ignore[assignment]  # None: no tensors; typed for batches that have some
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        transport.check_fields(self.batch)
        state = (self.batch, self.non_tensor_batch, self.meta_info)
        return _load_row, (type(self), *transport.dumps(state, int(protocol)))

    def __repr__(self) -> str:
        fields, values = sorted(rows.fields_of(self.batch)), sorted(self.non_tensor_batch)
        return f"{type(self).__name__}(batch={fields}, non_tensor_batch={values})"


@dataclass(eq=False, repr=False)
class DataProto(ColumnCache):
    """A batch of B rows.

    Attributes:
        batch: tensors by name, each with first dimension B; None where there are none.
        non_tensor_batch: NumPy arrays by name, each of length B; Python values are stored in arrays of dtype object.
        meta_info: values that belong to the batch as a whole.

    Raises:
        TypeError, ValueError: the parts do not fit together (see `check_consistency`).
    """

    batch: TensorDict = None  # type: ignore[assignment]  # None: no tensors; typed for batches that have some
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # None stands for no fields, as in verl.
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
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
                raise TypeError(f"field '{key}' must be a tensor, an array or a list, found {type(value).__name__}")
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
        """Make a batch from tensors and from arrays or lists (a list becomes an object array with one entry per row).

        Args:
            num_batch_dims: how many leading dimensions of the tensors belong to the batch. It may exceed 1 only when
                there are no non-tensor fields.
            auto_padding: the batch may be cut into uneven chunks and is padded where even ones are needed.

        Raises:
            TypeError, ValueError: a value has the wrong type, or fields differ in length; the message names them.
        """
        if num_batch_dims < 1:
            raise ValueError(f"num_batch_dims must be at least 1, found {num_batch_dims}")
        if non_tensors and num_batch_dims != 1:
            raise BatchError(f"non-tensors have one batch dimension, found num_batch_dims={num_batch_dims}")
        batch = tensordicts.tensordict_of(tensors, num_batch_dims) if tensors else None
        arrays = {}
        for key, value in (non_tensors or {}).items():
            if not isinstance(value, (np.ndarray, list, tuple)):
                raise TypeError(f"non-tensor field '{key}' must be an array or a list, found {type(value).__name__}")
            arrays[key] = rows.as_array(value)
        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)  # type: ignore[arg-type]

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """Make a batch from a TensorDict: stacks of non-tensor data become arrays, single ones go to meta_info."""
        tensors, arrays, single = tensordicts.split_tensordict(tensor_dict)
        batch_size = tensor_dict.batch_size[:num_batch_dims]
        batch = TensorDict(tensors, batch_size=batch_size, device=tensor_dict.device) if tensors else None
        return cls(batch=batch, non_tensor_batch=arrays, meta_info={**single, **(meta_info or {})})  # type: ignore[arg-type]

    def to_tensordict(self) -> TensorDict:
        """Return all three parts as one TensorDict; the inverse of `from_tensordict`.

        Raises:
            ValueError: a name occurs in more than one part.
        """
        return tensordicts.joined_tensordict(self.batch, self.non_tensor_batch, self.meta_info, len(self))

    # ---- looking at it ----------------------------------------------------------------------------------------------

    def check_consistency(self) -> None:
        """Check that all fields have the same number of rows.

        Every method that counts or gives rows checks this first: a field that is assigned later may have any length.

        Raises:
            TypeError: `batch` is not a TensorDict, or a non-tensor field is not a NumPy array.
            ValueError: a field has a different number of rows, or `batch` has no batch dimension.
        """
        length = None
        if self.batch is not None:
            if not isinstance(self.batch, TensorDictBase):
                raise TypeError(f"batch must be a TensorDict, found {type(self.batch).__name__}; see from_dict")
            if not self.batch.batch_size:
                raise ValueError("batch must have at least one batch dimension")
            length = self.batch.batch_size[0]
        for key, value in self.non_tensor_batch.items():
            if not isinstance(value, np.ndarray):
                raise TypeError(
                    f"non-tensor field '{key}' must be a NumPy array, found {type(value).__name__}; "
                    "use DataProto.from_dict, which converts lists"
                )
            if value.ndim == 0:
                raise ValueError(f"non-tensor field '{key}' is a single value, not one per row; put it into meta_info")
            if length is not None and value.shape[0] != length:
                raise ValueError(
                    f"non-tensor field '{key}' has shape {value.shape}, but the batch has {length} rows; give it one "
                    "entry per row, or put what belongs to the batch as a whole into meta_info"
                )
            length = value.shape[0]

    def __len__(self) -> int:
        self.check_consistency()
        return self._length

    @property
    def _length(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        for value in self.non_tensor_batch.values():
            return value.shape[0]
        return 0

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rows={self._length}, batch={sorted(rows.fields_of(self.batch))}, "
            f"non_tensor_batch={sorted(self.non_tensor_batch)}, meta_info={sorted(map(str, self.meta_info))})"
        )

    def get_data_info(self) -> str:
        """Return one line per field: its type, dtype and shape."""
        lines = [f"{type(self).__name__} of {self._length} rows"]
        for name in ("batch", "non_tensor_batch", "meta_info"):
            part = rows.fields_of(self.batch) if name == "batch" else getattr(self, name)
            lines += [f"  {name}.{key}: {tensordicts.describe(value)}" for key, value in part.items()]
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

    def _rows(
        self, of_tensor: Callable[[Any], Any], of_array: Callable[[np.ndarray], np.ndarray], count: int
    ) -> DataProto:
        batch = self.batch
        if batch is not None:
            fields = {key: of_tensor(value) for key, value in rows.fields_of(batch).items()}
            batch = TensorDict(fields, batch_size=[count, *batch.batch_size[1:]], device=batch.device)
        arrays = {key: of_array(value) for key, value in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=dict(self.meta_info))

    def select_idxs(self, idxs: Any) -> DataProto:
        """Return a copy of the rows given by a list, array or tensor of row numbers, or by a mask of length B.

        Raises:
            IndexError: a row does not exist, or a mask has the wrong length.
        """
        indices = rows.row_indices(idxs, len(self))
        index, memo = torch.from_numpy(indices), rows.Memo()
        return self._rows(lambda t: rows.index_tensor(t, index, memo), lambda a: a[indices], len(indices))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Return the rows of `[start:end:step]`; with a step of 1 they share memory with this batch."""
        first, last, stride = slice(start, end, step).indices(len(self))
        if stride != 1:
            return self.select_idxs(np.arange(first, last, stride))
        last, memo = max(first, last), rows.Memo()
        return self._rows(lambda t: rows.slice_tensor(t, first, last, memo), lambda a: a[first:last], last - first)

    @staticmethod
    def chunk_bounds(length: int, chunks: int, uneven: bool) -> list[tuple[int, int]]:
        """Return `(start, stop)` of each of `chunks` parts of `length` rows; uneven ones differ by at most one row.

        Raises:
            ValueError: `chunks` is below 1, or the rows do not divide evenly and `uneven` is not allowed.
        """
        if chunks < 1:
            raise ValueError(f"chunks must be at least 1, found {chunks}")
        size, longer = divmod(length, chunks)
        if longer and not uneven:
            raise BatchError(
                f"a batch of {length} rows does not divide into {chunks} equal chunks; pad it with "
                "pad_dataproto_to_divisor, or make it with auto_padding=True"
            )
        stops = [(i + 1) * size + min(i + 1, longer) for i in range(chunks)]
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cut the batch into `chunks` parts that share its memory. Parts may be uneven only if padding is enabled.

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

        In meta_info, `metrics` dicts become one dict of lists; every other key must agree between the parts that have
        it.

        Raises:
            ValueError: there are no parts, fields, dtypes or widths differ, or meta_info conflicts; the message names
                the fields or keys.
        """
        if not data:
            raise ValueError("concat needs at least one DataProto")
        for part in data:
            part.check_consistency()
        parts = [rows.fields_of(d.batch) for d in data]
        union.check_same_keys([set(part) for part in parts], "batch")
        union.check_same_keys([set(d.non_tensor_batch) for d in data], "non_tensor_batch")
        first, batch, memo = data[0], None, rows.Memo()
        if first.batch is not None:
            fields = {key: rows.cat_fields(key, [part[key] for part in parts], memo) for key in parts[0]}
            count = sum(map(len, data))
            batch = TensorDict(fields, batch_size=[count, *first.batch.batch_size[1:]], device=first.batch.device)
        arrays = {key: rows.cat_arrays([d.non_tensor_batch[key] for d in data]) for key in first.non_tensor_batch}
        return type(first)(batch=batch, non_tensor_batch=arrays, meta_info=DataProto.merged_meta_info(data))

    @staticmethod
    def merged_meta_info(data: Sequence[DataProto]) -> dict[str, Any]:
        """Return the meta_info that `concat` gives to the joined batch."""
        return union.merge_meta_info([d.meta_info for d in data])

    def reorder(self, indices: Any) -> None:
        """Reorder the rows in place by `indices` (B row numbers, or any selection of rows)."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Return every row `repeat_times` times: copies of a row adjacent (interleave) or batch after batch."""
        if repeat_times < 0:
            raise ValueError(f"repeat_times must not be negative, found {repeat_times}")
        order = np.arange(len(self))
        return self.select_idxs(np.repeat(order, repeat_times) if interleave else np.tile(order, repeat_times))

    def sample_level_repeat(self, repeat_times: Any) -> DataProto:
        """Return row b `repeat_times[b]` times, with the copies adjacent.

        Args:
            repeat_times: list, array or tensor of B counts.
        """
        counts = repeat_times.cpu().numpy() if isinstance(repeat_times, torch.Tensor) else np.asarray(repeat_times)
        if counts.shape != (len(self),):
            raise ValueError(f"repeat_times must have one count a row ({len(self)}), found shape {counts.shape}")
        return self.select_idxs(np.repeat(np.arange(len(self)), counts.astype(np.int64)))

    def unfold_column_chunks(self, n_split: int, split_keys: list[str] | None = None) -> DataProto:
        """Cut the second dimension of the fields `split_keys` into `n_split` parts, each of which becomes a row.

        A field `[B, C, ...]`, or lists of C objects each, becomes `[B * n_split, C / n_split, ...]`. The rows of all
        other fields are repeated `n_split` times each.

        Raises:
            KeyError: the batch lacks a key.
            ValueError: C is not a multiple of `n_split`.
        """
        keys = list(split_keys or [])
        self._require(keys, self._names(), "field")
        repeated = self.repeat(n_split)
        for key in keys:
            value, target = rows.as_matrix(self._part(key)[key]), repeated._part(key)
            if value.ndim < 2 or value.shape[1] % n_split:
                shape = tuple(value.shape)
                raise ValueError(f"the second dimension of field '{key}' {shape} does not divide into {n_split} parts")
            target[key] = value.reshape(len(self) * n_split, value.shape[1] // n_split, *value.shape[2:])
        return repeated

    # ---- fields -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _require(keys: Sequence[str], present: Any, label: str) -> None:
        missing = [key for key in keys if key not in present]
        if missing:
            raise KeyError(f"{label} {missing} not in the batch; it has {sorted(map(str, present))}")

    def _names(self) -> list[str]:
        return [*rows.fields_of(self.batch), *self.non_tensor_batch]

    def _part(self, key: str) -> Any:
        return self.batch if key in rows.fields_of(self.batch) else self.non_tensor_batch

    def _keys(self, batch_keys: Any, non_tensor_keys: Any, meta_keys: Any, everything: bool) -> list[list[str]]:
        present = [list(rows.fields_of(self.batch)), self.non_tensor_batch, self.meta_info]
        names = ["batch keys", "non_tensor_batch keys", "meta_info keys"]
        selected = []
        for keys, there, name in zip([batch_keys, non_tensor_keys, meta_keys], present, names, strict=True):
            if keys is None:
                keys = there if everything else []
            keys = [keys] if isinstance(keys, str) else list(keys)
            self._require(keys, there, name)
            selected.append(keys)
        return selected

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return a batch with only the named fields; None keeps all of that part. Values are shared unless `deepcopy`.

        Raises:
            KeyError: the batch lacks a key.
        """
        keys, array_keys, meta_keys = self._keys(batch_keys, non_tensor_batch_keys, meta_info_keys, everything=True)
        selected = type(self)(
            batch=None if self.batch is None else self.batch.select(*keys),
            non_tensor_batch={key: self.non_tensor_batch[key] for key in array_keys},
            meta_info={key: self.meta_info[key] for key in meta_keys},
        )
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Remove the named fields from this batch and return them as a new batch.

        Raises:
            KeyError: the batch lacks a key. Nothing is removed in that case.
        """
        self.check_consistency()
        keys, array_keys, meta_keys = self._keys(batch_keys, non_tensor_batch_keys, meta_info_keys, everything=False)
        batch = None
        if self.batch is not None and keys:
            fields = {key: self.batch.pop(key) for key in keys}
            batch = TensorDict(fields, batch_size=self.batch.batch_size, device=self.batch.device)
        arrays = {key: self.non_tensor_batch.pop(key) for key in array_keys}
        meta = {key: self.meta_info.pop(key) for key in meta_keys}
        return type(self)(batch, arrays, meta)  # type: ignore[arg-type]

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> DataProto:
        """Rename fields in place and return this batch. Both arguments are one name or a list of names.

        Raises:
            KeyError: the batch lacks a key.
            ValueError: the lists differ in length, or a new name is taken.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or [])
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or [])
        if len(old) != len(new):
            raise ValueError(f"rename: {len(old)} old names {old} but {len(new)} new names {new}")
        self.check_consistency()
        names = self._names()
        self._require(old, names, "field")
        names_after = [name for name in names if name not in old] + new
        duplicates = sorted({name for name in new if names_after.count(name) > 1})
        if duplicates:
            raise ValueError(f"rename: the new names {duplicates} are taken; pop those fields first")
        # All old names are removed before new ones are set, so that names can be swapped.
        parts = [self._part(key) for key in old]
        values = [part.pop(key) for key, part in zip(old, parts, strict=True)]
        for key, part, value in zip(new, parts, values, strict=True):
            part[key] = value
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the fields and meta_info of `other`, in place, and return this batch.

        Raises:
            ValueError: the numbers of rows differ, or a key has different values. Nothing is changed in that case.
        """
        self.check_consistency()
        other.check_consistency()
        if self.batch is not None and other.batch is not None:
            union.check_tensor_union(self.batch, other.batch)
        has_rows = [d for d in (self, other) if d.batch is not None or d.non_tensor_batch]
        if len(has_rows) == 2 and len(self) != len(other):
            raise BatchError(f"union: a batch of {len(self)} rows and one of {len(other)} cannot be joined by field")
        for part in ("non_tensor_batch", "meta_info"):
            union.refuse_differing(part, union.differing_keys(getattr(self, part), getattr(other, part)))
        if other.batch is not None:
            if self.batch is None:
                self.batch = TensorDict({}, batch_size=other.batch.batch_size, device=other.batch.device)
            present = rows.fields_of(self.batch)
            for key, value in rows.fields_of(other.batch).items():
                if key not in present:
                    self.batch.set(key, value)
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
        """Return whether this batch may be cut unevenly, and padded where a worker group needs even parts."""
        return DataProtoConfig.auto_padding or bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of one row, in place.

        Args:
            padding_candidate: "first" or "last", the row to copy; empty means the last.

        Raises:
            ValueError: the candidate is unknown, the size is negative, or the batch is empty.
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
            mini_batch_size: rows per mini-batch; must divide B.
            seed: makes the shuffled order repeatable; each epoch has a different order.
            dataloader_kwargs: `{"shuffle": bool}` (default False).

        Raises:
            ValueError: B is not a multiple of `mini_batch_size`, or an option does not exist.
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
            StorageError: an object cannot be stored; the message names its field and row. Nothing is written then.
        """
        self.check_consistency()
        storage.save(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> DataProto:
        """Read a batch that `save_to_disk` wrote, without executing any code from the file.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the file is corrupt or is not a stored batch.
        """
        return DataProto(*storage.load(filepath))  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.check_consistency()
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
