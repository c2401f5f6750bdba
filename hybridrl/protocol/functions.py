"""Functions on batches: padding to a divisor, folding the batch dimension, collating rows, gathering over ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import NonTensorData, NonTensorStack, TensorDict

from hybridrl.errors import BatchError
from hybridrl.protocol.dataproto import DataProto, DataProtoItem
from hybridrl.protocol.rows import cat_fields, fields_of, object_array


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of rows, starting with the first row, until their number is a multiple of `size_divisor`.

    Returns:
        The padded batch (`data` itself when nothing is missing) and the number of rows appended; `unpad_dataproto`
        removes them again.

    Raises:
        ValueError: the divisor is not positive, or the batch is empty.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor must be at least 1, found {size_divisor}")
    rows = len(data)
    pad_size = -rows % size_divisor
    if rows == 0:
        raise ValueError(f"an empty batch cannot be padded to a multiple of {size_divisor}: it has no row to repeat")
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(rows + pad_size) % rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return a view without the last `pad_size` rows.

    Raises:
        ValueError: there are fewer rows than `pad_size`.
    """
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"cannot take {pad_size} padding rows off a batch of {len(data)} rows")
    return data.slice(0, len(data) - pad_size) if pad_size else data


def collate_fn(x: list[DataProtoItem]) -> DataProto:
    """Stack rows (as `data[i]` returns them) into a batch; meta_info is that of the first row."""
    if not x:
        raise ValueError("collate_fn needs at least one row")
    for number, item in enumerate(x):
        names = [{*fields_of(row.batch), *row.non_tensor_batch} for row in (x[0], item)]
        if names[0] != names[1]:
            raise BatchError(
                f"collate_fn: row {number} and row 0 differ in the fields {sorted(names[0] ^ names[1])}, which must be "
                "in all rows or in none"
            )
    batch = None
    if x[0].batch is not None:
        items = [fields_of(item.batch) for item in x]
        batch = TensorDict({key: _stack([item[key] for item in items]) for key in items[0]}, batch_size=[len(x)])
    arrays = {key: object_array([item.non_tensor_batch[key] for item in x]) for key in x[0].non_tensor_batch}
    return DataProto(batch=batch, non_tensor_batch=arrays, meta_info=dict(x[0].meta_info))


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """Join TensorDicts with the same fields along their rows. A value of the batch as a whole is the first one's.

    Raises:
        BatchError: the parts have different fields; the message names them.
        ValueError: a field differs in dtype, width or layout; the message names it.
    """
    parts = [fields_of(part) for part in data]
    for number, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise BatchError(
                f"concat_tensordict: part {number} has the fields {sorted(part)}, and part 0 has {sorted(parts[0])}; "
                f"{sorted(part.keys() ^ parts[0].keys())} must be in all parts or in none"
            )
    memo: dict[Any, Any] = {}
    rows = [sum(map(len, data))] if data[0].batch_size else []
    result = TensorDict({}, batch_size=[*rows, *data[0].batch_size[1:]], device=data[0].device)
    for key, value in parts[0].items():
        if isinstance(value, NonTensorStack):
            entries: Any = [entry for part in parts for entry in part[key].unbind(0)]
            joined: Any = NonTensorStack(*entries)
        elif isinstance(value, NonTensorData):
            joined = NonTensorData(value.data)
        else:
            joined = cat_fields(key, [part[key] for part in parts], memo)
        result.set(key, joined)
    return result


def _stack(values: list[Any]) -> Any:
    """Stack values of one shape; tensors of different lengths become a jagged tensor again."""
    if isinstance(values[0], torch.Tensor) and len({value.shape for value in values}) > 1:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return torch.stack(values)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Turn fields `[B, ...]` into `[new_batch_size, B / new_batch_size, ...]`, so that groups of rows stay together.

    Raises:
        ValueError: B is not a multiple of `new_batch_size`.
    """
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise ValueError(f"a batch of {rows} rows cannot be folded into {new_batch_size} equal groups")
    group = rows // new_batch_size
    batch = data.batch
    if batch is not None:
        fields = {k: v.reshape(new_batch_size, group, *v.shape[1:]) for k, v in fields_of(batch).items()}
        batch = TensorDict(fields, batch_size=[new_batch_size], device=batch.device)
    arrays = {k: v.reshape(new_batch_size, group, *v.shape[1:]) for k, v in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=dict(data.meta_info))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Undo `fold_batch_dim`: flatten the first `batch_dims` dimensions of every field into one."""
    batch = data.batch
    if batch is not None:
        fields = {key: value.reshape(-1, *value.shape[batch_dims:]) for key, value in fields_of(batch).items()}
        rows = next(iter(fields.values())).shape[0] if fields else len(data)
        batch = TensorDict(fields, batch_size=[rows], device=batch.device)
    arrays = {key: value.reshape(-1, *value.shape[batch_dims:]) for key, value in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=dict(data.meta_info))


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace `data` in place by the rows of all ranks of the group, in rank order; counts may differ between ranks.

    Plain tensors travel by `all_gather` on their own device, jagged tensors and objects by `all_gather_object`.
    meta_info stays that of this rank.

    Raises:
        ValueError: the ranks have different fields, dtypes or widths.
    """
    size = dist.get_world_size(process_group)
    own = fields_of(data.batch)
    plain = {key: value for key, value in own.items() if _gathers_plain(value)}
    rest = DataProto(non_tensor_batch=data.non_tensor_batch)
    if data.batch is not None and len(plain) < len(own):
        rest.batch = data.batch.exclude(*plain)
    layout = {key: (str(value.dtype), tuple(value.shape[1:])) for key, value in plain.items()}
    peers: list[Any] = [None] * size
    dist.all_gather_object(peers, (len(data), layout, rest), group=process_group)
    for rank, (_, other, _) in enumerate(peers):
        if other != layout:
            raise ValueError(f"all_gather: rank {rank} of the group has fields {other}, this rank has {layout}")
    counts = [count for count, _, _ in peers]
    fields = {key: _gather_rows(value, counts, process_group) for key, value in plain.items()}
    whole = DataProto.concat([part for _, _, part in peers])
    if data.batch is not None:
        for key, value in fields_of(whole.batch).items():
            fields[key] = value.to(own[key].device)
        data.batch = TensorDict(fields, batch_size=[sum(counts)], device=data.batch.device)
    data.non_tensor_batch = whole.non_tensor_batch


def _gathers_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_nested and value.layout is torch.strided


def _gather_rows(value: torch.Tensor, counts: list[int], group: Any) -> torch.Tensor:
    """Gather `[counts[rank], ...]` from every rank; collectives need equal sizes, so short ranks send padding."""
    longest = max(counts)
    local = value.detach().contiguous()
    if len(local) < longest:
        local = torch.cat([local, local.new_zeros(longest - len(local), *local.shape[1:])])
    # Rows are sent as bytes, because backends differ in the dtypes that they support.
    raw = local.reshape(-1).view(torch.uint8)
    parts = [torch.empty_like(raw) for _ in counts]
    dist.all_gather(parts, raw, group=group)
    whole = [part.view(value.dtype).view(local.shape) for part in parts]
    return torch.cat([part[:count] for part, count in zip(whole, counts, strict=True)])
