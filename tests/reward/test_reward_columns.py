"""Columns of what reward functions return, where samples exceed the time limit or fail."""

import math
from typing import Any

import pytest

from hybridrl.reward.columns import ExtraColumns, extra_of, part_means
from hybridrl.reward.processes.outcome import Outcome, without_score
from hybridrl.scored import Unscored


def number(score: float) -> Outcome:
    """A function returned a number."""
    return Outcome(score, None, 0.1)


def parts(score: float, **extra: Any) -> Outcome:
    """A function returned a dict."""
    return Outcome(score, {"score": score, **extra}, 0.1)


def columns(
    *outcomes: Outcome, make: ExtraColumns | None = None, unscored: float | None = None
) -> dict[str, list[Any]]:
    return (make or ExtraColumns(unscored))([extra_of(outcome) for outcome in outcomes], outcomes)


LATE = without_score(Unscored("timeout"), 10.0, timed_out=True)
FAILED = without_score(Unscored("grading"), 0.1, error="it raised")
UNJUDGED = without_score(Unscored("infra"), 0.1)


def test_a_late_sample_invents_no_column(capsys: Any) -> None:
    assert columns(parts(0.5, letters=3), LATE) == {"score": [0.5, None], "letters": [3, None]}
    assert "'acc'" not in capsys.readouterr().err


@pytest.mark.parametrize("unscored", [None, 0.0])
def test_an_unscored_sample_scores_nothing_among_numbers(unscored) -> None:
    assert columns(number(1.0), LATE, FAILED, unscored=unscored) == {"acc": [1.0, unscored, unscored]}
    assert columns(number(0.3), LATE, UNJUDGED, unscored=unscored) == {"score": [0.3, unscored, unscored]}


@pytest.mark.parametrize("unscored", [None, 0.0])
def test_a_batch_in_which_nothing_was_scored_keeps_its_column(unscored) -> None:
    make = ExtraColumns(unscored)
    assert columns(LATE, LATE, make=make) == {"acc": [unscored, unscored]}
    assert columns(number(0.3), make=make) == {"score": [0.3]}
    assert columns(LATE, make=make) == {"score": [unscored]}
    make = ExtraColumns()
    assert columns(parts(0.5), make=make) == {"score": [0.5]}
    assert columns(LATE, make=make) == {}


@pytest.mark.parametrize(
    ("values", "mean", "is_told"),
    [
        ([1.0, None, 0.0], 0.5, False),
        ([True, 2], 1.5, False),
        (["a", "b"], None, False),
        ([None, None], None, False),
        ([1.0, "b"], None, True),
        ([1.0, math.nan], None, True),
        ([1.0, math.inf, -math.inf], None, True),
    ],
)
def test_a_column_without_a_mean_is_told_where_it_holds_numbers(capsys, values, mean, is_told):
    name = f"part {values!r}"
    assert part_means({name: values}) == ({} if mean is None else {f"reward/{name}/mean": mean})
    assert (f"reward/{name}/mean" in capsys.readouterr().err) == is_told
