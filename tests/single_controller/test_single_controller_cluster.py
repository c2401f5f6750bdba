"""Ray started, joined, refused and ended: whole driver processes, run from a folder of the user's own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from raising import raises_with

from hybridrl.single_controller import PlacementError, init_ray

Start = Callable[..., subprocess.Popen[str]]

USER_MODULE = '''
import os, signal, subprocess
import torch, torch.distributed as dist
from hybridrl.single_controller import Dispatch, Worker, register

class Mine(Worker):
    """A user's worker in a module of the user's own folder."""

    def __init__(self):
        super().__init__()
        dist.init_process_group("gloo")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start(self):
        import helper

        self.child = subprocess.Popen(["sleep", "1000"])
        value = torch.ones(1)
        dist.all_reduce(value)
        place = os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"]
        return os.getpid(), self.child.pid, int(value), *place, helper.NAME

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def node(self):
        import ray
        return ray.get_runtime_context().get_node_id()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self):
        self.counter = getattr(self, "counter", 0) + 1
        return self.counter

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self):
        if self.rank == 1:
            raise RuntimeError("the reason")
        dist.all_reduce(torch.ones(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait(self):
        import time
        time.sleep(1000)
'''

DRIVER = """
import json, os, sys
from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, init_ray, shutdown_ray
from user_module import Mine

if __name__ == "__main__":
    init_ray({}, {"pool": [2]}, use_gpu=False)
    group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(Mine), role="actor")
    print("process", os.getpid())
    print(json.dumps(group.start()), flush=True)
    if sys.argv[1] == "fail":
        group.fail()
    try:
        group.wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    group.wait()
"""


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    (tmp_path / "user_module.py").write_text(USER_MODULE)
    (tmp_path / "driver.py").write_text(DRIVER)
    for name in ("first", "second"):  # two modules of one name: an installed package and its checkout, for instance
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"NAME = {name!r}")
    return tmp_path


def environment_of(folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    paths = [str(folder / "first"), str(folder / "second"), environment["PYTHONPATH"]]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def run_driver(user_folder: Path) -> Iterator[Start]:
    """Starts the driver, which ends with the test at the latest."""
    with ExitStack() as stack:

        def run(mode: str, python: str = sys.executable) -> subprocess.Popen[str]:
            driver = subprocess.Popen(
                [python, "-m", "driver", mode],
                cwd=user_folder,
                env=environment_of(user_folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.enter_context(driver)
            stack.callback(driver.kill)
            return driver

        yield run


def first_json(driver: subprocess.Popen[str]) -> Any:
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("[["):
            return json.loads(line)
    raise AssertionError(f"the driver ended early:\n{driver.communicate()[1]}")


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=40)
    assert not alive, [process.cmdline() for process in alive]


def test_failed_run_ends_by_itself_with_the_reason_and_without_orphans(run_driver: Start) -> None:
    driver = run_driver("fail")
    answers = first_json(driver)
    # the driver's import path reaches the workers in its order: the first `helper` counts
    assert [answer[2:] for answer in answers] == [[2, "2", str(rank), "first"] for rank in range(2)]
    processes = [psutil.Process(pid) for answer in answers for pid in answer[:2]]
    _, errors = driver.communicate(timeout=300)
    assert driver.returncode == 1
    assert "actor rank 1 of 2 in fail" in errors and "RuntimeError: the reason" in errors
    assert "Connection closed" not in errors and "Unhandled error" not in errors
    assert_all_gone(processes)


def test_interrupt_leaves_workers_alone_and_a_killed_driver_takes_all_with_it(run_driver: Start) -> None:
    driver = run_driver("wait")
    workers = [psutil.Process(pid) for answer in first_json(driver) for pid in answer[:2]]
    own = psutil.Process(driver.pid).children(recursive=True)
    assert {"raylet", "gcs_server"} <= {process.name() for process in own} and len(own) > len(workers)
    time.sleep(0.5)
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.stdout is not None
    assert any(line.strip() == "interrupted" for line in driver.stdout)
    assert all(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers[::2])
    driver.kill()
    driver.wait()
    assert_all_gone([*workers, *own])


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_death_of_rays_own_process_is_told_with_its_name(run_driver: Start, forked: str, name: str) -> None:
    """Ray itself looks for a dead GCS for a minute, and then ends the program without a reason."""
    driver = run_driver("wait", forked)
    assert driver.stdout is not None
    program = next(int(line.split()[1]) for line in driver.stdout if line.startswith("process "))
    workers = [psutil.Process(pid) for answer in first_json(driver) for pid in answer[:2]]
    own = psutil.Process(program).children(recursive=True)
    (victim,) = [process for process in own if process.name() == name]
    victim.kill()
    _, errors = driver.communicate(timeout=300)
    assert driver.returncode != 0
    assert f"error: Ray's process {name} was killed or crashed" in errors
    assert "within 60 seconds" not in errors, "Ray did not have to find out"
    assert "ran out of memory" not in errors
    assert_all_gone([*workers, *own])


SESSION = """
import os, sys, stat
import ray
from hybridrl.single_controller import init_ray, shutdown_ray

