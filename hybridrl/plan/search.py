"""HybridFlow's Algorithm 1: which models share devices, how many devices each set of models has, and how each is run.

For every set partition of the models, for every allocation of devices to its sets, with the options of every model
(Algorithm 2: layouts of training, tensor-parallel sizes of generation), the cost of a step is the sum over its stages
of the slowest set, where a set needs the sum of its models' seconds. The models of a set fit if what all keep plus the
largest peak beyond it is within a device's memory, which the paper checks for each model alone.

Branch and bound finds the plan that trying everything finds (arXiv 2409.19256, section 6).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STAGES = ("generation", "preparation", "update")
#: roles that share devices
Sets = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class RunOption:
    """One way to run a model on some number of devices.

    Attributes:
        stages: seconds in each of `STAGES`.
        resident: bytes on a device between uses.
        peak: most bytes beyond `resident` while it is used.
        how: what the option is; not read by the search.
    """

    stages: tuple[float, ...]
    resident: float
    peak: float
    how: Any = None


@dataclass(frozen=True)
class SetOption:
    """One way to run the models of a set: seconds per stage, bytes, and the option of each model."""

    stages: tuple[float, ...]
    resident: float
    peak: float
    how: tuple[tuple[str, RunOption], ...]


@dataclass(frozen=True)
class Placement:
    """A solution.

    Attributes:
        cost: seconds of the step's stages.
        sets: roles that share devices, the number of devices, and the option of each.
    """

    cost: float
    sets: tuple[tuple[tuple[str, ...], int, SetOption], ...]


@dataclass(frozen=True)
class MappingProblem:
    """The models, their options and the devices.

    Attributes:
        roles: the models.
        options: the options of a role on a number of devices.
        sizes: numbers of devices that a set may have.
        devices: devices in all; some may stay idle.
        budget: bytes of a device.
        allowed: whether roles may share devices.
        slack: an option is left out if another needs no more of everything, up to this share. 0 is exact.
    """

    roles: tuple[str, ...]
    options: Callable[[str, int], Sequence[RunOption]]
    sizes: tuple[int, ...]
    devices: int
    budget: float
    allowed: Callable[[Sequence[str]], bool] = lambda roles: True
    slack: float = 0.0
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False)

    def set_options(self, roles: tuple[str, ...], size: int) -> list[SetOption]:
        """The options of a set on `size` devices that fit, none of which another one beats in every stage."""
        key = "set", roles, size
        if key not in self._cache:
            values, picks = self._merged(roles, size)
            own = [self.options(role, size) for role in roles]
            self._cache[key] = [
                SetOption(
                    tuple(map(float, values[index, : len(STAGES)])),
                    float(values[index, -2]),
                    float(values[index, -1]),
                    tuple((role, own[n][picks[index, n]]) for n, role in enumerate(roles)),
                )
                for index in front_of(values[:, : len(STAGES)], self.slack)
            ]
        result: list[SetOption] = self._cache[key]
        return result

    def _merged(self, roles: tuple[str, ...], size: int) -> tuple[np.ndarray, np.ndarray]:
        """Stages, resident bytes and peak of the set's options [K, 5], and the option of each role [K, roles]."""
        if not roles:
            return np.zeros((1, len(STAGES) + 2)), np.zeros((1, 0), dtype=int)
        key = "merged", roles, size
        if key not in self._cache:
            values, picks = self._merged(roles[:-1], size)
            own = self.options(roles[-1], size)
            if not own:
                values, picks = values[:0], np.zeros((0, len(roles)), dtype=int)
            else:
                table = np.array([(*option.stages, option.resident, option.peak) for option in own])
                first, second = (grid.ravel() for grid in np.indices((len(values), len(table))))
                values = np.hstack(
                    [values[first, :-1] + table[second, :-1], np.maximum(values[first, -1:], table[second, -1:])]
                )
                picks = np.hstack([picks[first], second[:, None]])
                fitting = np.flatnonzero(values[:, -2] + values[:, -1] <= self.budget)
                rows = fitting[front_of(values[fitting], self.slack)]
                values, picks = values[rows], picks[rows]
            self._cache[key] = values, picks
        merged: tuple[np.ndarray, np.ndarray] = self._cache[key]
        return merged


