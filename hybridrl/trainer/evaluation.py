"""The evaluation program: scores the responses in a file as training does, and summarises them by data source."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table as Grid

from hybridrl.config import EvaluationConfig, validate
from hybridrl.config.data_names import local_files
from hybridrl.data import DataError
from hybridrl.data.data_files import read_table
from hybridrl.data.table import REWARD_MODEL, Table
from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.observe.compare import interval
from hybridrl.observe.validation_metrics import validation_metrics
from hybridrl.reward import RewardError
from hybridrl.reward.column_checks import check_columns
from hybridrl.reward.columns import ExtraColumns, extra_of
from hybridrl.reward.pools import create_pool
from hybridrl.reward.processes.outcome import Outcome
from hybridrl.reward.score import check_data_source, check_ground_truth
from hybridrl.reward.scorers import SampleScorer
from hybridrl.reward.signature import Sample, ground_truth_of
from hybridrl.utils.files import write_text
from hybridrl.utils.urls import masked

_NAMED = 5  # how many faulty rows a message names
_CHUNK = 8192  # samples between two updates of the progress bar
_NO_SOURCE = "unknown"
_WIDEST = 1000  # columns of a printed table


@dataclass
class Answers:
    """The responses to score, in order.

    Attributes:
        samples: the inputs of the reward function.
        rows: the row number of each sample.
        places: the file and row of each sample, for messages.
    """

    samples: list[Sample] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    places: list[str] = field(default_factory=list)


def run_evaluation(config: EvaluationConfig) -> dict[str, float]:
    """Score, print a table, and write a JSON file.

    Returns:
        The metrics: `val-core/*` and `val-aux/*` as validation logs them (`hybridrl.observe.validation_metrics`),
        and for each data source `test_score/<data_source>`, the mean over rows of the mean over a row's responses.
        Responses without a score are in no mean; the file and a warning say how many there are, and why.

    Raises:
        ConfigError: `validate` finds faults in the configuration.
        DataError: rows cannot be scored; the error names them.
        RewardError: the reward function cannot be loaded or fails, or gives no score of any response.
    """
    validate(config)
    table = read_table(config.data.path, "data.path")
    answers, outcomes, label = score_answers(config, table)
    metrics, intervals = summarise(answers, outcomes)
    path = write_report(config, answers, outcomes, label, metrics, intervals)
    _print(metrics, intervals, answers)
    print(f"{len(set(answers.rows))} rows, {len(answers.samples)} responses; all metrics in {path}")
    return metrics


def score_answers(config: EvaluationConfig, table: Table) -> tuple[Answers, list[Outcome], str]:
    """Score the responses of a table.

    Returns:
        The responses, an outcome for each, and the name of the reward function.

    Raises:
        DataError, RewardError: see `run_evaluation`.
    """
    with create_pool(config.reward) as pool:
        answers = read_answers(config, table, built_in=pool.built_in)
        check_columns(pool, table.columns, any(sample.ground_truth is not None for sample in answers.samples))
        return answers, list(_scored(pool, answers)), pool.label


def write_report(
    config: EvaluationConfig,
    answers: Answers,
    outcomes: Sequence[Outcome],
    label: str,
    metrics: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]],
) -> Path:
    """Write all metrics of an evaluation as JSON, and return the path of the file.

    Args:
        config: names the files.
        answers: the responses.
        outcomes: one for each.
        label: the name of the reward function.
        metrics: by name.
        intervals: by data source, of `test_score`.
    """
    data = config.data
    missing = Counter(outcome.unscored.reason.value for outcome in outcomes if outcome.unscored is not None)
    path = Path(data.output_path).expanduser() if data.output_path else default_output(local_files(data.path[0])[0])
    report = {
        "files": [masked(path) for path in data.path],
        "reward_function": label,
        "rows": len(set(answers.rows)),
        "responses": len(answers.samples),
        "timeouts": sum(outcome.timed_out for outcome in outcomes),
        "missing": dict(missing),
        "metrics": dict(metrics),
        "intervals": {f"test_score/{source}": bounds for source, bounds in intervals.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return path


def default_output(file: str) -> Path:
    """Return the path that the metrics of a file are written to."""
    return Path(file).expanduser().with_suffix(".eval.json")


def read_answers(config: EvaluationConfig, table: Table, built_in: bool) -> Answers:
    """Read every response in the table.

    Args:
        built_in: whether the built-in scorers are used. They need a known data source and a ground truth.

    Raises:
        DataError: a column is missing, or rows cannot be scored; the error names the first of them.
    """
    data = config.data
    count = len(table) if data.max_samples < 0 else min(data.max_samples, len(table))
    table.require(data.response_key, "data.response_key")
    references = data.reward_model_key
    if data.ground_truth_key is not None:
        table, references = table.with_ground_truth(data.ground_truth_key), REWARD_MODEL
    for name, key in ((data.data_source_key, "data_source_key"), (references, "reward_model_key")):
        if built_in:
            table.require(name, f"data.{key}")
    columns = (data.response_key, data.data_source_key, references, data.extra_info_key)
    answers, faults = Answers(), []
    checked_sources: set[str] = set()
    for row in range(count):
        values = table[row]
        responses, source, reference, info = (values.get(name) for name in columns)
        texts: Any = [responses] if isinstance(responses, str) else responses
        truth = ground_truth_of({**values, REWARD_MODEL: reference})
        about = {name: value for name, value in values.items() if name != data.response_key}
        try:
            _check_responses(texts, data.response_key)
            if built_in:
                _check_reference(source, truth, data.data_source_key, references, checked_sources)
        except UserError as error:
            faults.append(f"{table.locate(row)}: {error}")
            continue
        for number, text in enumerate(texts):
            answers.samples.append(
                Sample(
                    source,
                    text,
                    truth,
                    dict(info) if isinstance(info, Mapping) else {},
                    prompt=values.get(data.prompt_key),
                    columns=about,
                )
            )
            answers.rows.append(row)
            answers.places.append(f"{table.locate(row)}, response {number} of {len(texts)}")
    if faults:
        more = f"\n  and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        listed = "\n  ".join(faults[:_NAMED])
        raise DataError(f"{len(faults)} of {count} rows cannot be scored:\n  {listed}{more}")
    _report_forms(answers, data.response_key)
    return answers


def _report_forms(answers: Answers, key: str) -> None:
    """Say that rows differ in their number of responses, or that their lists seem to have been written as text."""
    per_row = Counter(answers.rows)
    of_source: dict[str, set[int]] = defaultdict(set)
    for sample, row in zip(answers.samples, answers.rows, strict=True):
        of_source[_source(sample)].add(per_row[row])
    for source, numbers in of_source.items():
        if len(numbers) > 1:
            notify(
                f"rows of {source} have {min(numbers)} to {max(numbers)} responses: metrics with @N, such as "
                f"mean@{max(numbers)}, are those of the rows with N responses alone, and test_score is of all rows",
                "warning",
            )
    texts = [sample.solution_str for sample in answers.samples]
    if texts and set(per_row.values()) == {1} and all(map(_is_list_of_texts, texts)):
        notify(
            f"each row of column {key!r} is one text that is a JSON list of texts ({texts[0][:40]!r}), and is scored "
            "as one response. If these are several responses, write the list itself, as JSON or parquet",
            "warning",
        )


def _is_list_of_texts(text: str) -> bool:
    if not text.lstrip().startswith("["):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _check_responses(texts: Any, key: str) -> None:
    """Check that a row has texts.

    Raises:
        DataError: it has not.
    """
    if not isinstance(texts, Sequence) or not texts:
        actual = "empty" if isinstance(texts, Sequence) else f"{type(texts).__name__}"
        raise DataError(f"column {key!r} must hold a list of texts, and is {actual}")
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"column {key!r} holds {type(text).__name__} {str(text)[:40]!r} among its texts")


def _check_reference(source: Any, truth: Any, source_key: str, truth_key: str, checked_sources: set[str]) -> None:
    """Check that a built-in scorer can score a row.

    Args:
        checked_sources: data sources that have a scorer; the row's is added.

    Raises:
        RewardError, DataError: its data source has no scorer, or the scorer cannot read its ground truth.
    """
    if not isinstance(source, str) or source not in checked_sources:
        check_data_source(source, source_key)
        checked_sources.add(source)
    if truth is None:
        raise DataError(f"no ground truth: column {truth_key!r} must hold {{'ground_truth': ANSWER}}")
    check_ground_truth(truth, source)


def _scored(pool: SampleScorer, answers: Answers) -> Iterator[Outcome]:
    """Yield outcomes in order. A function that takes a batch is called once, with all samples."""
    samples, places = answers.samples, answers.places
    if any(how.form == "batch" for _, how in pool.calls):
        yield from pool.run(samples, places.__getitem__)
        return
    console = Console()
    starts = range(0, len(samples), _CHUNK)
    for start in track(starts, "scoring", console=console, disable=not console.is_terminal, transient=True):
        here = samples[start : start + _CHUNK]
        yield from pool.run(here, lambda number, start=start: places[start + number])  # type: ignore[misc]


def summarise(answers: Answers, outcomes: Sequence[Outcome]) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return the metrics of all responses, see `run_evaluation`, and by data source the 95 % interval of `test_score`.

    An interval is that of other rows of the same kind, by the bootstrap (`hybridrl.observe.compare.interval`).
    """
    judged = [number for number, outcome in enumerate(outcomes) if outcome.unscored is None]
    unscored = [outcome.unscored for outcome in outcomes if outcome.unscored is not None]
    if unscored:
        message = f"{len(unscored)} of {len(outcomes)} responses have no score"
        if not judged:
            raise RewardError(f"{message}. The first: {unscored[0]}")
        notify(f"{message} and are in no mean. The first: {unscored[0]}", "warning")
    answers = Answers([answers.samples[number] for number in judged], [answers.rows[number] for number in judged])
    outcomes = [outcomes[number] for number in judged]
    sources = [_source(sample) for sample in answers.samples]
    extra = ExtraColumns()([extra_of(outcome) for outcome in outcomes], outcomes)
    scores = [outcome.score for outcome in outcomes]
    metrics = validation_metrics(sources, [str(row) for row in answers.rows], extra | {"reward": scores})
    by_row: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for source, row, score in zip(sources, answers.rows, scores, strict=True):
        by_row[source][row].append(score)
    of_rows = {source: np.asarray([np.mean(row) for row in rows.values()]) for source, rows in by_row.items()}
    means = {f"test_score/{source}": float(values.mean()) for source, values in of_rows.items()}
    return means | metrics, {source: interval(values) for source, values in of_rows.items()}


