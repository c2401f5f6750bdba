"""`checkpoint.async_save`: what is written while training goes on is what a save that waits would have written.

Writers wait for a file, so that what happens meanwhile does not depend on time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from safetensors.torch import load_file
from test_trainer_sft import configured, conversations, records  # noqa: F401 (a fixture)

from hybridrl.checkpoint import CheckpointError, verify
from hybridrl.observe.timeline import rank_seconds, read_timeline
from hybridrl.trainer.supervised.run_supervised import run_supervised
from hybridrl.trainer.supervised.supervised_trainer import SupervisedTrainer

pytestmark = pytest.mark.usefixtures("ray_session")

# In the workers: each file of weights is written once a file `go` lies next to the run, or fails if `full` does.
SLOW_WRITER = """
import time
from pathlib import Path
from hybridrl.engine import saved_parts

write = saved_parts.write_slices

def slow(folder, rank, slices):
    flags = Path(__file__).parent
    deadline = time.monotonic() + 300
    while not (flags / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    if (flags / "full").exists():
        raise OSError(28, "No space left on device")
    write(folder, rank, slices)

if saved_parts.write_slices.__name__ == "write_slices":
    saved_parts.write_slices = slow
"""

Report = Callable[[SupervisedTrainer, int], None]


@pytest.fixture
def run(
    micro_model: Path,
    conversations: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Fine-tune into a folder, and call a function after each step, before it is saved."""

    def started(name: str, *words: str, after_step: Report = lambda trainer, step: None) -> Any:
        report = SupervisedTrainer.report

        def observed(self: SupervisedTrainer, metrics: Any) -> None:
            report(self, metrics)
            after_step(self, self.run.step)

        with monkeypatch.context() as patch:
            patch.setattr(SupervisedTrainer, "report", observed)
            settings = ["trainer.total_training_steps=4", "trainer.save_freq=2", *words]
            return run_supervised(configured(micro_model, conversations, tmp_path / name, 2, *settings))

    return started


def _state(checkpoint: Path) -> dict[str, torch.Tensor]:
    verify(checkpoint)
    found: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        found |= {f"{file.relative_to(checkpoint)}:{name}": tensor for name, tensor in load_file(file).items()}
    return found


def _same(one: Path, other: Path) -> None:
    expected, found = _state(one), _state(other)
    assert expected.keys() == found.keys() and any("optimizer" in name for name in found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for file in one.rglob("extra/schedule.json"):
        assert (other / file.relative_to(one)).read_text() == file.read_text()


def test_training_goes_on_while_a_checkpoint_is_written(run: Callable[..., Any], tmp_path: Path) -> None:
    """It is that of its step, bit for bit, and a run that resumes from it ends as one that was not interrupted."""
    events = tmp_path / "ray.json"
    run("waits", "trainer.peak_tflops=0.5", f"ray_kwargs.timeline_json_file={events}")
    assert isinstance(json.loads(events.read_text()), list)
    calls = rank_seconds([span for spans in read_timeline(tmp_path / "waits").values() for span in spans])
    updates = next(of_ranks for name, of_ranks in calls.items() if name.endswith("/update_model"))
    assert sorted(updates) == [0, 1] and min(updates.values()) > 0
    for record in records(tmp_path / "waits"):
        assert record["perf/tflops/model"] > 0
        assert record["perf/mfu/model"] == pytest.approx(record["perf/tflops/model"] / 0.5)
    (tmp_path / "slow.py").write_text(SLOW_WRITER)
    words = ["checkpoint.async_save=True", f"model.external_lib={tmp_path / 'slow.py'}"]
    steps = tmp_path / "goes_on"

    def after_step(trainer: SupervisedTrainer, step: int) -> None:
        if step == 3:  # this step was taken while the writers waited
            assert (steps / "global_step_2.tmp").is_dir() and not (steps / "global_step_2").exists()
            (tmp_path / "go").touch()
        if step == 4:
            trainer.run.checkpoints.complete()
            verify(steps / "global_step_2")

    run("goes_on", *words, after_step=after_step)
    assert sorted(path.name for path in steps.glob("global_step_*")) == ["global_step_2", "global_step_4"]
    for step in ("global_step_2", "global_step_4"):
        _same(tmp_path / "waits" / step, steps / step)
    shutil.rmtree(steps / "global_step_4")
    run("goes_on", *words)
    _same(tmp_path / "waits" / "global_step_4", steps / "global_step_4")
    assert [record["step"] for record in records(steps)] == [1, 2, 3, 4]


def test_a_stop_waits_for_the_checkpoint_and_a_full_disk_is_told_after_the_next_step(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_WRITER)
    words = ["checkpoint.async_save=True", f"model.external_lib={tmp_path / 'slow.py'}"]
    folder = tmp_path / "stopped"

    def stop(trainer: SupervisedTrainer, step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "go").touch()

    outcome = run("stopped", *words, after_step=stop)
    assert (outcome.step, outcome.stopped_by, outcome.checkpoint) == (2, "SIGTERM", folder / "global_step_2")
    verify(folder / "global_step_2")

    def fill(trainer: SupervisedTrainer, step: int) -> None:
        if step == 3:
            (tmp_path / "full").touch()

    words += ["trainer.total_training_steps=9", "trainer.save_freq=1"]
    with raises_with(CheckpointError, "step 3", "No space", "global_step_2"):
        run("stopped", *words, after_step=fill)
    assert [path.name for path in folder.glob("global_step_*")] == ["global_step_2"]
    assert [record["step"] for record in records(folder)][:3] == [1, 2, 3]  # told at once, or after the next step


def test_an_engine_that_cannot_copy_its_state_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "from hybridrl.engine import register_train_engine\n"
        "from hybridrl.engine.micro_batched import MicroBatchedEngine\n"
        "@register_train_engine('plain', model_types=['language_model'])\n"
        "class PlainEngine(MicroBatchedEngine):\n    pass\n"
    )
    words = [f"model.external_lib={tmp_path / 'plain.py'}", "engine.strategy=plain", "checkpoint.async_save=True"]
    with raises_with(Exception, "checkpoint.async_save=True", "CopiesState", "PlainEngine"):
        run("refused", *words)
