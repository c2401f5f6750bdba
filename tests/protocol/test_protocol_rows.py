"""Whatever is done to the rows of a batch is what Python does to a list of rows."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.protocol import DataProto, collate_fn, object_array, pad_dataproto_to_divisor, unpad_dataproto

LISTS = st.lists(st.integers(-9, 9), max_size=4)


def make(lists: list[list[int]], nested: bool = True) -> DataProto:
    """A batch of every kind of field; row b is made from `lists[b]` and b alone."""
    count = len(lists)
    numbers = torch.arange(count)
    tensors = {
        "wide": torch.stack([numbers, 10 * numbers, -numbers], dim=1),
        "half": torch.stack([numbers / 2, numbers / 4], dim=1).bfloat16(),
        "flag": numbers % 2 == 0,
    }
    if nested:
        values = torch.tensor([x for row in lists for x in row], dtype=torch.int64)
        offsets = torch.tensor([0, *np.cumsum([len(row) for row in lists])], dtype=torch.int64)
        tensors["jagged"] = torch.nested.nested_tensor_from_jagged(values, offsets)
        tensors["twin"] = torch.nested.nested_tensor_from_jagged(2 * values, offsets)
    non_tensors = {
        "ragged": lists,
        "text": [f"row {b}" for b in range(count)],
        "number": np.arange(count, dtype=np.float32),
        "dict": [{"b": b} for b in range(count)],
    }
    return DataProto.from_dict(tensors, non_tensors, {"temperature": 0.5})


def listed(data: DataProto) -> list[dict]:
    """The rows as plain Python values."""
    data.check_consistency()
    columns = {key: list(value) for key, value in data.non_tensor_batch.items()}
    for key, tensor in data.batch.items():
        if tensor.is_nested:
            offsets = tensor.offsets().tolist()
            flat = tensor.values().tolist()
            columns[key] = [flat[i:j] for i, j in itertools.pairwise(offsets)]
        else:
            columns[key] = tensor.tolist()
    assert {len(column) for column in columns.values()} == {len(data)}
    return [{key: column[b] for key, column in columns.items()} for b in range(len(data))]


batches = st.lists(LISTS, max_size=7)


@settings(max_examples=60)
@given(batches, st.slices(7))
def test_slices_are_those_of_a_list(lists, part):
    data = make(lists)
    assert listed(data[part]) == listed(data)[part]


@settings(max_examples=60)
@given(batches, st.data())
def test_choosing_rows_by_list_array_tensor_and_mask(lists, draw):
    data, rows = make(lists), listed(make(lists))
    count = len(lists)
    chosen = draw.draw(st.lists(st.integers(-count, count - 1), max_size=9)) if count else []
    for idxs in (chosen, np.array(chosen, dtype=np.int32), torch.tensor(chosen, dtype=torch.int64)):
        assert listed(data[idxs]) == [rows[i] for i in chosen]
    mask = draw.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    for idxs in (np.array(mask, dtype=bool), torch.tensor(mask, dtype=torch.bool)):
        assert listed(data.select_idxs(idxs)) == [row for row, keep in zip(rows, mask, strict=True) if keep]


@settings(max_examples=60)
@given(batches, st.integers(1, 9))
def test_chunk_then_concat_is_the_batch(lists, chunks):
    data = make(lists)
    if len(lists) % chunks:
        with raises_with(ValueError, f"{len(lists)} rows", f"into {chunks}"):
            data.chunk(chunks)
        data.meta_info["_auto_padding"] = True
    parts = data.chunk(chunks)
    assert len(parts) == chunks
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert listed(DataProto.concat(parts)) == listed(data)
    assert DataProto.concat(parts).meta_info == data.meta_info


@settings(max_examples=40)
@given(batches.filter(bool), st.integers(1, 9))
def test_split_then_concat_is_the_batch(lists, size):
    parts = make(lists).split(size)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert listed(DataProto.concat(parts)) == listed(make(lists))


@settings(max_examples=40)
@given(batches.filter(bool), st.randoms(use_true_random=False))
def test_reorder_and_back(lists, random):
    data, rows = make(lists), listed(make(lists))
    order = list(range(len(lists)))
    random.shuffle(order)
    data.reorder(torch.tensor(order))
    assert listed(data) == [rows[i] for i in order]
    data.reorder(np.argsort(order))
    assert listed(data) == rows


@settings(max_examples=40)
@given(batches, st.integers(0, 3), st.data())
def test_repeat(lists, times, draw):
    data, rows = make(lists), listed(make(lists))
    assert listed(data.repeat(times)) == [row for row in rows for _ in range(times)]
    assert listed(data.repeat(times, interleave=False)) == rows * times
    counts = draw.draw(st.lists(st.integers(0, 3), min_size=len(lists), max_size=len(lists)))
    for given_counts in (counts, np.array(counts, dtype=np.int64), torch.tensor(counts, dtype=torch.int64)):
        expected = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        assert listed(data.sample_level_repeat(given_counts)) == expected


@settings(max_examples=40)
@given(batches.filter(bool), st.integers(1, 20))
def test_padding_to_a_divisor_repeats_rows_from_the_first_on_and_comes_off_again(lists, divisor):
    data, rows = make(lists), listed(make(lists))
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert listed(padded) == [rows[b % len(rows)] for b in range(len(rows) + pad_size)]
    assert listed(unpad_dataproto(padded, pad_size)) == rows


@settings(max_examples=30)
@given(batches.filter(bool), st.integers(0, 4), st.sampled_from(["", "first", "last"]))
def test_padding_appends_one_row(lists, size, candidate):
    data, rows = make(lists), listed(make(lists))
    data.padding(size, candidate)
    assert listed(data) == rows + [rows[0 if candidate == "first" else -1]] * size


@settings(max_examples=40)
@given(batches, st.sampled_from([2, 4, 5]))
def test_pickling_keeps_every_row(lists, protocol):
    data = make(lists)
    again = pickle.loads(pickle.dumps(data, protocol=protocol))
    assert listed(again) == listed(data)
    assert again.meta_info == data.meta_info
    assert {k: v.dtype for k, v in again.batch.items()} == {k: v.dtype for k, v in data.batch.items()}
    assert {k: v.dtype for k, v in again.non_tensor_batch.items()} == {
        k: v.dtype for k, v in data.non_tensor_batch.items()
    }


@settings(max_examples=30)
@given(batches)
def test_disk_keeps_every_row(tmp_path_factory, lists):
    path = tmp_path_factory.getbasetemp() / "batch.safetensors"
    data = make(lists)
    data.save_to_disk(path)
    again = DataProto.load_from_disk(path)
    assert listed(again) == listed(data)
    assert again.meta_info == data.meta_info
    assert {k: v.dtype for k, v in again.batch.items()} == {k: v.dtype for k, v in data.batch.items()}


def test_single_rows_and_collate():
    data = make([[1], [2, 3], [], [4]])
    rows = listed(data)
    items = [data[b] for b in range(4)]
    assert items[1].batch["wide"].tolist() == rows[1]["wide"]
    assert items[1].batch["jagged"].tolist() == [2, 3]
    assert items[-1].non_tensor_batch["ragged"] == [4]
    assert [item.non_tensor_batch["text"] for item in data] == [row["text"] for row in rows]  # iteration ends
    assert listed(collate_fn(items)) == rows
    with raises_with(IndexError, "row 4", "4 rows"):
        data[4]
    assert pickle.loads(pickle.dumps(items[1])).batch["jagged"].tolist() == [2, 3]


def test_jagged_twins_can_still_be_combined():
    """Torch multiplies two jagged tensors only when they share their offsets."""
    data = make([[1, 2], [3], [], [4, 5, 6]])
    buffers = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    for again in (
        data[1:3],
        data[[3, 0]],
        data.repeat(2),
        DataProto.concat([data, data]),
        pickle.loads(stream, buffers=buffers),
        DataProto.concat(data.chunk(2)),
    ):
        product = again.batch["jagged"] * again.batch["twin"]
        assert torch.equal(product.values(), 2 * again.batch["jagged"].values() ** 2)


def test_jagged_second_dimension():
    """Position ids of several axes: [B, 3, j]."""
    rows = [torch.arange(3 * n).reshape(3, n) for n in (2, 4, 1)]
    values = torch.cat(rows, dim=1)
    offsets = torch.tensor([0, 2, 6, 7])
    data = DataProto.from_dict({"position_ids": torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)})
    for again, order in (
        (data[[2, 0]], [2, 0]),
        (data[1:], [1, 2]),
        (DataProto.concat([data[2:], data[:2]]), [2, 0, 1]),
        (pickle.loads(pickle.dumps(data)), [0, 1, 2]),
    ):
        found = again.batch["position_ids"].unbind()
        assert [row.tolist() for row in found] == [rows[i].tolist() for i in order]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensordict_and_strided_nested_fields_survive(tmp_path):
    inner = DataProto.from_dict({"pixels": torch.arange(6).reshape(3, 2)}).batch
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)])
    data = DataProto.from_dict({"inner": inner, "nested": nested})
    path = tmp_path / "batch"
    data.save_to_disk(path)
    for source in (data, DataProto.load_from_disk(path)):
        again = DataProto.concat(pickle.loads(pickle.dumps(source[[2, 0, 1]])).chunk(3))
        assert again.batch["inner"]["pixels"].tolist() == [[4, 5], [0, 1], [2, 3]]
        assert [row.tolist() for row in again.batch["nested"].unbind()] == [[2, 2, 2], [0], [1, 1]]


def test_slices_share_memory_and_copies_do_not():
    data = DataProto.from_dict({"x": torch.zeros(4, 2)})
    view = data[1:3]
    view.batch["x"][0] = 7
    assert data.batch["x"][1].tolist() == [7, 7]
    for fresh in (data[[0, 1]], DataProto.concat([data]), copy.deepcopy(data)):
        fresh.batch["x"][0] = 9
        assert data.batch["x"][0].tolist() == [0, 0]
    view.meta_info["leak"] = 1
    assert "leak" not in data.meta_info


def test_lists_of_equal_length_stay_lists():
    """np.array(lists, dtype=object) would make a matrix of them."""
    lists = [[1, 2], [3, 4]]
    assert object_array(lists).shape == (2,)
    data = DataProto.from_dict(non_tensors={"turns": lists})
    other = DataProto.from_dict(non_tensors={"turns": [[5], [6, 7, 8]]})
    joined = pickle.loads(pickle.dumps(DataProto.concat([data, other])))
    assert joined.non_tensor_batch["turns"].tolist() == [*lists, [5], [6, 7, 8]]
    assert collate_fn(list(data)).non_tensor_batch["turns"].tolist() == lists


def test_matrices_of_objects_made_by_chance_join_as_lists():
    first = DataProto(non_tensor_batch={"turns": np.array([[{"a": 1}], [{"a": 2}]], dtype=object)})
    second = DataProto(non_tensor_batch={"turns": object_array([[{"a": 3}, {"a": 4}]])})
    joined = DataProto.concat([first, second])
    assert joined.non_tensor_batch["turns"].tolist() == [[{"a": 1}], [{"a": 2}], [{"a": 3}, {"a": 4}]]


def test_arrays_of_different_kinds_keep_their_entries():
    numbers = DataProto(non_tensor_batch={"x": np.array([1, 2])})
    strings = DataProto(non_tensor_batch={"x": np.array(["a", "bc"])})
    joined = DataProto.concat([numbers, strings]).non_tensor_batch["x"]
    assert joined.tolist() == [1, 2, "a", "bc"]
    longer = DataProto.concat([strings, DataProto(non_tensor_batch={"x": np.array(["defg"])})])
    assert longer.non_tensor_batch["x"].tolist() == ["a", "bc", "defg"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_large_batches_take_the_same_values_through_huge_pages(dtype):
    wide = (torch.arange(5 * 2**20) % 100).reshape(1024, -1).to(dtype)
    data = DataProto.from_dict({"x": wide})
    order = np.random.default_rng(0).permutation(1024)
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    joined = DataProto.concat(data.chunk(4)).batch["x"]
    assert joined.dtype == dtype
    assert torch.equal(joined.view(view), wide.view(view))
    assert torch.equal(data[order].batch["x"].view(view), wide.view(view)[torch.from_numpy(order)])


JAGGED_ROWS = [[30, 31, 32], [10], [40, 41], [20, 21, 22, 23]]
#: every method that gives rows, and which rows it gives
GIVES_ROWS = {
    "slice": (lambda batch: batch[1:3], [1, 2]),
    "list": (lambda batch: batch[[3, 0]], [3, 0]),
    "mask": (lambda batch: batch[torch.tensor([True, False, True, False])], [0, 2]),
    "select": (lambda batch: batch.select(batch_keys=["x"]), [0, 1, 2, 3]),
    "pop": (lambda batch: copy.deepcopy(batch).pop(batch_keys=["x"]), [0, 1, 2, 3]),
    "rename": (lambda batch: copy.deepcopy(batch).rename("y", "z"), [0, 1, 2, 3]),
    "union": (lambda batch: batch.union(DataProto.from_dict({"q": torch.zeros(4)})), [0, 1, 2, 3]),
    "chunk": (lambda batch: batch.chunk(2)[1], [2, 3]),
    "split": (lambda batch: batch.split(3)[1], [3]),
    "concat": (lambda batch: DataProto.concat([batch, batch[:1]]), [0, 1, 2, 3, 0]),
    "repeat": (lambda batch: batch.repeat(2), [0, 0, 1, 1, 2, 2, 3, 3]),
    "repeat_blocks": (lambda batch: batch.repeat(2, interleave=False), [0, 1, 2, 3, 0, 1, 2, 3]),
    "sample_level_repeat": (lambda batch: batch.sample_level_repeat([1, 2, 0, 1]), [0, 1, 1, 3]),
    "to": (lambda batch: batch.to("cpu"), [0, 1, 2, 3]),
    "tensordict": (lambda batch: DataProto.from_tensordict(batch.to_tensordict()), [0, 1, 2, 3]),
    "copy": (copy.copy, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", GIVES_ROWS)
def test_every_method_preserves_the_jagged_layout(name: str) -> None:
    tensor = torch.nested.as_nested_tensor([torch.tensor(row) for row in JAGGED_ROWS], layout=torch.jagged)
    method, rows = GIVES_ROWS[name]
    found = method(DataProto.from_dict({"x": tensor, "y": torch.arange(4)})).batch["x"]
    assert found.layout == torch.jagged
    assert [row.tolist() for row in found.unbind()] == [JAGGED_ROWS[row] for row in rows]
