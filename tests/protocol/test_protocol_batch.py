"""The methods of DataProto on whole batches and fields, and what they refuse."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from raising import raises_with
from tensordict import TensorDict

import hybridrl
from hybridrl.protocol import (
    DataProto,
    DataProtoConfig,
    fold_batch_dim,
    object_array,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def make(**meta) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(6).reshape(3, 2), "y": torch.tensor([0.5, float("nan"), 1.5])},
        {"uid": ["a", "b", "c"], "number": np.arange(3)},
        meta,
    )


def test_importing_the_package_does_not_import_torch():
    code = (
        "import sys, hybridrl; assert not {'torch', 'ray'} & set(sys.modules); "
        "hybridrl.DataProto; assert 'torch' in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert hybridrl.DataProto is DataProto
    with raises_with(AttributeError, "'Nothing'"):
        hybridrl.Nothing  # noqa: B018 (the access is the test)


def test_from_single_dict_sorts_values_by_kind():
    data = DataProto.from_single_dict(
        {"x": torch.zeros(2, 1), "uid": ["a", "b"], "n": np.arange(2)}, meta_info={"k": 1}, auto_padding=True
    )
    assert set(data.batch.keys()) == {"x"}
    assert set(data.non_tensor_batch) == {"uid", "n"}
    assert data.is_padding_enabled() and data.meta_info["k"] == 1
    with raises_with(TypeError, "'bad'"):
        DataProto.from_single_dict({"bad": 3})


def test_batches_without_tensors_and_without_anything():
    texts = DataProto.from_dict(non_tensors={"uid": ["a", "b", "c", "d"]})
    assert texts.batch is None and len(texts) == 4
    assert DataProto.concat(texts.chunk(2)).non_tensor_batch["uid"].tolist() == ["a", "b", "c", "d"]
    assert texts[[3]].repeat(2).non_tensor_batch["uid"].tolist() == ["d", "d"]
    nothing = DataProto(meta_info={"metrics": {"loss": 1.0}})
    assert len(nothing) == 0
    assert DataProto.concat([nothing, nothing]).meta_info == {"metrics": {"loss": [1.0, 1.0]}}
    assert [len(part) for part in nothing.chunk(2)] == [0, 0]
    with pytest.raises(ValueError, match="at least one DataProto"):
        DataProto.concat([])


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: DataProto.from_dict({"x": torch.zeros(2), "y": torch.zeros(3)}), ValueError, "'y' has batch size"),
        (lambda: DataProto.from_dict({"x": [1, 2]}), TypeError, "'x' must be a tensor, found list"),
        (lambda: DataProto.from_dict({"x": torch.tensor(1.0)}), ValueError, "'x' has 0 dimensions"),
        (lambda: DataProto.from_dict({"x": torch.zeros(2)}, {"u": ["a"]}), ValueError, r"'u' has shape \(1,\)"),
        (lambda: DataProto.from_dict(None, {"u": "ab"}), TypeError, "'u' must be an array or a list, found str"),
        (lambda: DataProto(batch={"x": torch.zeros(2)}), TypeError, "must be a TensorDict, found dict"),
        (lambda: DataProto(batch=TensorDict({}, [])), ValueError, "at least one batch dimension"),
        (lambda: DataProto(non_tensor_batch={"u": ["a"]}), TypeError, "'u' must be a NumPy array, found list"),
        (lambda: DataProto(non_tensor_batch={"u": np.array(1)}), ValueError, "'u' is a single value"),
        (lambda: DataProto.from_dict({"x": torch.zeros(2)}, num_batch_dims=0), ValueError, "at least 1"),
        (lambda: DataProto.from_dict({"x": torch.zeros(2, 2)}, {"u": [1, 2]}, num_batch_dims=2), ValueError, "one ba"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda d: d["x"], TypeError, "indexed by an int, slice, list, array or mask, found str"),
        (lambda d: d[True], TypeError, "found bool"),
        (lambda d: d[[0, 3]], IndexError, "row 3 is outside a batch of 3 rows"),
        (lambda d: d[[-4]], IndexError, "row -4 is outside"),
        (lambda d: d[np.array([True, False])], IndexError, "mask has 2 entries but the batch has 3 rows"),
        (lambda d: d[[0.5]], IndexError, "integers or booleans, found float64"),
        (lambda d: d[np.zeros((1, 1), dtype=int)], IndexError, "one-dimensional"),
        (lambda d: d.chunk(0), ValueError, "chunks must be at least 1"),
        (lambda d: d.split(0), ValueError, "split_size must be at least 1"),
        (lambda d: d.repeat(-1), ValueError, "must not be negative"),
        (lambda d: d.sample_level_repeat([1, 2]), ValueError, r"one count a row \(3\)"),
        (lambda d: d.unfold_column_chunks(3, ["x"]), ValueError, "'x' .* does not divide into 3"),
        (lambda d: d.unfold_column_chunks(2, ["z"]), KeyError, "z.* not in the batch"),
        (lambda d: d.padding(1, "middle"), ValueError, "'first' or 'last', found 'middle'"),
        (lambda d: d[[]].padding(1), ValueError, "batch of 0 rows"),
        (lambda d: d.make_iterator(2, 1), ValueError, "mini_batch_size 2 does not divide the 3 rows"),
        (lambda d: d.make_iterator(3, 1, dataloader_kwargs={"workers": 1}), ValueError, "unknown .*workers"),
        (lambda d: d.select(["z"]), KeyError, r"batch keys \['z'\] not in the batch; it has \['x', 'y'\]"),
        (lambda d: d.pop(non_tensor_batch_keys=["z"]), KeyError, "non_tensor_batch keys .*'number', 'uid'"),
        (lambda d: d.select(meta_info_keys=["z"]), KeyError, "meta_info keys"),
        (lambda d: d.rename("z", "w"), KeyError, "'z'"),
        (lambda d: d.rename(["x", "y"], ["z"]), ValueError, "2 old names"),
        (lambda d: d.rename("x", "y"), ValueError, r"\['y'\] are taken"),
        (lambda d: pad_dataproto_to_divisor(d, 0), ValueError, "at least 1"),
        (lambda d: pad_dataproto_to_divisor(d[[]], 2), ValueError, "no row to repeat"),
        (lambda d: unpad_dataproto(d, 4), ValueError, "4 padding rows off a batch of 3"),
        (lambda d: fold_batch_dim(d, 2), ValueError, "3 rows cannot be folded into 2"),
    ],
)
def test_wrong_use_is_refused_and_changes_nothing(use, error, message):
    data = make(k=1)
    with pytest.raises(error, match=message):
        use(data)
    assert data.union(make(k=1)) is data and set(data.batch.keys()) == {"x", "y"}


def test_select_and_pop():
    data = make(k=1, j=2)
    chosen = data.select(["x"], ["uid"], ["k"])
    assert (set(chosen.batch.keys()), set(chosen.non_tensor_batch), chosen.meta_info) == ({"x"}, {"uid"}, {"k": 1})
    assert chosen.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    assert data.select(["x"], deepcopy=True).batch["x"].data_ptr() != data.batch["x"].data_ptr()
    assert set(data.select(["x"]).non_tensor_batch) == {"uid", "number"}  # None keeps the part whole
    taken = data.pop(["y"], ["number"], ["j"])
    assert (set(data.batch.keys()), set(data.non_tensor_batch), data.meta_info) == ({"x"}, {"uid"}, {"k": 1})
    assert (set(taken.batch.keys()), set(taken.non_tensor_batch), taken.meta_info) == ({"y"}, {"number"}, {"j": 2})
    assert data.pop(["x"]).non_tensor_batch == {} and len(data) == 3


def test_rename_can_exchange_names_and_reaches_both_parts():
    data = make()
    x, y = data.batch["x"], data.batch["y"]
    assert data.rename(["x", "y", "uid"], ["y", "x", "id"]) is data
    assert data.batch["x"] is y and data.batch["y"] is x
    assert data.non_tensor_batch["id"].tolist() == ["a", "b", "c"]


def test_union_adds_what_is_new_and_accepts_equal_values():
    data = make(k=1)
    other = make(j=[1, 2])
    other.batch["z"] = torch.ones(3)
    other.non_tensor_batch["extra"] = object_array([{"v": np.arange(2)}] * 3)
    assert data.union(other) is data
    assert data.batch["z"].tolist() == [1, 1, 1]
    assert data.meta_info == {"k": 1, "j": [1, 2]}
    data.union(data)  # NaN equals itself, arrays inside entries are compared by value
    tensors = DataProto.from_dict({"x": torch.zeros(2)})
    assert DataProto(meta_info={"k": 1}).union(tensors).batch["x"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.batch.set("x", d.batch["x"] + 1), "'x' in batch with different values"),
        (lambda d: d.batch.set("x", d.batch["x"].float()), "'x' in batch"),
        (lambda d: d.non_tensor_batch.update(uid=object_array(["a", "b", "z"])), "'uid' in non_tensor_batch"),
        (lambda d: d.meta_info.update(k=2), "'k' in meta_info"),
    ],
)
def test_union_refuses_differing_values_and_leaves_the_batch_as_it_was(change, message):
    data, other = make(k=1), make(k=1)
    other.batch["new"] = torch.zeros(3)
    change(other)
    with pytest.raises(ValueError, match=message):
        data.union(other)
    assert set(data.batch.keys()) == {"x", "y"} and data.meta_info == {"k": 1}


def test_union_refuses_other_row_counts():
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\) rows"):
        make().union(make()[:2])
    with raises_with(ValueError, "3 rows", "one of 2"):
        make().union(DataProto.from_dict(non_tensors={"u": [1, 2]}))


def test_union_functions():
    first = TensorDict({"a": torch.ones(2)}, [2])
    assert union_tensor_dict(first, TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}, [2])) is first
    assert set(first.keys()) == {"a", "b"}
    with raises_with(ValueError, "'b'"):
        union_tensor_dict(first, TensorDict({"b": torch.ones(2)}, [2]))
    arrays = {"u": np.array([1.0, np.nan])}
    assert union_numpy_dict(arrays, {"u": np.array([1.0, np.nan]), "v": np.arange(2)}) is arrays
    assert set(arrays) == {"u", "v"}
    with raises_with(ValueError, "'v'", "non_tensor_batch"):
        union_numpy_dict(arrays, {"v": np.arange(1, 3)})


def test_concat_merges_meta_info():
    first = make(temperature=0.5, tensor=torch.ones(2), metrics={"loss": 1.0, "rank0": [5]})
    second = make(temperature=0.5, tensor=torch.ones(2), metrics=[{"loss": [2.0, 3.0]}, {"loss": 4.0}], other=1)
    meta = DataProto.concat([first, second, make(metrics=None)]).meta_info
    assert meta["metrics"] == {"loss": [1.0, 2.0, 3.0, 4.0], "rank0": [5]}
    assert meta["temperature"] == 0.5 and meta["other"] == 1
    assert first.meta_info["metrics"] == {"loss": 1.0, "rank0": [5]}
    with raises_with(ValueError, "'temperature'", "0.5", "part 1", "0.7"):
        DataProto.concat([make(temperature=0.5), make(temperature=0.7)])
    with pytest.raises(ValueError, match="must be a dict or a list of dicts, found float"):
        DataProto.concat([make(metrics=1.0)])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (DataProto.from_dict({"x": torch.zeros(1, 2), "z": torch.zeros(1)}), r"part 1 has \['z'\] that part 0 lacks"),
        (DataProto.from_dict({"x": torch.zeros(1, 2)}, {"u": [1]}), "non_tensor_batch differs"),
        (DataProto.from_dict({"x": torch.zeros(1, 3)}), r"'x' has shape \(1, 2\) in part 0 and \(1, 3\) in part 1"),
        (DataProto.from_dict({"x": torch.zeros(1, 2).long()}), "'x' has dtype torch.float32 in part 0 and torch.int64"),
        (
            DataProto.from_dict({"x": torch.nested.as_nested_tensor([torch.zeros(2)], layout=torch.jagged)}),
            "'x' is nested in part 1 only",
        ),
        (DataProto(), "batch differs between the parts"),
    ],
)
def test_concat_refuses_parts_that_do_not_fit(second, message):
    with pytest.raises(ValueError, match=message):
        DataProto.concat([DataProto.from_dict({"x": torch.zeros(1, 2)}), second])


def test_chunks_may_be_uneven_process_wide(monkeypatch):
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert [len(part) for part in make().chunk(2)] == [2, 1]


def test_unfold_column_chunks():
    data = make().unfold_column_chunks(2, ["x"])
    assert data.batch["x"].tolist() == [[0], [1], [2], [3], [4], [5]]
    assert data.non_tensor_batch["uid"].tolist() == list("aabbcc")


def test_fold_and_unfold_keep_groups_together():
    data = DataProto.from_dict({"x": torch.arange(12).reshape(6, 2)}, {"u": list("aabbcc")})
    folded = fold_batch_dim(data, 3)
    assert len(folded) == 3
    assert folded.batch["x"].tolist() == data.batch["x"].reshape(3, 2, 2).tolist()
    assert folded.non_tensor_batch["u"].tolist() == [["a", "a"], ["b", "b"], ["c", "c"]]
    whole = unfold_batch_dim(folded[[2, 0]])
    assert whole.batch["x"].tolist() == [[8, 9], [10, 11], [0, 1], [2, 3]]
    assert whole.non_tensor_batch["u"].tolist() == list("ccaa")


def test_make_iterator_goes_over_every_row_once_an_epoch_and_repeats_with_its_seed():
    data = DataProto.from_dict({"x": torch.arange(8)}, {"u": [str(i) for i in range(8)]}, {"k": 1})

    def run(seed: int | None, shuffle: bool) -> list[list[int]]:
        parts = list(data.make_iterator(2, 3, seed=seed, dataloader_kwargs={"shuffle": shuffle}))
        assert all(part.meta_info == {"k": 1} for part in parts)
        assert all(part.non_tensor_batch["u"].tolist() == list(map(str, part.batch["x"].tolist())) for part in parts)
        return [part.batch["x"].tolist() for part in parts]

    assert run(None, False) == [[0, 1], [2, 3], [4, 5], [6, 7]] * 3
    shuffled = run(7, True)
    epochs = [[row for part in shuffled[start : start + 4] for row in part] for start in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert run(7, True) == shuffled != run(8, True)


def test_to_tensordict_and_back():
    data = make(k=1, settings={"a": [1]})
    data.non_tensor_batch["turns"] = object_array([[1, 2], [3, 4], [5]])
    again = DataProto.from_tensordict(data.to_tensordict())
    assert set(again.batch.keys()) == {"x", "y"}
    assert again.meta_info == {"k": 1, "settings": {"a": [1]}}
    assert again.non_tensor_batch["turns"].tolist() == [[1, 2], [3, 4], [5]]
    assert again.non_tensor_batch["uid"].tolist() == ["a", "b", "c"]
    with raises_with(ValueError, "['x']"):
        make(x=1).to_tensordict()


def test_descriptions_name_every_field(capsys):
    data = make(k=1)
    data.batch["j"] = torch.nested.as_nested_tensor([torch.zeros(2)] * 3, layout=torch.jagged)
    info = data.get_data_info()
    assert "batch.x: Tensor int64 [3, 2] cpu" in info
    assert "non_tensor_batch.uid: ndarray object [3] of str" in info
    assert "meta_info.k: int" in info
    assert "rows=3, batch=['j', 'x', 'y']" in repr(data)
    data.print_size("step 1")
    assert capsys.readouterr().out.startswith("step 1, Size of tensordict: ")


def test_to_moves_the_tensors_and_returns_the_batch():
    data = make()
    assert data.to("meta") is data
    assert data.batch["x"].device.type == "meta"
