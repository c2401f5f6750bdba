"""`hybridrl simulate`: the table, the proposal, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from hybridrl.errors import DataError
from hybridrl.simulation.simulate_command import best, main, response_times, schedules, simulate
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
    assert lines[-2].startswith("proposed: ")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--devices", "0"], "--devices"),
        (["--learn", "0"], "--learn"),
        (["--publish", "-1"], "--publish"),
        (["--staleness", "-1"], "--staleness"),
        (["--window", "0"], "--window"),
        (["--median", "0"], "--median"),
        (["--lengths", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_impossible_values_are_refused_by_name(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *words]) == 2
    assert name in capsys.readouterr().err
