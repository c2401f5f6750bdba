"""Signals as batch systems send them: to the whole group, to every process of the job, twice, or as a warning; and in
each phase of a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest
from e2e_tools import Job, records

PPO, SFT, EVALUATION, GENERATION = (f"hybridrl.trainer.main_{name}" for name in ("ppo", "sft", "eval", "generation"))

# The score says whether a program that the reward function starts can be ended as anywhere else.
REWARD = """
import signal, subprocess

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    program = subprocess.Popen(["sleep", "1000"])
    program.terminate()
    return float(program.wait() == -signal.SIGTERM)
"""

# A module of the user's own: holds the run in a phase, at a call of it, until it is let go.
HELD = """
import os, time
from pathlib import Path

from hybridrl.algorithms import get_policy_loss_fn, register_policy_loss
from hybridrl.engine import saved_parts
from hybridrl.rollout.hf import rollout

phase, call, folder = os.environ["HELD"].split(":")
calls = 0

def held(name, function):
    def wrapper(*arguments, **named):
        global calls
        calls += name == phase
        if name == phase and calls == int(call):
            Path(folder, "held").touch()
            while not Path(folder, "go").exists():
                time.sleep(0.05)
        return function(*arguments, **named)
    return wrapper

rollout.HFRollout.generate = held("generation", rollout.HFRollout.generate)
saved_parts.write_slices = held("save", saved_parts.write_slices)
register_policy_loss("held")(held("update", get_policy_loss_fn("vanilla")))
"""


class Hold:
    """Where runs wait.

    The files that say so lie in a folder of their own: those next to the module that its code names belong to the
    settings of a run.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._module, self.folder, self._monkeypatch = folder / "held.py", folder / "marks", monkeypatch
        self._module.write_text(HELD)
        self.folder.mkdir()

    def at(self, phase: str, call: int) -> str:
        """The next run waits there. Returns the module that it has to load."""
        self._monkeypatch.setenv("HELD", f"{phase}:{call}:{self.folder}")
        return str(self._module)

    def reached(self) -> bool:
        return (self.folder / "held").exists()

    def go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hold:
    return Hold(tmp_path, monkeypatch)


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
    ("send", "number", "phase", "call"),
    [
        (to_group_as_timeout_does, signal.SIGTERM, "update", 2),
        (to_each, signal.SIGTERM, "save", 1),
        (to_each, signal.SIGUSR1, "generation", 2),  # of the validation
    ],
    ids=["timeout in the update", "scancel in the save", "warning in the validation"],
)
def test_a_stop_signal_to_all_processes_saves_the_last_step(
    start_real: Callable[..., Job],
    sort_run: list[str],
    tmp_path: Path,
    hold: Hold,
    send: Callable[[Job, int], None],
    number: int,
    phase: str,
    call: int,
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "score.py").write_text(REWARD)
    job = start_real(
        *sort_run,
        f"trainer.default_local_dir={folder}",
        "trainer.total_training_steps=100000",
        f"trainer.save_freq={1 if phase == 'save' else -1}",
        "trainer.test_freq=1",
        f"custom_reward_function.path={tmp_path / 'score.py'}",
        f"actor_rollout_ref.model.external_lib={hold.at(phase, call)}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=held",
        module=PPO,
    )
    job.wait_for(hold.reached)
    processes = family(job)
    send(job, number)
    job.wait_for(lambda: "the run stops after this step" in job.output)
    hold.go()
    assert job.wait() == 75, job.output[-4000:]
    name = signal.Signals(number).name
    assert f"stopped by {name} after step 1" in job.output and "run the same command again" in job.output
    assert json.loads((folder / "latest_checkpointed_iteration.txt").read_text()) == 1
    assert any(record.get("critic/score/mean") == 1.0 for record in records(folder))
    assert_ends(processes)


