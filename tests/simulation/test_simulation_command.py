"""`hybridrl simulate`: the table, the proposal, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
import yaml

from hybridrl.config import load_config, validate
from hybridrl.errors import DataError, UserError
from hybridrl.protocol import DataProto
from hybridrl.simulation.measured_run import long_tailed, read_run
from hybridrl.simulation.simulate_command import best, main, response_times, run_settings, schedules, simulate
from hybridrl.simulation.world import World
from hybridrl.trainer.ppo.ledger import AdmissionSchedule

EQUAL = World(
    AdmissionSchedule(8, lot=8), places=2, samples=2, steps=30, response_s=lambda random: 1.0, reward_s=0.0, learn_s=1.0
)


def test_equal_responses_on_shared_devices_gain_nothing() -> None:
    """16 responses on 8 places take 2 s, an update 1 s, new weights 0.5 s; nobody waits for a longest response."""
    synchronous = simulate(EQUAL, 4, 0, AdmissionSchedule(8, lot=8), 0)
    assert synchronous.step_s == pytest.approx(3.5)
    assert synchronous.ideal_s == pytest.approx(3.5)
    assert (synchronous.mean_age, synchronous.oldest) == (0, 0)
    assert synchronous.training_idle == pytest.approx(2.5 / 3.5)
    assert synchronous.generation_idle == pytest.approx(1.5 / 3.5)
    assert simulate(EQUAL, 4, 0, AdmissionSchedule(8, 1), 0).step_s == pytest.approx(3.5, rel=0.05)


def test_split_devices_are_bounded_by_the_slower_half() -> None:
    """Two devices generate 16 responses on 4 places in 4 s; the other two take 2 s for an update."""
    split = simulate(EQUAL, 4, 2, AdmissionSchedule(8, 2), 0)
    assert split.ideal_s == pytest.approx(4.5)
    assert 4.5 <= split.step_s < 1.1 * 4.5


def test_the_proposal_reads_least_ahead_among_the_fastest() -> None:
    rows = [simulate(EQUAL, 4, 0, schedule, 0) for schedule in schedules(8, [0, 1, 2], [1, 4])]
    assert len(rows) == 5
    assert (best(rows).staleness, best(rows).window) == (0, 1)


def test_what_is_void_is_waste() -> None:
    schedule = AdmissionSchedule(8, lot=8)
    clean = simulate(EQUAL, 4, 0, schedule, 0)
    assert clean.waste == 0 and clean.responses_per_s == pytest.approx(16 / 3.5)
    half = simulate(World(**{**vars(EQUAL), "uniform": 0.5}), 4, 0, schedule, 0)
    assert 0.4 < half.waste < 0.6
    assert half.responses_per_s < clean.responses_per_s


def test_the_proposal_is_settings_of_a_run(micro_model: Path, sort_data: Path) -> None:
    """They are accepted, and mean the schedule that was simulated."""
    for schedule, generating in ((AdmissionSchedule(8, 2, 4), 3), (AdmissionSchedule(8, 0.5), 0), (None, 0)):
        row = simulate(EQUAL, 4, generating, schedule or AdmissionSchedule(8, lot=8), 0)
        words = [f"actor_rollout_ref.model.path={micro_model}", f"data.train_files={sort_data / 'train.parquet'}"]
        words += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
        words += [
            "actor_rollout_ref.rollout.name=auto",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=2",
        ]
        config = load_config("ppo_trainer", [*words, *run_settings(row, 4)])
        validate(config)
        mode, rollout = config.trainer.v1, config.actor_rollout_ref.rollout
        assert (mode.staleness, mode.window) == (row.staleness, row.window)
        if schedule is not None:
            assert config.data.gen_batch_size == schedule.lot
            assert (rollout.nnodes * rollout.n_gpus_per_node, config.trainer.n_gpus_per_node) == (
                generating,
                4 - generating,
            )


# ---------------------------------------------------------------------- the times of a run


def write_run(folder: Path, mode: str = "sync", lengths: list[int] | None = None) -> Path:
    """The folder of a run with 8 prompts, 2 samples, and 4 devices with 2 places; its first step is slow."""
    trainer = {"nnodes": 1, "n_gpus_per_node": 4, "v1": {"trainer_mode": mode}}
    rollout = {"nnodes": 0, "n_gpus_per_node": 0, "n": 2, "max_num_seqs": 2}
    settings: dict[str, dict] = {"trainer": trainer, "actor_rollout_ref": {"rollout": rollout}}
    settings["data"] = {"train_batch_size": 8, "max_response_length": 20}
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    timing = {"gen": 4.0, "reward": 0.25, "old_log_prob": 0.5, "update_actor": 2.0, "update_weights": 0.125, "save": 9}
    with (folder / "metrics.jsonl").open("w") as file:
        for step, factor in enumerate((10, 1, 1, 1), start=1):
            line = {f"timing_s/{name}": factor * seconds for name, seconds in timing.items()}
            line |= {"step": step, "response_length/mean": 10.0, "response_length/max": 10.0}
            file.write(json.dumps(line) + "\n")
    if lengths is not None:
        (folder / "recording").mkdir()
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        batch = DataProto.from_dict({"attention_mask": mask.long(), "responses": mask.long()})
        batch.save_to_disk(folder / "recording" / "step_00001.safetensors")
    return folder


def test_times_are_read_from_a_run(tmp_path: Path) -> None:
    """16 responses of 10 tokens on 8 places: two after each other, so that a token takes 4 s / 20."""
    run = read_run(write_run(tmp_path / "run"))
    assert (run.devices, run.places, run.prompts, run.samples) == (4, 2, 8, 2)
    assert (run.learn_s, run.publish_s, run.reward_s, run.generation_s) == (2.5, 0.125, 0.25, 4.0)
    assert run.synchronous and not run.recorded
    assert run.seconds_per_token() == pytest.approx(0.2)
    recorded = read_run(write_run(tmp_path / "recorded", lengths=[4, 4, 4]))
    assert recorded.recorded and recorded.seconds_per_token() == pytest.approx(0.5)


def test_lengths_have_the_mean_and_the_maximum_of_the_metrics() -> None:
    random, draw = Random(1), long_tailed(100, 500, 64, 10_000)
    steps = [[draw(random) for _ in range(64)] for _ in range(1000)]
    assert sum(map(sum, steps)) / (1000 * 64) == pytest.approx(100, rel=0.05)
    assert sorted(map(max, steps))[500] == pytest.approx(500, rel=0.1)
    limited = long_tailed(100, 500, 64, 150)
    assert max(limited(random) for _ in range(1000)) == 150


def test_the_command_reads_a_run_and_options_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--run", str(write_run(tmp_path / "run")), "--steps", "4", "--staleness", "1", "--window", "1"]
    assert main(words) == 0
    read, _, header, *rows = capsys.readouterr().out.splitlines()
    assert "8 prompts x 2" in read and "4 devices x 2 places" in read and "0.2 s per token" in read
    assert header.split()[0] == "devices" and len([row for row in rows if " + " in row]) == 3
    synchronous = next(row for row in rows if row.split()[2] == "0")
    assert 6.6 < float(synchronous.split()[4]) < 8.0  # 4 + 2.5 + 0.125 s, and the scores at the end
    assert main([*words, "--devices", "2", "--learn", "7"]) == 0
    assert "2 devices x 2 places; update 7 s" in capsys.readouterr().out


def test_runs_without_what_is_needed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ahead = write_run(tmp_path / "ahead", mode="colocate_async")
    assert main(["--run", str(ahead)]) == 2
    assert "--seconds-per-token" in capsys.readouterr().err
    assert main(["--run", str(ahead), "--seconds-per-token", "0.1", "--steps", "2", "--staleness", "1"]) == 0
    (ahead / "metrics.jsonl").write_text((ahead / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    for folder in (ahead, tmp_path / "absent"):
        with pytest.raises(UserError) as caught:
            read_run(folder)
        assert str(folder) in str(caught.value)


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"seconds": 3}\n{"response_length": 100, "score": 1}\n')
    draw, random = response_times(path, 0.05), Random(0)
    assert {draw(random) for _ in range(50)} == {3.0, 5.0}


@pytest.mark.parametrize("line", ["", "{}", "[1]", "5", '{"seconds": "x"}', '{"seconds": -1}', '{"seconds": NaN}', "{"])
def test_files_without_times_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(json.dumps({"seconds": 1}) + f"\n{line}\n" if line else "")
    with pytest.raises(DataError) as caught:
        response_times(path, 0.05)
    assert path.name in str(caught.value)


SMALL = ["--devices", "2", "--places", "2", "--prompts", "4", "--samples", "2", "--steps", "4"]


def test_the_command_prints_a_table_and_a_proposal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--staleness", "1", "--window", "1", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["devices", "S", "W", "s/step"]
    # synchronous; S = 1 on shared devices and on 1 + 1, each with two windows
    assert sum(line.split()[1] in ("shared", "+") for line in lines[1:6]) == 5
    assert lines[-2].startswith("proposed: ") and "trainer.v1.trainer_mode=" in lines[-1]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--devices", "0"], "--devices"),
        (["--learn", "0"], "--learn"),
        (["--publish", "-1"], "--publish"),
        (["--staleness", "-1"], "--staleness"),
        (["--window", "0"], "--window"),
        (["--median", "0"], "--median"),
        (["--uniform", "1"], "--uniform"),
        (["--replica-lost", "0"], "--replica-lost"),
        (["--lengths", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_impossible_values_are_refused_by_name(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *words]) == 2
    assert name in capsys.readouterr().err
