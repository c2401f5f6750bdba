"""Validation metrics over several samples per prompt: mean@N, pass@k, best@n, worst@n, maj@n.

With N samples per prompt, `best@n` is the score of drawing n of them and keeping the best, `worst@n` of keeping
the worst, and `maj@n` of taking the majority answer of the n. Each is estimated by the bootstrap: n samples are drawn
with replacement, many times. The mean over the draws is the estimate, and their standard deviation is its spread. The
draws come from a separate generator with the same seed for every prompt, so results are reproducible and the global
random state does not change. Of scores that are 0 or 1, `pass@k` is the probability that k samples drawn without
replacement have a 1 among them: the unbiased estimate of Chen et al. 2021, arXiv 2107.03374, without draws.

Legend: U prompts, N samples per prompt, D bootstrap draws, n samples per draw.
"""

import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from hybridrl.notify import notify

# Elements of one block of draws (prompts x draws x samples): bounds memory at about 100 MB.
_BLOCK = 4_000_000
_VOTE_KEY = "pred"
_CORE_PREFIXES = ("mean@", "maj@", "best@")

Table = dict[str, dict[str, dict[str, float]]]


def _draws(n_data: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray:
    """Return the indices `[D, n]` of the samples in each draw."""
    return np.random.default_rng(seed).integers(0, n_data, size=(n_bootstrap, subset_size))


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[np.ndarray], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Return mean and standard deviation of each reduction over draws of `subset_size` from `data`, with replacement.

    Args:
        data: one entry per sample: numbers, or anything a reduction takes (dicts for `calc_maj_val`).
        subset_size: n, samples per draw.
        reduce_fns: each takes the entries of one draw (a NumPy array of numbers, or a list if the entries are not
            numbers). `np.max`, `np.min`, `np.mean`, `np.median` and `np.sum` run over all draws at once.
        n_bootstrap: D, number of draws.
        seed: seed of the draws.

    Raises:
        ValueError: there is no data, or the size is below 1.
    """
    if len(data) == 0 or subset_size < 1 or n_bootstrap < 1:
        raise ValueError(
            f"bootstrap_metric needs data and sizes of at least 1; found {len(data)} entries, "
            f"subset_size={subset_size}, n_bootstrap={n_bootstrap}"
        )
    index = _draws(len(data), subset_size, n_bootstrap, seed)
    numeric = all(isinstance(entry, (numbers.Real, np.bool_)) for entry in data)
    drawn = np.asarray(data, dtype=np.float64)[index] if numeric else None
    results = []
    for reduce_fn in reduce_fns:
        if drawn is not None and reduce_fn in (np.max, np.min, np.mean, np.median, np.sum):
            values = np.asarray(reduce_fn(drawn, axis=1))
        elif drawn is not None:
            values = np.asarray([reduce_fn(row) for row in drawn], dtype=np.float64)
        else:
            values = np.asarray([reduce_fn([data[i] for i in row]) for row in index], dtype=np.float64)  # type: ignore[arg-type]
        results.append((float(values.mean()), float(values.std())))
    return results


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """Return the value of the most frequent answer. Of equally frequent answers, the one that comes first wins.

    Args:
        data: one mapping per sample.
        vote_key: key of the answer.
        val_key: key of the answer's value. Equal answers have equal values; the first one's is returned.

    Raises:
        ValueError: there is no data.
    """
    if not data:
        raise ValueError("calc_maj_val needs at least one sample")
    counts: dict[Hashable, int] = defaultdict(int)
    for entry in data:
        counts[_hashable(entry[vote_key])] += 1
    most = max(counts.values())
    return float(next(entry[val_key] for entry in data if counts[_hashable(entry[vote_key])] == most))


def _hashable(answer: Any) -> Hashable:
    """Return a hashable form of an answer. Answers are compared by value, lists and dicts by their text."""
    return answer if isinstance(answer, Hashable) else repr(answer)


def _subset_sizes(n: int) -> list[int]:
    """Return 2, 4, 8, ... below n, then n itself."""
    return [2**k for k in range(1, math.ceil(math.log2(n)))] + [n] if n > 1 else []


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k), from n samples of which c are right.

    Raises:
        ValueError: k is not between 1 and n, or c not between 0 and n.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass_at_k needs 1 <= k <= n and 0 <= c <= n; k={k}, n={samples}, c={right}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _pass_at(values: np.ndarray, size: int) -> np.ndarray:
    """Compute pass@k of each prompt. `values [U, N]` of 0 and 1 -> `[U]`."""
    count = values.shape[1]
    table = np.asarray([pass_at_k(count, right, size) for right in range(count + 1)])
    return np.asarray(table[values.sum(axis=1).astype(np.int64)])


def _best_worst(values: np.ndarray, size: int, n_bootstrap: int, seed: int) -> dict[str, np.ndarray]:
    """Compute best@n and worst@n, mean and std over draws, of each prompt. `values [U, N]` -> arrays `[U]`."""
    index = _draws(values.shape[1], size, n_bootstrap, seed)
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    block = max(1, _BLOCK // index.size)
    for start in range(0, len(values), block):
        drawn = values[start : start + block][:, index]
        for kind, reduced in (("best", drawn.max(axis=2)), ("worst", drawn.min(axis=2))):
            parts[f"{kind}@{size}/mean"].append(reduced.mean(axis=1))
            parts[f"{kind}@{size}/std"].append(reduced.std(axis=1))
    return {name: np.concatenate(blocks) for name, blocks in parts.items()}


def _majority(values: np.ndarray, votes: np.ndarray, size: int, n_bootstrap: int, seed: int) -> dict[str, np.ndarray]:
    """Compute maj@n of each prompt. `values [U, N]`, `votes [U, N]` (answers as integers below N) -> arrays `[U]`."""
    n = values.shape[1]
    index = _draws(n, size, n_bootstrap, seed)
    means, stds = [], []
    block = max(1, _BLOCK // (n_bootstrap * max(n, size)))
    for start in range(0, len(values), block):
        drawn = votes[start : start + block][:, index]
        rows = np.arange(drawn.shape[0] * n_bootstrap).reshape(drawn.shape[0], n_bootstrap, 1)
        cells = rows * n + drawn
        counts = np.bincount(cells.reshape(-1), minlength=rows.size * n)
        # argmax finds the first sample whose answer is among the most frequent: ties go to the earliest, as in
        # calc_maj_val.
        winner = counts[cells].argmax(axis=2)
        winner_samples = np.take_along_axis(np.broadcast_to(index, drawn.shape), winner[..., None], axis=2)[..., 0]
        won = np.take_along_axis(values[start : start + block], winner_samples, axis=1)
        means.append(won.mean(axis=1))
        stds.append(won.std(axis=1))
    return {f"maj@{size}/mean": np.concatenate(means), f"maj@{size}/std": np.concatenate(stds)}


def _encode(answers: Sequence[Any]) -> list[int]:
    codes: dict[Hashable, int] = {}
    return [codes.setdefault(_hashable(answer), len(codes)) for answer in answers]


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Real, np.bool_))


class _Missing:
    """The answer of a sample that failed. It equals no other answer, so that failures do not form a majority."""


def _group(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    expected_acc_counts: Mapping[tuple[str, str], int] | None,
) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """Group the values: source -> uid -> variable -> values of the prompt's samples, in their order."""
    grouped: dict[str, dict[str, dict[str, list[Any]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for i, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        prompt = grouped[source][uid]
        for name, values in infos_dict.items():
            prompt[name].append(values[i])
    for (source, uid), expected in (expected_acc_counts or {}).items():
        prompt = grouped[source][uid]
        missing = expected - len(prompt["acc"])
        if missing < 0:
            raise ValueError(
                f"prompt {uid!r} of {source!r} has {len(prompt['acc'])} samples, expected_acc_counts says {expected}"
            )
        prompt["acc"] += [0.0] * missing
        if _VOTE_KEY in infos_dict:
            prompt[_VOTE_KEY] += [_Missing() for _ in range(missing)]
    return grouped


def _prompt_metrics(
    values: np.ndarray, votes: np.ndarray | None, binary: bool, n_bootstrap: int, seed: int
) -> dict[str, np.ndarray]:
    """Compute every metric of one variable, for prompts with the same N. `values [U, N]` -> arrays `[U]`.

    Args:
        votes: answers as integers, `[U, N]`; None: there is no `maj@n`.
        binary: whether all values of the data source are 0 or 1.
    """
    n = values.shape[1]
    metrics = {f"mean@{n}": values.mean(axis=1)}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = values.std(axis=1)
    for size in _subset_sizes(n):
        metrics |= _best_worst(values, size, n_bootstrap, seed)
        if binary:
            metrics[f"pass@{size}"] = _pass_at(values, size)
        if votes is not None:
            metrics |= _majority(values, votes, size, n_bootstrap, seed)
    return metrics


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
    expected_acc_counts: Mapping[tuple[str, str], int] | None = None,
) -> Table:
    """Compute mean@N, std@N, best@n, worst@n and maj@n of each variable, averaged over the prompts of a data source.

    Samples with equal data source and uid belong to the same prompt. n runs over 2, 4, 8, ... and N. `maj@n` exists
    only if `infos_dict` has the answers under `pred`, and `pass@n` only if all values are 0 or 1. A variable is
    averaged over the prompts whose values are all numbers (booleans count as 0 and 1). Text appears only in the dumps.

    Args:
        data_sources: one per sample.
        sample_uids: one per sample, equal for the samples of a prompt.
        infos_dict: variable -> one value per sample (`reward`, `acc`, `pred`, what the reward function returned).
        seed: seed of the bootstrap draws; 1,000 draws are made.
        expected_acc_counts: (data source, uid) -> number of requested samples. Samples that were not returned count as
            `acc` 0, even if none of a prompt's samples were.

    Returns:
        data source -> variable -> metric -> value, for example `["gsm8k"]["acc"]["best@4/mean"]`.

    Raises:
        ValueError: lists differ in length, or there are more samples than expected; the error names the variable or
            prompt.
    """
    count = len(data_sources)
    lengths = {"sample_uids": len(sample_uids), **{name: len(values) for name, values in infos_dict.items()}}
    for name, length in lengths.items():
        if length != count:
            raise ValueError(f"{name} has {length} entries for {count} samples; one per sample is needed")
    table: Table = {}
    for source, prompts in _group(data_sources, sample_uids, infos_dict, expected_acc_counts).items():
        names = dict.fromkeys(name for prompt in prompts.values() for name in prompt)
        for name in names:
            _report_mixed(source, name, [value for prompt in prompts.values() for value in prompt.get(name, ())])
            metrics = _variable_metrics([p for p in prompts.values() if name in p], name, seed)
            if metrics:
                table.setdefault(source, {})[name] = metrics
    return table


def _report_mixed(source: str, name: str, values: Sequence[Any]) -> None:
    """Say that a variable is no number in some samples: its means are those of other prompts alone."""
    if 0 < sum(map(_is_number, values)) < len(values) and name != _VOTE_KEY:
        notify(
            f"validation: {name!r} is no number for some samples of {source!r}, and its means leave out all prompts of "
            "these. Have the reward function return a number in each case",
            "warning",
            once=True,
        )


def _variable_metrics(prompts: list[dict[str, list[Any]]], name: str, seed: int) -> dict[str, float]:
    """Compute one variable over the prompts of a source. Prompts with the same N are computed together."""
    by_size: dict[tuple[int, bool], list[dict[str, list[Any]]]] = defaultdict(list)
    for prompt in prompts:
        samples = prompt[name]
        if samples and all(map(_is_number, samples)):
            by_size[len(samples), len(prompt.get(_VOTE_KEY, ())) == len(samples)].append(prompt)
    collected: dict[str, list[np.ndarray]] = defaultdict(list)
    binary = all(value in (0, 1) for group in by_size.values() for prompt in group for value in prompt[name])
    for (_, voting), group in by_size.items():
        values = np.asarray([prompt[name] for prompt in group], dtype=np.float64)
        votes = np.asarray([_encode(prompt[_VOTE_KEY]) for prompt in group]) if voting else None
        for metric, per_prompt in _prompt_metrics(values, votes, binary, 1000, seed).items():
            collected[metric].append(per_prompt)
    return {metric: float(np.concatenate(parts).mean()) for metric, parts in collected.items()}


def validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    num_turns: Sequence[float] | None = None,
    seed: int = 42,
    expected_acc_counts: Mapping[tuple[str, str], int] | None = None,
) -> dict[str, float]:
    """Return `process_validation_metrics` under the names that are logged.

    The core variable of a data source is `acc`, or `reward` if there is no `acc`. Its mean@N, best@N and maj@N (with N
    the largest number of samples) are `val-core/<source>/<variable>/<metric>`; everything else is `val-aux/...`. The
    numbers of turns of multi-turn samples are `val-aux/num_turns/{min,max,mean}`.
    """
    table = process_validation_metrics(data_sources, sample_uids, infos_dict, seed, expected_acc_counts)
    logged: dict[str, float] = {}
    for source, variables in table.items():
        core = "acc" if "acc" in variables else "reward"
        for name, metrics in variables.items():
            largest = max(_samples(metric) for metric in metrics)
            for metric, value in metrics.items():
                is_core = name == core and metric.startswith(_CORE_PREFIXES) and _samples(metric) == largest
                logged[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = value
    if num_turns is not None and len(num_turns):
        turns = np.asarray(num_turns, dtype=np.float64)
        for kind, number in (("min", turns.min()), ("max", turns.max()), ("mean", turns.mean())):
            logged[f"val-aux/num_turns/{kind}"] = float(number)
    return logged


def _samples(metric: str) -> int:
    """Return the n of `best@n/mean`."""
    return int(metric.split("@", 1)[1].split("/", 1)[0])
