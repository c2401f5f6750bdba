"""Prefix trees: each path spells its row, tokens are shared exactly where prefixes are equal, runs see their paths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.models.prefix_tree import PrefixOrder, PrefixTree, even_partition, partition, share_saved

# Few words, so that rows share prefixes; rows that are prefixes of others and equal rows occur often.
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


def order_of(rows: list[list[int]]) -> PrefixOrder:
    tokens = torch.full((len(rows), max(map(len, rows))), 7)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    return PrefixOrder.of(tokens, [len(row) for row in rows])


def prefixes(rows: list[list[int]]) -> set[tuple[int, ...]]:
    """The nodes of the tree: all distinct prefixes."""
    return {tuple(row[: n + 1]) for row in rows for n in range(len(row))}


@settings(max_examples=300)
@given(ROWS)
def test_a_tree_holds_each_prefix_once(rows: list[list[int]]) -> None:
    order = order_of(rows)
    tree = PrefixTree.of(order)
    assert sorted(order.rows) == list(range(len(rows)))
    assert order.tokens == tree.tokens == len(prefixes(rows))
    index = {}  # of a prefix in the flat row
    for row, path in zip(order.rows, tree.paths, strict=True):
        assert len(path) == len(rows[row])
        for n, place in enumerate(path.tolist()):
            assert index.setdefault(tuple(rows[row][: n + 1]), place) == place
    assert sorted(index.values()) == list(range(tree.tokens))


@settings(max_examples=300)
@given(ROWS)
def test_a_run_sees_the_path_of_its_tokens(rows: list[list[int]]) -> None:
    tree = PrefixTree.of(order_of(rows))
    sees = np.zeros((tree.tokens, tree.tokens), dtype=bool)
    edges = list(itertools.accumulate(tree.pieces, initial=0))
    stop = 0
    for run in tree.runs:
        assert run.start == stop  # one after the other, without gaps
        stop = run.stop
        keys = [token for piece in run.pieces for token in range(edges[piece], edges[piece + 1])]
        assert keys[run.before :] == list(range(run.start, run.stop))
        for token in range(run.start, run.stop):
            sees[token, keys[: run.before + token - run.start + 1]] = True
    assert stop == tree.tokens
    expected = np.zeros_like(sees)
    for path in tree.paths:
        for n, token in enumerate(path):
            expected[token, path[: n + 1]] = True
    assert (sees == expected).all()


@given(ROWS, st.data())
def test_some_of_the_rows(rows: list[list[int]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True))
    found = order_of(rows).only(chosen)
    assert sorted(found.rows) == sorted(chosen)
    expected = order_of([rows[row] for row in found.rows])
    assert (found.lengths, found.shared) == (expected.lengths, expected.shared)


@given(st.dictionaries(st.sampled_from("abc"), ROWS, min_size=1), st.randoms(use_true_random=False))
def test_what_families_save_is_found_by_comparing_neighbours(families, shuffled) -> None:
    """Never more than their trees save, and just that where rows that share most follow each other."""
    rows = [(family, sorted(of_family)) for family, of_family in families.items()]
    spread = [(family, row) for family, of_family in rows for row in of_family]
    tokens = sum(len(row) for _, row in spread)
    trees = 1 - sum(len(prefixes(of_family)) for _, of_family in rows) / tokens
    assert saved_by(spread) == pytest.approx(trees)
    shuffled.shuffle(spread)
    assert saved_by(spread) <= trees + 1e-9


def saved_by(rows: list[tuple[str, list[int]]]) -> float:
    """`share_saved` of rows with padding on both sides."""
    ids, attention = torch.full((len(rows), 12), 7), torch.zeros(len(rows), 12, dtype=torch.int64)
    for number, (_, row) in enumerate(rows):
        ids[number, number % 3 :][: len(row)] = torch.tensor(row)
        attention[number, number % 3 :][: len(row)] = 1
    return share_saved(ids, attention, [family for family, _ in rows])


def test_a_chain_of_rows_is_one_run() -> None:
    """A session whose turns are rows, each the prefix of the next, is one causal sequence."""
    tree = PrefixTree.of(order_of([[1], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4]]))
    assert [(run.start, run.stop, run.before) for run in tree.runs] == [(0, 4, 0)]
    assert tree.pieces == [4]


def test_a_group_is_a_prompt_and_its_responses() -> None:
    tree = PrefixTree.of(order_of([[5, 6, number, 9] for number in range(3)]))
    assert [(run.start, run.stop, run.before, run.pieces) for run in tree.runs] == [
        (0, 4, 0, (0, 1)),
        (4, 6, 2, (0, 2)),
        (6, 8, 2, (0, 3)),
    ]
    assert tree.pieces == [2, 2, 2, 2]


def test_tokens_at_other_positions_are_not_shared() -> None:
    ids = torch.tensor([[1, 2, 3], [1, 2, 3]])
    positions = torch.tensor([[0, 1, 2], [0, 5, 6]])
    assert PrefixOrder.of(torch.stack([ids, positions], -1), [3, 3]).shared == [0, 1]


def every_partition(order: PrefixOrder) -> list[list[list[int]]]:
    """All ways to cut sorted rows."""
    count = len(order.rows)
    return [
        [order.rows[a:b] for a, b in itertools.pairwise([0, *cuts, count])]
        for number in range(count)
        for cuts in itertools.combinations(range(1, count), number)
    ]


def attending(length: int) -> float:
    """The cost of a row whose tokens attend to those before them."""
    return length + 0.5 * length * (length + 1) / 2


def costs_of(
    rows: list[list[int]], parts: list[list[int]], size: int, budget: int | None, quadratic: bool
) -> list[float]:
    """The cost of each micro-batch, counted node by node; infinite beyond a limit."""
    found = []
    for part in parts:
        nodes = prefixes([rows[row] for row in part])
        beyond = len(part) > size or (len(part) > 1 and budget is not None and len(nodes) > budget)
        found.append(float("inf") if beyond else sum(1 + 0.5 * len(node) * quadratic for node in nodes))
    return found


LIMITS = pytest.mark.parametrize(("size", "budget"), [(9, None), (1, 6), (2, 14), (9, 6), (9, 14)])


@pytest.mark.parametrize("quadratic", [False, True])
@LIMITS
@given(rows=ROWS)
@settings(max_examples=50)
def test_a_partition_is_within_its_limits_and_the_cheapest(
    rows: list[list[int]], budget: int | None, size: int, quadratic: bool
) -> None:
    order = order_of(rows)
    groups = partition(order, size, budget, preferred=1000, overhead=3, cost=attending if quadratic else float)
    assert [row for group in groups for row in group] == order.rows

    def cost(parts: list[list[int]]) -> float:
        return sum(one + 3 for one in costs_of(rows, parts, size, budget, quadratic))

    assert cost(groups) == pytest.approx(min(map(cost, every_partition(order))))


@pytest.mark.parametrize("quadratic", [False, True])
@LIMITS
@given(rows=ROWS, count=st.integers(1, 4))
@settings(max_examples=50)
def test_the_largest_part_of_an_even_partition_is_as_cheap_as_it_can_be(
    rows: list[list[int]], count: int, budget: int | None, size: int, quadratic: bool
) -> None:
    order = order_of(rows)
    groups = even_partition(order, count, size, budget, attending if quadratic else float)
    largest = min(
        max(costs_of(rows, parts, size, budget, quadratic)) for parts in every_partition(order) if len(parts) <= count
    )
    assert (groups is None) == (largest == float("inf"))
    if groups is not None:
        assert len(groups) <= count and [row for group in groups for row in group] == order.rows
        assert max(costs_of(rows, groups, size, budget, quadratic)) == pytest.approx(largest, rel=1e-5)


@LIMITS
@given(rows=ROWS, count=st.integers(1, 4))
@settings(max_examples=50)
def test_rows_that_stay_together_are_cut_as_wholes(
    rows: list[list[int]], count: int, budget: int | None, size: int
) -> None:
    rows = [*rows, *rows[: len(rows) % 2]]
    order = order_of(rows).in_units(2)
    assert sorted(order.rows) == list(range(len(rows)))
    for row, before, shared in zip(order.rows[1:], order.rows[:-1], order.shared[1:], strict=True):
        common = itertools.takewhile(lambda two: two[0] == two[1], zip(rows[row], rows[before], strict=False))
        assert shared == len(list(common))
    evenly = even_partition(order, count, size, budget, together=2)
    for groups in (partition(order, size, budget, preferred=1000, overhead=3, together=2), evenly):
        if groups is None:
            continue
        assert [row for group in groups for row in group] == order.rows
        for group in groups:
            assert {row ^ 1 for row in group} == set(group), "a unit is cut"
            nodes = prefixes([rows[row] for row in group])
            assert len(group) == 2 or (len(group) <= size and (budget is None or len(nodes) <= budget))


def test_attention_decides_where_rows_are_cut() -> None:
    """A row of 12 tokens attends to as many as all the others together."""
    rows = [[0] * 12, *([number] * 3 for number in range(1, 9))]
    evenly = even_partition(order_of(rows), 2, 9, None)
    assert evenly is not None and sorted(map(len, evenly)) == [3, 6]
    evenly = even_partition(order_of(rows), 2, 9, None, attending)
    assert evenly is not None and sorted(map(len, evenly)) == [1, 8]
    cut = {cost: partition(order_of(rows), 9, 24, 1000, 3, cost) for cost in (float, attending)}
    assert [*map(len, cut[float])] != [*map(len, cut[attending])]


def test_of_equal_partitions_the_most_equal_is_taken() -> None:
    rows = [[number, 0] for number in range(6)]
    groups = partition(order_of(rows), 9, budget=10, preferred=1000, overhead=3)
    assert [len(group) for group in groups] == [3, 3]
    # A family stays together above the preferred size if it shares enough, and unrelated rows do not.
    family = [[1] * 20 + [number] for number in range(4)]
    assert len(partition(order_of(family), 9, None, preferred=20, overhead=3)) == 1
    strangers = [[number] * 20 for number in range(4)]
    assert len(partition(order_of(strangers), 9, None, preferred=20, overhead=3)) == 4