def main():
    try:
        init_ray(use_gpu=False)
        print(ray._private.worker.global_worker.node.get_session_dir_path())
        print(os.environ["RAY_AUTH_MODE"])
        print(oct(stat.S_IMODE(os.stat(os.path.expanduser("~/.ray/auth_token")).st_mode)))
        if sys.argv[1:]:
            raise ValueError("a fault")
    finally:
        shutdown_ray()

if __name__ == "__main__":
    main()
"""


def test_rays_folder_goes_with_the_run_and_stays_after_a_fault_and_tokens_are_on(
    user_folder: Path, finish: Callable[..., Any], forked: str
) -> None:
    (user_folder / "driver.py").write_text(SESSION)
    home = user_folder / "home"
    home.mkdir()
    environment = environment_of(user_folder) | {"HOME": str(home)}
    environment.pop("RAY_AUTH_MODE", None)
    done = finish([forked, "driver.py"], cwd=user_folder, env=environment)
    assert done.returncode == 0, done.stderr
    folder, mode, bits = done.stdout.splitlines()[-3:]
    assert not os.path.exists(folder) and (mode, bits) == ("token", "0o600")
    assert "authentication" not in done.stderr, "there is nothing to warn about"
    done = finish([forked, "driver.py", "fail"], cwd=user_folder, env=environment | {"RAY_AUTH_MODE": "disabled"})
    folder = done.stdout.splitlines()[0]
    assert "a fault" in done.stderr and os.path.isdir(os.path.join(folder, "logs"))
    assert "warning: the Ray cluster (started here) has no token authentication" in done.stderr
    shutil.rmtree(folder)


SLOW_START = """
import sys, time, types
import psutil, ray
from ray._private import node, services
from hybridrl.single_controller import PlacementError, init_ray, shutdown_ray
from hybridrl.single_controller.ray import start_ray
from hybridrl.utils import movement

tries = []

def late(*args, real=services.get_node):
    # The raylet is not registered, as often as this is asked
    tries.append(1)
    if sys.argv[1] == "agent" and len(tries) == 1:
        # What the raylet of a busy machine writes after 30 s, a limit that cannot be set, before it ends itself
        with open(start_ray._logs_of(start_ray._rays_processes()) / "raylet.out", "a") as log:
            log.write("Check failed: port.has_value() Timed out waiting for file metrics_agent_port")
    if (sys.argv[1], len(tries)) in (("killed", 2), ("agent", 1)):
        [child.kill() for child in psutil.Process().children() if child.name() == "raylet"]
    if sys.argv[1] == "stopped" and len(tries) == 2:
        movement.STILL_S = 5
        [child.suspend() for child in psutil.Process().children(recursive=True)]
    if len(tries) < {"agent": 2, "busy": 4}.get(sys.argv[1], 1000):
        raise RuntimeError("not registered")
    return real(*args)

# Ray counts its 30 s by this clock, on which every look takes a minute
clock = iter(range(0, 10**9, 60))
node.time = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: next(clock)})
services.get_node = late
try:
    init_ray({}, {"pool": [1]}, use_gpu=False)
    print("answer:", ray.get(ray.remote(lambda: 42).remote()))
    # Also the one that has ended is waited for, so that it is not taken for the one that runs
    (raylet,) = [child for child in psutil.Process().children() if child.name() == "raylet"]
    print("workers have", raylet.environ()["RAY_worker_register_timeout_seconds"], "s")
except PlacementError as error:
    print("refused:", error)
    print("left:", [child.name() for child in psutil.Process().children() if child.status() != "zombie"])
