"""`hybridrl certify`: runs whose weights are compared, what its exit status says, and the table in docs/certify.md."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.trainer.certify.certificate import CertificateRow, certify
from hybridrl.trainer.certify.certified_runs import ENGINES, CertifiedRun, Incident, certified_runs, with_references
from hybridrl.trainer.certify.certify_command import as_table, main
from hybridrl.trainer.ppo.ledger import GroupState
from hybridrl.trainer.ppo.ledger_journal import JOURNAL, read_journal

ROWS = {run.name: run for run in certified_runs(ENGINES)}
AHEAD, KILLED, REPLAYED = "hf, S = 1", "hf, S = 1, killed and resumed", "hf, S = 1, replayed"


def test_equal_runs_hold_and_another_one_does_not(ray_session: None, joined: str, micro_model: Path, tmp_path) -> None:
    """Ahead of training: killed with SIGKILL and resumed, replayed, and with another learning rate."""
    slower = (*ROWS[AHEAD].words, "actor_rollout_ref.actor.optim.lr=1e-3")
    other = CertifiedRun("another rate", "hf", slower, AHEAD)
    rows = certify([*with_references([KILLED, REPLAYED]), other], tmp_path / "runs", micro_model, joined)
    assert [row.run.name for row in rows] == [AHEAD, KILLED, REPLAYED, "another rate"]
    assert [row.error for row in rows] == [""] * 4
    assert [row.holds for row in rows] == [True, True, True, False]
    assert rows[0].weights == rows[1].weights == rows[2].weights != rows[3].weights
    difference = rows[3].largest_difference
    assert difference is not None and 1e-4 < difference < 1
    killed = tmp_path / "runs" / "hf__S___1__killed_and_resumed"
    steps = [json.loads(line)["training/global_step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4], "step 3 was complete, and was trained on again"
    journal = read_journal(killed / JOURNAL)
    assert journal.resumed == 1 and max(journal.ages) == 1
    assert list(journal.states.values()).count(GroupState.RELEASED) == 16
    log = (tmp_path / "runs" / "output.log").read_text()
    assert "step 2" in log, "the second life begins with a checkpoint"


def test_rows_that_may_differ_say_by_how_much() -> None:
    exempt = ROWS["hf, S = 0, two training processes"]
    row = CertificateRow(exempt, "abc", 2e-4, 1.0)
    assert row.holds and exempt.exempt in row.result and "2.0e-04" in row.result
    broken = replace(row, run=replace(exempt, exempt=""))
    assert not broken.holds and "2.0E-04" in broken.result
    assert replace(broken, largest_difference=0.0).result == "equal"
    assert not replace(row, error="no memory").holds


def test_a_run_that_fails_is_a_row_and_an_exit_status(
    ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--json", "--only", AHEAD, "--model", str(tmp_path / "absent")]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["holds"], row["weights"]) == (AHEAD, False, "")
    assert "absent" in row["result"]


def test_arguments_that_are_wrong_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for words, part in ((["--only", "hf, S = 7"], "hf, S = 7"), (["--folder", str(tmp_path)], str(tmp_path))):
        assert main(words) == 2
        assert part in capsys.readouterr().err
    assert main(["--list", "--engine", "vllm"]) == 0
    assert capsys.readouterr().out.splitlines() == [name for name in ROWS if name.startswith("vllm")]


def test_each_row_comes_after_its_reference() -> None:
    names = list(ROWS)
    for run in ROWS.values():
        assert run.name.startswith(run.engine)
        assert run.reference is None or names.index(run.reference) < names.index(run.name)
        assert run.reference is not None or run.incident is Incident.NONE
    assert [run.name for run in with_references([REPLAYED, "hf, S = 0"])] == ["hf, S = 0", AHEAD, REPLAYED]


def test_the_table_of_the_page_has_the_rows_of_the_program(repository: Path) -> None:
    lines = [line for line in (repository / "docs" / "certify.md").read_text().splitlines() if line.startswith("| ")]
    start = lines.index(as_table([])[0])
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 :]][: len(ROWS)]
    assert [(name, reference) for name, reference, _, _ in table] == [
        (run.name, run.reference or "") for run in ROWS.values()
    ]
    weights = {name: digits for name, _, digits, _ in table}
    for name, reference, digits, result in table:
        if ROWS[name].must_equal:
            assert (result, digits) == ("equal", weights[reference])
        if ROWS[name].exempt:
            assert ROWS[name].exempt in result
