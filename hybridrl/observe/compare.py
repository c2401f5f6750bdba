"""Whether one run's validation is better than another's, prompt by prompt.

Two accuracies of 0.52 and 0.55 on the same 200 prompts say little: what counts is on which prompts the runs differ.
Each prompt's mean score in one run is subtracted from that in the other. With d_i the difference of prompt i and n
prompts:

    difference = mean(d)
    95 % interval = the 2.5 and 97.5 percentiles of mean(d*), d* drawn n times with replacement from d (10,000 draws)
    p = share of sign changes s in {-1, 1}^n with |mean(s d)| >= |mean(d)| (all of them up to n = 13, else 10,000)

From 5,000 prompts on both are those of the normal distribution, which differs from them by less than the draws do.

Samples of a prompt are not independent, so prompts are drawn and not samples (Miller 2024, arXiv 2411.00640).
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.errors import UserError
from hybridrl.observe import jsonl
from hybridrl.observe.dump import dumped_steps
from hybridrl.observe.report_samples import dump_folder
from hybridrl.observe.run_folder import BEST
from hybridrl.observe.run_history import RunHistory, load_history

_DRAWS = 10_000
_EXACT = 13  # prompts up to which every change of signs is counted
_MANY = 5_000  # prompts from which on a mean is distributed normally
_Z = 1.959963984540054  # the 97.5 percentile of the normal distribution
_BLOCK = 2_000_000  # elements of one block of draws


@dataclass(frozen=True)
class ValidatedPrompt:
    """A prompt of a validation.

    Attributes:
        source: its `data_source`.
        prompt: its text.
        uid: its number in the validation data.
        ground_truth: as text.
        values: of the metric, one per sample.
    """

    source: str
    prompt: str
    uid: str
    ground_truth: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Validation:
    """The validation of a run after a step.

    Attributes:
        run: its folder.
        step: training steps that the weights have had.
        metric: what is compared.
        prompts: in the order of the file.
    """

    run: Path
    step: int
    metric: str
    prompts: tuple[ValidatedPrompt, ...]


@dataclass(frozen=True)
class PairedComparison:
    """The difference between two runs on one data source; "" is all of them.

    Attributes:
        source: the data source.
        prompts: that both runs have.
        first, second: mean of the metric.
        low, high: 95 % interval of the difference, second minus first.
        p: probability of such a difference, or a larger one, between runs that are equally good.
        better, worse: prompts on which the second run is better, or worse.
    """

    source: str
    prompts: int
    first: float
    second: float
    low: float
    high: float
    p: float
    better: int
    worse: int

    @property
    def difference(self) -> float:
        """Mean of the second run minus that of the first."""
        return self.second - self.first


def read_validation(folder: str | Path, step: str = "last", metric: str | None = None) -> Validation:
    """Read a validation of a run.

    Args:
        folder: the run's folder.
        step: a number; `last`; or `best`, that of the best checkpoint (`trainer.best_metric`).
        metric: a column of the dumps; None: `acc` where the reward function returns it, else `score`.

    Raises:
        UserError: there is no such validation, or it has no such number for some sample.
    """
    history = load_history(folder)
    place = dump_folder(history, "validation")
    steps = dumped_steps(place) if place is not None else []
    if place is None:
        raise UserError(
            f"{folder} has no validation samples: set data.val_files and trainer.test_freq. Runs of sft, dpo, kto and "
            "rm measure their loss only"
        )
    number = _step(history, step, steps)
    if number not in steps:
        raise UserError(f"{folder} has no validation of step {number}; it has {', '.join(map(str, steps))}")
    rows = jsonl.read(place / f"{number}.jsonl")
    if metric is None:
        metric = "acc" if all(jsonl.number(row.get("acc")) is not None for row in rows) else "score"
    return Validation(Path(folder), number, metric, tuple(_prompts(rows, metric, place / f"{number}.jsonl")))


def _step(history: RunHistory, step: str, steps: Sequence[int]) -> int:
    if step == "last":
        return steps[-1]
    if step == "best":
        try:
            return int(json.loads((history.folder / BEST).read_text(encoding="utf-8"))["step"])
        except FileNotFoundError:
            raise UserError(f"{history.folder} has no best checkpoint: it ran without trainer.best_metric") from None
    try:
        return int(step)
    except ValueError:
        raise UserError(f"--step {step}: give a number, last or best") from None


def _prompts(rows: Sequence[Mapping[str, Any]], metric: str, file: Path) -> Iterator[ValidatedPrompt]:
    by_uid: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_uid[str(row.get("uid", row.get("input")))].append(row)
    for uid, samples in by_uid.items():
        values = [jsonl.number(row.get(metric, "")) for row in samples if row.get(metric, "") is not None]
        if None in values:
            names = sorted({name for row in samples for name, value in row.items() if jsonl.number(value) is not None})
            raise UserError(f"{file}: {metric!r} is no number for every sample; numbers are {', '.join(names)}")
        numbers = tuple(value for value in values if value is not None and math.isfinite(value))
        if numbers:  # a sample without a score, null or NaN, is in no mean
            source, text = str(samples[0].get("data_source", "")), str(samples[0].get("input"))
            yield ValidatedPrompt(source, text, uid, json.dumps(samples[0].get("gts")), numbers)


def compare(first: Validation, second: Validation, seed: int = 0) -> list[PairedComparison]:
    """Compare two validations on the prompts that both have, by data source; also on all of several sources.

    Prompts are paired by their text; where the runs have no text in common, because their templates differ, by their
    number in the data and their ground truth.

    Raises:
        UserError: the runs share no prompt, or they have different metrics.
    """
    if first.metric != second.metric:
        raise UserError(
            f"{first.run} has {first.metric!r}, and {second.run} has {second.metric!r}: choose one that both have with "
            "--metric, such as score"
        )
    pairs = _paired(first, second)
    if not pairs:
        raise UserError(f"{first.run} and {second.run} share no validation prompt")
    sources = list(dict.fromkeys(source for source, _, _ in pairs))
    groups = {source: [pair for pair in pairs if pair[0] == source] for source in sources}
    if len(sources) > 1:
        groups[""] = pairs
    return [_compared(source, group, seed) for source, group in groups.items()]


def _paired(first: Validation, second: Validation) -> list[tuple[str, float, float]]:
    """Return (data source, mean in the first run, mean in the second) of each prompt that both have."""

    def by_text(prompt: ValidatedPrompt) -> tuple[str, ...]:
        return prompt.source, prompt.prompt

    def by_number(prompt: ValidatedPrompt) -> tuple[str, ...]:
        return prompt.source, prompt.uid, prompt.ground_truth

    for key in (by_text, by_number):
        others: dict[tuple[str, ...], list[ValidatedPrompt]] = defaultdict(list)
        for prompt in second.prompts:
            others[key(prompt)].append(prompt)
        pairs = []
        for prompt in first.prompts:
            if same := others[key(prompt)]:  # one that occurs several times is paired in the order of the files
                pairs.append((prompt.source, float(np.mean(prompt.values)), float(np.mean(same.pop(0).values))))
        if pairs:
            return pairs
    return []


def _compared(source: str, pairs: Sequence[tuple[str, float, float]], seed: int) -> PairedComparison:
    first, second = (np.asarray([pair[which] for pair in pairs]) for which in (1, 2))
    differences = second - first
    low, high = interval(differences, seed)
    return PairedComparison(
        source,
        len(pairs),
        float(first.mean()),
        float(second.mean()),
        low,
        high,
        sign_change_probability(differences, seed),
        int((differences > 0).sum()),
        int((differences < 0).sum()),
    )


def interval(differences: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `differences [n]`, by the percentile bootstrap."""
    generator, count = np.random.default_rng(seed), len(differences)
    if count >= _MANY:
        mean, error = float(differences.mean()), float(differences.std()) / math.sqrt(count)
        return mean - _Z * error, mean + _Z * error
    means = [
        differences[generator.integers(0, count, size=(draws, count))].mean(axis=1) for draws in _blocks(_DRAWS, count)
    ]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def sign_change_probability(differences: np.ndarray, seed: int = 0) -> float:
    """Return the two-sided p-value of a mean of 0 for `differences [n]`, by changes of sign.

    Random changes count the one that was observed, too, so that p is never 0.
    """
    count = len(differences)
    observed = abs(differences.sum())
    tolerance = 1e-9 * max(float(np.abs(differences).sum()), 1e-300)
    if count >= _MANY:
        spread = math.sqrt(float(np.square(differences).sum()))
        return math.erfc(float(observed) / spread / math.sqrt(2)) if spread else 1.0
    if count <= _EXACT:
        bits = np.arange(2**count)[:, None] >> np.arange(count) & 1
        return float((np.abs((2 * bits - 1) @ differences) >= observed - tolerance).mean())
    generator = np.random.default_rng(seed)
    extreme = 0
    for draws in _blocks(_DRAWS, count):
        signs = 2.0 * generator.integers(0, 2, size=(draws, count)) - 1.0
        extreme += int((np.abs(signs @ differences) >= observed - tolerance).sum())
    return (extreme + 1) / (_DRAWS + 1)


def _blocks(draws: int, count: int) -> Iterator[int]:
    size = max(1, _BLOCK // max(count, 1))
    for start in range(0, draws, size):
        yield min(size, draws - start)