shutdown_ray()
"""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("busy", ["answer: 42", "workers have 600 s"]),
        ("agent", ["its agent did not start within 30 s: starting Ray again", "answer: 42"]),
        ("killed", ["refused: Ray did not start here", "its raylet to register raylet ended", "raylet.", "left: []"]),
        ("stopped", ["refused: Ray did not start here", "nothing has moved for", "The end of", "left: []"]),
    ],
)
def test_ray_is_waited_for_as_long_as_it_gets_on(
    user_folder: Path, finish: Callable[..., Any], forked: str, fault: str, told: list[str]
) -> None:
    (user_folder / "driver.py").write_text(SLOW_START)
    done = finish([forked, "driver.py", fault], cwd=user_folder, env=environment_of(user_folder))
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout + done.stderr for words in told), done.stdout + done.stderr


STOPPED_WHILE_IT_STARTS = """
import os, signal, sys, threading, time
import ray
from ray._private import node, services
from hybridrl.processes.inherited import block_stop_signals
from hybridrl.single_controller import init_ray, shutdown_ray
from hybridrl.utils.termination import Terminated, ending_in_order

moment, thread = sys.argv[1:]
owner, name = {"gcs": (node, "wait_for_persisted_port"), "raylet": (services, "get_node"),
               "core": (ray._raylet, "CoreWorker"), "end": (ray, "init")}[moment]
real, sent = getattr(owner, name), []

def stopped(*args, **named):
    result = real(*args, **named)
    if not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
    return result

def start():
    if thread == "thread":
        block_stop_signals()  # as the program does for the thread that starts Ray
    init_ray({}, {"pool": [1]}, use_gpu=False)

setattr(owner, name, stopped)
try:
    with ending_in_order():
        try:
            if thread == "thread":
                starting = threading.Thread(target=start)
                starting.start()
                starting.join()
            else:
                start()
            time.sleep(1000)
        finally:
            if thread == "thread":
                starting.join()
            time.sleep(5)  # as long as a run takes to end what it has started
            shutdown_ray()
            print("in order", flush=True)
except Terminated as terminated:
    terminated.end()
"""


@pytest.mark.slow(10)
@pytest.mark.parametrize(
    ("moment", "thread"),
    [("gcs", "thread"), ("core", "thread"), ("core", "main")],
)
def test_sigterm_at_each_moment_of_rays_start_ends_the_program_in_order(
    user_folder: Path, finish: Callable[..., Any], forked: str, moment: str, thread: str
) -> None:
    """Ray's core took SIGTERM for a failure: 3 s later the program was ended by SIGABRT, amid its end."""
    (user_folder / "driver.py").write_text(STOPPED_WHILE_IT_STARTS)
    command = [forked, "driver.py", moment, thread]
    done = finish(command, cwd=user_folder, env=environment_of(user_folder))
    assert done.returncode == -signal.SIGTERM, done.stderr[-4000:]
    assert done.stdout.split("\n")[-2] == "in order" and "*** SIGTERM" not in done.stderr


EXIT_CODES = """
import json, os, signal, subprocess
import psutil
from hybridrl.single_controller import (
    Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, init_ray, register, shutdown_ray
)

ORPHAN = ["sh", "-c", "sleep 1000 >/dev/null & echo $!"]

def codes():
    return subprocess.run(["false"]).returncode, subprocess.Popen(["sh", "-c", "kill -9 $$"]).wait()

class Runs(Worker):
    def __init__(self):
        super().__init__()
        self.at_first = codes()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def codes(self):
        return self.at_first, codes()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave_behind(self):
        script = "sleep 1000 >/dev/null & echo $!; exec sleep 1000"
        child = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        return os.getpid(), child.pid, int(child.stdout.readline()), int(subprocess.check_output(ORPHAN))

def main():
    init_ray({}, {"pool": [1]}, use_gpu=False)
    seen = {"driver": codes()}
    orphan = psutil.Process(int(subprocess.check_output(ORPHAN)))
    seen["adopted"] = orphan.ppid() == os.getpid()
    orphan.kill()
    group = RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(Runs), role="actor")
    ((seen["constructor"], seen["method"]),) = group.codes()
    (pids,) = group.leave_behind()
    processes = [psutil.Process(pid) for pid in pids]
    processes[0].kill()
    seen["left"] = [process.cmdline() for process in psutil.wait_procs(processes, timeout=100)[1]]
    shutdown_ray()
    print(json.dumps(seen))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("subreaper", ["false", "true"])
def test_exit_codes_of_child_processes_arrive_and_none_outlives_its_worker(
    user_folder: Path, finish: Callable[..., Any], subreaper: str
) -> None:
    """Also where the user asks for Ray's subreaper, with which Ray discards exit codes in the driver and in workers."""
    (user_folder / "driver.py").write_text(EXIT_CODES)
    environment = environment_of(user_folder)
    environment["RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"] = subreaper
    done = finish([sys.executable, "driver.py"], cwd=user_folder, env=environment)
    assert done.returncode == 0, done.stderr
    codes = [1, -signal.SIGKILL]
    # As a subreaper the driver would have to wait for whatever a reward process leaves behind.
    expected = {"driver": codes, "adopted": False, "constructor": codes, "method": codes, "left": []}
    assert json.loads(done.stdout.splitlines()[-1]) == expected


