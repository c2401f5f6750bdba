"""`hybridrl compare RUN RUN ...`: prints on which data one run's validation is better, and by how much."""

import argparse
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hybridrl.config.differences import leaves
from hybridrl.config.schema.node import declared
from hybridrl.config.schema.root import ROOTS
from hybridrl.errors import UserError
from hybridrl.notify import write_out
from hybridrl.observe.compare import PairedComparison, Validation, compare, read_validation
from hybridrl.observe.run_history import load_history, show_number

_FEW = 20  # prompts below which the interval is too narrow
#: settings that say where a run is, and not what it does
_PLACES = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name", "trainer.logger")
_HEADERS = ("data source", "prompts", "first", "second", "difference", "95 % interval", "p", "better", "worse")


def setting_differences(first: Validation, second: Validation) -> list[tuple[str, Any, Any]]:
    """Return (key, value in the first run, value in the second) of the settings in which two runs differ."""
    settings = {key for root in ROOTS.values() for key in declared(root)}
    before, after = (dict(leaves(load_history(each.run).config, settings)) for each in (first, second))
    keys = [key for key in dict.fromkeys([*before, *after]) if key not in _PLACES]
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def main(arguments: Sequence[str] | None = None, command: str = "hybridrl compare") -> int:
    """Run the command line, called `command` in its help. Return 0, or 2 if runs cannot be compared."""
    parser = argparse.ArgumentParser(
        prog=command, description="Compare the validations of runs, prompt by prompt, with that of the first run."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs (trainer.default_local_dir)")
    parser.add_argument("--step", default="last", help="a number, last (default), or best (trainer.best_metric)")
    parser.add_argument("--metric", help="a column of the samples; default: acc where there is one, else score")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if len(options.runs) < 2:
        parser.error("name at least two runs")
    try:
        first, *others = [read_validation(run, options.step, options.metric) for run in options.runs]
        results = [(other, compare(first, other)) for other in others]
        text = _as_json(first, results) if options.json else "\n".join(_texts(first, results))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_out(lambda: print(text, flush=True))
    return 0


def _as_json(first: Validation, results: Sequence[tuple[Validation, list[PairedComparison]]]) -> str:
    records = [
        {
            "runs": [str(first.run), str(other.run)],
            "steps": [first.step, other.step],
            "metric": first.metric,
            "sources": [{**asdict(each), "difference": each.difference} for each in comparisons],
            "settings": {key: values for key, *values in setting_differences(first, other)},
        }
        for other, comparisons in results
    ]
    return json.dumps(records, indent=1, ensure_ascii=False)


def _texts(first: Validation, results: Sequence[tuple[Validation, list[PairedComparison]]]) -> Iterator[str]:
    for other, comparisons in results:
        yield f"{first.metric} of\n  first   {first.run}, step {first.step}\n  second  {other.run}, step {other.step}"
        yield _table(comparisons)
        fewest = min(comparison.prompts for comparison in comparisons)
        if fewest < _FEW:
            yield f"{fewest} prompts are few: the true interval is wider. More samples per prompt (val_kwargs.n) help."
        if len({len(first.prompts), len(other.prompts), comparisons[-1].prompts}) > 1:
            yield (
                f"Compared are the prompts that both have: {comparisons[-1].prompts} of {len(first.prompts)} and of "
                f"{len(other.prompts)}."
            )
        if settings := setting_differences(first, other):
            yield "settings that differ (first -> second):"
            yield from (f"  {key}: {json.dumps(before)} -> {json.dumps(after)}" for key, before, after in settings)
        yield ""


def _table(comparisons: Sequence[PairedComparison]) -> str:
    table = Table(box=box.SIMPLE)
    for heading in _HEADERS:
        table.add_column(heading, justify="left" if heading == _HEADERS[0] else "right", no_wrap=True)
    for each in comparisons:
        table.add_row(
            each.source or "all",
            str(each.prompts),
            show_number(each.first),
            show_number(each.second),
            f"{each.difference:+.4f}",
            f"{each.low:+.4f} to {each.high:+.4f}",
            f"{each.p:.4f}",
            str(each.better),
            str(each.worse),
        )
    buffer = io.StringIO()
    Console(file=buffer, width=200).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().strip("\n").splitlines())
