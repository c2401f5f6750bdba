"""Worker groups on a real Ray: dispatch, meshes, futures, colocation, attaching."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from raising import raises_with

from hybridrl.protocol import DataProto, DataProtoFuture
from hybridrl.single_controller import (
    Dispatch,
    Execute,
    PlacementError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    Worker,
    WorkerError,
    create_colocated_worker_cls,
    extract_pg_from_exist,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_dispatch_fn,
    merge_resource_pool,
    padding_mask,
    register,
    register_dispatch_mode,
    split_resource_pool,
)
from hybridrl.single_controller.base.decorator import dispatch_one_to_all

# This module's classes reach the workers whole, whatever is on their import path.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("ray_session")

LAST = register_dispatch_mode("last_rank", dispatch_one_to_all, lambda group, output: output[-1])


class Folder(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def files(self) -> list[str]:
        return sorted(os.listdir())


class Doubler(Worker):
    """Knows every way of being called; on four ranks a mesh of 2 data-parallel by 2 tensor-parallel ranks."""

    def __init__(self, factor: int = 2, fail: bool = False) -> None:
        super().__init__()
        self.factor = factor
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        if self.world_size == 4:
            # data-parallel groups {0, 3} and {1, 2}, collected from ranks 3 and 1: not in rank order
            self._register_dispatch_collect_info(
                "mesh", dp_rank=[1, 0, 0, 1][self.rank], is_collect=self.rank in (1, 3)
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whoami(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self.rank, args, kwargs

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> dict[str, Any]:
        keys = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "OMP_NUM_THREADS",
            "NOTE",
        )
        return {key: os.environ.get(key) for key in keys} | {
            "pid": os.getpid(),
            "folder": os.getcwd(),
            "threads": torch.get_num_threads(),
            "master": self.get_master_addr_port(),
            "devices": self.get_cuda_visible_devices(),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce(self) -> float:
        value = torch.tensor(float(self.rank + 1))
        dist.all_reduce(value)
        return value.item()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, value: list[int]) -> tuple[int, list[int]]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def also_rank_zero(self, value: list[int]) -> tuple[int, list[int]]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, value: int) -> int:
        return value * self.factor

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"x": batch.batch["x"] * self.factor})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, batch: DataProto) -> tuple[int, list[bool] | None]:
        mask = padding_mask(batch)
        return len(batch), None if mask is None else mask.tolist()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mesh"))
    def mesh_double(self, batch: DataProto) -> DataProto:
        rows = len(batch)
        return DataProto.from_dict({"x": batch.batch["x"] * self.factor, "rank": torch.full((rows,), self.rank)})

    @register(dispatch_mode=make_nd_compute_dispatch_fn("mesh"))
    def mesh_list(self, value: str) -> tuple[str, int]:
        return value, self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(
            {"x": batch.batch["x"] + 1}, {"made_by": np.array([self.rank] * len(batch), dtype=object)}
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rank_later(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def raw_future(self, batch: Any) -> DataProto:
        assert isinstance(batch, DataProtoFuture)
        return batch.get()

    @register(dispatch_mode=Dispatch.LAST_RANK)
    def from_last(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def address_of(self, array: np.ndarray) -> tuple[bool, int]:
        return array.flags.writeable, array.nbytes

    def unregistered(self, value: int) -> tuple[int, int]:
        return self.rank, value


class Other(Worker):
    """A second role."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whoami(self, suffix: str) -> str:
        return f"other {self.rank} {suffix}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def neighbour_factor(self) -> int:
        return self.get_fused_worker_by_name("doubler").factor


class Talker(Worker):
    """Has asynchronous methods, whose calls overlap."""

    def __init__(self) -> None:
        super().__init__()
        import asyncio

        self.event = asyncio.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def wait(self) -> str:
        await self.event.wait()
        return f"released {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def release(self) -> None:
        self.event.set()


