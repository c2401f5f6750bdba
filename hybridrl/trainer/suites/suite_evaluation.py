"""The program `hybridrl eval --suite`: generates responses to benchmark suites, scores them, and prints a table.

It writes next to `data.output_path`, for an output called `responses.parquet`:

    responses.parquet        the rows of all suites with their responses (`hybridrl.trainer.generation`)
    responses.eval.json      every metric of the scores (`hybridrl.trainer.evaluation`)
    responses.suites.json    the results by suite
    responses.suites/        the same as a run with one validation, for `hybridrl compare`
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from hybridrl.config import SuiteEvaluationConfig, load_config, validate
from hybridrl.config.data_names import suite_name
from hybridrl.data.data_files import read_table
from hybridrl.data.table import Table
from hybridrl.errors import ConfigError
from hybridrl.notify import notify
from hybridrl.observe import jsonl
from hybridrl.observe.dump import dump_generations
from hybridrl.observe.suite_results import Estimate, ScoredRow, SuiteResult, suite_result
from hybridrl.observe.tracking import METRICS
from hybridrl.registry import SUITES, import_external_lib
from hybridrl.reward.pools import sandbox_settings
from hybridrl.reward.processes.outcome import Outcome
from hybridrl.reward.score import check_data_source, check_ground_truth, check_machine
from hybridrl.trainer.evaluation import Answers, score_answers, summarise, write_report
from hybridrl.trainer.generation.run_generation import run_generation
from hybridrl.utils.files import write_text

_NO_ANSWER = "[INVALID]"  # `pred` of a scorer that can read no answer
_WIDEST = 1000  # columns of a printed table


def run_suites(config: SuiteEvaluationConfig) -> dict[str, float]:
    """Generate, score, print a table, and write the files that the module names.

    Returns:
        `SUITE/pass@1`, `SUITE/pass@K` and `SUITE/maj@K` of each suite that has them.

    Raises:
        ConfigError: `validate` finds faults in the configuration, or `data.path` names other data than suites.
        DataError: the data of a suite cannot be read.
        RewardError: no response of any suite has a score, or no program can run where a suite needs that.
        UserError: responses cannot be generated.
    """
    validate(config)
    import_external_lib(config.actor_rollout_ref.model.external_lib)
    names = suite_names(config.data.path)
    _check_scorers(config, read_table(config.data.path, "data.path"))
    for name in names:
        metadata = SUITES.metadata(name)
        notify(f"suite {name}: usually reported with {metadata.sampling or 'no setting in particular'}")
    run_generation(config)
    output = Path(config.data.output_path).expanduser()
    scoring = load_config("evaluation")
    scoring.data.path, scoring.data.response_key = [str(output)], config.data.response_key
    scoring.reward = config.reward
    table = read_table(scoring.data.path, "data.output_path")
    answers, outcomes, label = score_answers(scoring, table)
    metrics, intervals = summarise(answers, outcomes)
    write_report(scoring, answers, outcomes, label, metrics, intervals)
    key, k = config.data.response_key, config.data.n_samples
    results = [suite_result(name, rows, k) for name, rows in scored_rows(table, answers, outcomes, key).items()]
    values = _values(results)
    _write(output, results, values, answers, outcomes)
    _print(results, k)
    print(f"responses in {output}; results in {_results_path(output)}")
    return values


def suite_names(entries: Sequence[str]) -> list[str]:
    """Return the names of the suites that `data.path` lists.

    Raises:
        ConfigError: an entry names something else, or a suite stands there twice.
    """
    names = []
    for entry in entries:
        suite = suite_name(entry)
        if suite is None:
            raise ConfigError(
                f"data.path={entry} is no suite: `hybridrl eval --suite NAME` generates for suites "
                f"({', '.join(SUITES.names())}); `hybridrl generate` and `hybridrl eval` do that for files"
            )
        if suite.name in names:
            raise ConfigError(f"data.path has the suite {suite.name} twice; name it once")
        names.append(suite.name)
    return names


def _check_scorers(config: SuiteEvaluationConfig, table: Table) -> None:
    """Have the built-in scorers try the references, and whether programs can run, before a model is loaded."""
    if config.reward.custom_reward_function.path is not None or config.reward.functions:
        return
    sources = table.column("data_source")
    for source in dict.fromkeys(sources):
        check_data_source(source)
    for source, reference in zip(sources, table.column("reward_model"), strict=True):
        check_ground_truth(reference["ground_truth"], source)
    check_machine(dict.fromkeys(sources), sandbox_settings(config.reward))


def scored_rows(table: Table, answers: Answers, outcomes: Sequence[Outcome], key: str) -> dict[str, list[ScoredRow]]:
    """Return the scored responses of each problem, by suite.

    Args:
        table: the output of generation.
        answers: its responses.
        outcomes: one for each.
        key: `data.response_key`.
    """
    suites = [info["suite"] for info in table.column("extra_info")]
    lengths, reasons = table.column(f"{key}_tokens"), table.column(f"{key}_finish_reasons")
    rows = [
        ScoredRow(
            tokens=[length for length in of_row if length is not None],
            cut=[reason == "length" for reason in ended if reason is not None],
        )
        for of_row, ended in zip(lengths, reasons, strict=True)
    ]
    for row, outcome in zip(answers.rows, outcomes, strict=True):
        if outcome.unscored is not None:
            rows[row].unscored += 1
            continue
        extra = outcome.extra or {}
        rows[row].right.append(bool(extra["acc"]) if "acc" in extra else outcome.score >= 1.0)
        if "pred" in extra:
            rows[row].votes.append(None if extra["pred"] == _NO_ANSWER else str(extra["pred"]))
    by_suite: dict[str, list[ScoredRow]] = defaultdict(list)
    for suite, scored in zip(suites, rows, strict=True):
        by_suite[suite].append(scored)
    return by_suite


def _values(results: Sequence[SuiteResult]) -> dict[str, float]:
    values: dict[str, float] = {}
    for result in results:
        estimates = {"pass@1": result.pass_1, f"pass@{result.k}": result.pass_k, f"maj@{result.k}": result.maj_k}
        values |= {f"{result.suite}/{name}": each.value for name, each in estimates.items() if each is not None}
    return values


def _results_path(output: Path) -> Path:
    return output.with_suffix(".suites.json")


def _write(
    output: Path,
    results: Sequence[SuiteResult],
    values: Mapping[str, float],
    answers: Answers,
    outcomes: Sequence[Outcome],
) -> None:
    """Write the results, and the samples as the validation of a run (`hybridrl.observe.dump`)."""
    write_text(_results_path(output), json.dumps([asdict(result) for result in results], indent=1) + "\n")
    folder = output.with_suffix(".suites")
    samples = answers.samples
    dump_generations(
        folder / "validation",
        0,
        [_text_of(sample.prompt) for sample in samples],
        [sample.solution_str for sample in samples],
        [outcome.score if outcome.unscored is None else float("nan") for outcome in outcomes],
        [sample.ground_truth for sample in samples],
        {
            "data_source": [sample.extra_info["suite"] for sample in samples],
            "uid": [str(row) for row in answers.rows],
            "acc": [_accuracy(outcome) for outcome in outcomes],
            "pred": [(outcome.extra or {}).get("pred") for outcome in outcomes],
            "unscored": [None if outcome.unscored is None else str(outcome.unscored) for outcome in outcomes],
        },
    )
    metrics = {f"val-core/{name}": value for name, value in values.items()}
    write_text(folder / METRICS, jsonl.encode({"step": 0, **metrics}) + "\n")


def _accuracy(outcome: Outcome) -> float | None:
    """1 or 0; None for a response without a score."""
    if outcome.unscored is not None:
        return None
    return float((outcome.extra or {}).get("acc", outcome.score >= 1.0))


def _text_of(prompt: Any) -> str:
    """The text of a prompt: that of its messages."""
    return prompt if isinstance(prompt, str) else "\n\n".join(str(message["content"]) for message in prompt)


def _print(results: Sequence[SuiteResult], k: int) -> None:
    """Print a line per suite."""
    several = (f"pass@{k}", f"maj@{k}") if k > 1 else ()
    grid = Grid("suite", "n", "pass@1", *several, "unscored", "mean tokens", "cut by length")
    for result in results:
        estimates = (result.pass_1, result.pass_k, result.maj_k) if k > 1 else (result.pass_1,)
        tokens = "-" if result.mean_tokens is None else f"{result.mean_tokens:.1f}"
        cut = "-" if result.cut_share is None else f"{result.cut_share:.1%}"
        counts = (str(result.rows), *map(_shown, estimates), f"{result.unscored} of {result.responses}")
        grid.add_row(result.suite, *counts, tokens, cut)
    console = Console()
    whole = console.measure(grid, options=console.options.update(width=_WIDEST)).maximum  # a narrow one breaks numbers
    Console(width=max(console.width, whole)).print(grid)


def _shown(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.4f} ({estimate.low:.4f} to {estimate.high:.4f})"
