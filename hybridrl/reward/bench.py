"""Measures reward functions on responses in a file: `python -m hybridrl.reward.bench FILE.jsonl --function F.py`.

Prints the distribution of scores, latency, exceptions and missing scores, whether two runs agree, and where two
functions disagree, with examples.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.errors import DataError, RewardError, UserError
from hybridrl.reward.function import RewardFunction
from hybridrl.reward.processes.outcome import Outcome
from hybridrl.reward.processes.pool import RewardPool
from hybridrl.reward.signature import Sample, ground_truth_of
from hybridrl.scored import Reason

_BUILT_IN = "built-in"
_IN_FILE = "the file"
_RESPONSES = ("solution_str", "response", "output", "completion", "responses")
_PROMPTS = ("prompt", "raw_prompt", "input")
_SHOWN = 160  # characters of a text in an example


@dataclass(frozen=True)
class Item:
    """One response.

    Attributes:
        sample: what is scored.
        place: its line in the file.
        score: that the file has of it; None: it has none.
    """

    sample: Sample
    place: str
    score: float | None


@dataclass
class Measured:
    """The outcomes of a function.

    Attributes:
        name: of the function.
        outcomes: of each run, by sample.
        seconds: of each run, as a whole.
    """

    name: str
    outcomes: list[list[Outcome]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def scores(self) -> list[float | None]:
        """The scores of the first run; None without a score."""
        return [None if outcome.unscored is not None else outcome.score for outcome in self.outcomes[0]]


@dataclass(frozen=True)
class Distribution:
    """Of numbers: how many, their mean, standard deviation and quantiles, and counts by value or by range."""

    count: int
    mean: float
    std: float
    min: float
    p05: float
    median: float
    p95: float
    max: float
    counts: dict[str, int]


def distribution(values: Sequence[float]) -> Distribution | None:
    """The distribution of numbers; None where there are none."""
    if not values:
        return None
    mean, spread = math.fsum(values) / len(values), statistics.pstdev(values)
    counts = Counter(values)
    if len(counts) <= 12:
        listed = {f"{value:g}": counts[value] for value in sorted(counts)}
    else:
        low, high = min(values), max(values)
        width = (high - low) / 10
        places = Counter(min(int((value - low) / width), 9) for value in values)
        listed = {f"{low + n * width:.4g} to {low + (n + 1) * width:.4g}": places[n] for n in range(10)}
    quantiles = {name: quantile(values, share) for name, share in (("p05", 0.05), ("median", 0.5), ("p95", 0.95))}
    return Distribution(len(values), mean, spread, min(values), **quantiles, max=max(values), counts=listed)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the others does not exceed, interpolated between two."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low if low == high else low + (high - low) * (place - math.floor(place))


def changed(measured: Measured, tolerance: float) -> list[tuple[int, list[float | None]]]:
    """The samples whose score differs between runs by more than the tolerance, or that have none in some run only."""
    runs = [[None if outcome.unscored is not None else outcome.score for outcome in run] for run in measured.outcomes]
    differing = []
    for number, scores in enumerate(zip(*runs, strict=True)):
        present = [score for score in scores if score is not None]
        if (present and len(present) < len(scores)) or (present and max(present) - min(present) > tolerance):
            differing.append((number, list(scores)))
    return differing


def disagreements(
    first_scores: Sequence[float | None], second_scores: Sequence[float | None], tolerance: float
) -> list[int]:
    """The samples on which two functions disagree, the clearest first.

    Scores are compared on the scale from each function's lowest to its highest score, so that 1 and 0 agree with 1 and
    -1. A sample that one of them has no score of counts as well, last.
    """
    first, second = _scaled(first_scores), _scaled(second_scores)
    apart: list[tuple[float, int]] = []
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        if (a is None) != (b is None):
            apart.append((0.0, number))
        elif a is not None and b is not None and abs(a - b) > tolerance:
            apart.append((abs(a - b), number))
    return [number for _, number in sorted(apart, key=lambda pair: (-pair[0], pair[1]))]


def correlation(first_scores: Sequence[float | None], second_scores: Sequence[float | None]) -> float | None:
    """Pearson's correlation over the samples that both scored; None where one of them does not vary."""
    pairs = [(a, b) for a, b in zip(first_scores, second_scores, strict=True) if a is not None and b is not None]
    if len(pairs) < 2:
        return None
    first, second = zip(*pairs, strict=True)
    if len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return statistics.correlation(first, second)


def _scaled(scores: Sequence[float | None]) -> list[float | None]:
    present = [score for score in scores if score is not None]
    low, high = (min(present), max(present)) if present else (0.0, 0.0)
    width = high - low or 1.0
    return [None if score is None else (score - low) / width for score in scores]


