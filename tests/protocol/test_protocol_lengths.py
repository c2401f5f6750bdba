"""A field that is assigned later and has another number of rows than the batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises_with

from hybridrl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from hybridrl.protocol.functions import collate_fn, fold_batch_dim


def batch(rows: int = 4, tensors: bool = True) -> DataProto:
    return DataProto.from_dict(
        {"a": torch.arange(rows)} if tensors else None, {"b": np.arange(rows), "c": np.array(["x"] * rows, object)}
    )


OPERATIONS: dict[str, Callable[[DataProto], Any]] = {
    "chunk": lambda data: data.chunk(2),
    "split": lambda data: data.split(2),
    "repeat": lambda data: data.repeat(2),
    "repeat in blocks": lambda data: data.repeat(2, interleave=False),
    "slice": lambda data: data[0:2],
    "index": lambda data: data[1],
    "rows": lambda data: data[[0, 1]],
    "mask": lambda data: data[torch.tensor([True, False, True, False])],
    "concat": lambda data: DataProto.concat([batch(), data]),
    "concat first": lambda data: DataProto.concat([data, data]),
    "union": lambda data: data.union(DataProto.from_dict({"e": torch.zeros(4)})),
    "union of the other": lambda data: batch().union(data),
    "select": lambda data: data.select(["a"] if data.batch is not None else None),
    "pop": lambda data: data.pop(non_tensor_batch_keys=["c"]),
    "rename": lambda data: data.rename("c", "d"),
    "reorder": lambda data: data.reorder([3, 2, 1, 0]),
    "padding": lambda data: data.padding(2),
    "pad to a divisor": lambda data: pad_dataproto_to_divisor(data, 3),
    "unpad": lambda data: unpad_dataproto(data, 1),
    "sample_level_repeat": lambda data: data.sample_level_repeat([1, 2, 0, 1]),
    "make_iterator": lambda data: list(data.make_iterator(2, 1)),
    "fold": lambda data: fold_batch_dim(data, 2),
    "to_tensordict": lambda data: data.to_tensordict(),
    "pickle": lambda data: pickle.dumps(data),
}


@pytest.mark.parametrize("rows", [3, 5, 8])
@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_longer_or_shorter_column_is_refused(name: str, tensors: bool, rows: int) -> None:
    data = batch(tensors=tensors)
    data.non_tensor_batch["b"] = np.arange(rows)
    if name == "select" and not tensors:
        return
    with pytest.raises(ValueError, match=r"non-tensor field '[bc]' has shape \(\d,\), but the batch has \d rows"):
        OPERATIONS[name](data)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_same_operations_work_on_a_whole_batch(name: str) -> None:
    OPERATIONS[name](batch())


def test_a_list_in_place_of_an_array_is_refused() -> None:
    data = batch()
    data.non_tensor_batch["b"] = [0, 1, 2, 3]  # type: ignore[assignment]
    with raises_with(TypeError, "'b'", "NumPy"):
        data.chunk(2)


def test_nothing_is_written_of_a_batch_that_does_not_fit(tmp_path: Path) -> None:
    data = batch()
    data.non_tensor_batch["b"] = np.arange(9)
    with pytest.raises(ValueError, match="has shape"):
        data.save_to_disk(tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_rows_with_different_fields_are_not_collated() -> None:
    other = batch()
    other.non_tensor_batch["d"] = np.arange(4)
    with raises_with(ValueError, "row 1", "row 0", "['d']"):
        collate_fn([batch()[0], other[0]])
