"""What a reward function returns beside the scores, as columns: in training, validation and evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridrl.notify import notify
from hybridrl.reward.processes.pool import Outcome


def extra_of(outcome: Outcome) -> dict[str, Any]:
    """A sample's extra information: the function's dict, or ``acc``, the score itself, where it returned a number."""
    return dict(outcome.extra) if outcome.extra is not None else {"acc": outcome.score}


def extra_columns(
    extras: Sequence[dict[str, Any]], outcomes: Sequence[Outcome], reported: set[str]
) -> dict[str, list[Any]]:
    """Name -> one value a sample, None where a sample's dict lacks it.

    A sample that exceeded the time limit returned nothing; what says how well it did (``score``, ``acc``) is 0 there.

    Args:
        extras: one a sample, see ``extra_of``.
        outcomes: one a sample.
        reported: names that some samples lack are added to it, and warned of unless they were in it.
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
