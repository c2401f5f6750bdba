"""Batches on disk: everything comes back, nothing runs code, nothing is lost by a failed save."""

import datetime
import os
import pickle
import resource
import signal
import uuid
import zoneinfo
from decimal import Decimal

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from raising import raises_with
from safetensors.torch import load_file, save_file

from hybridrl.errors import UserError
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.union import same


def test_a_stored_batch_has_the_mode_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        DataProto.from_dict(tensors={"x": torch.zeros(2)}).save_to_disk(tmp_path / "batch")
    finally:
        os.umask(before)
    assert oct((tmp_path / "batch").stat().st_mode & 0o777) == oct(0o640)


def test_every_kind_of_value_comes_back(tmp_path):
    wide = torch.arange(12).reshape(3, 4)
    values, offsets = torch.arange(5.0), torch.tensor([0, 2, 2, 5])
    tensors = {
        "wide": wide,
        "part": wide[:, 1:3],
        "same": wide,
        "as_float": torch.arange(12).reshape(3, 4).view(torch.float64),
        "half": torch.randn(3, 2).bfloat16(),
        "tiny": torch.randn(3, 2).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
        "empty": torch.zeros(3, 0),
        "jagged": torch.nested.nested_tensor_from_jagged(values, offsets),
        "twin": torch.nested.nested_tensor_from_jagged(values + 1, offsets),
    }
    entries = [
        {"image": np.arange(6).reshape(2, 3), "mask": torch.ones(2).bool(), 3: (1, (2.5, None))},
        {"bytes": b"\x00\xff", "nan": float("nan"), "inf": -float("inf"), "big": 2**80, "$": "dollar"},
        [np.float32(0.1), np.int64(7), np.bool_(True), "\ud800 é 🎲 \0", True, 1, 1.0],
    ]
    non_tensors = {
        "entries": object_array(entries),
        "text": np.array(["a", "bcd", ""]),
        "number": np.arange(3, dtype=np.int16),
        "swapped": np.arange(3, dtype=">f4"),
        "matrix": np.array([[1, "a"], [None, 2], [[], {}]], dtype=object),
    }
    data = DataProto.from_dict(tensors, non_tensors, {"k": [1, {"a": ()}], "weights": torch.ones(2), ("t", 1): 2})
    data.save_to_disk(tmp_path / "deep" / "batch.safetensors")
    again = DataProto.load_from_disk(str(tmp_path / "deep" / "batch.safetensors"))
    assert list(again.batch.keys()) == list(tensors)
    for key, tensor in tensors.items():
        found = again.batch[key]
        if key == "tiny":
            found, tensor = found.view(torch.uint8), tensor.view(torch.uint8)
        assert same(found, tensor), key
    assert torch.equal((again.batch["jagged"] * again.batch["twin"]).values(), values * (values + 1))
    for key in ("entries", "matrix"):
        assert repr(again.non_tensor_batch[key].tolist()) == repr(data.non_tensor_batch[key].tolist())
        assert again.non_tensor_batch[key].shape == data.non_tensor_batch[key].shape
    assert again.non_tensor_batch["text"].dtype == np.dtype("<U3")
    assert again.non_tensor_batch["number"].dtype == np.int16
    assert again.non_tensor_batch["swapped"].tolist() == [0, 1, 2]
    assert same(again.meta_info, data.meta_info)


def test_values_of_columns_of_parquet_come_back(tmp_path):
    """Prompts that wait are saved with their columns: a run must not end at its checkpoint because of a date."""
    moment = datetime.datetime(2026, 10, 25, 2, 30, 0, 123456)
    zones = [
        None,
        datetime.UTC,
        datetime.timezone(datetime.timedelta(hours=5, minutes=30)),
        zoneinfo.ZoneInfo("Europe/Rome"),
    ]
    values = [
        *(Decimal("3.10"), Decimal("-1E+3"), Decimal("NaN"), datetime.date(2026, 2, 28), uuid.UUID(int=7)),
        *(datetime.timedelta(days=-1, microseconds=3), datetime.time(1, 2, 3), datetime.time(1, tzinfo=zones[2])),
        *(moment.replace(tzinfo=zone, fold=fold) for zone in zones for fold in (0, 1)),
        *(pandas.Timestamp("2026-01-02 03:04:05.123456789", tz=zone) for zone in (None, "UTC", "Asia/Kolkata")),
        *(pandas.Timestamp("2026-01-02").as_unit("ms"), pandas.Timedelta(5, unit="ns")),
    ]
    kinds = {"ns": pyarrow.timestamp("ns", "Europe/Rome"), "us": pyarrow.timestamp("us", "America/New_York")}
    for kind in kinds.values():
        values += pyarrow.array([moment], kind).to_pylist()
    batch = DataProto.from_dict(
        None, {"a": object_array(values), "in": object_array([{"x": [value]} for value in values])}
    )
    batch.save_to_disk(tmp_path / "batch")
    again = DataProto.load_from_disk(tmp_path / "batch").non_tensor_batch
    assert [repr(value) for value in again["a"]] == [repr(value) for value in values]
    assert repr(again["in"].tolist()) == repr([{"x": [value]} for value in values])
    assert [getattr(value, "fold", 0) for value in again["a"]] == [getattr(value, "fold", 0) for value in values]