@pytest.fixture
def start(ray_session: None) -> Iterator[Any]:
    """Starts groups that end with the test."""
    groups: list[RayWorkerGroup] = []

    def make(cls: type, count: int | RayResourcePool, *args: Any, **kwargs: Any) -> RayWorkerGroup:
        pool = RayResourcePool([count], use_gpu=False) if isinstance(count, int) else count
        groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(cls, *args, **kwargs)))
        return groups[-1]

    yield make
    for group in groups:
        group.kill()
        group.resource_pool.release()


@pytest.fixture(scope="module")
def pair(ray_session: None) -> Iterator[RayWorkerGroup]:
    pool = RayResourcePool([2], use_gpu=False)
    wrapped = RayClassWithInitArgs(Doubler, factor=3)
    group = RayWorkerGroup(pool, wrapped, role="pair", threads=1, worker_env={"NOTE": "here"})
    yield group
    group.kill()
    pool.release()


def rows(count: int, start: int = 0) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(start, start + count)})


def test_ranks_know_their_place_and_meet(pair: RayWorkerGroup) -> None:
    places = pair.place()
    assert [place["RANK"] for place in places] == ["0", "1"] == [place["LOCAL_RANK"] for place in places]
    assert {place["WORLD_SIZE"] for place in places} == {"2"} == {place["LOCAL_WORLD_SIZE"] for place in places}
    assert {place["devices"] for place in places} <= {"", "not set"}, "there are no GPUs to see"
    assert {place["master"] for place in places} == {(pair.master_address, pair.master_port)}
    assert {(place["threads"], place["OMP_NUM_THREADS"], place["NOTE"]) for place in places} == {(1, "1", "here")}
    assert len({place["pid"] for place in places}) == 2
    assert pair.all_reduce() == [3.0, 3.0]


def test_variables_of_a_rank_cannot_be_set_for_all() -> None:
    pool = RayResourcePool([2], use_gpu=False)
    with raises_with(ValueError, "worker_env", "WORLD_SIZE", "MASTER_PORT"):
        RayWorkerGroup(
            pool, RayClassWithInitArgs(Doubler, factor=3), worker_env={"MASTER_PORT": "1", "WORLD_SIZE": "3"}
        )


def test_simple_modes(pair: RayWorkerGroup) -> None:
    assert pair.whoami([1, 2], key=None) == [(0, ([1, 2],), {"key": None}), (1, ([1, 2],), {"key": None})]
    assert pair.rank_zero([1, 2]) == (0, [1, 2]) == pair.also_rank_zero([1, 2])
    assert pair.all_to_all(["a", "b"]) == ["a", "b"] and pair.all_to_all("ab") == ["ab", "ab"]
    assert pair.dp_compute([1, 2]) == [3, 6]
    assert pair.from_last() == 1
    assert pair.execute_func_rank_zero(max, 3, 4) == 4


def test_rows_are_split_and_padded(pair: RayWorkerGroup) -> None:
    assert pair.double(rows(4)).batch["x"].tolist() == [0, 3, 6, 9]
    assert pair.double(rows(5)).batch["x"].tolist() == [0, 3, 6, 9, 12]
    assert pair.double(rows(1)).batch["x"].tolist() == [0]
    assert pair.count(rows(3)) == [(2, [False, False]), (2, [False, True])]
    assert pair.count(rows(4)) == [(2, None), (2, None)]
    echoed = pair.echo(DataProto.from_dict({"x": torch.arange(3)}, {"uid": np.array(["a", "b", "c"], dtype=object)}))
    assert echoed.non_tensor_batch["uid"].tolist() == ["a", "b", "c"] and list(echoed.batch.keys()) == ["x"]


def test_function_is_brought_to_every_rank(pair: RayWorkerGroup) -> None:
    result = pair.execute_with_func_generator(
        lambda worker, batch: DataProto.from_dict({"x": batch.batch["x"] * 0 + worker.rank}), rows(3)
    )
    assert result.batch["x"].tolist() == [0, 0, 1]


