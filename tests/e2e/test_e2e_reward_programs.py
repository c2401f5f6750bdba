"""Rewards that run programs, in a whole run: the exit code of a program decides the score, so it has to arrive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from e2e_tools import Job, records

REWARD = """
import os, subprocess, time
from pathlib import Path

def compute_score(solution_str, ground_truth):
    hung = Path({folder!r}) / "hung"
    try:
        hung.touch(exist_ok=False)
    except FileExistsError:
        codes = [subprocess.run(["sh", "-c", f"exit {{number}}"]).returncode for number in (0, 1, 7)]
        assert codes == [0, 1, 7], codes
        {then}
        return 1.0
    time.sleep(1000)  # the first of all calls: its process is killed, and another one takes its place
"""


def command(sort_run: list[str], folder: Path, then: str = "pass") -> list[str]:
    """A run of two steps whose reward function runs programs, and hangs once."""
    (folder / "reward.py").write_text(REWARD.format(folder=str(folder), then=then))
    return [
        *sort_run,
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "reward.num_workers=1",  # so that all further calls go to the process that was started last
        "reward.timeout_s=10",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


def test_exit_codes_arrive_before_and_after_a_time_out(
    start_with_ray: Callable[..., Job], sort_run: list[str], tmp_path: Path
) -> None:
    job = start_with_ray(*command(sort_run, tmp_path))
    assert job.wait() == 0, job.output[-4000:]
    first, second = (record for record in records(tmp_path / "run") if record["step"] in (1, 2))
    assert first["reward/timeouts"] == 1 and second["reward/timeouts"] == 0
    # The sample that was out of time is generated and scored again; it never counts as 0.
    assert first["missing/timeout"] == 1 / 33 and first["missing/refilled"] == 1 / 32
    assert second["missing/timeout"] == second["missing/refilled"] == 0
    assert first["critic/score/mean"] == second["critic/score/mean"] == 1


def test_run_ends_with_the_exit_code_of_a_reward_process(
    start_with_ray: Callable[..., Job], sort_run: list[str], tmp_path: Path
) -> None:
    job = start_with_ray(*command(sort_run, tmp_path, then="os._exit(9)"))
    assert job.wait() == 2, job.output[-4000:]
    assert "exit code 9" in job.output