@pytest.mark.parametrize("data", [DataProto(), DataProto.from_dict(None, {"u": ["a"]}), DataProto(meta_info={"k": 1})])
def test_batches_without_tensors(tmp_path, data):
    data.save_to_disk(tmp_path / "batch")
    again = DataProto.load_from_disk(tmp_path / "batch")
    assert again.batch is None and len(again) == len(data) and again.meta_info == data.meta_info


def test_tensors_are_plain_safetensors(tmp_path):
    DataProto.from_dict({"x": torch.ones(2, 2).bfloat16()}).save_to_disk(tmp_path / "batch")
    found = [tensor for tensor in load_file(tmp_path / "batch").values() if tensor.dtype == torch.bfloat16]
    assert [tensor.tolist() for tensor in found] == [[[1, 1], [1, 1]]]


class Custom:
    pass


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataProto.from_dict(None, {"a": [1, Custom()]}), r"non_tensor_batch\['a'\]\[1\].*Custom cannot be stored"),
        (DataProto.from_dict(None, {"a": [{"b": [len]}]}), r"non_tensor_batch\['a'\]\[0\]\['b'\]\[0\]"),
        (DataProto(meta_info={"f": {"g": {1, 2}}}), r"meta_info\['f'\]\['g'\].*builtins.set"),
        (DataProto(non_tensor_batch={"t": np.array(["2025-01-01"], dtype="M8[D]")}), r"\['t'\].*datetime64"),
        (DataProto.from_dict({"c": torch.zeros(2, dtype=torch.complex128)}), r"batch\['c'\].*complex128"),
        (DataProto(meta_info={"s": torch.eye(2).to_sparse()}), r"meta_info\['s'\].*sparse"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name_and_the_old_file_stays(tmp_path, data, message):
    path = tmp_path / "batch"
    DataProto(meta_info={"old": 1}).save_to_disk(path)
    with pytest.raises(UserError, match=message):
        data.save_to_disk(path)
    assert DataProto.load_from_disk(path).meta_info == {"old": 1}
    assert os.listdir(tmp_path) == ["batch"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "batch"
    DataProto(meta_info={"old": 1}).save_to_disk(path)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))  # as if the disk were full
        with pytest.raises(UserError, match=r"batch.*could not be written"):
            DataProto.from_dict({"x": torch.zeros(1 << 20)}).save_to_disk(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert DataProto.load_from_disk(path).meta_info == {"old": 1}
    assert os.listdir(tmp_path) == ["batch"]


class Exploit:
    def __reduce__(self):
        return os.mkdir, (os.environ["HYBRIDRL_TEST_EXPLOIT"],)


def test_a_pickled_file_is_refused_without_running_it(tmp_path, monkeypatch):
    target = tmp_path / "ran"
    monkeypatch.setenv("HYBRIDRL_TEST_EXPLOIT", str(target))
    (tmp_path / "batch").write_bytes(pickle.dumps(Exploit()))
    with raises_with(UserError, "DataProto.save_to_disk"):
        DataProto.load_from_disk(tmp_path / "batch")
    assert not target.exists()


def test_other_and_damaged_files_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no stored batch at .*nothing"):
        DataProto.load_from_disk(tmp_path / "nothing")
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(UserError, match="other: a safetensors file, but not one"):
        DataProto.load_from_disk(tmp_path / "other")
    path = tmp_path / "batch"
    DataProto.from_dict({"x": torch.ones(100)}, {"u": ["a"] * 100}).save_to_disk(path)
    whole = path.read_bytes()
    for size in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="damaged"):
            DataProto.load_from_disk(path)
    path.write_bytes(whole.replace(b'"$":"dict"', b'"$":"evil"'))
    with pytest.raises(UserError, match="damaged"):
        DataProto.load_from_disk(path)
