"""A batch whose tensors are packed until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridrl.errors import BatchError
from hybridrl.protocol import compact, rows, transport
from hybridrl.protocol.dataproto import DataProto


class PackedProto(DataProto):
    """A `DataProto` on its way to ranks: rows are selected, cut and sent without their padding (see `compact`).

    Whoever reads `batch` gets the tensors. It is an ordinary batch from then on, and always one where it arrives.
    """

    _packed: compact.PackedTensors | None = None

    @classmethod
    def of(cls, data: DataProto) -> PackedProto:
        """Pack a batch, if that saves anything."""
        if isinstance(data, PackedProto):
            return data
        packed = compact.pack(data.batch)
        if packed is None:
            return cls(data.batch, dict(data.non_tensor_batch), dict(data.meta_info))
        return cls._with(packed, dict(data.non_tensor_batch), dict(data.meta_info))

    @classmethod
    def _with(
        cls, packed: compact.PackedTensors, arrays: dict[str, np.ndarray], meta_info: dict[str, Any]
    ) -> PackedProto:
        batch = cls(None, arrays, meta_info)  # type: ignore[arg-type]
        batch._packed = packed
        batch.check_consistency()
        return batch

    @property
    def batch(self) -> TensorDict:
        """The tensors."""
        if self._packed is not None:
            self._tensors, self._packed = self._packed.unpack(), None
        return self._tensors

    @batch.setter
    def batch(self, tensors: TensorDict) -> None:
        self._tensors, self._packed = tensors, None

    @property
    def is_packed(self) -> bool:
        """Whether nobody has read its tensors yet."""
        return self._packed is not None

    @property
    def packed_bytes(self) -> int | None:
        """Number of bytes of its tensors as they travel; None once they were read."""
        return None if self._packed is None else self._packed.nbytes

    def tensor_names(self) -> list[str]:
        """Return the names of the tensors."""
        return list(rows.fields_of(self.batch) if self._packed is None else self._packed.fields)

    def field(self, name: str) -> torch.Tensor:
        """Return one tensor, and leave the others packed."""
        return self.batch[name] if self._packed is None else self._packed.tensor(name)

    def set_field(self, name: str, tensor: torch.Tensor) -> None:
        """Replace one tensor, and leave the others packed."""
        if self._packed is None:
            self.batch[name] = tensor
        else:
            self._packed = self._packed.with_tensor(name, tensor)

    # ---- what needs no tensors

    def check_consistency(self) -> None:
        if self._packed is None:
            super().check_consistency()
            return
        for key, value in self.non_tensor_batch.items():
            if len(value) != self._packed.rows:
                raise BatchError(f"non-tensor field '{key}' has {len(value)} entries for {self._packed.rows} rows")

    @property
    def _length(self) -> int:
        return super()._length if self._packed is None else self._packed.rows

    def select_idxs(self, idxs: Any) -> PackedProto:
        if self._packed is None:
            ordinary = super().select_idxs(idxs)
            return type(self)(ordinary.batch, ordinary.non_tensor_batch, ordinary.meta_info)
        indices = rows.row_indices(idxs, len(self))
        arrays = {key: value[indices] for key, value in self.non_tensor_batch.items()}
        return self._with(self._packed.take(indices), arrays, dict(self.meta_info))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        first, last, stride = slice(start, end, step).indices(len(self))
        if self._packed is None or stride != 1:
            return super().slice(start, end, step)
        last = max(first, last)
        arrays = {key: value[first:last] for key, value in self.non_tensor_batch.items()}
        return self._with(self._packed.cut(first, last), arrays, dict(self.meta_info))

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> PackedProto:
        if self._packed is None or deepcopy:
            ordinary = super().select(batch_keys, non_tensor_batch_keys, meta_info_keys, deepcopy)
            return type(self)(ordinary.batch, ordinary.non_tensor_batch, ordinary.meta_info)
        names = list(self._packed.fields if batch_keys is None else batch_keys)
        self._require(names, self._packed.fields, "batch keys")
        rest = DataProto(None, self.non_tensor_batch, self.meta_info)  # type: ignore[arg-type]
        rest = rest.select(None, non_tensor_batch_keys, meta_info_keys)
        return self._with(self._packed.select(names), rest.non_tensor_batch, rest.meta_info)

    def __copy__(self) -> DataProto:
        if self._packed is None:
            return super().__copy__()
        return self._with(self._packed, dict(self.non_tensor_batch), dict(self.meta_info))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._packed is None:
            return DataProto(self.batch, self.non_tensor_batch, self.meta_info).__reduce_ex__(protocol)
        self.check_consistency()
        state = (self._packed, self.non_tensor_batch, self.meta_info)
        return _load, transport.dumps(state, int(protocol))


def _load(stream: Any, buffers: list[Any], foreign: list[Any]) -> DataProto:
    return DataProto(*transport.loads(stream, buffers, foreign))