def test_futures_chain_from_worker_to_worker(pair: RayWorkerGroup) -> None:
    future = pair.later(rows(4))
    assert isinstance(future, DataProtoFuture)
    chained = pair.later(future)
    result = pair.double(chained)
    assert result.batch["x"].tolist() == [6, 9, 12, 15]
    assert chained.get().batch["x"].tolist() == [2, 3, 4, 5] and future.get().batch["x"].tolist() == [1, 2, 3, 4]
    assert pair.raw_future(pair.later(rows(2))).batch["x"].tolist() == [1, 2]


def test_futures_of_padded_and_unevenly_split_batches(pair: RayWorkerGroup, start: Any) -> None:
    future = pair.later(rows(3))
    assert future.get().batch["x"].tolist() == [1, 2, 3]
    with pytest.raises(WorkerError, match="future batch of 3 rows cannot be split over 2 ranks"):
        broken = start(Doubler, 2)
        broken.later(broken.later(rows(3))).get()


def test_future_goes_to_a_group_of_another_size(pair: RayWorkerGroup, start: Any) -> None:
    single = start(Doubler, 1, factor=5)
    assert single.double(pair.later(rows(4))).batch["x"].tolist() == [5, 10, 15, 20]
    assert pair.double(single.later(rows(4))).batch["x"].tolist() == [3, 6, 9, 12]
    # 5 rows padded to 6 on the way: the consumer must not see the sixth
    assert single.double(pair.later(rows(5))).batch["x"].tolist() == [5, 10, 15, 20, 25]


def test_lists_of_results_can_be_waited_for_later(pair: RayWorkerGroup) -> None:
    pending = pair.rank_later()
    assert ray.get(pending) == [0, 1] == pending.get()
    assert pair.execute_all_sync("unregistered", 7) == [(0, 7), (1, 7)]
    assert pair.execute_all_sync("unregistered", ["a", "b"]) == [(0, "a"), (1, "b")]
    for start in (pair.execute_all_async, pair.execute_all):  # the same, by both of verl's names
        assert ray.get(start("unregistered", 7)) == [(0, 7), (1, 7)]
    assert pair.execute_rank_zero_sync("unregistered", [7, 8]) == (0, [7, 8])
    assert ray.get(pair.execute_rank_zero("unregistered", 7)) == (0, 7)
    assert ray.get(pair.workers[1].unregistered.remote(9)) == (1, 9)


def test_time_in_methods_is_the_slowest_ranks(pair: RayWorkerGroup) -> None:
    pair.method_seconds.clear()
    pair.execute_with_func_generator(_sleep_by_rank, rows(2))
    pair.later(rows(2)).get()
    seconds = pair.method_seconds
    assert seconds["execute_with_func_generator"] > 0.15 and "later" in seconds


def _sleep_by_rank(worker: Worker, batch: DataProto) -> DataProto:
    import time

    time.sleep(0.2 * worker.rank)
    return batch


