"""Fixtures of the end-to-end tests."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forked_processes
import pytest
import ray
from e2e_tools import Job


@pytest.fixture
def start_real(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs that end with the test, each as a user would: the controller and its workers import everything."""
    yield from _jobs(sys.executable, tmp_path / "real")


@pytest.fixture
def start(tmp_path: Path, ray_session: None, forked: str) -> Iterator[Callable[..., Job]]:
    """Starts jobs that end with the test, on the Ray that all tests of the process share. Controllers and workers are
    forked, with their imports done."""
    yield from _jobs(forked, tmp_path / "job", RAY_ADDRESS=ray.get_runtime_context().gcs_address)


@pytest.fixture
def start_with_ray(tmp_path: Path, forked: str) -> Iterator[Callable[..., Job]]:
    """Like `start`, of jobs that start a Ray of their own."""
    yield from _jobs(forked, tmp_path / "job")


@pytest.fixture
def start_apart(tmp_path: Path, forked_apart: str) -> Iterator[Callable[..., Job]]:
    """Like `start_with_ray`; all processes have another hash seed than those of `start`."""
    yield from _jobs(forked_apart, tmp_path / "apart")


@pytest.fixture(scope="module")
def forked_apart() -> Iterator[str]:
    """Like `forked`, with servers of its own: what they fork has the hash seed with which they were started."""
    folder = Path(os.environ["RAY_TMPDIR"]) / "apart"
    folder.mkdir(exist_ok=True)
    with forked_processes.programs(folder, shared=False) as python:
        yield python


def _jobs(python: str, log: Path, **environment: str) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start_job(
        *arguments: str, module: str = "hybridrl.trainer.main_ppo", folder: Path | None = None
    ) -> Job:  # in `folder`
        file = (folder or log.parent) / f"{log.name}{len(jobs)}.log"
        jobs.append(Job([python, "-m", module, *arguments], file, os.environ | environment))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.close()


@pytest.fixture(scope="session")
def sort_run(micro_model: Path, sort_data: Path) -> list[str]:
    """Overrides of a small GRPO run on the sorting task: 4 steps an epoch, 2 samples a prompt."""
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"data.val_files={sort_data / 'test.parquet'}",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=16",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.val_before_train=False",
        "trainer.report=False",
    ]
