"""Published step times: what the factors promise, and that the table in docs/plan.md is the code's."""

from __future__ import annotations

import re
import runpy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridrl.plan.factors import FITTED, STEP_ERROR
from hybridrl.plan.published import errors, fit, predict, read_models, read_rows
from hybridrl.plan.seconds import TEXTBOOK

FOLDER = Path(__file__).parent
ROWS, MODELS = read_rows(FOLDER / "published_rows.csv"), read_models(FOLDER / "public_models.json")


@pytest.fixture(scope="module")
def script(repository: Path) -> dict[str, Any]:
    return runpy.run_path(str(repository / "benchmarks" / "plan_errors.py"))


def test_the_table_of_the_page_is_that_of_the_code(repository: Path, script: dict[str, Any]) -> None:
    """Run `python benchmarks/plan_errors.py --write` if this fails."""
    page = (repository / "docs" / "plan.md").read_text(encoding="utf-8")
    table = page.split(script["BEGIN"])[1].split(script["END"])[0]
    assert f"digest {script['digest'](ROWS)} " in table
    assert all(f"{line}\n" in table for line in script["quick_lines"](ROWS))


def test_settings_and_not_rows_are_held_out() -> None:
    held = {row.setting for row in ROWS if row.held_out}
    assert not held & {row.setting for row in ROWS if not row.held_out}
    assert 12 <= sum(row.held_out for row in ROWS) <= 30
    assert len(ROWS) == 75


def test_errors_are_those_that_ties_assume(repository: Path) -> None:
    page = (repository / "docs" / "plan.md").read_text(encoding="utf-8")
    left_out = {name: int(value) for name, value in re.findall(r"\| one (\w+) left out \| 75 \| (\d+)%", page)}
    assert left_out["model"] <= 20 and left_out["device"] <= 25
    assert round(100 * STEP_ERROR) >= left_out["model"]
    held = [row for row in ROWS if row.held_out]
    assert np.median(np.abs(errors(held, MODELS, FITTED))) <= 0.2


def test_a_fit_lowers_the_error_and_never_sees_what_is_held_out() -> None:
    rows = [row for row in ROWS if row.framework == "hybridrl"]
    factors = fit(rows, MODELS, rounds=2)
    before, after = (np.abs(errors(rows, MODELS, costs)) for costs in (TEXTBOOK, factors))
    assert np.median(after) < np.median(before)
    unused = ("decode_memory", "refit_bytes_s", "sigma", "fixed_s")
    assert all(getattr(factors, name) == getattr(TEXTBOOK, name) for name in unused), "rows of training alone"


@pytest.mark.slow(60)
def test_the_factors_are_those_of_the_fit() -> None:
    fitted = fit([row for row in ROWS if not row.held_out], MODELS)
    assert asdict(fitted) == pytest.approx(asdict(FITTED), rel=1e-6)


def test_asynchronous_steps_hide_the_shorter_of_both_phases() -> None:
    rows = {row.fields["mode"]: row for row in ROWS if row.name in ("nemo-v0.6-H100-07", "nemo-v0.6-H100-08")}
    assert set(rows) == {"sync", "async1"}
    assert all(predict(row, MODELS, FITTED) > 0 for row in rows.values())
