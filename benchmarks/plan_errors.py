"""How far the planner's seconds are from published step times; writes the table in docs/plan.md.

    python benchmarks/plan_errors.py            # the figures, without the cross-validation (half a minute)
    python benchmarks/plan_errors.py --write    # all of them (minutes), into docs/plan.md

The factors of `FITTED` in hybridrl/plan/factors.py come from `--fit`, which prints them. Settings whose hash says so
are held out and never fitted. `tests/plan/test_plan_published.py` fails if the table is not that of the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hybridrl.plan.factors import FITTED
from hybridrl.plan.published import (
    PublishedRow,
    errors,
    fit,
    leave_out,
    pairs_in_order,
    predict,
    read_models,
    read_rows,
)
from hybridrl.plan.seconds import TEXTBOOK

REPOSITORY = Path(__file__).resolve().parents[1]
ROWS, MODELS = (REPOSITORY / "tests" / "plan" / name for name in ("published_rows.csv", "public_models.json"))
PAGE = REPOSITORY / "docs" / "plan.md"
BEGIN, END = "<!-- errors: begin -->\n", "<!-- errors: end -->\n"
KEYS = {
    "one model left out": lambda row: row.model,
    "one device left out": lambda row: row.device,
    "one framework left out": lambda row: row.framework.split()[0],
}


def line(name: str, off: np.ndarray) -> str:
    """A row of the table."""
    size = np.abs(off)
    within = np.mean((off < 0.5) & (off > -1 / 3))
    return (
        f"| {name} | {len(off)} | {np.median(size):.0%} | {np.quantile(size, 0.9):.0%} | {np.mean(size <= 0.2):.0%} | "
        f"{within:.0%} |"
    )


def digest(rows: Sequence[PublishedRow]) -> str:
    """Changes with the rows, the formulas or the factors."""
    models = read_models(MODELS)
    both = [(row.name, row.seconds, *(f"{predict(row, models, f):.4g}" for f in (TEXTBOOK, FITTED))) for row in rows]
    return hashlib.sha256(json.dumps(both).encode()).hexdigest()[:16]


def quick_lines(rows: Sequence[PublishedRow]) -> list[str]:
    """The part of the table that needs no fit."""
    models = read_models(MODELS)
    fitted, held = [row for row in rows if not row.held_out], [row for row in rows if row.held_out]
    predicted = np.array([predict(row, models, FITTED) for row in rows])
    right, total = pairs_in_order(rows, predicted)
    return [
        "| factors | rows | median error | 90th percentile | within 20 % | within x 1.5 |",
        "|---|---|---|---|---|---|",
        line("textbook values, all rows", errors(rows, models, TEXTBOOK)),
        line("fitted, the rows of the fit", errors(fitted, models, FITTED)),
        line("fitted, rows held out", errors(held, models, FITTED)),
        f"| order of two settings, fitted | {total} pairs | right in {right / total:.0%} | | | |",
    ]


def crossed_lines(rows: Sequence[PublishedRow], rounds: int) -> list[str]:
    """The part of the table that is fitted anew for each part of the rows."""
    models = read_models(MODELS)
    return [line(name, leave_out(rows, models, key, rounds)) for name, key in KEYS.items()]


def text_of(lines: Sequence[str], crossed: Sequence[str], rows: Sequence[PublishedRow]) -> str:
    """The table as the page has it, with its digest."""
    return "\n".join([*lines[:-1], *crossed, lines[-1], "", f"<!-- digest {digest(rows)} -->", ""])


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the factors to the rows that are not held out")
    parser.add_argument("--write", action="store_true", help="cross-validate and write docs/plan.md")
    parser.add_argument("--worst", type=int, default=0, help="print so many rows that are furthest off")
    parser.add_argument("--rounds", type=int, default=6, help="of each fit of the cross-validation")
    options = parser.parse_args()
    rows, models = read_rows(ROWS), read_models(MODELS)
    if options.fit:
        print(fit([row for row in rows if not row.held_out], models))
        return
    print("\n".join(quick_lines(rows)))
    off = errors(rows, models, FITTED)
    for index in np.argsort(-np.abs(np.log1p(off)))[: options.worst]:
        print(f"  {off[index]:+5.0%} {rows[index].name}: {rows[index].seconds:.4g} s of {rows[index].metric}")
    if options.write:
        table = text_of(quick_lines(rows), crossed_lines(rows, options.rounds), rows)
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
