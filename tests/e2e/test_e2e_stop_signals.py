"""Signals as batch systems send them: to the whole group, to every process of the job, twice, or as a warning."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from e2e_tools import Job, records

PPO, SFT = "hybridrl.trainer.main_ppo", "hybridrl.trainer.main_sft"

# The score says whether a program that the reward function starts can be ended as anywhere else.
REWARD = """
import signal, subprocess

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    program = subprocess.Popen(["sleep", "1000"])
    program.terminate()
    return float(program.wait() == -signal.SIGTERM)
"""


def family(job: Job) -> list[psutil.Process]:
    return [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children(recursive=True)]


def to_group_as_timeout_does(job: Job, number: int) -> None:
    """`timeout` signals its child and then the group; here the child has handled the first by then."""
    job.process.send_signal(number)
    job.wait_for(lambda: "the run stops after this step" in job.output)
    os.killpg(job.process.pid, number)


def to_group(job: Job, number: int) -> None:
    os.killpg(job.process.pid, number)


def to_each(job: Job, number: int) -> None:
    """As Slurm does: to every process of the job step, in no special order."""
    for process in reversed(family(job)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def assert_ends(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not alive, [process.cmdline() for process in alive]


@pytest.mark.slow(30)
@pytest.mark.parametrize(
    ("send", "number"),
    [(to_group_as_timeout_does, signal.SIGTERM), (to_each, signal.SIGTERM), (to_each, signal.SIGUSR1)],
    ids=["timeout", "scancel", "warning"],
)
def test_a_stop_signal_to_all_processes_saves_the_last_step(
    start_real: Callable[..., Job], sort_run: list[str], tmp_path: Path, send: Callable[[Job, int], None], number: int
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "score.py").write_text(REWARD)
    job = start_real(
        *sort_run,
        f"trainer.default_local_dir={folder}",
        "trainer.total_training_steps=100000",
        f"custom_reward_function.path={tmp_path / 'score.py'}",
        module=PPO,
    )
    job.wait_for(lambda: any(record["step"] >= 2 for record in records(folder)))
    processes = family(job)
    send(job, number)
    assert job.wait() == 75, job.output[-4000:]
    name = signal.Signals(number).name
    assert f"stopped by {name}" in job.output and "run the same command again" in job.output
    assert json.loads((folder / "latest_checkpointed_iteration.txt").read_text()) == records(folder)[-1]["step"]
    assert records(folder)[-1]["critic/score/mean"] == 1.0
    assert_ends(processes)


@pytest.mark.slow(30)
def test_main_sft_saves_when_its_group_is_signalled(
    start_real: Callable[..., Job], micro_model: Path, sort_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = start_real(
        f"model.path={micro_model}",
        f"data.train_files={sort_data / 'sft_train.parquet'}",
        "data.val_files=[]",
        "data.train_batch_size=16",
        "data.micro_batch_size_per_gpu=4",
        "trainer.total_training_steps=100000",
        "trainer.total_epochs=100000",
        "trainer.n_gpus_per_node=1",
        "trainer.report=False",
        f"trainer.default_local_dir={folder}",
        module=SFT,
    )
    job.wait_for(lambda: any(record["step"] >= 2 for record in records(folder)))
    processes = family(job)
    to_group(job, signal.SIGTERM)
    assert job.wait() == 75, job.output[-4000:]
    assert json.loads((folder / "latest_checkpointed_iteration.txt").read_text()) == records(folder)[-1]["step"]
    assert_ends(processes)


@pytest.mark.slow(30)
def test_a_later_second_sigterm_ends_the_run_and_all_that_it_started(
    start_real: Callable[..., Job], sort_run: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    mark = tmp_path / "scoring"
    held = f"    open({str(mark)!r}, 'w').close(); import time; time.sleep(100)\n    program = "
    (tmp_path / "score.py").write_text(REWARD.replace("    program = ", held))
    job = start_real(
        *sort_run,
        f"trainer.default_local_dir={folder}",
        f"custom_reward_function.path={tmp_path / 'score.py'}",
        module=PPO,
    )
    job.wait_for(mark.exists)
    processes = family(job)
    to_group(job, signal.SIGTERM)
    job.wait_for(lambda: "the run stops after this step" in job.output)
    time.sleep(6)  # by now it is no copy of the first
    to_group(job, signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM, job.output[-4000:]
    assert_ends(processes)