def read_items(path: Path, limit: int | None = None) -> list[Item]:
    """The responses of a JSONL file: rollouts that a run dumped, or lines of one's own.

    A line has a response (`output`, `response`, `solution_str`, `completion`, or a list `responses`), and may have
    `data_source`, `ground_truth` or `gts` or `reward_model`, `prompt` or `input`, `extra_info`, `score` and columns.

    Raises:
        DataError: there is no such file, or a line is none.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    items: list[Item] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                items += _items_of(line, f"{path}:{number}")
            if limit is not None and len(items) >= limit:
                return items[:limit]
    if not items:
        raise DataError(f"{path}: it has no lines")
    return items


def _items_of(line: str, place: str) -> list[Item]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: it is no JSON: {error}") from None
    name = next((name for name in _RESPONSES if isinstance(row, dict) and name in row), None)
    if name is None:
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"{place}: a line is an object with a response, in one of {', '.join(_RESPONSES)}; found {keys}"
        )
    texts = row[name] if isinstance(row[name], list) else [row[name]]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{place}: {name} must be text, or a list of texts")
    truth = ground_truth_of(row)
    truth = row.get("gts") if truth is None else truth
    info, score = row.get("extra_info"), row.get("score")
    prompt = next((row[name] for name in _PROMPTS if row.get(name) is not None), None)
    about = dict(info) if isinstance(info, Mapping) else {}
    columns = {key: value for key, value in row.items() if key != name}  # the response is no column
    number = score if isinstance(score, (int, float)) and len(texts) == 1 else None
    return [
        Item(
            Sample(row.get("data_source"), text, truth, about, prompt, columns={"ground_truth": truth, **columns}),
            place,
            number,
        )
        for text in texts
    ]


def measure(
    items: Sequence[Item], name: str, function: RewardFunction, runs: int, workers: int | None, timeout_s: float
) -> Measured:
    """Have a function score all samples, `runs` times.

    Raises:
        RewardError: it cannot be loaded, or hangs on everything.
    """
    measured = Measured(name)
    samples = [item.sample for item in items]
    for _ in range(runs):
        with RewardPool(function, workers, timeout_s, {Reason.GRADING, Reason.INFRA}) as pool:
            pool.start(wait_for_one=True)
            started = time.perf_counter()
            measured.outcomes.append(pool.run(samples, lambda number: items[number].place))
            measured.seconds.append(time.perf_counter() - started)
    return measured


def report(items: Sequence[Item], measured: Sequence[Measured], tolerance: float, examples: int) -> dict[str, Any]:
    """Everything that is printed, as JSON can hold it."""
    functions = {function.name: _of_function(items, function, tolerance, examples) for function in measured}
    scores: dict[str, Sequence[float | None]] = {function.name: function.scores for function in measured}
    if any(item.score is not None for item in items):
        scores[_IN_FILE] = [item.score for item in items]
    pairs = []
    names = list(scores)
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            apart = disagreements(scores[first], scores[second], tolerance)
            pairs.append(
                {
                    "functions": [first, second],
                    "disagree": len(apart),
                    "correlation": correlation(scores[first], scores[second]),
                    "examples": [
                        {first: scores[first][n], second: scores[second][n], **_shown(items[n])}
                        for n in apart[:examples]
                    ],
                }
            )
    return {"samples": len(items), "functions": functions, "pairs": pairs}


def _of_function(items: Sequence[Item], measured: Measured, tolerance: float, examples: int) -> dict[str, Any]:
    outcomes = measured.outcomes[0]
    seconds = [outcome.seconds for run in measured.outcomes for outcome in run]
    missing = Counter(outcome.unscored.reason.value for outcome in outcomes if outcome.unscored is not None)
    why = Counter(_last_line(outcome) for outcome in outcomes if outcome.unscored is not None)
    apart = changed(measured, tolerance)
    scores = distribution([score for score in measured.scores if score is not None])
    return {
        "scores": None if scores is None else asdict(scores),
        "latency_s": {"mean": statistics.fmean(seconds), "p95": quantile(seconds, 0.95), "max": max(seconds)},
        "samples_per_s": len(outcomes) / max(min(measured.seconds), 1e-9),
        "exceptions": sum(outcome.error is not None for outcome in outcomes),
        "timeouts": sum(outcome.timed_out for outcome in outcomes),
        "unscored": dict(missing),
        "reasons": [{"count": count, "what": reason} for reason, count in why.most_common(examples)],
        "runs": len(measured.outcomes),
        "runs_disagree": len(apart),
        "changed": [{"scores": scores, **_shown(items[number])} for number, scores in apart[:examples]],
    }


def _last_line(outcome: Outcome) -> str:
    assert outcome.unscored is not None
    return (outcome.unscored.detail.strip().splitlines() or [""])[-1][:_SHOWN]


def _shown(item: Item) -> dict[str, Any]:
    text, truth = item.sample.solution_str, str(item.sample.ground_truth)
    return {"place": item.place, "response": text[-_SHOWN:], "ground_truth": truth[:_SHOWN]}


def text_of(report: Mapping[str, Any]) -> str:
    """A report as text."""
    lines = [f"{report['samples']} samples"]
    for name, function in report["functions"].items():
        scores, latency = function["scores"], function["latency_s"]
        lines.append(f"\n{name}")
        if scores is None:
            lines.append("  scores      none: no sample has a score")
        else:
            names = ("mean", "std", "min", "p05", "median", "p95", "max")
            lines.append("  scores      " + "  ".join(f"{part} {scores[part]:.4g}" for part in names))
            most = max(scores["counts"].values())
            for value, count in scores["counts"].items():
                lines.append(f"    {value:>20}  {count:>7}  {'#' * math.ceil(40 * count / most)}")
        lines.append("  seconds     " + "  ".join(f"{part} {latency[part]:.4g}" for part in ("mean", "p95", "max")))
        lines.append(f"  speed       {function['samples_per_s']:.1f} samples/s")
        missing = ", ".join(f"{count} {reason}" for reason, count in function["unscored"].items()) or "none"
        lines.append(f"  no score  {missing}; {function['exceptions']} exceptions, {function['timeouts']} time-outs")
        lines += [f"    {reason['count']} x {reason['what']}" for reason in function["reasons"]]
        lines.append(f"  {function['runs']} runs      {function['runs_disagree']} samples with another score")
        lines += [f"    {row['place']}: {row['scores']}: ...{row['response']!r}" for row in function["changed"]]
    for pair in report["pairs"]:
        first, second = pair["functions"]
        alike = "" if pair["correlation"] is None else f", correlation {pair['correlation']:.3f}"
        lines.append(f"\n{first} and {second} disagree on {pair['disagree']} samples{alike}")
        for row in pair["examples"]:
            lines.append(f"  {row['place']}: {row[first]} and {row[second]}, ground truth {row['ground_truth']!r}")
            lines.append(f"    ...{row['response']!r}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, command: str = "python -m hybridrl.reward.bench") -> int:
    """Run the command line.

    Returns:
        0, or 2 with one message where something is wrong.
    """
    args = _arguments(argv, command)
    try:
        arguments = json.loads(args.kwargs)
        if not isinstance(arguments, dict):
            raise RewardError(f"--kwargs {args.kwargs}: give a JSON object")
        items = read_items(args.file, args.limit)
        measured = []
        for word in args.function or [_BUILT_IN]:
            function = _function(word, arguments, "batch" if args.batch else "sample")
            measured.append(measure(items, word, function, args.runs, args.workers, args.timeout))
    except ValueError as error:
        print(f"error: --kwargs {args.kwargs}: {error}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = report(items, measured, args.tolerance, args.examples)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(text_of(result))
    return 0


def _function(word: str, arguments: Mapping[str, Any], form: Any) -> RewardFunction:
    if word == _BUILT_IN:
        return RewardFunction(None, None, arguments, form, key="--function")
    path, colon, name = word.rpartition(":")
    if not colon or "/" in name or (word.startswith("pkg://") and path == "pkg"):
        path, name = word, ""
    return RewardFunction(path, name or None, arguments, form, key="--function")


def _arguments(argv: Sequence[str] | None, command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=command, description="Measure reward functions on the responses in a file.")
    parser.add_argument("file", type=Path, help="JSONL: rollouts/N.jsonl of a run, or lines with a response each")
    parser.add_argument(
        "--function",
        action="append",
        metavar="FILE.py[:NAME]",
        help=f"a reward function, again for more of them; {_BUILT_IN}: the scorers by data_source (the default)",
    )
    parser.add_argument(
        "--kwargs", default="{}", help='further arguments of the functions, as JSON: {"method": "flexible"}'
    )
    parser.add_argument("--batch", action="store_true", help="functions whose names do not tell take lists")
    parser.add_argument("--runs", type=int, default=2, help="how often each function scores everything (2)")
    parser.add_argument("--limit", type=int, help="responses that are scored; all by default")
    parser.add_argument("--workers", type=int, help="processes; one per core by default, at most 8")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that a call may take (30)")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="difference from which scores disagree (1e-6)")
    parser.add_argument("--examples", type=int, default=5, help="examples of each kind (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON, too")
    args = parser.parse_args(argv)
    for name in ("runs", "limit", "workers", "timeout"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)}: give a number above 0")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
