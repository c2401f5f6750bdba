"""`trainer.best_metric`: the checkpoint of the best validation is kept, and a run without better ones ends."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config import SFTTrainerConfig, load_config, validate
from hybridrl.errors import ConfigError, UserError
from hybridrl.observe.jsonl import encode
from hybridrl.observe.run_folder import BEST
from hybridrl.programs import ProgramResult
from hybridrl.trainer.best_checkpoint import BestCheckpoint, BestStep
from hybridrl.trainer.callbacks import RunEvent, calling
from hybridrl.trainer.run import VALIDATION_SECONDS, TrainingRun

SETTINGS = ("data.train_files=a.parquet", "data.val_files=b.parquet", "model.path=x", "trainer.test_freq=1")


def configured(*settings: str) -> SFTTrainerConfig:
    config = load_config("sft_trainer", [*SETTINGS, "trainer.best_metric=val/loss", *settings])
    assert isinstance(config, SFTTrainerConfig)
    return config


def trained(folder: Path, values: Sequence[float], *settings: str, until: int | None = None) -> ProgramResult:
    """Run a loop without workers that validates after each step, with these values of `val/loss`."""
    places = (f"trainer.default_local_dir={folder}", "trainer.logger=[]", "trainer.report=False")
    config = configured(*places, *settings)
    with TrainingRun(config, config.trainer, len(values), identity={"model": "x"}) as run:
        run.restore(lambda folder, state: None)
        while not run.is_last and run.step != until:
            with run.measured_step():
                pass
            run.report({"train/loss": 1.0})
            run.report({"val/loss": values[run.step - 1], VALIDATION_SECONDS: 1.0})
            run.save_if_due(lambda folder: {})
    return run.outcome


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path: Path) -> None:
    """It is saved at once, whatever save_freq is; an earlier best one is then removed as any other."""
    values = [5.0, 2.0, 3.0, 1.0, 4.0, 4.0, 4.0]
    outcome = trained(tmp_path, values, "trainer.max_actor_ckpt_to_keep=1", "trainer.save_freq=3")
    assert steps(tmp_path) == [4, 7]
    assert outcome.best_checkpoint == tmp_path / "global_step_4"
    assert outcome.finished and not outcome.ended_early
    record = {"metric": "val/loss", "value": 1.0, "step": 4, "checkpoint": "global_step_4"}
    assert json.loads((tmp_path / BEST).read_text()) == record


def test_an_earlier_best_checkpoint_goes_at_once(tmp_path: Path) -> None:
    trained(tmp_path, [3.0, 2.0, 1.0], "trainer.max_actor_ckpt_to_keep=1")
    assert steps(tmp_path) == [3]


def test_a_run_without_a_better_validation_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With exit status 0, a checkpoint of the last step, and a message; started again, it trains nothing."""
    values = [5.0, 2.0, 3.0, 2.0, 1.0, 1.0, 1.0]
    patience = "trainer.early_stopping_patience=2"
    outcome = trained(tmp_path, values, patience)
    assert outcome.step == 4 and outcome.ended_early and outcome.finished and outcome.exit_code == 0
    assert outcome.checkpoint == tmp_path / "global_step_4" and steps(tmp_path) == [1, 2, 4]
    assert "finished early, after 2 validations without a better val/loss (step 4 of 7)" in capfd.readouterr().err
    again = trained(tmp_path, values, patience)
    assert (again.step, again.ended_early) == (4, True)
    assert "nothing was trained" in capfd.readouterr().err
    longer = trained(tmp_path, values, "trainer.early_stopping_patience=3")
    assert (longer.step, longer.ended_early) == (7, False)
    assert longer.best_checkpoint == tmp_path / "global_step_5"


def test_a_run_that_ends_early_and_is_asked_to_stop_is_finished(tmp_path: Path) -> None:
    def stop(event: RunEvent) -> None:
        if event.kind == "step" and event.step == 2:
            event.stop("enough")

    with calling([stop]):
        outcome = trained(tmp_path, [1.0, 2.0, 3.0], "trainer.early_stopping_patience=1")
    assert (outcome.step, outcome.ended_early, outcome.stopped_by, outcome.exit_code) == (2, True, None, 0)


