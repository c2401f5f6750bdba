"""What the user sees when workers raise, die, hang or never come up. Real processes are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from raising import raises_with

from hybridrl.errors import UserError
from hybridrl.protocol import DataProto
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    WorkerUserError,
    register,
)
from hybridrl.single_controller.ray import calls
from hybridrl.single_controller.ray.postmortem import end_or_crash, likely_cause

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("ray_session")


class Fragile(Worker):
    """Fails in the way it is told to, while the other ranks wait for it in a collective."""

    def __init__(self, fail_rank: int = -1) -> None:
        super().__init__()
        if self.rank == fail_rank:
            raise UserError("the model folder /nowhere does not exist")
        if self.world_size > 1:
            dist.init_process_group("gloo")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, how: str) -> None:
        if self.rank == self.world_size - 1:
            getattr(self, f"_{how}")()
        dist.all_reduce(torch.ones(1))

    def _raise(self) -> None:
        raise KeyError("the real cause")

    def _raise_late(self) -> None:
        time.sleep(1.0)
        raise KeyError("the real cause")

    def _leave_then_raise(self) -> None:
        dist.destroy_process_group()  # the others fail at once, this rank a moment later
        time.sleep(3.0)
        raise KeyError("the real cause")

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _segfault(self) -> None:
        import ctypes

        ctypes.string_at(0)

    def _exit(self) -> None:
        sys.exit("enough")

    def _sleep(self) -> None:
        time.sleep(600)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fail_later(self, batch: DataProto) -> DataProto:
        raise KeyError("upstream")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def consume(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def pid_later(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hang(self) -> None:
        time.sleep(600)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def started() -> Iterator[Any]:
    groups: list[RayWorkerGroup] = []

    def start(count: int, *args: Any, **options: Any) -> RayWorkerGroup:
        pool = RayResourcePool([count], use_gpu=False)
        groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(Fragile, *args), role="actor", **options))
        return groups[-1]

    yield start
    for group in groups:
        group.kill()
        group.resource_pool.release()


def assert_gone(pids: list[int]) -> None:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@pytest.mark.parametrize("how", ["raise", "leave_then_raise"])
def test_exception_is_reported_whole_while_others_wait_in_a_collective(started: Any, how: str) -> None:
    group = started(2)
    pids = group.pid()
    with pytest.raises(WorkerError) as caught:
        group.fail(how)
    error = caught.value
    assert (error.role, error.rank, error.method, error.pid) == ("actor", 1, "fail", pids[1])
    assert isinstance(error.__cause__, KeyError)
    text = str(error)
    assert text.startswith("actor rank 1 of 2 in fail (node ") and "KeyError: 'the real cause'" in text
    assert f"in _{how}" in error.remote_traceback and "_host_call" not in error.remote_traceback
    if how == "leave_then_raise":
        assert "Other failures that came with it:\n  actor rank 0: RuntimeError" in text
    assert_gone(pids)
    with pytest.raises(WorkerError) as again:
        group.pid()
    assert again.value is error


@pytest.mark.parametrize(("how", "cause"), [("kill", "SIGKILL"), ("segfault", "Segmentation|SIGSEGV")])
def test_death_is_reported_and_not_the_broken_collective(started: Any, how: str, cause: str) -> None:
    group = started(2)
    pids = group.pid()
    with pytest.raises(WorkerDiedError, match=cause) as caught:
        group.fail(how)
    assert (caught.value.rank, caught.value.pid, caught.value.method) == (1, pids[1], "fail")
    assert str(caught.value).startswith(f"actor rank 1 of 2 died in fail (node {caught.value.node}, pid {pids[1]}): ")
    if how == "segfault":
        assert "_segfault" in str(caught.value), "the stack that the crash left in the log"
    assert_gone(pids)


def test_hang_ends_with_the_method_the_ranks_and_their_stacks(started: Any) -> None:
    group = started(2)
    pids = group.pid()
    group.timeout_s = 2.0
    with pytest.raises(WorkerTimeoutError) as caught:
        group.hang()
    text = str(caught.value)
    assert "actor.hang: no answer from ranks [0, 1] within 2 s" in text and f"pid {pids[1]}" in text
    assert "time_s" not in text and "in hang" in text, "the stack of the hanging method"
    assert caught.value.missing == (0, 1) and isinstance(caught.value, TimeoutError)
    assert_gone(pids)


def test_constructor_failure_is_the_users_to_mend(started: Any) -> None:
    group = started(2, 1)
    with pytest.raises(WorkerUserError) as caught:
        group.pid()
    assert isinstance(caught.value, UserError) and caught.value.rank == 1
    assert str(caught.value).startswith(
        "the model folder /nowhere does not exist\n(reported by actor rank 1 of 2 in __init__"
    )


def test_workers_that_do_not_come_up_are_named(started: Any) -> None:
    group = started(1, ray_wait_register_center_timeout=0.05)
    with pytest.raises(
        WorkerTimeoutError, match=r"actor.__init__: no answer from ranks \[0\] within 0.05 s(.|\n)*not up yet"
    ):
        group.pid()


def test_port_in_use_is_named(started: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        group = started(1, master_port=port)
        with pytest.raises(UserError, match=f"port {port} on node .* cannot be taken(.|\n)*Choose another master_port"):
            group.pid()


def test_failures_of_calls_not_waited_for(started: Any) -> None:
    batch = DataProto.from_dict({"x": torch.arange(2)})
    # the consumer of a future that fails reports its maker
    maker, consumer = started(1), started(1)
    future = maker.fail_later(batch)
    with pytest.raises(WorkerError, match=r"actor rank 0 of 1 in fail_later(.|\n)*KeyError: 'upstream'"):
        consumer.consume(future)
    with raises_with(WorkerError, "fail_later"):
        future.get()
    # a call that nobody asks about any more is reported by the next one
    dropper = started(1)
    dropper.fail_later(batch)
    pids = None
    with raises_with(WorkerError, "fail_later"):
        for _ in range(100):
            pids = dropper.pid()
            time.sleep(0.05)
    assert_gone(pids or [])


def test_failure_in_another_group_ends_a_wait_that_would_not_end(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_FOREIGN_S", 0.5)
    broken, waiting = started(1), started(1)
    waiting.pid()
    future = broken.fail_later(DataProto.from_dict({"x": torch.arange(2)}))
    with pytest.raises(WorkerError, match=r"in fail_later(.|\n)*'upstream'"):
        waiting.hang()
    with raises_with(WorkerError, "fail_later"):
        future.get()


def test_a_failure_that_was_reported_with_another_is_not_raised_again(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, failing, healthy = started(1), started(1), started(1)
    pids = [*broken.pid(), *failing.pid()]
    healthy.pid()
    future = broken.fail_later(DataProto.from_dict({"x": torch.arange(2)}))
    ray.wait(future.answers)  # so that the next wait notices this failure before its own
    with pytest.raises(WorkerError, match=r"in fail (.|\n)*'the real cause'(.|\n)*'upstream'"):
        failing.fail("raise_late")
    monkeypatch.setattr(calls, "GRACE_FOREIGN_S", 0.5)
    assert healthy.sleep(2.0) == [None]
    assert_gone(pids)
    with raises_with(WorkerError, "'upstream'"):
        future.get()


def test_aliveness_check_notices_a_death_between_calls(started: Any, capsys: pytest.CaptureFixture[str]) -> None:
    group = started(2)
    pids = group.pid()
    group.start_worker_aliveness_check(every_n_seconds=0.1)
    os.kill(pids[1], signal.SIGKILL)
    deadline = time.monotonic() + 30
    told = ""
    while "rank 1 of 2 died" not in told and time.monotonic() < deadline:
        time.sleep(0.1)
        told += capsys.readouterr().err
    with pytest.raises(WorkerDiedError, match="rank 1 of 2 died in no method"):
        group.pid()
    group.stop_worker_aliveness_check()


def test_exit_in_a_method_is_an_error_like_any_other(started: Any) -> None:
    group = started(1)
    with pytest.raises(WorkerError, match="SystemExit: enough"):
        group.fail("exit")


def test_threads_may_call_groups_at_the_same_time(started: Any) -> None:
    """Calls that are not waited for are recorded for all groups together: every thread adds, looks and removes."""
    groups = [started(1), started(1)]
    pids = [group.pid()[0] for group in groups]

    def call_often(index: int) -> list[int]:
        kept = []
        for round_ in range(60):
            output = groups[index % 2].pid_later()
            if round_ % 3:
                kept.append(output)  # the others are dropped, so that the next call looks for their failures
            if len(kept) == 10:
                found = [pid for late in kept for pid in late.get()]
                assert set(found) == {pids[index % 2]}
                kept.clear()
        return [late.get()[0] for late in kept]

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            for index, left in enumerate(threads.map(call_often, range(8))):
                assert set(left) <= {pids[index % 2]}
    finally:
        sys.setswitchinterval(switch)


def test_a_crash_with_a_long_report_is_a_crash() -> None:
    """The stacks of other threads, or of native code, may be longer than what is shown of a log."""
    head, others, own = (
        "Fatal Python error: Segmentation fault",
        "Thread 0x7f (most recent call first):",
        "Current thread",
    )
    stack = [f"frame {number}" for number in range(40)]
    shown = end_or_crash(["before", head, others, *stack, own, *stack])
    assert shown == [head, own, *stack[:23]]
    assert likely_cause("", "\n".join(shown)).startswith("it crashed (Fatal Python error)")
    assert end_or_crash(["before", head, *stack]) == [head, *stack[:24]]
    assert end_or_crash([*stack, head, own, "last"]) == [*stack[18:], head, own, "last"]
    assert end_or_crash(stack) == stack[15:]