def front_of(table: np.ndarray, slack: float = 0.0) -> np.ndarray:
    """Return the rows of `table` [K, values] for which no other one has values that are all at most (1 + slack) times
    theirs, as indices."""
    remaining = np.lexsort((*table.T[::-1], table.sum(axis=1)))
    front = []
    while len(remaining):  # the first has the least sum, so no other one beats it
        front.append(remaining[0])
        remaining = remaining[(table[remaining] * (1 + slack) < table[remaining[0]]).any(axis=1)]
    return np.array(front, dtype=int)


def partitions(roles: Sequence[str]) -> Iterator[Sets]:
    """Yield every set partition: 15 of four roles."""
    if not roles:
        yield ()
        return
    *rest, last = roles
    for sets in partitions(rest):
        for number, own in enumerate(sets):
            yield (*sets[:number], (*own, last), *sets[number + 1 :])
        yield (*sets, (last,))


def best_of(problem: MappingProblem, sets: Sets, limit: float = float("inf")) -> Placement | None:
    """Return the placement of these sets that takes the least time; None if none fits or all take `limit` or longer."""
    options = [
        [(size, option) for size in problem.sizes for option in problem.set_options(roles, size)] for roles in sets
    ]
    if not all(options):
        return None
    options = [_undominated_allocations(choices) for choices in options]
    floors = np.array([np.min([option.stages for _, option in choices], axis=0) for choices in options])
    least = [min(size for size, _ in choices) for choices in options]
    best: Placement | None = None

    def cost_of(stages: np.ndarray) -> float:
        return float(stages.sum())

    def descend(number: int, unused: int, stages: np.ndarray, picked: tuple[tuple[int, SetOption], ...]) -> None:
        nonlocal best, limit
        if number == len(sets):
            limit = cost_of(stages)
            best = Placement(limit, tuple((roles, *pair) for roles, pair in zip(sets, picked, strict=True)))
            return
        room = unused - sum(least[number + 1 :])
        coming = floors[number + 1 :].max(axis=0) if number + 1 < len(sets) else np.zeros(len(STAGES))
        for size, option in options[number]:
            if size > room:
                continue
            slowest = np.maximum(stages, option.stages)
            if cost_of(np.maximum(slowest, coming)) < limit:
                descend(number + 1, unused - size, slowest, (*picked, (size, option)))

    descend(0, problem.devices, np.zeros(len(STAGES)), ())
    return best


def _undominated_allocations(choices: Sequence[tuple[int, SetOption]]) -> list[tuple[int, SetOption]]:
    """Choices that no other one beats with as few devices, the fastest first."""
    table = np.array([(*option.stages, size) for size, option in choices])
    front = [choices[index] for index in front_of(table)]
    return sorted(front, key=lambda choice: (sum(choice[1].stages), choice[0]))


def search(problem: MappingProblem, within: float = 0.0) -> list[Placement]:
    """Return the best placement of each set partition, fastest first; empty if nothing fits.

    Args:
        within: placements that take more than (1 + within) times the fastest are left out.
    """
    placements: list[Placement] = []
    limit = float("inf")
    for sets in sorted(partitions(problem.roles), key=len):
        if all(problem.allowed(roles) for roles in sets) and len(sets) <= problem.devices:
            placement = best_of(problem, sets, limit * (1 + within))
            if placement is not None:
                placements.append(placement)
                limit = min(limit, placement.cost)
    close = [placement for placement in placements if placement.cost <= limit * (1 + within)]
    return sorted(close, key=lambda placement: (placement.cost, len(placement.sets)))
