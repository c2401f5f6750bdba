"""Pickling with protocol 5: what travels, how many bytes, and in which form it arrives."""

import dataclasses
import datetime
import pickle
import warnings

import numpy as np
import pytest
import torch
from raising import raises_with

from hybridrl.protocol import DataProto, object_array


def send(data):
    """Pickle out of band as Ray does, into read-only memory; return (received, stream, buffers)."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    raw = [bytes(buffer.raw()) for buffer in buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pickle.loads(stream, buffers=raw), stream, raw


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else bits(tensor[None])


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("rows", [0, 3, 2000])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_every_dtype_arrives_bit_for_bit(dtype, rows):
    tensor = (torch.arange(rows * 4).reshape(rows, 4) % 120).to(dtype)
    received, _, _ = send(DataProto.from_dict({"x": tensor}))
    assert received.batch["x"].dtype == dtype
    assert received.batch["x"].shape == tensor.shape
    assert bits(received.batch["x"]) == bits(tensor)


def test_special_values_survive_bfloat16():
    tensor = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 1e-40], dtype=torch.bfloat16)
    received, _, _ = send(DataProto.from_dict({"x": tensor}))
    assert bits(received.batch["x"]) == bits(tensor)


def test_a_shard_sends_its_own_rows_only():
    data = DataProto.from_dict({"x": torch.rand(1000, 500), "b": torch.rand(1000, 500).bfloat16()})
    whole = 1000 * 500 * (4 + 2)
    for shard in data.chunk(4):
        received, stream, buffers = send(shard)
        assert len(stream) + sum(map(len, buffers)) < whole / 4 + 4096
        assert torch.equal(received.batch["x"], shard.batch["x"])


def test_a_contiguous_shard_is_sent_without_a_copy():
    data = DataProto.from_dict({"x": torch.zeros(1000, 500), "b": torch.zeros(1000, 500, dtype=torch.bfloat16)})
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(data[250:500], protocol=5, buffer_callback=buffers.append)
    large = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers if buffer.raw().nbytes > 100_000]
    for array, key in zip(large, ("x", "b"), strict=True):
        assert array.ctypes.data == data.batch[key][250].data_ptr()


def test_received_memory_is_used_in_place():
    data = DataProto.from_dict({"x": torch.rand(1000, 500)})
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    raw = [np.frombuffer(bytes(buffer.raw()), dtype=np.uint8) for buffer in buffers]
    received = pickle.loads(stream, buffers=raw)
    assert received.batch["x"].data_ptr() in {array.ctypes.data for array in raw}
    del raw, buffers, stream  # the tensor alone keeps the memory alive
    assert torch.equal(received.batch["x"], data.batch["x"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(20000).reshape(100, 200).t()[:, ::3],
        torch.ones(1, 5000).expand(30, 5000),
        torch.randn(50, 100, dtype=torch.complex64).conj(),
        torch.randn(50, 100, dtype=torch.complex64).conj().imag,
        torch.nn.Parameter(torch.randn(50, 100)),
        torch.randn(50, 100, requires_grad=True) * 2,
    ],
    ids=["strided", "expanded", "conjugated", "negative", "parameter", "with_history"],
)
def test_tensors_of_every_kind_of_view(tensor):
    received, _, _ = send(DataProto.from_dict({"x": tensor}))
    assert torch.equal(received.batch["x"], tensor.detach())
    assert not received.batch["x"].requires_grad
    assert received.batch["x"].is_contiguous()


def test_tensors_and_arrays_inside_entries_and_meta_info_travel_the_same_way():
    base = torch.rand(1000, 1000)
    images = [{"pixels": base[b], "grid": (b, [np.full(3, b)])} for b in range(4)]
    data = DataProto.from_dict(non_tensors={"images": images}, meta_info={"weights": base[:2].bfloat16()})
    received, stream, buffers = send(data)
    assert len(stream) + sum(map(len, buffers)) < 4 * 4000 + 2 * 2000 + 4096  # not the storage they are views of
    for b in range(4):
        entry = received.non_tensor_batch["images"][b]
        assert torch.equal(entry["pixels"], base[b])
        assert entry["grid"][0] == b and entry["grid"][1][0].tolist() == [b] * 3
    assert torch.equal(received.meta_info["weights"], base[:2].bfloat16())


@dataclasses.dataclass
class Turn:
    text: str
    score: torch.Tensor


def test_objects_of_other_classes_are_left_to_the_outer_pickler():
    when = datetime.datetime(2025, 1, 2)
    turns = object_array([Turn("a", torch.ones(2)), Turn("b", torch.zeros(2))])
    data = DataProto(non_tensor_batch={"turns": turns}, meta_info={"when": when, "kind": Turn, "twice": [when, when]})
    received, _, _ = send(data)
    assert [turn.text for turn in received.non_tensor_batch["turns"]] == ["a", "b"]
    assert received.non_tensor_batch["turns"][0].score.tolist() == [1, 1]
    assert received.meta_info["when"] == when and received.meta_info["kind"] is Turn
    assert received.meta_info["twice"][0] is received.meta_info["twice"][1]


def test_functions_defined_here_travel_with_cloudpickle():
    import ray.cloudpickle as cloudpickle

    factor = 3
    data = DataProto.from_dict({"x": torch.ones(2)}, meta_info={"scale": lambda x: factor * x})
    assert pickle.loads(cloudpickle.dumps(data)).meta_info["scale"](2) == 6


def test_arrays_keep_dtype_shape_and_identity_of_entries():
    shared = {"a": 1}
    data = DataProto(
        non_tensor_batch={
            "matrix": np.array([[1, "a"], [None, 2.5]], dtype=object),
            "shared": object_array([shared, shared]),
            "text": np.array(["ab", "c"]),
            "fortran": np.asfortranarray(np.arange(20000.0).reshape(2, 10000)),
            "surrogate": object_array(["\ud800", "\0é🎲"]),
        }
    )
    received, _, _ = send(data)
    assert received.non_tensor_batch["matrix"].tolist() == [[1, "a"], [None, 2.5]]
    assert received.non_tensor_batch["shared"][0] is received.non_tensor_batch["shared"][1]
    assert received.non_tensor_batch["text"].dtype == np.dtype("<U2")
    assert np.array_equal(received.non_tensor_batch["fortran"], data.non_tensor_batch["fortran"])
    assert received.non_tensor_batch["surrogate"].tolist() == ["\ud800", "\0é🎲"]


def test_arrays_out_of_band_are_marked_read_only():
    received, _, _ = send(DataProto(non_tensor_batch={"x": np.zeros((3, 5000))}))
    with pytest.raises(ValueError, match="read-only"):
        received.non_tensor_batch["x"][0] = 1


def test_batch_device_and_subclass_survive():
    class Mine(DataProto):
        pass

    import ray.cloudpickle as cloudpickle

    data = Mine.from_dict({"x": torch.ones(2)}).to("cpu")
    received = pickle.loads(cloudpickle.dumps(data))
    assert type(received).__name__ == "Mine" and isinstance(received, DataProto)
    assert received.batch.device == torch.device("cpu")
    assert pickle.loads(pickle.dumps(DataProto.from_dict({"x": torch.ones(2)}))).batch.device is None
    assert type(data[0:1]) is Mine and type(Mine.concat([data, data])) is Mine


def test_a_batch_inside_a_batch_travels():
    inner = DataProto.from_dict({"x": torch.arange(5000)}, meta_info={"when": datetime.date(2025, 1, 2)})
    received, stream, _ = send(DataProto(meta_info={"inner": inner}, non_tensor_batch={"rows": object_array([inner])}))
    assert len(stream) < 5000
    assert torch.equal(received.meta_info["inner"].batch["x"], torch.arange(5000))
    assert received.meta_info["inner"] is received.non_tensor_batch["rows"][0]
    assert received.meta_info["inner"].meta_info["when"] == datetime.date(2025, 1, 2)


def test_sparse_tensors_travel():
    sparse = torch.eye(3).to_sparse()
    received, _, _ = send(DataProto(meta_info={"sparse": sparse}))
    assert torch.equal(received.meta_info["sparse"].to_dense(), torch.eye(3))


def test_a_tensor_spread_over_ranks_is_refused_by_name(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        spread = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Replicate()])
        with raises_with(TypeError, "'x'", "full_tensor"):
            pickle.dumps(DataProto.from_dict({"x": spread}))
        with pytest.raises(TypeError, match=r"DTensor of shape \(2, 2\)"):
            pickle.dumps(DataProto(meta_info={"x": spread}))
    finally:
        dist.destroy_process_group()