def test_large_argument_enters_the_object_store_once(pair: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[int] = []
    real = ray.put

    def counting(value: Any) -> Any:
        puts.append(value.nbytes)
        return real(value)

    monkeypatch.setattr(ray, "put", counting)
    big = np.zeros(300_000, dtype=np.uint8)
    assert pair.address_of(big) == [(False, big.nbytes)] * 2
    assert puts == [big.nbytes]
    pair.address_of(big[:1000])
    assert len(puts) == 1, "a small argument travels in the call"


def test_mesh_splits_over_data_parallel_ranks_and_collects_in_their_order(start: Any) -> None:
    group = start(Doubler, 4, factor=10)
    result = group.mesh_double(rows(5))
    assert result.batch["x"].tolist() == [0, 10, 20, 30, 40]
    assert result.batch["rank"].tolist() == [1, 1, 1, 3, 3]
    assert group.mesh_list(["a", "b"]) == [("a", 1), ("b", 3)]


def test_unknown_mesh_is_explained(start: Any) -> None:
    group = start(Doubler, 1)
    with raises_with(WorkerError, "'mesh'"):
        group.mesh_double(rows(1))


def test_roles_share_processes() -> None:
    classes = {"doubler": RayClassWithInitArgs(Doubler, factor=7), "other": RayClassWithInitArgs(ray.remote(Other))}
    resource = "node:__internal_head__"  # one that every Ray has
    classes["other"].set_additional_resource({resource: 1e-4})
    with raises_with(PlacementError, resource, "holds CPU", "accelerator_type"):
        RayWorkerGroup(RayResourcePool([2], use_gpu=False), create_colocated_worker_cls(classes))
    pool = RayResourcePool([2], use_gpu=False, accelerator_type=resource)
    group = RayWorkerGroup(pool, create_colocated_worker_cls(classes))
    spawned = group.spawn(prefix_set={"doubler", "other"})
    assert group.spawn_fused({"other"})["other"] is spawned["other"]
    assert spawned["other"].whoami("x") == ["other 0 x", "other 1 x"] == group.other_whoami("x")
    assert spawned["doubler"].double(rows(3)).batch["x"].tolist() == [0, 7, 14]
    assert spawned["other"].neighbour_factor() == [7, 7]
    assert spawned["doubler"].place()[0]["pid"] == group.doubler_place()[0]["pid"]
    assert spawned["doubler"].worker_names == group.worker_names and not hasattr(spawned["other"], "double")
    group.fuse({"other"})
    assert group.other.whoami("y") == ["other 0 y", "other 1 y"]
    assert set(spawned["other"].method_seconds) == {"whoami", "neighbour_factor"}
    with raises_with(ValueError, "'critic'"):
        group.spawn({"critic"})
    group.kill()
    pool.release()


class Terminated(Worker):
    """Writes a file if it gets SIGTERM."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def watch(self, file: str) -> int:
        signal.signal(signal.SIGTERM, lambda *_: Path(file).write_text("SIGTERM"))
        return os.getpid()


@pytest.mark.parametrize("colocated", [False, True])
def test_workers_of_a_released_pool_end_without_running_python(tmp_path: Path, colocated: bool) -> None:
    """One that was importing wrote a traceback to the terminal."""
    pool, wrapped = RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(Terminated)
    if colocated:
        group = RayWorkerGroup(pool, create_colocated_worker_cls({"one": wrapped})).spawn({"one"})["one"]
    else:
        group = RayWorkerGroup(pool, wrapped)
    process = psutil.Process(group.watch(str(tmp_path / "file"))[0])
    pool.release()
    psutil.wait_procs([process], timeout=60)
    assert not process.is_running() and not (tmp_path / "file").exists()
    group.kill()


def test_asynchronous_methods_overlap(start: Any) -> None:
    group = start(Talker, 2)
    waiting = group.wait()
    group.release()
    assert waiting.get() == ["released 0", "released 1"]


def test_workers_work_in_the_folder_of_the_program(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster that the program joins as well, whose own processes run where `ray start` was called."""
    monkeypatch.chdir(tmp_path)
    (place,) = start(Doubler, 1).place()
    assert place["folder"] == str(tmp_path)
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "mine.txt").touch()
    archive = shutil.make_archive(str(tmp_path / "copied"), "zip", tmp_path, "copied")
    worker_class = RayClassWithInitArgs(Folder)
    worker_class.update_options({"runtime_env": {"working_dir": f"file://{archive}"}})
    pool = RayResourcePool([1], use_gpu=False)
    try:
        (found,) = RayWorkerGroup(pool, worker_class).files()
    finally:
        pool.release()
    assert found == ["mine.txt"], "Ray's copy of a working_dir stays the folder of the worker"


def test_groups_share_a_slot_and_threads_are_explicit(start: Any) -> None:
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=2)
    first = start(Doubler, pool)
    second = RayWorkerGroup(pool, RayClassWithInitArgs(Doubler), threads=3)
    assert first.all_reduce() == second.all_reduce() == [1.0]
    assert second.place()[0]["threads"] == 3 and second.place()[0]["OMP_NUM_THREADS"] == "3"
    assert first.master_port != second.master_port
    second.kill()


