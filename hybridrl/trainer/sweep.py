"""Sweeps: `hybridrl grpo -m lr=1e-5,1e-6 seed=1,2` runs every combination, one after another, and compares them."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from hybridrl.config import cli
from hybridrl.config.checks.check_run import check
from hybridrl.config.command import read_words, user_file
from hybridrl.config.compose import compose_config
from hybridrl.errors import ConfigError
from hybridrl.observe import jsonl
from hybridrl.observe.tracking import METRICS
from hybridrl.programs import STOPPED

OPTIONS = ("-m", "--multirun")
_INTERRUPTED = 130
_STATUS = {0: "finished", STOPPED: "stopped", _INTERRUPTED: "interrupted", None: "not run"}
_FOLDERS = ("trainer.default_local_dir", "default_local_dir", "output_dir")
#: of each line, the first metric that a run has is compared: the beginning of its name, and whether less is better
_COMPARED = (
    (("val-core/", False), ("val/loss", True)),
    (("critic/score/mean", False), ("train/loss", True)),
)


@dataclass
class SweepRun:
    """One combination.

    Attributes:
        words: the values that differ from run to run.
        folder: of the run.
        status: its exit status; None: it did not run.
    """

    words: tuple[str, ...]
    folder: Path
    status: int | None = None


def sweep(
    tree: str,
    run: Callable[[Any], object],
    argv: Sequence[str],
    *,
    command: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Run all combinations of the values that words of a command line list. Arguments: those of `hybridrl.config.cli`.

    Every combination is checked before the first one runs. A run that fails does not keep the next from starting; one
    that is asked to stop ends the sweep, and the same command goes on with it.

    Returns:
        The exit status: 0, or that of the last run that failed or was stopped.
    """
    argv = [word for word in argv if word not in OPTIONS]
    try:
        runs = _checked(tree, argv, combinations_of(tree, argv, command), defaults or {})
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for number, each in enumerate(runs, 1):
        print(f"sweep, run {number} of {len(runs)}: {' '.join(each.words)}", file=sys.stderr)
        folder = str(each.folder).replace("'", "\\'")
        fixed = _without(argv, [*_names(each.words), *_FOLDERS])
        words = [*fixed, *each.words, f"trainer.default_local_dir='{folder}'"]
        each.status = _status_of(functools.partial(cli, tree, run, words, command=command, defaults=defaults))
        if each.status in (STOPPED, _INTERRUPTED):
            break
    print(table(runs))
    return next((each.status for each in reversed(runs) if each.status), 0)


def combinations_of(tree: str, argv: Sequence[str], command: str | None = None) -> list[tuple[str, ...]]:
    """Return the words of each run that stand for the words that list several values.

    Raises:
        ConfigError: no word lists several values.
    """
    listed = []
    for word in read_words(tree, argv, command).overrides:
        try:
            (override,) = OverridesParser.create().parse_overrides([word])
        except HydraException:
            continue  # composing names it
        if override.is_sweep_override():
            name = word.partition("=")[0]
            listed.append([f"{name}={value}" for value in override.sweep_string_iterator()])
    if not listed:
        raise ConfigError(f"{OPTIONS[0]}: no word lists several values, such as lr=1e-5,1e-6")
    return list(itertools.product(*listed))


def table(runs: Sequence[SweepRun]) -> str:
    """Return a table with the values of each run, its metrics and its folder; the best of each metric has a star."""
    metrics = [_last_metrics(each.folder) if each.status is not None else {} for each in runs]
    names = sorted({name for each in metrics for name in each})
    columns: list[tuple[str, list[float | None], float]] = []
    for candidates in _COMPARED:
        matching = [(name, less) for prefix, less in candidates for name in names if name.startswith(prefix)]
        for name, less in matching[:1]:
            values = [each.get(name) for each in metrics]
            columns.append((name, values, (min if less else max)(value for value in values if value is not None)))
    lines = [["run", *(name for name, _, _ in columns), "status", "folder"]]
    for row, each in enumerate(runs):
        cells = [" ".join(each.words)]
        for _, values, best in columns:
            value = values[row]
            cells.append("-" if value is None else f"{value:.4g}{' *' if value == best else ''}")
        lines.append([*cells, _STATUS.get(each.status, f"failed ({each.status})"), str(each.folder)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _checked(
    tree: str, argv: Sequence[str], combinations: Sequence[tuple[str, ...]], defaults: Mapping[str, Any]
) -> list[SweepRun]:
    """Compose and check every combination.

    Raises:
        ConfigError: lists the faults of all of them, each once.
    """
    runs: list[SweepRun] = []
    faults: dict[str, list[str]] = {}  # with the combinations that have them
    for words in combinations:
        options = read_words(tree, [*_without(argv, _names(words)), *words])
        try:
            composed = compose_config(tree, options.overrides, *user_file(options), defaults=defaults)
            check(composed.config)  # type: ignore[arg-type]
        except ConfigError as error:
            for fault in error.faults:
                faults.setdefault(fault, []).append(" ".join(words))
            continue
        trainer: Any = getattr(composed.config, "trainer", None)
        if not hasattr(trainer, "default_local_dir"):
            raise ConfigError(f"{OPTIONS[0]}: sweeps are for programs that train")
        runs.append(SweepRun(words, Path(trainer.default_local_dir) / _folder_name(words)))
    if faults:
        every = len(combinations)
        raise ConfigError(
            [fault if len(where) == every else f"{fault} (with {'; '.join(where)})" for fault, where in faults.items()]
        )
    return runs


def _names(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words]


def _without(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the words of a command line that set none of the names."""
    return [word for word in argv if word.startswith("-") or word.partition("=")[0] not in names]


def _folder_name(words: Sequence[str]) -> str:
    """Return the name of a run's folder, such as `lr=1e-05_seed=1`."""
    parts = []
    for word in words:
        key, _, value = word.partition("=")
        parts.append(f"{key.rpartition('.')[2]}={value}")
    return "".join(letter if letter.isalnum() or letter in "=.-_" else "-" for letter in "_".join(parts))


def _status_of(run: Callable[[], None]) -> int:
    """Return the exit status with which a command line ends."""
    try:
        run()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def _last_metrics(folder: Path) -> dict[str, float]:
    """Return the last value of each metric of a run; none if it has written none."""
    path = folder / METRICS
    if not path.is_file():
        return {}
    numbers = ((name, jsonl.number(value)) for record in jsonl.read(path) for name, value in record.items())
    return {name: value for name, value in numbers if value is not None}
