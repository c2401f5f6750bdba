"""Tensors of a batch without their padding.

A padded batch of responses with a long tail of lengths is mostly padding, and most of its fields follow from others.
`pack` keeps the tokens between the padding, in the smallest integer type that holds them, and of the other fields what
cannot be derived. `unpack` gives back the same tensors: same names in the same order, same types, same bits.

| field | what is kept |
|---|---|
| `attention_mask` [B, S] | where each row's tokens begin and how many they are: the *span* of a row |
| `input_ids` | the tokens in the spans, and the padding token |
| `prompts`, `responses` | nothing where they are columns of `input_ids` |
| `position_ids` [B, S], [B, k, S] | the place from which each row counts; with images the difference in the spans |
| fields of prompts, responses and sequences (`fields.FIELDS`) | the values in the spans: one, one per row or token |
| all others, and those that have other values on padding | the tensor itself |

Without an `attention_mask` the span of a row is between its first and last value that is not padding, which is the most
frequent value at the edge. Nothing is assumed: a field is left as it is unless what is kept gives back its bits.

Legend: B rows, W columns of a field, N tokens of all rows in their spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from hybridrl.protocol import rows
from hybridrl.protocol.fields import FIELDS

#: smaller batches are left as they are
SMALLEST = 64 * 1024
_WORTHWHILE = 0.9  # of the bytes as they are
_BLOCK = 256  # rows that are compared at once
_WIDE = 512  # columns; rows of more are handled one by one, which takes less time and memory than masks of all cells
_BITS: dict[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW = (np.uint8, np.int8, np.uint16, np.int16, np.int32)
_POSITIONS = "position_ids"
_PARTS = ("prompts", "responses")


@dataclass(frozen=True, slots=True)
class _Spans:
    """Where the tokens of each row are: first columns and numbers of columns, int32 [B], in fields of W columns."""

    starts: np.ndarray
    lengths: np.ndarray
    width: int

    @classmethod
    def between(cls, starts: np.ndarray, ends: np.ndarray, width: int) -> _Spans:
        return cls(starts.astype(np.int32), (ends - starts).astype(np.int32), width)

    def take(self, indices: np.ndarray) -> _Spans:
        return _Spans(self.starts[indices], self.lengths[indices], self.width)

    def cut(self, start: int, stop: int) -> _Spans:
        return _Spans(self.starts[start:stop], self.lengths[start:stop], self.width)

    def ends(self) -> np.ndarray:
        """Return for each row where its tokens end among the N."""
        return np.cumsum(self.lengths, dtype=np.int64)

    def slices(self) -> Iterator[tuple[int, int, int]]:
        """Yield (row, first column, column behind the last)."""
        for row, (start, length) in enumerate(zip(self.starts.tolist(), self.lengths.tolist(), strict=True)):
            yield row, start, start + length

    def masks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield blocks of rows, each with whether its cells are in the spans, [rows, W]."""
        columns, ends = np.arange(self.width, dtype=np.int32), self.starts + self.lengths
        for begin in range(0, len(self.starts), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            yield block, (columns >= self.starts[block, None]) & (columns < ends[block, None])

    def values_in(self, values: np.ndarray) -> np.ndarray:
        """Return the values in the spans, [N, ...]."""
        if self.width > _WIDE:
            return np.concatenate([values[row, first:end] for row, first, end in self.slices()])
        return np.concatenate([values[block][mask] for block, mask in self.masks()])

    def put(self, values: np.ndarray, field: _Tokens) -> None:
        """Set the values in the spans to those of a field; where it has origins, add them."""
        ends = self.ends()
        if self.width > _WIDE:
            for (row, first, stop), end in zip(self.slices(), ends.tolist(), strict=True):
                if field.per == "token":
                    own = field.values[end - (stop - first) : end]
                else:
                    own = field.values if field.per == "field" else field.values[row]
                values[row, first:stop] = own if field.origins is None else values[row, first:stop] + own
            return
        for block, mask in self.masks():
            own, some = field.values, values[block]
            if field.per == "token":
                own = own[int(ends[block.start] - self.lengths[block.start]) : int(ends[block][-1])]
            elif field.per == "row":
                own = np.repeat(own[block], self.lengths[block], axis=0)
            some[mask] = own if field.origins is None else some[mask] + own

    def fill_of(self, values: np.ndarray) -> int | None:
        """Return the value that all cells outside of the spans have, 0 if there are none; None where they differ."""
        partly = self.lengths < self.width
        if not partly.any():
            return 0
        row = int(partly.argmax())
        fill = values[row, 0 if self.starts[row] > 0 else self.lengths[row]].flat[0]
        if self.width > _WIDE:
            for row, first, end in self.slices():
                if (values[row, :first] != fill).any() or (values[row, end:] != fill).any():
                    return None
            return int(fill)
        for block, mask in self.masks():
            differs = values[block] != fill
            differs = differs.reshape(*differs.shape[:2], -1).any(axis=2) if differs.ndim > 2 else differs
            if (differs & ~mask).any():
                return None
        return int(fill)

    def within(self, first: int, width: int) -> _Spans:
        """Return the spans in the columns from `first` on, `width` of them."""
        starts = np.clip(self.starts - first, 0, width)
        return _Spans.between(starts, np.clip(self.starts + self.lengths - first, 0, width), width)


@dataclass(frozen=True, slots=True)
class _Whole:
    """A field as it is."""

    tensor: Any

    @property
    def nbytes(self) -> int:
        return _bytes_of(self.tensor)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of another field."""

    source: str
    start: int
    stop: int
    nbytes = 0


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Values in the spans, one value elsewhere.

    Attributes:
        values: [N, ...] of an integer type, whose bits are those of the field where that has floating-point numbers.
        per: what has a value of its own: each token, each row ([B, ...]), or nothing ([...]).
        spans: name of the spans.
        fill: value elsewhere.
        kind: dtype of the field.
        dim: dimension of its columns.
        origins: int64 [B, 1, ...], the column from which a row counts on: `max(column - origin, 0)` is added to what is
            there. None: nothing is added.
        shape: of `values` where they travel as bits, else None.
    """

    values: np.ndarray
    per: Literal["token", "row", "field"]
    spans: str
    fill: int
    kind: torch.dtype
    dim: int
    origins: np.ndarray | None = None
    shape: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        of_origins = 0 if self.origins is None else self.origins.nbytes
        return of_origins + ((self.values.size + 7) // 8 if self.values.dtype == np.bool_ else self.values.nbytes)

    def of_rows(self, indices: Any, values: np.ndarray) -> _Tokens:
        """Return it for other rows.

        Args:
            indices: index the rows of this.
            values: of their tokens, where each token has its own.
        """
        if self.per != "token":
            values = self.values[indices] if self.per == "row" else self.values
        return replace(self, values=values, origins=None if self.origins is None else self.origins[indices])

    def sent(self) -> _Tokens:
        """Return it with bits in place of a mask."""
        if self.values.dtype != np.bool_:
            return self
        return replace(self, values=np.packbits(self.values), shape=self.values.shape)

    def received(self) -> _Tokens:
        """Return what `sent` was called on."""
        if self.shape is None:
            return self
        values = np.unpackbits(self.values, count=int(np.prod(self.shape))).reshape(self.shape)
        return replace(self, values=values.view(np.bool_), shape=None)


_Field = _Whole | _Columns | _Tokens


@dataclass(frozen=True)
class PackedTensors:
    """The tensors of a batch, packed.

    Its rows can be selected and cut like those of the batch. It is pickled as what it is and read as a TensorDict.

    Attributes:
        rows: B.
        has_device: the TensorDict has a device; it is read with the CPU.
        spans: by name.
        fields: by name, in the order of the TensorDict.
    """

    rows: int
    has_device: bool
    spans: Mapping[str, _Spans]
    fields: Mapping[str, _Field]

    def __reduce__(self) -> Any:
        fields = {name: each.sent() if isinstance(each, _Tokens) else each for name, each in self.fields.items()}
        return _unpacked, (self.rows, self.has_device, self._used_spans(), fields)

    def _used_spans(self) -> dict[str, _Spans]:
        used = {field.spans for field in self.fields.values() if isinstance(field, _Tokens)}
        return {name: spans for name, spans in self.spans.items() if name in used}

    @property
    def nbytes(self) -> int:
        """Number of bytes that travel."""
        spans = sum(each.starts.nbytes + each.lengths.nbytes for each in self._used_spans().values())
        return spans + sum(each.nbytes for each in self.fields.values())

    def take(self, indices: np.ndarray) -> PackedTensors:
        """Return the rows `indices`, int64 [N], none negative."""
        memo, index = rows.Memo(), torch.from_numpy(indices)
        ends = {name: spans.ends()[indices] for name, spans in self.spans.items()}
        spans = {name: each.take(indices) for name, each in self.spans.items()}

        def taken(field: _Field) -> _Field:
            if isinstance(field, _Whole):
                return _Whole(rows.index_tensor(field.tensor, index, memo))
            if isinstance(field, _Columns):
                return field
            values = field.values
            if field.per == "token":
                bounds = zip(
                    (ends[field.spans] - spans[field.spans].lengths).tolist(), ends[field.spans].tolist(), strict=True
                )
                values = np.concatenate([values[:0], *(values[first:end] for first, end in bounds)])
            return field.of_rows(indices, values)

        return replace(
            self, rows=len(indices), spans=spans, fields={name: taken(each) for name, each in self.fields.items()}
        )

    def cut(self, start: int, stop: int) -> PackedTensors:
        """Return the rows from `start` to `stop` (0 <= start <= stop <= B); they share memory with these."""
        memo = rows.Memo()
        spans = {name: each.cut(start, stop) for name, each in self.spans.items()}

        def part(field: _Field) -> _Field:
            if isinstance(field, _Whole):
                return _Whole(rows.slice_tensor(field.tensor, start, stop, memo))
            if isinstance(field, _Columns):
                return field
            values = field.values
            if field.per == "token":
                first = int(self.spans[field.spans].lengths[:start].sum())
                values = values[first : first + int(spans[field.spans].lengths.sum())]
            return field.of_rows(slice(start, stop), values)

        return replace(
            self, rows=stop - start, spans=spans, fields={name: part(each) for name, each in self.fields.items()}
        )

    def select(self, names: Sequence[str]) -> PackedTensors:
        """Return these fields, in this order."""
        fields: dict[str, _Field] = {}
        for name in names:
            field = self.fields[name]
            lacks_source = isinstance(field, _Columns) and field.source not in names
            fields[name] = _Whole(self.tensor(name)) if lacks_source else field
        return replace(self, fields=fields)

    def with_tensor(self, name: str, tensor: torch.Tensor) -> PackedTensors:
        """Return it with another tensor for a field that no other is derived from."""
        spans = dict(self.spans)
        return replace(self, spans=spans, fields={**self.fields, name: _encoded(name, tensor, spans)})

    def tensor(self, name: str) -> Any:
        """Return one field."""
        field = self.fields[name]
        if isinstance(field, _Whole):
            return field.tensor
        if isinstance(field, _Columns):
            return self.tensor(field.source)[:, field.start : field.stop].contiguous()
        return _decoded(field, self.spans[field.spans], self.rows)

    def unpack(self) -> TensorDict:
        """Return the tensors, in new memory but for those that were not packed."""
        fields: dict[str, Any] = {}
        for name, field in self.fields.items():
            if not isinstance(field, _Columns):
                fields[name] = self.tensor(name)
        for name, field in self.fields.items():
            if isinstance(field, _Columns):
                fields[name] = fields[field.source][:, field.start : field.stop].contiguous()
        ordered = {name: fields[name] for name in self.fields}
        return TensorDict(ordered, batch_size=[self.rows], device="cpu" if self.has_device else None)


def _unpacked(count: int, has_device: bool, spans: Mapping[str, _Spans], fields: Mapping[str, _Field]) -> TensorDict:
    received = {name: each.received() if isinstance(each, _Tokens) else each for name, each in fields.items()}
    return PackedTensors(count, has_device, spans, received).unpack()


def pack(batch: TensorDictBase | None, smallest: int = SMALLEST) -> PackedTensors | None:
    """Pack the tensors of a batch; None where that saves little.

    Args:
        batch: of a `DataProto`.
        smallest: number of bytes from which on a batch is packed.
    """
    if type(batch) is not TensorDict or len(batch.batch_size) != 1 or not batch.batch_size[0]:
        return None
    tensors = rows.fields_of(batch)
    whole = sum(map(_bytes_of, tensors.values()))
    if whole < smallest or not any(name in FIELDS and FIELDS[name].axis != "row" for name in tensors):
        return None
    spans = _spans_of(tensors)
    fields: dict[str, _Field] = {
        name: _columns(name, tensors) or _encoded(name, tensor, spans) for name, tensor in tensors.items()
    }
    packed = PackedTensors(batch.batch_size[0], batch.device is not None, spans, fields)
    return packed if packed.nbytes <= _WORTHWHILE * whole else None


def _bytes_of(value: Any) -> int:
    if isinstance(value, TensorDictBase):
        return int(value.bytes())
    if isinstance(value, torch.Tensor) and value.is_nested:
        return sum(row.nbytes for row in value.unbind())
    return int(getattr(value, "nbytes", 0))


def _is_plain(tensor: Any) -> bool:
    """Return whether the bits of a tensor can be read as integers."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_nested
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_complex())
        and tensor.element_size() in _BITS
        and tensor.numel() > 0
    )


def _spans_of(tensors: Mapping[str, Any]) -> dict[str, _Spans]:
    """Return the spans of sequences, prompts and responses by `attention_mask`; none without it."""
    attention: Any = tensors.get("attention_mask")
    if not _is_plain(attention) or attention.ndim != 2:
        return {}
    sequence = _hull(attention.detach().cpu().numpy())
    spans, width = {"sequence": sequence}, attention.shape[1]
    for name in ("responses", "response_mask", "prompts"):
        columns = (
            tensors[name].shape[1] if name in tensors and _is_plain(tensors[name]) and tensors[name].ndim > 1 else 0
        )
        if 0 < columns <= width:
            prompt = columns if name == "prompts" else width - columns
            return spans | {
                "prompt": sequence.within(0, prompt),
                "response": sequence.within(prompt, width - prompt),
            }
    return spans


def _likely_fill(edge: np.ndarray) -> Any:
    """Return the most frequent value in a column at the edge of a field."""
    kinds, counts = np.unique(edge, return_counts=True)
    return kinds[counts.argmax()]


def _hull(values: np.ndarray, fill: Any = 0) -> _Spans:
    """Return the spans from the first to the last value of each row that is not `fill`."""
    count, width = values.shape[:2]
    starts, ends = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for block in range(0, count, _BLOCK):
        some = values[block : block + _BLOCK] != fill
        some = some.reshape(*some.shape[:2], -1).any(axis=2) if some.ndim > 2 else some
        filled = some.any(axis=1)
        starts[block : block + _BLOCK] = np.where(filled, some.argmax(axis=1), 0)
        ends[block : block + _BLOCK] = np.where(filled, width - some[:, ::-1].argmax(axis=1), 0)
    return _Spans.between(starts, ends, width)


def _columns(name: str, tensors: Mapping[str, Any]) -> _Columns | None:
    """Return where a field is a part of `input_ids`; None where it is not."""
    tensor, whole = tensors[name], tensors.get("input_ids", tensors[name])
    if name not in _PARTS or whole is tensor or not _is_plain(tensor) or not _is_plain(whole):
        return None
    if tensor.ndim != 2 or whole.ndim != 2 or tensor.dtype != whole.dtype or tensor.shape[1] > whole.shape[1]:
        return None
    start = 0 if name == "prompts" else whole.shape[1] - tensor.shape[1]
    stop = start + tensor.shape[1]
    return _Columns("input_ids", start, stop) if torch.equal(whole[:, start:stop], tensor) else None


def _encoded(name: str, tensor: Any, spans: dict[str, _Spans]) -> _Field:
    """Return a field without its padding, or as it is where that saves nothing.

    Args:
        spans: by axis; a field whose axis has none gets its own, under its name.
    """
    field = FIELDS.get(name)
    if field is None or field.axis == "row" or not _is_plain(tensor) or not 0 < field.dim % tensor.ndim < tensor.ndim:
        return _Whole(tensor)
    on_cpu, dim = tensor.detach().cpu(), field.dim % tensor.ndim
    values = on_cpu.view(_BITS[tensor.element_size()]).movedim(dim, 1).numpy()
    where: str = field.axis
    if where not in spans or spans[where].width != values.shape[1]:
        where = name
        spans[name] = _hull(values, _likely_fill(values[:, 0 if field.axis == "prompt" else -1]))
    origins = None
    if name == _POSITIONS and tensor.dtype == torch.int64:
        origins = _origins(values)
        rest = _without_counting(values, origins)
        if rest is None:
            nothing = np.zeros(values.shape[2:], dtype=np.uint8)
            return _Tokens(nothing, "field", where, 0, tensor.dtype, dim, origins)
        values = rest
    fill = spans[where].fill_of(values)
    if fill is None or (fill and origins is not None):
        return _Whole(on_cpu)
    inside = spans[where].values_in(values)
    reduced, per = _reduced(inside, spans[where])
    if per != "field" and not tensor.is_floating_point():
        reduced = _narrowed(reduced, per == "token")
    encoded = _Tokens(reduced, per, where, fill, tensor.dtype, dim, origins)
    return encoded if encoded.nbytes <= _WORTHWHILE * tensor.nbytes else _Whole(on_cpu)


def _counts(origins: np.ndarray, width: int) -> np.ndarray:
    """Return how far each column is behind the origin of its row, [B, W, ...]; 0 before it."""
    counts = np.arange(width).reshape(1, -1, *(1,) * (origins.ndim - 2)) - origins
    return np.maximum(counts, 0, out=counts)


def _origins(positions: np.ndarray) -> np.ndarray:
    """Return the origins from which the last columns of positions count, [B, 1, ...]."""
    width = positions.shape[1]
    return width - 1 - np.clip(positions[:, -1:], 0, 2 * width - 1)


def _without_counting(positions: np.ndarray, origins: np.ndarray) -> np.ndarray | None:
    """Return positions minus what counting from the origins gives; None where nothing is rest."""
    count, width = positions.shape[:2]
    if width <= _WIDE:
        difference = positions - _counts(origins, width)
        return difference if difference.any() else None
    columns, first = positions.reshape(count, width, -1), origins.reshape(count, -1)
    ramp = np.concatenate([np.zeros(width, dtype=np.int64), np.arange(2 * width + 1)])  # 0 at `width`
    rest = None
    for row, of_row in enumerate(first.tolist()):
        for number, origin in enumerate(of_row):
            expected, own = ramp[width - origin : 2 * width - origin], columns[row, :, number]
            if not np.array_equal(own, expected):
                rest = np.zeros(columns.shape, dtype=np.int64) if rest is None else rest
                rest[row, :, number] = own - expected
    return None if rest is None else rest.reshape(positions.shape)


def _reduced(values: np.ndarray, spans: _Spans) -> tuple[np.ndarray, Literal["token", "row", "field"]]:
    """Return the values in the spans once for all or once per row, if they are equal there."""
    if not len(values):
        return np.zeros(values.shape[1:], dtype=values.dtype), "field"
    if (values[-1] == values[0]).all() and (values == values[0]).all():
        return np.array(values[0]), "field"
    ends, filled = spans.ends(), spans.lengths > 0
    of_rows = np.zeros((len(ends), *values.shape[1:]), dtype=values.dtype)
    of_rows[filled] = values[ends[filled] - 1]
    starts = (ends - spans.lengths)[filled]
    if (of_rows[filled] == values[starts]).all() and (values == np.repeat(of_rows, spans.lengths, axis=0)).all():
        return of_rows, "row"
    return values, "token"


def _narrowed(values: np.ndarray, masks: bool) -> np.ndarray:
    """Return integers in the smallest type that holds them; with `masks`, 0 and 1 as booleans."""
    low, high = int(values.min()), int(values.max())
    if masks and (low, high) in ((0, 0), (0, 1), (1, 1)):
        return values.astype(np.bool_)
    for kind in _NARROW:
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return values.astype(kind)
    return values


def _decoded(field: _Tokens, spans: _Spans, count: int) -> torch.Tensor:
    """Return the tensor that `_encoded` was given; its values are in new memory."""
    tail = field.values.shape if field.per == "field" else field.values.shape[1:]
    kind = np.dtype(f"i{field.kind.itemsize}") if field.kind.itemsize > 1 else np.dtype(np.uint8)
    shape = (count, spans.width, *tail)
    if field.origins is not None:
        values = _counts(field.origins, spans.width)
    else:
        values = np.full(shape, field.fill, dtype=kind) if field.fill else np.zeros(shape, dtype=kind)
    if field.origins is None or field.per != "field" or field.values.any():
        spans.put(values, field)
    tensor = torch.from_numpy(values)
    tensor = tensor if tensor.dtype == field.kind else tensor.view(field.kind)
    return tensor.movedim(1, field.dim).contiguous()