def test_attach_by_name_and_by_handle(pair: RayWorkerGroup) -> None:
    wrapped = RayClassWithInitArgs(Doubler)
    by_name = RayWorkerGroup.from_detached(worker_names=pair.worker_names, ray_cls_with_init=wrapped)
    assert by_name.double(rows(3)).batch["x"].tolist() == [0, 3, 6] and by_name.world_size == 2
    by_handle = RayWorkerGroup.from_detached(worker_handles=pair.workers, ray_cls_with_init=wrapped)
    assert by_handle.master_port == pair.master_port
    with raises_with(WorkerError, "'nobody'"):
        RayWorkerGroup.from_detached(worker_names=["nobody"], ray_cls_with_init=wrapped)


def test_pools_split_merge_and_lend(start: Any) -> None:
    pool = RayResourcePool([4], use_gpu=False, name_prefix="whole")
    parts = split_resource_pool(pool, [1, 3])
    assert [part.world_size for part in parts] == [1, 3]
    groups = [start(Doubler, part) for part in parts]
    assert [group.all_reduce() for group in groups] == [[1.0], [6.0] * 3]
    again = split_resource_pool(parts[1], [1, 2])
    assert again[1].slots() == pool.slots()[2:]
    with pytest.raises(PlacementError, match="pool of 4 slots cannot be cut into parts of 3"):
        split_resource_pool(pool, 3)
    other = RayResourcePool([1], use_gpu=False)
    merged = merge_resource_pool(pool, other)
    assert merged.world_size == 5 and merged.slots() == pool.slots() + other.slots()
    with raises_with(PlacementError, "use_gpu"):
        merge_resource_pool(pool, RayResourcePool([1], use_gpu=True))
    lent = extract_pg_from_exist({"a": pool, "b": other}, ["a", "b"], RayResourcePool([1, 3], use_gpu=False))
    assert [group.bundle_count for group in lent] == [1, 4]
    with raises_with(PlacementError, "[5]"):
        extract_pg_from_exist({"a": pool}, ["a"], RayResourcePool([5], use_gpu=False))
    pool.release()
    other.release()


def test_manager_maps_roles_to_pools() -> None:
    manager = ResourcePoolManager(
        {"one": [1], "two": [2]}, {"actor": "two", "ref": "one", "critic": "two"}, use_gpu=False
    )
    manager.create_resource_pool()
    assert manager.get_resource_pool("actor") is manager.get_resource_pool("critic")
    assert manager.get_resource_pool("ref").world_size == 1 and manager.get_n_gpus() == 3
    with pytest.raises(PlacementError, match="role reward is mapped to no pool; mapped are actor, ref, critic"):
        manager.get_resource_pool("reward")
    with pytest.raises(PlacementError, match=r"role actor is mapped to pool 'gone'.*\n.*pool 'none' is \[\]"):
        ResourcePoolManager({"none": []}, {"actor": "gone"})
    for pool in manager.resource_pool_dict.values():
        pool.release()


def test_what_does_not_fit_is_refused_at_once() -> None:
    with pytest.raises(PlacementError) as refused:
        RayResourcePool([64], use_gpu=False, name_prefix="huge").get_placement_groups()
    text = str(refused.value)
    assert "pool 'huge' asks for 64 slots of 1 CPU" in text and "has 16 CPU" in text and "at most 16 slots" in text
    with pytest.raises(PlacementError, match="No node offers a GPU"):
        RayResourcePool([1], use_gpu=True).get_placement_groups()
    with pytest.raises(PlacementError, match=r"asks for 9 slots(.|\n)*asks for 9 slots"):
        ResourcePoolManager({"a": [9], "b": [9]}, {}, use_gpu=False).create_resource_pool()
