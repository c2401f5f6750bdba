"""What every test shares: quiet and offline libraries, few threads, one Ray, one tiny model, one small data set."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
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
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    WANDB_MODE="offline",
)
# Started in the background of a shell, tests ignore Ctrl-C, and what they start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Ray workers and subprocesses run in folders of their own and must find the package of this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

import hypothesis  # noqa: E402  (the environment comes first)
import pytest  # noqa: E402  (the environment comes first)
import torch  # noqa: E402  (the environment comes first)

torch.set_num_threads(1)
hypothesis.settings.register_profile("tests", deadline=None)  # an example may wait for its turn on a busy machine
hypothesis.settings.load_profile("tests")


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
def sort_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sorting task, 64 training and 16 validation prompts: train, test, sft_train, sft_val .parquet."""
    from hybridrl.data.preprocess.sort import write_sort_data

    return write_sort_data(tmp_path_factory.mktemp("sort_data"), train_size=64, test_size=16)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One Ray for all tests of the session: 16 logical CPUs whatever the machine has, a 256 MB object store."""
    import ray

    from hybridrl.single_controller.ray.cluster import start_ray

    started = not ray.is_initialized()
    if started:
        start_ray(
            address="local",  # another's cluster on this machine is none of ours
            num_cpus=16,
            include_dashboard=False,
            object_store_memory=256 * 1024**2,
            log_to_driver=True,
            logging_level="ERROR",
        )
    yield
    if started:
        ray.shutdown()
