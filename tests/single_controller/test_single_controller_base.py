"""Dispatch, collect, padding and worker basics: everything that needs no Ray."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.errors import UserError
from hybridrl.protocol import DataProto
from hybridrl.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    ResourcePool,
    Worker,
    WorkerError,
    padding_mask,
    real_rows,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from hybridrl.single_controller.base.decorator import (
    MAGIC_ATTR,
    PADDING_KEY,
    collect_dp_compute_data_proto,
    collect_nd_compute_dataproto,
    collect_order,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    finish_output,
    get_predefined_dispatch_fn,
)
from hybridrl.single_controller.base.failures import RemoteFailure, is_collective_error
from hybridrl.single_controller.base.worker import PortReservation
from hybridrl.single_controller.base.worker_group import WorkerGroup


class Group:
    """Stands where dispatch functions only ask for the number of ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


def batch_of(rows: int, **meta: object) -> DataProto:
    tensors = {"x": torch.arange(rows), "response_mask": torch.ones(rows, 3, dtype=torch.int64)}
    return DataProto.from_dict(tensors, {"uid": np.array([f"u{i}" for i in range(rows)], dtype=object)}, meta_info=meta)


@settings(max_examples=60)
@given(rows=st.integers(1, 23), ranks=st.integers(1, 8), per_row=st.integers(1, 3))
def test_rows_come_back_whole_and_in_order_however_uneven(rows: int, ranks: int, per_row: int) -> None:
    group, batch = Group(ranks), batch_of(rows)
    (shards,), kwargs = dispatch_dp_compute_data_proto(group, batch)
    padding = kwargs.pop(PADDING_KEY, None)
    assert {len(shard) for shard in shards} == {-(-rows // ranks)}
    assert sum(real_rows(shard) for shard in shards) == rows
    assert sum(int(shard.batch["response_mask"].sum()) for shard in shards) == 3 * rows
    outputs = [DataProto.from_dict({"y": shard.batch["x"].repeat_interleave(per_row) * 10}) for shard in shards]
    result = finish_output(collect_dp_compute_data_proto(group, outputs), padding)
    assert result.batch["y"].tolist() == [10 * row for row in range(rows) for _ in range(per_row)]


@settings(max_examples=40)
@given(data=st.data(), dp_size=st.integers(1, 4), copies=st.integers(1, 3), rows=st.integers(1, 13))
def test_any_mesh_returns_each_row_once(data: st.DataObject, dp_size: int, copies: int, rows: int) -> None:
    mapping = data.draw(st.permutations([dp for dp in range(dp_size) for _ in range(copies)]))
    collects = [False] * len(mapping)
    for dp in range(dp_size):
        collects[data.draw(st.sampled_from([rank for rank, own in enumerate(mapping) if own == dp]))] = True
    order = collect_order("m", mapping, collects)
    (shards,), kwargs = dispatch_nd_compute_dataproto(mapping, dp_size, Group(len(mapping)), batch_of(rows))
    padding = kwargs.pop(PADDING_KEY, None)
    for rank, dp in enumerate(mapping):
        assert shards[rank] is shards[mapping.index(dp)], "ranks of a data-parallel group share one shard object"
    result = finish_output(collect_dp_compute_data_proto(None, [shards[rank] for rank in order]), padding)
    assert result.batch["x"].tolist() == list(range(rows))
    assert result.non_tensor_batch["uid"].tolist() == [f"u{row}" for row in range(rows)]


def test_padding_is_marked_on_the_row_and_leaves_the_caller_alone() -> None:
    batch = batch_of(3, temperature=0.5)
    (shards,), _ = dispatch_dp_compute_data_proto(Group(2), batch)
    assert "is_padding" not in batch.batch and padding_mask(batch) is None and batch.batch["response_mask"].sum() == 9
    assert padding_mask(shards[0]).tolist() == [False, False] and padding_mask(shards[1]).tolist() == [False, True]
    turned = shards[1].select_idxs([1, 0])
    assert padding_mask(turned).tolist() == [True, False] and turned.batch["response_mask"].sum(-1).tolist() == [0, 3]
    assert shards[1].meta_info["temperature"] == 0.5


def test_padding_marks_a_batch_without_tensors() -> None:
    batch = DataProto.from_dict(non_tensors={"uid": np.array(["a", "b", "c"], dtype=object)})
    (shards,), kwargs = dispatch_dp_compute_data_proto(Group(2), batch)
    assert [real_rows(shard) for shard in shards] == [2, 1]
    result = finish_output(collect_dp_compute_data_proto(None, shards), kwargs[PADDING_KEY])
    assert result.non_tensor_batch["uid"].tolist() == ["a", "b", "c"]


def test_echoed_marker_survives_reordering_inside_the_worker() -> None:
    (shards,), kwargs = dispatch_dp_compute_data_proto(Group(2), batch_of(5))
    outputs = [shard.select_idxs(list(range(len(shard)))[::-1]) for shard in shards]
    result = finish_output(collect_dp_compute_data_proto(None, outputs), kwargs[PADDING_KEY])
    assert sorted(result.batch["x"].tolist()) == [0, 1, 2, 3, 4] and "is_padding" not in result.batch


def test_output_whose_padding_cannot_be_found_is_refused_and_metrics_pass() -> None:
    _, kwargs = dispatch_dp_compute_data_proto(Group(2), batch_of(3))
    padding = kwargs[PADDING_KEY]
    with pytest.raises(ValueError, match=r"batch of 3 rows was filled up to 4.*returned 3 rows"):
        finish_output(DataProto.from_dict({"y": torch.zeros(3)}), padding)
    metrics = DataProto(meta_info={"metrics": {"a": 1}})
    assert finish_output(metrics, padding) is metrics
    assert finish_output([1, 2], padding) == [1, 2]


def test_wrong_arguments_are_refused_by_name() -> None:
    with raises_with(TypeError, "argument 1", "meta_info"):
        dispatch_dp_compute_data_proto(Group(2), batch_of(2), 0.5)
    with raises_with(ValueError, "'b'", "2 rows", 4):
        dispatch_dp_compute_data_proto(Group(2), batch_of(4), b=batch_of(2))
    with pytest.raises(ValueError, match="without rows"):
        dispatch_dp_compute_data_proto(Group(2), DataProto())
    with pytest.raises(
        ValueError, match="argument 0 must be a list with one entry for each of the 3 ranks; got 2 entries"
    ):
        dispatch_dp_compute(Group(3), [1, 2])
    with raises_with(TypeError, "dict", "rank 1"):
        collect_dp_compute_data_proto(None, [batch_of(1), {}])


def test_mesh_faults_are_named() -> None:
    with raises_with(ValueError, "ranks 0 and 1", "data-parallel rank 0"):
        collect_order("actor", [0, 0, 1], [True, True, True])
    with raises_with(ValueError, "[1]"):
        collect_order("actor", [0, 1], [True, False])
    with pytest.raises(ValueError, match="without gaps"):
        collect_order("actor", [0, 2], [True, True])
    assert collect_order("actor", [1, 0, 1, 0], [True, False, False, True]) == [3, 0]


def test_collect_nd_takes_rank_order() -> None:
    outputs = [DataProto.from_dict({"y": torch.tensor([rank])}) for rank in range(4)]
    result = collect_nd_compute_dataproto([True, False, True, False], None, outputs)
    assert result.batch["y"].tolist() == [0, 2]


def test_one_to_all_never_scatters_a_list() -> None:
    args, kwargs = dispatch_one_to_all(Group(2), [1, 2], key=(3, 4))
    assert args == ([[1, 2], [1, 2]],) and kwargs == {"key": [(3, 4), (3, 4)]}


def test_register_keeps_the_function_and_checks_its_arguments() -> None:
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def method(self: object, value: int) -> int:
        """Doc."""
        return value + 1

    assert method(None, 1) == 2 and method.__doc__ == "Doc." and method.__name__ == "method"
    assert getattr(method, MAGIC_ATTR)["blocking"] is False
    with raises_with(ValueError, "dispatch_mode", "'all'", "RANK_ZERO", "ONE_TO_ALL"):
        register(dispatch_mode="all")
    with raises_with(ValueError, "collect_fn"):
        register(dispatch_mode={"dispatch_fn": dispatch_one_to_all})
    with raises_with(ValueError, "execute_mode"):
        register(execute_mode=Dispatch.ONE_TO_ALL)
    with pytest.raises(AttributeError, match="NONE"):
        _ = Dispatch.NONE


def test_user_modes_are_added_replaced_and_pickled_by_name() -> None:
    mode = register_dispatch_mode("every_other", dispatch_one_to_all, lambda group, output: output[::2])
    assert mode is Dispatch.EVERY_OTHER and "EVERY_OTHER" in Dispatch.names()
    assert get_predefined_dispatch_fn(mode)["collect_fn"](None, [0, 1, 2]) == [0, 2]
    update_dispatch_mode(mode, dispatch_one_to_all, lambda group, output: output[1::2])
    assert get_predefined_dispatch_fn(mode)["collect_fn"](None, [0, 1, 2]) == [1]
    assert pickle.loads(pickle.dumps(mode)) is mode
    with pytest.raises(ValueError, match="exists already"):
        register_dispatch_mode("EVERY_OTHER", dispatch_one_to_all, dispatch_one_to_all)
    with raises_with(TypeError, "collect_fn", 3):
        register_dispatch_mode("other", dispatch_one_to_all, 3)
    with pytest.raises(ValueError, match="'NO NAME' cannot be"):
        register_dispatch_mode("no name", dispatch_one_to_all, dispatch_one_to_all)


def test_a_mode_without_functions_is_refused_when_used_and_replaced_when_set() -> None:
    mode = Dispatch.register("late")
    with raises_with(ValueError, "Dispatch.LATE", "update_dispatch_mode"):
        mode.dispatch_fn(Group(2), 1)
    update_dispatch_mode(mode, dispatch_one_to_all, lambda group, output: output[0])
    assert Dispatch.LATE.dispatch_fn(Group(2), 1) == (([1, 1],), {})


def test_arguments_that_a_group_does_not_know_are_refused_by_name() -> None:
    WorkerGroup(None, device_name="cuda", profile_steps=None)  # what verl's programs pass without effect here
    with raises_with(TypeError, "profile_steps=[1]", "worker_enw="):
        WorkerGroup(None, profile_steps=[1], worker_enw={"A": "1"})


def test_base_loads_without_ray_being_asked_for() -> None:
    code = "import sys, hybridrl.single_controller.base.decorator; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_worker_outside_a_group_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Worker.env_keys():
        monkeypatch.delenv(name, raising=False)
    worker = Worker()
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (0, 1, 0, 1)
    inner = Worker()
    inner._register_dispatch_collect_info("actor", dp_rank=3, is_collect=True)
    worker.set_dispatch_collect("actor", **inner.get_dispatch_collect())
    assert worker.query_collect_info("actor") is True
    with raises_with(ValueError, "'actor'"):
        worker._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)
    with raises_with(ValueError, "'ref'", "'actor'"):
        worker.query_collect_info("ref")


def test_reserved_port_is_given_to_nobody_but_the_store_that_names_it() -> None:
    reservation = PortReservation()
    handed_out = set()
    sockets = []
    for _ in range(300):
        probe = socket.socket()
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", 0))
        sockets.append(probe)
        handed_out.add(probe.getsockname()[1])
    assert reservation.port not in handed_out
    store = torch.distributed.TCPStore("127.0.0.1", reservation.port, 1, True, wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
    for probe in sockets:
        probe.close()
    reservation.release()


def test_port_in_use_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(OSError):
            PortReservation(taken.getsockname()[1])


def test_resource_pool_numbers_ranks_node_by_node() -> None:
    pool = ResourcePool([2, 1])
    pool.add_node(3)
    assert pool.world_size == 6 and pool.store == [2, 1, 3]
    assert pool.local_world_size_list() == [2, 2, 1, 3, 3, 3]
    assert pool.local_rank_list() == [0, 1, 0, 0, 1, 2]
    with raises_with(ValueError, "process_on_nodes", "[2, 0]"):
        ResourcePool([2, 0])


def test_class_with_init_args_builds_later() -> None:
    assert ClassWithInitArgs(dict, [("a", 1)], b=2)() == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ("RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.1]:2", True),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970", True),
        ("torch.distributed.DistNetworkError: The client socket has timed out after 300s", True),
        ("ValueError: the NCCL flag is wrong", True),
        ("ValueError: boom", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("AssertionError", False),
    ],
)
def test_symptoms_are_told_from_causes(summary: str, expected: bool) -> None:
    assert is_collective_error(summary) is expected


class Unpicklable(Exception):
    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("no")


def test_failure_travels_even_if_its_exception_cannot() -> None:
    try:
        raise Unpicklable("deep inside")
    except Unpicklable as error:
        failure = RemoteFailure.capture(error, "actor", 1, 2, "node", 7, "update")
    failure = pickle.loads(pickle.dumps(failure))
    assert failure.original() is None
    error = failure.to_error()
    assert "actor rank 1 of 2 in update (node node, pid 7)" in str(error) and "deep inside" in str(error)
    assert "raise Unpicklable" in error.remote_traceback and not isinstance(error, UserError)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, WorkerError) and again.rank == 1 and again.method == "update"


def test_users_own_mistake_in_a_worker_needs_no_traceback() -> None:
    failure = RemoteFailure.capture(UserError("no such model: x"), "actor", 0, 2, "n", 7, "init_model")
    error = failure.to_error()
    assert isinstance(error, UserError) and isinstance(error, WorkerError)
    assert str(error).startswith("no such model: x") and "Traceback" not in str(error)
