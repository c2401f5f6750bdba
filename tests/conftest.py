"""What every test shares: quiet and offline libraries, few threads, one Ray, one tiny model, one small data set."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]

# Before torch, Ray or transformers are imported, and inherited by every process that a test starts.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_LOG_MONITOR_MANY_FILES_THRESHOLD="1",  # files; with more, Ray looks for new ones every 0.5 s, not 0.1 s
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OMP_WAIT_POLICY="passive",  # idle threads of a worker with all cores would spin on those that others use
    WANDB_MODE="offline",
)
# All other tests state what holds on a CPU, on a machine with a GPU too.
if os.environ.get("HYBRIDRL_GPU_TESTS") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Each process that runs tests has a folder of its own for Ray: jobs would join a cluster that a shared folder names.
# Its path is short because those of sockets have a limit.
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
FIRST_WORKER = "gw0"
COLLECTED = "HYBRIDRL_TESTS_COLLECTED"  # names the file that says that the first process has imported all tests
if WORKER is None:
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="hybridrl-")
    # In a new checkout each process would compile every test: 20 s. The others wait for what the first one writes.
    if not list((REPOSITORY / "tests" / "trainer").glob("__pycache__/*-pytest-*.pyc")):
        os.environ[COLLECTED] = os.path.join(os.environ["RAY_TMPDIR"], "collected")
else:
    os.environ["RAY_TMPDIR"] = os.path.join(os.environ["RAY_TMPDIR"], WORKER)
    os.makedirs(os.environ["RAY_TMPDIR"])
# Started in the background of a shell, tests ignore Ctrl-C, and under nohup a closed terminal; what they start would
# inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # programs that are started get the default
# Ray workers and subprocesses run in folders of their own and must find the packages of this checkout. Each Python
# among them begins with what is in tests/startup, and so does this one.
STARTUP = REPOSITORY / "tests" / "startup"
PACKAGES = [str(REPOSITORY), str(REPOSITORY / "packages" / "hybridrl-testing")]
if str(STARTUP) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*PACKAGES, str(STARTUP), os.environ.get("PYTHONPATH", "")])
    )
runpy.run_path(str(STARTUP / "sitecustomize.py"))
sys.path[:0] = [folder for folder in PACKAGES if folder not in sys.path]

import hypothesis  # noqa: E402  (the environment comes first)
import omegaconf  # noqa: E402  (the environment comes first)
import pytest  # noqa: E402  (the environment comes first)
import torch  # noqa: E402  (the environment comes first)
from scheduling import LostProcesses  # noqa: E402  (the environment comes first)
from shared_ray import SharedRay  # noqa: E402  (the environment comes first)

torch.set_num_threads(1)
# Each of the thousands of configurations that tests compose has the same interpolations. To parse them takes 60 ms.
omegaconf.base.parse = functools.cache(omegaconf.base.parse)
omegaconf._utils.parse = functools.cache(omegaconf._utils.parse)
# An example may wait for its turn on a busy machine. Every run takes the same examples, so that a change is not refused
# for an example that another run would not have met; `--hypothesis-profile default` takes random ones.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")


# What a test costs by what it uses, in seconds of processor time; what is not named here costs next to nothing.
COSTS = {
    "start_real": 25,  # a whole job: imports, a Ray and workers of its own
    "forked": 12,  # the same without the imports
    "run_driver": 15,
    "trained": 15,
    "finish": 12,  # a command in a process of its own
    "call": 12,
    "rollout": 10,
    "replica": 10,
    "run": 8,  # a job in a process that has imports and Ray (tests/e2e/many_runs.py)
    "ray_session": 5,  # a worker group, on the Ray that all tests of the process share
}
SLOW = 60  # of a test that its author marks `slow`; `slow(20)` says another number of seconds
LEAST = 0.2
# Inference engines take gigabytes of memory each: files whose tests start them never run side by side.
ENGINES = ("rollout_vllm", "rollout_sglang", "rollout_vision", "trainer_rollouts")
ENGINES_DONE = "HYBRIDRL_ENGINES_DONE"  # names the file that says that none of them is left (scripts/test.sh)


def cost(item: pytest.Item) -> float:
    """Seconds of processor time that a test takes, roughly."""
    marked = item.get_closest_marker("slow")
    if marked is not None:
        return marked.args[0] if marked.args else SLOW
    return max((COSTS.get(name, LEAST) for name in getattr(item, "fixturenames", ())), default=LEAST)


def group(nodeid: str) -> str:
    """Tests of a group run in one process, one after the other: those of a file share its fixtures."""
    file = nodeid.split("::")[0]
    return "engines" if any(word in file for word in ENGINES) else file


_shared_ray = SharedRay()


def pytest_configure(config: pytest.Config) -> None:
    """With `-n`: a process that is lost fails the run."""
    config.pluginmanager.register(LostProcesses())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect after the first of several processes where it has everything to compile (see `COLLECTED`)."""
    mark = os.environ.get(COLLECTED)
    if mark is None or WORKER is None:
        return (yield)
    deadline = time.monotonic() + 180
    while WORKER != FIRST_WORKER and not os.path.exists(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        return (yield)
    finally:
        if WORKER == FIRST_WORKER:
            Path(mark).touch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not for a quick answer; side by side, start the longest groups first."""
    total: dict[str, float] = {}
    for item in items:
        total[group(item.nodeid)] = total.get(group(item.nodeid), 0) + cost(item)
    if WORKER is not None:
        items.sort(key=lambda item: (-total[group(item.nodeid)], group(item.nodeid)))  # keeps the order in a group
    for item in items:
        if cost(item) > LEAST:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What imports and the collection made stays; the garbage collector need not look at it again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After the tests of a file, nothing of theirs may hold slots of the Ray that all files share. After the last one
    that starts an inference engine, say so: no engine runs any more.
    """
    try:
        yield
    finally:
        ours = [one is not None and group(one.nodeid) == "engines" for one in (item, nextitem)]
        if ours == [True, False] and ENGINES_DONE in os.environ:
            Path(os.environ[ENGINES_DONE]).touch()
        _shared_ray.check()
    if nextitem is None or nextitem.path != item.path:
        left = free_slots()
        if left:
            raise AssertionError(
                f"{item.path.name}: {len(left)} placement groups were not removed: {left}. A test created a pool, or a "
                "program that was stopped halfway did, and nobody called `release`"
            )


def free_slots() -> list[str]:
    """Remove the placement groups that are left on this process's Ray, and return their bundles."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    from ray.util.placement_group import PlacementGroup, PlacementGroupID, placement_group_table

    def left() -> dict[str, Any]:
        return {key: entry for key, entry in placement_group_table().items() if entry["state"] != "REMOVED"}

    deadline = time.monotonic() + 5
    while left() and time.monotonic() < deadline:  # Ray removes them in the background
        time.sleep(0.05)
    found = left()
    for key in found:
        ray.util.remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(key)))
    return [str(list(entry["bundles"].values())) for entry in found.values()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """What a test that fails has placed on the shared Ray is removed: the next one would find no CPU free."""
    if "ray_session" not in getattr(item, "fixturenames", ()):
        return (yield)
    before = placement_groups()
    try:
        return (yield)
    except BaseException:
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup, remove_placement_group

        for name in placement_groups() - before:
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))  # with its processes
        raise


def placement_groups() -> set[str]:
    """The ids of those that hold or wait for CPUs of the shared Ray; none where a test has ended it."""
    import ray
    from ray.util.placement_group import placement_group_table

    if not ray.is_initialized():
        return set()
    return {name for name, facts in placement_group_table().items() if facts["state"] != "REMOVED"}


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`: whole groups go to the processes, in the order of `pytest_collection_modifyitems`."""
    from scheduling import Groups

    return Groups(config, log, group)


_forks_of_session = contextlib.ExitStack()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """With `-n`: the processes that run tests are forked too."""
    import forked_processes

    if not hasattr(os, "pidfd_open"):  # Linux alone has what the base needs
        return
    _forks_of_session.enter_context(forked_processes.base(Path(os.environ["RAY_TMPDIR"])))
    for spec in specs:
        spec.python = os.environ[forked_processes.CHILDREN]


@pytest.hookimpl(trylast=True)  # after the processes of pytest-xdist have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ray's logs are kept where something failed."""
    _forks_of_session.close()
    if WORKER is None and session.exitstatus == 0:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def finish() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command to its end, and returns its output; late, it is ended with what it started."""

    def run(command: list[str], limit: float = 500.0, **options: Any) -> subprocess.CompletedProcess[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes, start_new_session=True, **options) as process:
            try:
                output, errors = process.communicate(timeout=limit)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the quickstart's model: a random Qwen2 of 0.36 M parameters and its character tokenizer. Read only."""
    from hybridrl.models.tiny import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like ``tiny_model`` with hidden 32 (2 heads, 1 KV head of size 16): for tests that need any model. Read only."""
    from hybridrl.models.tiny import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("micro_model"), hidden=32, heads=2, kv_heads=1)


@pytest.fixture(scope="session")
def vision_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny vision-language model of each family, with its tokenizer and image processor. Read only."""
    from hybridrl.models.tiny_vision import build_tiny_vision_model
    from hybridrl.models.vision_families import FAMILIES

    root, sizes = tmp_path_factory.mktemp("vision"), {"hidden": 64, "heads": 2, "kv_heads": 1, "vision_hidden": 16}
    return {family: build_tiny_vision_model(root / family, family=family, **sizes) for family in FAMILIES}


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def vision_model(request: pytest.FixtureRequest, vision_models: dict[str, Path]) -> Path:
    """One of `vision_models`."""
    return vision_models[request.param]


@pytest.fixture(scope="session")
def micro_reward_model(tmp_path_factory: pytest.TempPathFactory, micro_model: Path) -> Path:
    """A random classifier with one label on the backbone of ``micro_model``, with its tokenizer. Read only."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("micro_reward_model")
    model = AutoModelForSequenceClassification.from_pretrained(micro_model, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(5))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(micro_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sort_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sorting task, 64 training and 16 validation prompts: train, test, sft_train, sft_val .parquet."""
    from hybridrl.data.preprocess.sort import write_sort_data

    return write_sort_data(tmp_path_factory.mktemp("sort_data"), train_size=64, test_size=16)


@pytest.fixture(scope="session")
def fork_base() -> Iterator[None]:
    """The process that others are forked from, with their imports done. All processes that run tests share one."""
    import forked_processes

    with forked_processes.base(Path(os.environ["RAY_TMPDIR"])):
        yield


@pytest.fixture(scope="session")
def forked(fork_base: None) -> Iterator[str]:
    """A Python whose programs, and the workers of their Rays, are forked with their imports done (tests/README.md)."""
    import forked_processes

    with forked_processes.programs(Path(os.environ["RAY_TMPDIR"])) as python:
        yield python


@pytest.fixture
def forked_children(fork_base: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library starts in this test, such as the process of a server, is forked with its imports done."""
    import forked_processes

    monkeypatch.setattr(sys, "executable", os.environ[forked_processes.CHILDREN])


@pytest.fixture
def joined(ray_session: None, forked: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Like `forked`, of programs that join the Ray that all tests of the session share, and start none."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    return forked


@pytest.fixture(scope="session")
def started_engines(ray_session: None) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """In a block of it, processes of inference engines start by themselves, as a user's do (tests/README.md)."""
    import forked_processes

    return lambda: forked_processes.started_engines(Path(os.environ["RAY_TMPDIR"]))


@pytest.fixture(scope="session")
def shared_ray(ray_session: None) -> SharedRay:
    """What `ray_session` has started."""
    return _shared_ray


@pytest.fixture(scope="session")
def ray_session(fork_base: None) -> Iterator[None]:
    """One Ray for all tests of the session (`tests/shared_ray.py`)."""
    import ray

    if ray.is_initialized():
        yield
        return
    _shared_ray.start(with_engines=group(os.environ["PYTEST_CURRENT_TEST"]) == "engines")
    yield
    _shared_ray.end()