def _source(sample: Sample) -> str:
    return _NO_SOURCE if sample.data_source in (None, "") else str(sample.data_source)


def _print(metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]], answers: Answers) -> None:
    """Print one line per data source: its score with the interval, its core metrics and pass@k."""
    rows: dict[str, set[int]] = defaultdict(set)
    for sample, row in zip(answers.samples, answers.rows, strict=True):
        if f"test_score/{_source(sample)}" in metrics:  # else no response of it has a score
            rows[_source(sample)].add(row)
    core: dict[str, dict[str, float]] = {source: {} for source in rows}
    for source in rows:
        prefix = f"val-core/{source}/"
        core[source] = {
            name.removeprefix(prefix).removesuffix("/mean"): value
            for name, value in metrics.items()
            if name.startswith(prefix) and not name.endswith("/std")
        }
        for variable in ("acc", "reward"):
            prefix = f"val-aux/{source}/{variable}/"
            own = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
            core[source] |= {name: value for name, value in own.items() if name.startswith("pass@")}
    names = list(dict.fromkeys(name for values in core.values() for name in values))
    grid = Grid("data source", "rows", "test_score", "95 % interval", *names)
    for source, values in core.items():
        cells = [f"{values[name]:.4f}" if name in values else "-" for name in names]
        low, high = intervals[source]
        score = f"{metrics[f'test_score/{source}']:.4f}"
        grid.add_row(source, str(len(rows[source])), score, f"{low:.4f} to {high:.4f}", *cells)
    console = Console()
    whole = console.measure(grid, options=console.options.update(width=_WIDEST)).maximum  # a narrow one breaks numbers
    Console(width=max(console.width, whole)).print(grid)