@pytest.mark.slow(30)
def test_main_sft_saves_when_its_group_is_signalled(
    start_real: Callable[..., Job], micro_model: Path, sort_data: Path, tmp_path: Path, hold: Hold
) -> None:
    """In the first save: what is half written does not count."""
    folder = tmp_path / "run"
    job = start_real(
        f"model.path={micro_model}",
        f"model.external_lib={hold.at('save', 1)}",
        "trainer.save_freq=1",
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
    job.wait_for(hold.reached)
    processes = family(job)
    to_group(job, signal.SIGTERM)
    job.wait_for(lambda: "the run stops after this step" in job.output)
    assert not (folder / "latest_checkpointed_iteration.txt").exists()
    hold.go()
    assert job.wait() == 75, job.output[-4000:]
    assert json.loads((folder / "latest_checkpointed_iteration.txt").read_text()) == records(folder)[-1]["step"]
    assert_ends(processes)


@pytest.mark.slow(30)
def test_a_later_second_sigterm_leaves_the_step_and_saves_the_one_before(
    start_real: Callable[..., Job], sort_run: list[str], tmp_path: Path, hold: Hold
) -> None:
    folder = tmp_path / "run"
    job = start_real(
        *sort_run,
        f"trainer.default_local_dir={folder}",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"actor_rollout_ref.model.external_lib={hold.at('generation', 2)}",
        module=PPO,
    )
    job.wait_for(hold.reached)
    processes = family(job)
    to_group(job, signal.SIGTERM)
    job.wait_for(lambda: "the run stops after this step" in job.output)
    time.sleep(6)  # by now it is no copy of the first
    to_group(job, signal.SIGTERM)
    time.sleep(1)
    hold.go()  # the worker answers, and saves
    assert job.wait() == 75, job.output[-4000:]
    assert "stopped by SIGTERM after step 1 of" in job.output
    assert json.loads((folder / "latest_checkpointed_iteration.txt").read_text()) == 1
    assert_ends(processes)


@pytest.mark.slow(10)
def test_main_eval_ends_by_the_signal_with_all_that_it_has_started(
    start_real: Callable[..., Job], tmp_path: Path
) -> None:
    mark = tmp_path / "scoring"
    held = (
        f"def compute_score(*_, **__):\n    import time\n    open({str(mark)!r}, 'w').close()\n    time.sleep(1000)\n"
    )
    (tmp_path / "score.py").write_text(held)
    row = {"prompt": "1 + 1", "responses": ["2"], "data_source": "mine", "reward_model": {"ground_truth": "2"}}
    pd.DataFrame([row]).to_parquet(tmp_path / "answers.parquet")
    job = start_real(
        f"data.path={tmp_path / 'answers.parquet'}",
        f"reward.custom_reward_function.path={tmp_path / 'score.py'}",
        "reward.timeout_s=1000",
        module=EVALUATION,
    )
    job.wait_for(mark.exists)
    processes = family(job)
    to_group(job, signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM and "ended by SIGTERM" in job.output, job.output[-4000:]
    assert not list(tmp_path.glob("*.json"))
    assert_ends(processes)


@pytest.mark.slow(40)
def test_main_generation_keeps_its_parts_and_goes_on(
    start_real: Callable[..., Job],
    start_with_ray: Callable[..., Job],
    micro_model: Path,
    sort_data: Path,
    tmp_path: Path,
    hold: Hold,
) -> None:
    """Signalled within the third part: the first two are there, and the same command answers the rest."""
    output = tmp_path / "out" / "answers.parquet"
    words = [
        f"data.path={sort_data / 'test.parquet'}",
        f"data.output_path={output}",
        "data.batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={micro_model}",
        f"actor_rollout_ref.model.external_lib={hold.at('generation', 3)}",
    ]
    job = start_real(*words, module=GENERATION)
    job.wait_for(hold.reached)
    parts = output.with_name("answers.parquet.parts")
    job.wait_for(lambda: (parts / "part_000001.parquet").exists())
    processes = family(job)
    to_each(job, signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM and "ended by SIGTERM" in job.output, job.output[-4000:]
    assert_ends(processes)
    assert len(list(parts.glob("part_*.parquet"))) == 2 and not output.exists()
    hold.at("never", 1)
    job = start_with_ray(*words, module=GENERATION)
    assert job.wait() == 0, job.output[-4000:]
    assert json.loads(output.with_suffix(".metrics.json").read_text())["parts_of_earlier_runs"] == 2
    assert len(pd.read_parquet(output)) == 16 and not parts.exists()
