"""Columns made of what a reward function returns besides the scores, for training, validation and evaluation."""

from collections.abc import Sequence
from typing import Any

from hybridrl.notify import notify
from hybridrl.reward.processes.pool import Outcome


def extra_of(outcome: Outcome) -> dict[str, Any]:
    """A sample's extra information: the function's dict, or `acc`, the score itself, where it returned a number."""
    return dict(outcome.extra) if outcome.extra is not None else {"acc": outcome.score}


def extra_columns(
    extras: Sequence[dict[str, Any]], outcomes: Sequence[Outcome], reported: set[str]
) -> dict[str, list[Any]]:
    """Name -> one value per sample, None where a sample's dict lacks it.

    A sample that exceeded the time limit returned nothing; its `score` and `acc` are 0.

    Args:
        extras: one per sample, see `extra_of`.
        outcomes: one per sample.
        reported: names that some samples lack are added to it; names that it does not hold yet are warned of.
    """
    names = dict.fromkeys(name for extra in extras for name in extra)
    for extra, outcome in zip(extras, outcomes, strict=True):
        if outcome.timed_out:
            extra.update({name: 0.0 for name in ("score", "acc") if name in names})
    for name in names:
        lacking = sum(name not in extra for extra in extras)
        if lacking and name not in reported:
            reported.add(name)
            notify(
                f"the reward function returned {name!r} for {len(extras) - lacking} of {len(extras)} responses only; "
                "the others have None there",
                "warning",
            )
    return {name: [extra.get(name) for extra in extras] for name in names}
