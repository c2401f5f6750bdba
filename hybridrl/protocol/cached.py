"""Values that a batch keeps as long as the columns that they are computed from."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class ColumnCache:
    """Base of batches: keeps what is computed from non-tensor columns.

    The values do not travel to other processes, and a batch that is made of this one computes its own.
    """

    non_tensor_batch: dict[str, np.ndarray]

    def cached(self, name: str, columns: Sequence[str], make: Callable[[], T]) -> T:
        """Return the value of `make`, computed once as long as the columns are the same arrays.

        Args:
            name: of the value.
            columns: the columns that it is computed from; they need not exist.
            make: computes it.
        """
        values: dict[str, tuple[list[Any], T]] = self.__dict__.setdefault("_cached_values", {})
        arrays = [self.non_tensor_batch.get(column) for column in columns]
        if name not in values or any(old is not new for old, new in zip(values[name][0], arrays, strict=True)):
            values[name] = arrays, make()
        return values[name][1]
