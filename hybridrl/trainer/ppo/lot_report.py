"""The metrics of a generation batch, and those of the step that trains on its groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridrl.data.group_scores import GroupScore
from hybridrl.trainer.ppo.episode import merged
from hybridrl.trainer.ppo.missing_statistics import MissingCounts


@dataclass
class LotReport:
    """The metrics of a generation batch. They belong to the step that trains on its groups.

    Attributes:
        metrics: of scoring, and of the baselines.
        seconds: of each phase.
        columns: names of the columns that the reward function returned; None: nothing was scored.
        counts: attempts at the samples, and at those of the baselines.
        scored: number of groups with scored samples, enough of them.
        discarded: those of them that dynamic sampling drops.
        scores, dropped_scores: of the rows of those groups.
        groups: the scores of all of them.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    counts: list[MissingCounts] = field(default_factory=list)
    scored: int = 0
    discarded: int = 0
    scores: torch.Tensor | None = None
    dropped_scores: torch.Tensor | None = None
    groups: list[GroupScore] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Return everything as JSON values, for `from_state`."""
        return {
            "metrics": self.metrics,
            "seconds": self.seconds,
            "columns": None if self.columns is None else list(self.columns),
            "counts": [counts.state() for counts in self.counts],
            "scored": self.scored,
            "discarded": self.discarded,
            "scores": None if self.scores is None else self.scores.tolist(),
            "dropped_scores": None if self.dropped_scores is None else self.dropped_scores.tolist(),
            "groups": [list(group) for group in self.groups],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "LotReport":
        """Return the report that `state` describes."""
        tensors = {
            name: None if state[name] is None else torch.tensor(state[name], dtype=torch.float32)
            for name in ("scores", "dropped_scores")
        }
        return cls(
            **{
                **state,
                "columns": None if state["columns"] is None else tuple(state["columns"]),
                "counts": [MissingCounts.from_state(counts) for counts in state["counts"]],
                "groups": [GroupScore(*group) for group in state.get("groups", [])],  # earlier versions wrote none
                **tensors,
            }
        )


def merged_metrics(reports: Sequence[LotReport]) -> dict[str, float]:
    """Return the metrics of scoring of a step's lots. Counts are added; others are those of the last lot."""
    metrics: dict[str, float] = {}
    for report in reports:
        metrics = merged(metrics, report.metrics)
    return metrics


def summed_seconds(reports: Sequence[LotReport]) -> dict[str, float]:
    """Return the seconds of each phase, of all generation batches of a step."""
    seconds: dict[str, float] = {}
    for report in reports:
        for name, value in report.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
    return seconds


def filter_metrics(reports: Sequence[LotReport], carried: int, surplus: int) -> dict[str, float]:
    """Return `filter_groups/*` of a step.

    They are the number of generation batches; the numbers of prompts generated, discarded, carried over from the
    previous step and left for the next; and the mean scores of all generated samples (the mean of the batch hardly
    moves if only mixed groups are kept) and of the discarded ones.
    """
    scored = [report for report in reports if report.scored]
    metrics = {
        "filter_groups/generation_batches": float(len(scored)),
        "filter_groups/generated": float(sum(report.scored for report in scored)),
        "filter_groups/discarded": float(sum(report.discarded for report in scored)),
        "filter_groups/carried_over": float(carried),
        "filter_groups/surplus": float(surplus),
    }
    scores = [report.scores for report in scored if report.scores is not None]
    dropped = [report.dropped_scores for report in scored if report.dropped_scores is not None]
    if scores:
        metrics["filter_groups/generated_score/mean"] = float(torch.cat(scores).mean())
    if dropped:
        metrics["filter_groups/discarded_score/mean"] = float(torch.cat(dropped).mean())
    return metrics
