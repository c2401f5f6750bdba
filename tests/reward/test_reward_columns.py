"""Columns of what reward functions return, where samples exceed the time limit or fail."""

from typing import Any

from hybridrl.reward.columns import ExtraColumns, extra_of
from hybridrl.reward.processes.outcome import Outcome


def number(score: float) -> Outcome:
    """A function returned a number."""
    return Outcome(score, None, 0.1)


def parts(score: float, **extra: Any) -> Outcome:
    """A function returned a dict."""
    return Outcome(score, {"score": score, **extra}, 0.1)


def columns(*outcomes: Outcome, make: ExtraColumns | None = None) -> dict[str, list[Any]]:
    return (make or ExtraColumns())([extra_of(outcome) for outcome in outcomes], outcomes)


LATE = Outcome(0.0, None, 10.0, timed_out=True)
FAILED = Outcome(0.0, None, 0.1, error="it raised")


def test_a_late_sample_invents_no_column(capsys: Any) -> None:
    assert columns(parts(0.5, letters=3), LATE) == {"score": [0.5, 0.0], "letters": [3, None]}
    assert "'acc'" not in capsys.readouterr().err


def test_a_late_sample_scores_zero_among_numbers() -> None:
    assert columns(number(1.0), LATE, FAILED) == {"acc": [1.0, 0.0, 0.0]}
    assert columns(number(0.3), LATE) == {"score": [0.3, 0.0]}


def test_a_batch_in_which_nothing_was_scored_keeps_its_column() -> None:
    make = ExtraColumns()
    assert columns(LATE, LATE, make=make) == {"acc": [0.0, 0.0]}
    assert columns(number(0.3), make=make) == {"score": [0.3]}
    assert columns(LATE, make=make) == {"score": [0.0]}
    make = ExtraColumns()
    assert columns(parts(0.5), make=make) == {"score": [0.5]}
    assert columns(LATE, make=make) == {}


def test_one_late_function_of_several_leaves_what_the_others_returned() -> None:
    late = Outcome(0.5, {"score": 0.5, "acc": 1.0, "slow": 0.0}, 10.0, timed_out=True)
    found = columns(late, parts(1.5, acc=1.0, slow=1.0))
    assert found == {"score": [0.5, 1.5], "acc": [1.0, 1.0], "slow": [0.0, 1.0]}