CLUSTER = """
import json, os, subprocess, sys
from ray.cluster_utils import Cluster
from hybridrl.single_controller import (
    PlacementError, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, ResourcePoolManager, init_ray, shutdown_ray
)
from user_module import Mine

def attach(names):
    init_ray()
    group = RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=RayClassWithInitArgs(Mine))
    print(json.dumps(group.count()))
    shutdown_ray()

def main():
    for last in (False, True):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=2, include_dashboard=False)
            cluster.add_node(num_cpus=2)
            break
        except Exception as error:  # as in `init_ray`: Ray gives itself 30 s
            if last or "timed out during startup" not in str(error):
                raise
            cluster.shutdown()
    os.environ["RAY_ADDRESS"] = cluster.address
    refusals = []
    for kwargs, pools in (({"num_cpus": 8}, {"pool": [1]}), ({}, {"pool": [3]}), ({}, {"one": [2, 2], "two": [1]})):
        try:
            init_ray(kwargs, pools, use_gpu=False)
        except PlacementError as error:
            refusals.append(str(error))
    init_ray({}, {"pool": [2, 2]}, use_gpu=False)
    pool = RayResourcePool([2, 2], use_gpu=False, detached=True)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Mine), detached=True, name_prefix="kept")
    started, nodes, counts = group.start(), group.node(), [group.count()]
    shutdown_ray()
    command = [sys.executable, "driver.py", "attach", *group.worker_names]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts.append(json.loads(output.splitlines()[-1]))
    cluster.shutdown()
    print(json.dumps({"refusals": refusals, "started": started, "nodes": nodes, "counts": counts}))

if __name__ == "__main__":
    attach(sys.argv[2:]) if sys.argv[1:2] == ["attach"] else main()
"""


def test_running_cluster_of_two_nodes_is_joined(user_folder: Path, finish: Callable[..., Any], forked: str) -> None:
    (user_folder / "driver.py").write_text(CLUSTER)
    done = finish([forked, "driver.py"], cwd=user_folder, env=environment_of(user_folder))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    given_cpus, one_node, too_many = seen["refusals"]
    assert "ray_kwargs.ray_init.num_cpus=8 cannot be set" in given_cpus and "unset the address" in given_cpus
    assert "asks for 3 slots of 1 CPU" in one_node and "not on one node" in one_node
    assert "pool 'one' asks for 2 + 2 slots" in too_many and "at most 4 slots" in too_many
    assert [answer[2:5] for answer in seen["started"]] == [[4, "2", "0"], [4, "2", "1"]] * 2
    first, second = seen["nodes"][:2], seen["nodes"][2:]
    assert len(set(first)) == 1 == len(set(second)) and first != second
    assert seen["counts"] == [[1] * 4, [2] * 4], "detached workers outlive the driver that started them"


def test_placement_is_refused_before_ray_starts_or_waits(ray_session: None) -> None:
    with raises_with(PlacementError, "'global'", "64 slots", "1 CPU"):
        init_ray({}, {"global": [64]}, use_gpu=False)
    with raises_with(PlacementError, "'global'", "[0]"):
        init_ray({}, {"global": [0]}, use_gpu=False)
    assert init_ray({}, {"global": [2]}) is False


CROWD = """
import ray
from hybridrl.errors import PlacementError
from hybridrl.single_controller import init_ray
from hybridrl.utils.cores import available_cores

count = max(8, 4 * available_cores()) + 1
try:
    init_ray({}, {"global": [count]}, use_gpu=False)
except PlacementError as error:
    assert not ray.is_initialized()
    text = str(error)
    assert f"{count} worker processes on {available_cores()} cores" in text, text
    assert "min to start" in text and "trainer.n_gpus_per_node" in text and f"{count - 1} at most" in text, text
    print("refused")
"""


def test_more_processes_than_the_cores_can_start_are_refused_before_ray_starts(
    user_folder: Path, finish: Callable[..., Any]
) -> None:
    """64 processes on two cores took minutes to fail, with a page of Ray's messages."""
    done = finish([sys.executable, "-c", CROWD], cwd=user_folder, env=environment_of(user_folder))
    assert done.stdout == "refused\n", done.stderr


def test_a_program_of_torchrun_is_no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its ranks would be one, and their workers would wait for a store of torchrun's."""
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlacementError, match=r"torchrun .* rank 1 of 2"):
        init_ray({}, {"global": [2]}, use_gpu=False)
