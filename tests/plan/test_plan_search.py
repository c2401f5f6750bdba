"""Algorithm 1: the plan that trying everything finds, on 200 random cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest

from hybridrl.plan.search import STAGES, MappingProblem, RunOption, front_of, partitions, search


def labelled(count: int) -> Iterator[list[int]]:
    """Set partitions as restricted growth strings, another way than the library's."""
    for labels in itertools.product(range(count), repeat=count):
        if all(label <= max((*labels[:n], -1)) + 1 for n, label in enumerate(labels)):
            yield list(labels)


def brute_force(problem: MappingProblem) -> float:
    """The least cost over every partition, allocation and choice of options."""
    best = math.inf
    for labels in labelled(len(problem.roles)):
        sets = [
            [role for role, own in zip(problem.roles, labels, strict=True) if own == label]
            for label in range(max(labels) + 1)
        ]
        if not all(problem.allowed(roles) for roles in sets):
            continue
        for sizes in itertools.product(problem.sizes, repeat=len(sets)):
            if sum(sizes) > problem.devices:
                continue
            ways = [
                list(itertools.product(*(problem.options(role, size) for role in roles)))
                for roles, size in zip(sets, sizes, strict=True)
            ]
            for choice in itertools.product(*ways):
                if all(fits(options, problem.budget) for options in choice):
                    best = min(best, cost(choice))
    return best


def fits(options: Sequence[RunOption], budget: float) -> bool:
    return sum(option.resident for option in options) + max(option.peak for option in options) <= budget


def cost(choice: Sequence[Sequence[RunOption]]) -> float:
    return sum(max(sum(option.stages[n] for option in options) for options in choice) for n in range(len(STAGES)))


def random_problem(random: Random) -> MappingProblem:
    count = random.choice([2, 3, 3, 4])
    roles = tuple("abcd"[:count])
    sizes = tuple(sorted(random.sample([1, 2, 3, 4, 6, 8], random.choice([2, 3]))))
    table = {
        (role, size): [
            RunOption(
                tuple(random.choice([0.0, random.randint(1, 30) / size]) for _ in STAGES),
                random.randint(0, 40) / size,
                random.randint(0, 40) / size,
            )
            for _ in range(random.randint(0 if random.random() < 0.2 else 1, 2))
        ]
        for role in roles
        for size in sizes
    }
    forbidden = random.choice([None, {"a", "b"}])
    return MappingProblem(
        roles,
        lambda role, size: table[role, size],
        sizes,
        random.randint(max(sizes), sum(sizes) + 2),
        random.choice([30.0, 60.0, 1000.0]),
        lambda roles: forbidden is None or not forbidden <= set(roles),
    )


@pytest.mark.parametrize("part", range(4))
def test_branch_and_bound_finds_what_trying_everything_finds(part: int) -> None:
    solved = 0
    for seed in range(50 * part, 50 * part + 50):
        problem = random_problem(Random(seed))
        best, expected = search(problem), brute_force(problem)
        assert (best[0].cost if best else math.inf) == pytest.approx(expected), seed
        solved += bool(best)
        for placement in best:
            chosen = [[option for _, option in found.how] for _, _, found in placement.sets]
            assert sum(size for _, size, _ in placement.sets) <= problem.devices
            assert all(fits(options, problem.budget) for options in chosen)
            assert cost(chosen) == pytest.approx(placement.cost)
    assert solved > 25, "cases without a solution say little"


@pytest.mark.parametrize(("count", "bell"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52)])
def test_partitions_are_as_many_as_bells_numbers(count: int, bell: int) -> None:
    found = list(partitions("abcde"[:count]))
    assert len(found) == bell == len({frozenset(map(frozenset, sets)) for sets in found})
    assert all(sorted(role for roles in sets for role in roles) == list("abcde"[:count]) for sets in found)


def test_every_placement_within_the_band_is_returned_once_and_no_other() -> None:
    problem = random_problem(Random(3))
    everything, close = search(problem, within=math.inf), search(problem, within=0.3)
    limit = 1.3 * everything[0].cost
    assert [placement.cost for placement in close] == [p.cost for p in everything if p.cost <= limit]
    assert len({frozenset(roles for roles, _, _ in p.sets) for p in everything}) == len(everything)


def test_a_set_is_checked_as_a_whole() -> None:
    """Each of two models fits alone, and both together keep more than a device has."""
    option = RunOption((1.0, 1.0, 1.0), resident=40.0, peak=30.0)
    tight = MappingProblem(("a", "b"), lambda role, size: [option], (1,), 2, 100.0)
    roomy = MappingProblem(("a", "b"), lambda role, size: [option], (1,), 2, 110.0)
    assert [len(placement.sets) for placement in search(tight, math.inf)] == [2]
    assert sorted(len(placement.sets) for placement in search(roomy, math.inf)) == [1, 2]


def test_the_front_leaves_out_what_another_row_beats() -> None:
    table = np.random.default_rng(0).integers(0, 6, (60, 3)).astype(float)
    rows = {tuple(row) for row in table[front_of(table)]}
    for row in table:
        beaten = any((other <= row).all() and (other < row).any() for other in table)
        assert (tuple(row) in rows) != beaten
    assert len(front_of(table)) == len(rows), "of equal rows one is kept"
    loose = table[front_of(table, 0.2)]
    assert all((loose <= row * 1.2 + 1e-9).all(axis=1).any() for row in table)
