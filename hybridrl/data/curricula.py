"""Curricula: weights of the sources that follow the scores of their prompts (`data.mixture.curriculum`).

A curriculum is a function from the records of the sources to how useful each is now. A module that
`actor_rollout_ref.model.external_lib` names adds its own with `register_curriculum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridrl.data.source_mixture import MixtureSampler
from hybridrl.errors import DataError
from hybridrl.registry import CURRICULA
from hybridrl.utils.entry_metadata import EntryMetadata

if TYPE_CHECKING:
    from hybridrl.protocol import DataProto

_ROUNDING = 1e-6
NAME = "data.mixture.curriculum.name"


@dataclass
class SourceRecord:
    """The scored prompts of a source, of which those of earlier steps count less.

    A step in which prompts of the source were scored makes b S + (the step's sum) of each sum S, b being `smoothing`.

    Attributes:
        groups: number of prompts.
        score: sum of their mean scores.
        mixed: number of those whose samples differ in their scores.
    """

    groups: float = 0.0
    score: float = 0.0
    mixed: float = 0.0

    @property
    def pass_rate(self) -> float:
        """The mean score of a prompt."""
        return self.score / self.groups

    @property
    def mixed_share(self) -> float:
        """The share of prompts whose samples differ in their scores."""
        return self.mixed / self.groups


#: returns how useful each source is: a number that is not negative, of any scale
Curriculum = Callable[[Mapping[str, SourceRecord], Any], Mapping[str, float]]


def register_curriculum(name: str, *, settings: type | str | None = None) -> Callable[[Curriculum], Curriculum]:
    """Function decorator: make a curriculum known as `data.mixture.curriculum.name=NAME`.

    The function gets the records of the sources that have been scored, by name, and its settings.

    Args:
        settings: dataclass of its own keys of `data.mixture.curriculum`, or `module:Class`.

    Raises:
        DataError: another function has that name.
    """

    def decorate(function: Curriculum) -> Curriculum:
        CURRICULA.add(name, function, EntryMetadata(settings=settings))
        return function

    return decorate


@register_curriculum("mixed_groups")
def mixed_groups(records: Mapping[str, SourceRecord], settings: Any) -> dict[str, float]:
    """The share of prompts with samples of different scores: only these have advantages in a group estimator."""
    return {name: record.mixed_share for name, record in records.items()}


@register_curriculum("target_pass_rate")
def target_pass_rate(records: Mapping[str, SourceRecord], settings: Any) -> dict[str, float]:
    """1 - |p - t| / max(t, 1 - t) for the pass rate p and the target t: 1 at the target, less on both sides.

    Raises:
        DataError: a pass rate is outside [0, 1].
    """
    target = settings.target
    for name, record in records.items():
        if not -_ROUNDING <= record.pass_rate <= 1 + _ROUNDING:
            raise DataError(
                f"{NAME}=target_pass_rate: the mean score of the source {name} is {record.pass_rate:.4g}, and a pass "
                "rate is from 0 to 1. Have the reward function return scores from 0 to 1, or set "
                f"{NAME}=mixed_groups, which takes scores of any range"
            )
    furthest = max(target, 1 - target)
    return {name: max(1 - abs(record.pass_rate - target) / furthest, 0.0) for name, record in records.items()}


class CurriculumSampler(MixtureSampler):
    """A mixture whose shares follow the scores of the prompts.

    With the configured weights b_s (of sum 1), the usefulness u_s and the floor f, a source has the share

        p_s = b_s (f + (1 - f) u_s / sum_r b_r u_r).

    A source that has not been scored has the mean usefulness of the others. Where all are 0 the shares are b_s.

    Args:
        items, indices, weights, batch_size, shuffle, seed: see `MixtureSampler`.
        settings: `data.mixture.curriculum`.

    Attributes:
        records: of each source.
    """

    def __init__(
        self,
        items: Mapping[str, Sequence[int]],
        indices: Sequence[Any],
        weights: Mapping[str, float],
        batch_size: int = 1,
        *,
        settings: Any,
        shuffle: bool = True,
        seed: int = 1,
    ) -> None:
        super().__init__(items, indices, weights, batch_size, shuffle=shuffle, seed=seed)
        self.settings = settings
        self.curriculum: Curriculum = CURRICULA.get(settings.name)
        self.records = {name: SourceRecord() for name in self.sources}

    def update(self, batch: DataProto) -> None:
        """Take in the scores of a step, and change the shares of the next draws.

        Raises:
            DataError: the curriculum returned something else than a number for each source.
        """
        smoothing = self.settings.smoothing
        for name, groups in self.scored(batch).items():
            record = self.records[name]
            record.groups = smoothing * record.groups + len(groups)
            record.score = smoothing * record.score + sum(group.mean for group in groups)
            record.mixed = smoothing * record.mixed + sum(group.mixed for group in groups)
        self._set_shares()

    def _set_shares(self) -> None:
        records = {name: record for name, record in self.records.items() if record.groups}
        own = self.settings if self.settings.own is None else self.settings.own
        useful = dict(self.curriculum(records, own)) if records else {}
        wrong = [name for name in records if not _is_usefulness(useful.get(name))]
        if wrong or useful.keys() - records.keys():
            raise DataError(
                f"{NAME}={self.settings.name} returned {useful} for the sources {', '.join(records)}; it has to return "
                "a finite number that is not negative for each of them, by name"
            )
        mean = sum(useful.values()) / len(useful) if useful else 1.0
        useful = {name: useful.get(name, mean) for name in self.base}
        total = sum(self.base[name] * value for name, value in useful.items())
        floor = self.settings.floor if total else 1.0
        self.shares = {
            name: base * (floor + (1 - floor) * useful[name] / (total or 1.0)) for name, base in self.base.items()
        }

    def state_dict(self) -> dict[str, Any]:
        records = {name: vars(record).copy() for name, record in self.records.items()}
        return {**super().state_dict(), "records": records}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        saved = state.get("records", {})  # none where the weights did not change before
        self.records = {name: SourceRecord(**saved.get(name, {})) for name in self.sources}
        self._set_shares()


def _is_usefulness(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