def test_a_resumed_run_ends_where_the_whole_one_does(tmp_path: Path) -> None:
    values = [5.0, 3.0, 4.0, 2.0, 2.5, 2.5, 9.0, 1.0]
    settings = ("trainer.early_stopping_patience=3", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")
    whole = trained(tmp_path / "whole", values, *settings)
    for cut in range(1, 7):
        folder = tmp_path / str(cut)
        trained(folder, values, *settings, until=cut)
        outcome = trained(folder, values, *settings)
        assert (outcome.step, outcome.ended_early) == (whole.step, whole.ended_early) == (7, True)
        assert steps(folder) == steps(tmp_path / "whole") == [4, 6, 7]


def test_steps_without_a_checkpoint_cannot_be_the_best(tmp_path: Path) -> None:
    """The metric is named only when the run is resumed: its best step so far has no checkpoint any more."""
    values = [1.0, 3.0, 2.0, 4.0]
    config = load_config(
        "sft_trainer", [*SETTINGS, f"trainer.default_local_dir={tmp_path}", "trainer.logger=[]", "trainer.report=False"]
    )
    with TrainingRun(config, config.trainer, 4, identity={"model": "x"}) as run:
        run.restore(lambda folder, state: None)
        for value in values[:2]:
            with run.measured_step():
                pass
            run.report({"val/loss": value, VALIDATION_SECONDS: 1.0})
        run.save(lambda folder: {})
    outcome = trained(tmp_path, values)
    assert outcome.best_checkpoint == tmp_path / "global_step_3"


def test_a_metric_that_validations_do_not_have_is_named_with_the_others(tmp_path: Path) -> None:
    """Before training it is an error at once; later the step is saved first."""
    places = [f"trainer.default_local_dir={tmp_path}", "trainer.logger=[]", "trainer.report=False"]
    config = load_config("sft_trainer", [*SETTINGS, "trainer.best_metric=val/lose", *places])

    def train() -> None:
        with TrainingRun(config, config.trainer, 4, identity={"model": "x"}) as run:
            run.restore(lambda folder, state: None)
            with run.measured_step():
                pass
            run.report({"val/loss": 1.0, VALIDATION_SECONDS: 1.0})
            run.save_if_due(lambda folder: {})

    with pytest.raises(UserError, match=r"trainer.best_metric=val/lose.*val/loss.*global_step_1"):
        train()
    assert steps(tmp_path) == [1]
    with pytest.raises(UserError, match=r"val/lose.*val/loss"):
        BestCheckpoint(config.trainer).observe(0, {"val/loss": 1.0})


def test_a_variable_need_not_stay_the_core_one() -> None:
    """A function of numbers has an `acc` as long as all are 0 or 1, which is then the core variable."""
    metric = "val-core/sort/reward/mean@1"
    settings = load_config("sft_trainer", [*SETTINGS, f"trainer.best_metric={metric}"]).trainer
    records = [{"step": 1, "val-aux/sort/reward/mean@1": 0.5}, {"step": 2, metric: 0.75}]
    watched, replayed = BestCheckpoint(settings), BestCheckpoint(settings)
    watched.observe(0, {"val-aux/sort/reward/mean@1": 1.0, "val-core/sort/acc/mean@1": 1.0})
    for record in records:
        watched.observe(int(record["step"]), record)
    replayed.replay(records, lambda step: True)
    assert watched.best == replayed.best == BestStep(2, 0.75)


@given(
    values=st.lists(st.one_of(st.integers(-3, 3).map(float), st.just(math.nan), st.just(math.inf)), max_size=12),
    larger=st.booleans(),
    threshold=st.sampled_from([0.0, 1.0]),
    patience=st.integers(1, 4),
)
def test_best_value_and_patience(values: list[float], larger: bool, threshold: float, patience: int) -> None:
    """Against a direct count, watched and read again from a run's records."""
    config = configured(
        f"trainer.greater_is_better={larger}",
        f"trainer.early_stopping_patience={patience}",
        f"trainer.early_stopping_threshold={threshold}",
    )
    sign = 1 if larger else -1
    watched, records = BestCheckpoint(config.trainer), []
    watched.observe(0, {"val/loss": 100.0 * sign})  # before training: no checkpoint has it
    records.append({"step": 0, "val/loss": 100.0 * sign})
    waiting, to_beat = 0, -math.inf
    for step, value in enumerate(values, 1):
        watched.observe(step, {"val/loss": value})
        records += [json.loads(encode(each)) for each in ({"step": step, "x": 1}, {"step": step, "val/loss": value})]
        waiting += 1
        if math.isfinite(value) and sign * value > to_beat + threshold:
            waiting, to_beat = 0, sign * value
        assert watched.waiting == waiting and watched.ends_run == (waiting >= patience)
    finite = [(sign * value, -step) for step, value in enumerate(values, 1) if math.isfinite(value)]
    expected = (max(finite)[0] * sign, -max(finite)[1]) if finite else None
    replayed = BestCheckpoint(config.trainer)
    replayed.replay(records, lambda step: True)
    for each in (watched, replayed):
        assert (each.best and (each.best.value, each.best.step)) == expected
        assert each.waiting == waiting


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["trainer.early_stopping_patience=3"], "trainer.best_metric"),
        (["trainer.greater_is_better=True"], "trainer.best_metric"),
        (["trainer.best_metric=val/loss", "trainer.test_freq=-1"], "trainer.test_freq"),
        (["trainer.best_metric=val/loss", "data.val_files=null"], "data.val_files"),
        (["trainer.best_metric=val/loss", "trainer.early_stopping_threshold=0.1"], "early_stopping_patience"),
    ],
)
def test_settings_that_cannot_act(settings: list[str], fault: str) -> None:
    config = load_config("sft_trainer", [*SETTINGS, *settings])
    with pytest.raises(ConfigError, match=fault):
        validate(config)


def test_a_validation_next_to_training_comes_too_late() -> None:
    words = [
        "data.train_files=a.parquet",
        "data.val_files=b.parquet",
        "actor_rollout_ref.model.path=x",
        "trainer.test_freq=1",
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.rollout.nnodes=1",
        "trainer.best_metric=val-core/sort/acc/mean@1",
    ]
    config: Any = load_config("ppo_trainer", words)
    assert config.trainer.v1.separate_async.background_validation is False
    late = load_config("ppo_trainer", [*words, "trainer.v1.separate_async.background_validation=True"])
    with pytest.raises(ConfigError, match="background_validation"):
        validate(late)
