"""Columns made of what a reward function returns besides the scores, for training, validation and evaluation."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.notify import notify
from hybridrl.protocol.bookkeeping import Writer, reserved
from hybridrl.reward.processes.outcome import Outcome


def extra_of(outcome: Outcome) -> dict[str, Any]:
    """A sample's extra information: the function's dict, or `acc`, the score itself, where it returned a number.

    Empty for a sample without a score, because the function returned nothing.
    """
    if outcome.extra is not None:
        return dict(outcome.extra)
    return {} if _without_result(outcome) else {"acc": outcome.score}


def _without_result(outcome: Outcome) -> bool:
    return outcome.error is not None or outcome.timed_out or outcome.unscored is not None


class ExtraColumns:
    """Makes columns of extra information, batch after batch.

    A number that a function returned is its accuracy (`acc`) only if it tells right from wrong: after the first one
    that is neither 0 nor 1, numbers are called `score`. Beside dicts, a number means `{"score": number}`, with the same
    `acc` if dicts have one and the number is 0 or 1.

    Args:
        unscored: `score` and `acc` of a sample that the function returned nothing for.
        every_score_is_accuracy: numbers are accuracies whatever they are.
    """

    def __init__(self, unscored: float | None = None, every_score_is_accuracy: bool = False) -> None:
        self._unscored, self._every_score_is_accuracy = unscored, every_score_is_accuracy
        self._reported: set[str] = set()  # names that some samples lacked
        self._is_accuracy = True
        self._returns_dicts = self._has_accuracy = False

    def __call__(self, extras: Sequence[dict[str, Any]], outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
        """Name -> one value per sample, None where a sample's dict lacks it.

        Nothing was returned for a sample without a score; its `score` and `acc` are `unscored`.

        Args:
            extras: one per sample, see `extra_of`.
            outcomes: one per sample.
        """
        self._returns_dicts |= any(outcome.extra is not None for outcome in outcomes)
        self._has_accuracy |= any("acc" in outcome.extra for outcome in outcomes if outcome.extra is not None)
        extras = self._named(extras, outcomes)
        names = dict.fromkeys(name for extra in extras for name in extra)
        if outcomes and not names and not self._returns_dicts:  # no sample of a function of numbers has a score
            names["acc" if self._is_accuracy else "score"] = None
        failed = [outcome.extra is None and _without_result(outcome) for outcome in outcomes]
        for extra, bad in zip(extras, failed, strict=True):
            if bad:
                extra.update({name: self._unscored for name in ("score", "acc") if name in names})
        for name in names:
            lacking = sum(name not in extra and not bad for extra, bad in zip(extras, failed, strict=True))
            if lacking and name not in self._reported:
                self._reported.add(name)
                notify(
                    f"the reward function returned {name!r} for {len(extras) - lacking} of {len(extras)} responses "
                    "only; the others have None there",
                    "warning",
                )
        return {name: [extra.get(name) for extra in extras] for name in names}

    def _named(self, extras: Sequence[dict[str, Any]], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
        numbers = [outcome.extra is None and not _without_result(outcome) for outcome in outcomes]
        scores = [outcome.score for is_number, outcome in zip(numbers, outcomes, strict=True) if is_number]
        self._is_accuracy &= all(map(self._may_be_accuracy, scores))
        if self._returns_dicts:
            return [
                self._beside_dicts(extra, outcome.score) if is_number else dict(extra)
                for extra, outcome, is_number in zip(extras, outcomes, numbers, strict=True)
            ]
        if self._is_accuracy:
            return [dict(extra) for extra in extras]
        return [
            {"score" if is_number and name == "acc" else name: value for name, value in extra.items()}
            for extra, is_number in zip(extras, numbers, strict=True)
        ]

    def _beside_dicts(self, extra: Mapping[str, Any], score: float) -> dict[str, Any]:
        named = {"score": score} | {name: value for name, value in extra.items() if name != "acc"}
        has_accuracy = self._every_score_is_accuracy or self._has_accuracy
        return named | {"acc": score} if has_accuracy and self._may_be_accuracy(score) else named

    def _may_be_accuracy(self, score: float) -> bool:
        return self._every_score_is_accuracy or score in (0, 1)


def check_keys(names: Iterable[str], source: str, read: Collection[str] = (), *, of_roles: bool = False) -> None:
    """Refuse keys of a reward function that are names of columns which the run writes, or reads from the data.

    Args:
        names: the keys.
        source: what returned them, for the message.
        read: further columns of the data that the run reads.
        of_roles: the columns of models that score are among them.

    Raises:
        RewardError: names the key.
    """
    refused = [*reserved(names, *([Writer.ROLE] if of_roles else [])), *(name for name in names if name in read)]
    if refused:
        raise RewardError(
            f"{source} returned a dict with the key {refused[0]!r}, which is already a column of the batch that the "
            "run itself uses. Rename the key."
        )


def part_means(columns: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Return `reward/NAME/mean` of every column of numbers; None (a part that does not apply) is left out.

    A column that holds other values besides numbers, or NaN or infinity, has no mean, and a warning says so.
    """
    means = {}
    for name, column in columns.items():
        values = [value for value in column if value is not None]
        numbers = [value for value in values if isinstance(value, (bool, int, float)) and math.isfinite(value)]
        if numbers and len(numbers) < len(values):
            notify(
                f"{name!r} of the reward function is no finite number for some responses, so there is no "
                f"reward/{name}/mean of their step; return a number, or None where there is none",
                "warning",
                once=True,
            )
        if values and len(numbers) == len(values):
            means[f"reward/{name}/mean"] = math.fsum(values) / len(values)
    return means
