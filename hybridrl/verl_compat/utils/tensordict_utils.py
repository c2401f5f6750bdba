"""`verl.utils.tensordict_utils`: batches that are TensorDicts, without a `DataProto` around them.

A TensorDict of B rows holds tensors (also jagged ones), one Python object per row as a `NonTensorStack`, and values
that belong to the batch as a whole as `NonTensorData`. Nothing here is called by hybridrl itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

from hybridrl.protocol import concat_tensordict
from hybridrl.protocol.rows import cat_fields, fields_of, index_tensor, row_indices, slice_tensor
from hybridrl.protocol.union import same

__all__ = [
    "assert_tensordict_eq",
    "assign_non_tensor",
    "assign_non_tensor_data",
    "assign_non_tensor_stack",
    "chunk_tensordict",
    "concat_nested_tensors",
    "concat_tensordict",
    "contiguous",
    "get",
    "get_keys",
    "get_non_tensor_data",
    "get_tensordict",
    "index_select_tensor_dict",
    "list_of_dict_to_tensordict",
    "make_iterator",
    "maybe_fix_3d_position_ids",
    "nested_tensor_from_tensor_list",
    "pad_to_divisor",
    "pop",
    "pop_keys",
    "union_tensor_dict",
    "unpad",
    "unwrap_non_tensor_data",
]


# ---- making one -----------------------------------------------------------------------------------------------------


def get_tensordict(
    tensor_dict: Mapping[str, torch.Tensor | list[Any]], non_tensor_dict: Mapping[str, Any] | None = None
) -> TensorDict:
    """Make a TensorDict.

    Args:
        tensor_dict: tensors, and lists with one object per row.
        non_tensor_dict: values of the batch as a whole.

    Raises:
        RuntimeError: fields differ in their number of rows.
    """
    stacks = {key: value for key, value in tensor_dict.items() if isinstance(value, (list, tuple))}
    tensors: dict[str, Any] = {key: value for key, value in tensor_dict.items() if key not in stacks}
    lengths = {key: len(value) for key, value in stacks.items()}
    lengths |= {key: value.size(0) for key, value in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise RuntimeError(f"get_tensordict: fields have different numbers of rows: {lengths}")
    result = TensorDict(tensors, batch_size=list(lengths.values())[:1])
    for key, value in stacks.items():
        assign_non_tensor_stack(result, key, list(value))
    for key, value in (non_tensor_dict or {}).items():
        assign_non_tensor_data(result, key, value)
    return result


def list_of_dict_to_tensordict(list_of_dicts: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Make a TensorDict from rows with the same keys. Tensors become jagged, everything else one object per row."""
    columns = {key: [row[key] for row in list_of_dicts] for key in list_of_dicts[0]}
    return get_tensordict(
        {
            key: nested_tensor_from_tensor_list(values) if isinstance(values[0], torch.Tensor) else values
            for key, values in columns.items()
        }
    )


def nested_tensor_from_tensor_list(tensors: Sequence[torch.Tensor], ragged_idx: int | None = None) -> torch.Tensor:
    """Make a jagged tensor from one tensor per row.

    Args:
        ragged_idx: the dimension of the result in which rows differ; by default the last one.
    """
    dim = tensors[0].dim() if ragged_idx is None else ragged_idx
    lengths = torch.tensor([tensor.shape[dim - 1] for tensor in tensors])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(tensors[0].device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(tensors), dim=dim - 1), offsets, jagged_dim=dim)


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Set a value of the batch as a whole."""
    data: Any = NonTensorData(unwrap_non_tensor_data(val))
    tensor_dict.set(key, data)


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: list[Any]) -> None:
    """Set one object per row."""
    entries: Any = [entry if isinstance(entry, NonTensorData) else NonTensorData(entry) for entry in val]
    tensor_dict.set(key, NonTensorStack(*entries))


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> TensorDict:
    """Set several values: a list has one object per row, everything else belongs to the batch.

    Raises:
        RuntimeError: there is not one object per row.
    """
    for key, value in kwargs.items():
        if isinstance(value, NonTensorStack):
            tensor_dict.set(key, value)
        elif isinstance(value, list):
            assign_non_tensor_stack(tensor_dict, key, value)
        else:
            assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


# ---- reading --------------------------------------------------------------------------------------------------------


def unwrap_non_tensor_data(data: Any) -> Any:
    """Return the value that a `NonTensorData` holds, and anything else as it is."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """Return a value of the batch as a whole, or `default`."""
    return unwrap_non_tensor_data(data.get(key, default))


def get(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """Return a field: a tensor, a list with one object per row, or a value of the batch; `default` if there is none."""
    return _plain(tensordict.get(key)) if key in tensordict else default


def get_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Return a TensorDict with some of the fields.

    Raises:
        KeyError: there is no such field.
    """
    fields = fields_of(tensordict)
    return _with_fields({key: fields[key] for key in keys}, tensordict)


