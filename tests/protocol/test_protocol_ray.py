"""Batches and futures through real Ray actors."""

import numpy as np
import pytest
import ray
import torch
from raising import raises_with

from hybridrl.protocol import DataProto, DataProtoFuture

pytestmark = pytest.mark.usefixtures("ray_session")


@ray.remote(num_cpus=1)
class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def echo(self, data: DataProto) -> DataProto:
        return data

    def double(self, data: DataProto | DataProtoFuture) -> DataProto:
        if isinstance(data, DataProtoFuture):
            data = data.get(timeout=60)
        result = DataProto.from_dict({"doubled": 2 * data.batch["x"]}, {"uid": data.non_tensor_batch["uid"]})
        result.meta_info = {"metrics": {"rank": self.rank, "rows": len(data)}, "step": 3}
        return result

    def look(self, data: DataProto) -> dict:
        return {
            "sum": float(data.batch["x"].float().sum()),
            "dtypes": {key: value.dtype for key, value in data.batch.items()},
            "read_only": not data.non_tensor_batch["large"].flags.writeable,
            "turns": [type(turn) for turn in data.non_tensor_batch["turns"]],
        }

    def number(self) -> int:
        return 1


@pytest.fixture(scope="module")
def workers(ray_session):
    actors = [Worker.remote(rank) for rank in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def make(rows: int = 6) -> DataProto:
    values, offsets = torch.arange(3 * rows), 3 * torch.arange(rows + 1)
    return DataProto.from_dict(
        {
            "x": torch.arange(rows * 4000).reshape(rows, 4000) % 256,
            "half": torch.randn(rows, 4000).bfloat16(),
            "jagged": torch.nested.nested_tensor_from_jagged(values, offsets),
        },
        {
            "uid": [f"u{i}" for i in range(rows)],
            "turns": [[1, 2]] * rows,
            "large": np.random.default_rng(0).random((rows, 4000)),
        },
        {"temperature": 1.0},
    )


def check_same(received: DataProto, sent: DataProto) -> None:
    received.union(sent.select())  # refuses any difference
    assert set(received.batch.keys()) == set(sent.batch.keys())
    assert set(received.non_tensor_batch) == set(sent.non_tensor_batch)
    assert received.meta_info == sent.meta_info


def test_scatter_echo_collect(workers):
    data = make()
    references = [ray.put(shard) for shard in data.chunk(2)]
    parts = ray.get([worker.echo.remote(ref) for worker, ref in zip(workers, references, strict=True)])
    check_same(DataProto.concat(parts), data)


def test_what_a_worker_receives(workers):
    data = make()
    seen = ray.get(workers[0].look.remote(ray.put(data)))
    assert seen["sum"] == float(data.batch["x"].float().sum())
    assert seen["dtypes"] == {key: value.dtype for key, value in data.batch.items()}
    assert seen["read_only"]
    assert set(seen["turns"]) == {list}


def test_object_references_and_actors_travel_in_meta_info(workers):
    inner = ray.put(np.arange(3))
    data = DataProto(meta_info={"inner": inner, "nested": [{"actor": workers[1]}]})
    del inner
    received = ray.get(workers[0].echo.remote(data))
    assert ray.get(received.meta_info["inner"]).tolist() == [0, 1, 2]
    assert ray.get(received.meta_info["nested"][0]["actor"].number.remote()) == 1


def test_a_future_passes_from_group_to_group_without_the_controller(workers):
    data = make()
    first = [w.echo.remote(shard) for w, shard in zip(workers, data.chunk(2), strict=True)]
    shards = DataProtoFuture.concat(first).chunk(2)
    second = DataProtoFuture.concat([w.double.remote(shard) for w, shard in zip(workers, shards, strict=True)])
    result = second.get(timeout=60)
    assert torch.equal(result.batch["doubled"], 2 * data.batch["x"])
    assert result.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
    assert result.meta_info == {"metrics": {"rank": [0, 1], "rows": [3, 3]}, "step": 3}


@pytest.mark.parametrize("sizes", [[5, 1], [2, 2, 2], [6], [0, 6], [3, 0, 3]])
@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_a_chunk_of_a_future_is_that_chunk_of_the_whole(sizes, chunks):
    data = make()
    stops = np.cumsum(sizes)
    parts = [data.slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    for rank, part in enumerate(parts):
        part.meta_info["metrics"] = {"rank": rank}
    future = DataProtoFuture.concat([ray.put(part) for part in parts])
    expected = DataProto.concat(parts).chunk(chunks)
    for share, whole in zip(future.chunk(chunks), expected, strict=True):
        check_same(share.get(), whole)


def test_uneven_chunks_of_a_future_need_padding_enabled():
    data = make()
    future = DataProtoFuture.concat([ray.put(data)])
    with raises_with(ValueError, "6 rows", "into 4"):
        future.chunk(4)[0].get()
    data.meta_info["_auto_padding"] = True
    future = DataProtoFuture.concat([ray.put(data)])
    assert [len(share.get()) for share in future.chunk(4)] == [2, 2, 1, 1]


def test_a_future_with_a_collect_function_of_its_own():
    future = DataProtoFuture(collect_fn=lambda parts: DataProto.concat(parts[::-1]), futures=[])
    future.futures = [ray.put(make(2)), ray.put(make(4)[2:])]
    assert future.get().non_tensor_batch["uid"].tolist() == ["u2", "u3", "u0", "u1"]
    assert future.chunk(2)[1].get().non_tensor_batch["uid"].tolist() == ["u0", "u1"]


def test_wrong_futures_are_refused(workers):
    with raises_with(TypeError, "part 0", "DataProtoFuture"):
        DataProtoFuture.concat([workers[0].number.remote()]).get()
    future = DataProtoFuture.concat([ray.put(make())])
    with pytest.raises(ValueError, match="a part of a batch already"):
        future.chunk(2)[0].chunk(2)
    with pytest.raises(ValueError, match="at least 1, found 0"):
        future.chunk(0)