def pop(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """Remove a field and return it as `get` does."""
    value = get(tensordict, key, default)
    if key in tensordict:
        del tensordict[key]
    return value


def pop_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Remove some of the fields and return them as a TensorDict.

    Raises:
        KeyError: there is no such field; then nothing is removed.
    """
    names = list(keys)
    result = get_keys(tensordict, names)
    for name in names:
        del tensordict[name]
    return result


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """Check that two TensorDicts have the same fields with the same values.

    Raises:
        AssertionError: they differ; the message names the fields.
    """
    first, second = fields_of(tensordict1), fields_of(tensordict2)
    if first.keys() != second.keys():
        raise AssertionError(f"only one side has {', '.join(sorted(first.keys() ^ second.keys()))}")
    differing = _differing(first, second)
    if differing:
        raise AssertionError(f"{', '.join(differing)} have different values")


# ---- rows -----------------------------------------------------------------------------------------------------------


def index_select_tensor_dict(batch: TensorDict, indices: torch.Tensor | Sequence[int]) -> TensorDict:
    """Return a copy of the chosen rows."""
    row_index = torch.from_numpy(row_indices(indices, len(batch)))
    memo: dict[Any, Any] = {}
    fields = {
        key: _rows(value, row_index.tolist()) if _is_not_tensor(value) else index_tensor(value, row_index, memo)
        for key, value in fields_of(batch).items()
    }
    return _with_fields(fields, batch, len(row_index))


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """Cut a TensorDict into parts of equal size, which share its memory.

    Raises:
        ValueError: the rows do not divide evenly.
    """
    if chunks < 1 or len(td) % chunks:
        raise ValueError(f"a TensorDict of {len(td)} rows does not divide into {chunks} equal chunks")
    size = len(td) // chunks
    return [_slice(td, start, start + size) for start in range(0, len(td), size)]


def concat_nested_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join jagged tensors along their rows."""
    joined: torch.Tensor = cat_fields("nested", tensors, {})
    return joined


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Repeat rows from the beginning until the number of rows is a multiple.

    Returns:
        The longer TensorDict, and how many rows were added.
    """
    missing = -len(data) % size_divisor
    if not missing:
        return data, 0
    return index_select_tensor_dict(data, [row % len(data) for row in range(len(data) + missing)]), missing


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Remove the rows that `pad_to_divisor` added."""
    return _slice(data, 0, len(data) - pad_size) if pad_size else data


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Return an iterator over mini-batches, several times over the rows.

    Raises:
        ValueError: the rows do not divide evenly into mini-batches.
    """
    if len(tensordict) % mini_batch_size:
        raise ValueError(f"{len(tensordict)} rows do not divide into mini-batches of {mini_batch_size}")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader: Any = DataLoader(
        range(len(tensordict)),  # type: ignore[arg-type]  # a sequence is a map-style data set
        batch_size=mini_batch_size,
        collate_fn=list,
        generator=generator,
        **(dataloader_kwargs or {}),
    )

    def iterate() -> Iterator[TensorDict]:
        for _ in range(epochs):
            for rows in loader:
                yield index_select_tensor_dict(tensordict, rows)

    return iterate()


# ---- changing it ----------------------------------------------------------------------------------------------------


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the fields of the second to the first, in place, and return the first.

    Raises:
        AssertionError: the number of rows differs, or a field of both has different values.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise AssertionError(f"union: {tensor_dict1.batch_size} and {tensor_dict2.batch_size} rows cannot be joined")
    first, second = fields_of(tensor_dict1), fields_of(tensor_dict2)
    differing = _differing(first, {key: second[key] for key in second if key in first})
    if differing:
        raise AssertionError(f"union: {', '.join(differing)} have different values on both sides")
    for key, value in second.items():
        if key not in first:
            tensor_dict1.set(key, value)
    return tensor_dict1


def contiguous(data: TensorDict) -> TensorDict:
    """Return a TensorDict with copies of the tensors, which may be modified."""
    fields = {key: value if _is_not_tensor(value) else value.clone() for key, value in fields_of(data).items()}
    return _with_fields(fields, data)


def maybe_fix_3d_position_ids(data: TensorDict) -> None:
    """Do nothing: hybridrl sends jagged tensors without losing their ragged dimension, which this repairs in verl."""


def _is_not_tensor(value: Any) -> bool:
    return isinstance(value, (NonTensorData, NonTensorStack))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, NonTensorStack) else unwrap_non_tensor_data(value)


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [key for key, value in second.items() if not same(_plain(first[key]), _plain(value))]


def _with_fields(fields: dict[str, Any], like: TensorDict, rows: int | None = None) -> TensorDict:
    """Return a TensorDict of these fields; values of the batch as a whole get its size."""
    size = like.batch_size if rows is None else torch.Size([rows, *like.batch_size[1:]])
    result = TensorDict({}, batch_size=size, device=like.device)
    for key, value in fields.items():
        if isinstance(value, NonTensorData):
            assign_non_tensor_data(result, key, value)
        else:
            result.set(key, value)
    return result


def _rows(value: Any, rows: Sequence[int]) -> Any:
    if isinstance(value, NonTensorData):
        return value
    entries = value.unbind(0)
    return NonTensorStack(*(entries[row] for row in rows))


def _slice(td: TensorDict, start: int, stop: int) -> TensorDict:
    memo: dict[Any, Any] = {}
    fields = {
        key: _rows(value, range(start, stop)) if _is_not_tensor(value) else slice_tensor(value, start, stop, memo)
        for key, value in fields_of(td).items()
    }
    return _with_fields(fields, td, stop - start)
