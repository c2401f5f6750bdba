"""Results of a suite: against their formulas, enumerated."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.observe.suite_results import ScoredRow, majority_share, suite_result

ROWS = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=6)


@given(ROWS, st.integers(2, 4))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(rights: list[list[bool]], k: int) -> None:
    result = suite_result("s", [ScoredRow(right) for right in rights], k)
    shares = [
        sum(any(subset) for subset in itertools.combinations(right, k)) / len([*itertools.combinations(right, k)])
        for right in rights
    ]
    assert result.pass_k is not None and result.pass_k.value == pytest.approx(sum(shares) / len(shares))
    assert result.pass_1 is not None
    assert result.pass_1.value == pytest.approx(sum(map(sum, rights)) / sum(map(len, rights)))
    for estimate in (result.pass_1, result.pass_k):
        assert 0 <= estimate.low <= estimate.value + 1e-12 and estimate.value <= estimate.high + 1e-12 <= 1 + 1e-11


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=7), st.sampled_from("abc"))
def test_a_majority_counts_votes_and_shares_ties(votes: list[str | None], truth: str) -> None:
    counted = Counter(vote for vote in votes if vote is not None).most_common()
    tied = [vote for vote, count in counted if count == counted[0][1]]
    expected = 1 / len(tied) if truth in tied else 0.0
    assert majority_share([vote == truth for vote in votes], votes) == pytest.approx(expected)


def test_responses_without_a_score_are_counted_and_in_no_mean() -> None:
    rows = [
        ScoredRow([True, False], ["1", "2"], tokens=[4, 8], cut=[False, True]),
        ScoredRow([True], ["1"], unscored=1, tokens=[2, 2], cut=[False, False]),
        ScoredRow(unscored=2),
    ]
    result = suite_result("s", rows, 2)
    assert (result.rows, result.responses, result.unscored) == (3, 6, 3)
    assert result.pass_1 is not None and result.pass_1.value == pytest.approx(0.75)
    assert result.pass_k is not None and result.pass_k.value == 1.0  # of the one row with two scores
    assert result.maj_k is not None and result.maj_k.value == 0.5
    assert (result.mean_tokens, result.cut_share) == (4.0, 0.25)
    nothing = suite_result("s", [ScoredRow(unscored=2)], 2)
    assert nothing.pass_1 is nothing.pass_k is nothing.maj_k is nothing.mean_tokens is nothing.cut_share is None


def test_rows_that_are_all_alike_have_an_interval_all_the_same() -> None:
    none = suite_result("s", [ScoredRow([False])] * 30, 1).pass_1
    every = suite_result("s", [ScoredRow([True])] * 30, 1).pass_1
    assert none is not None and every is not None
    assert (none.value, none.low) == (0.0, 0.0) and none.high == pytest.approx(0.1135, abs=1e-4)  # Wilson, n=30
    assert (every.value, every.high) == (1.0, 1.0) and every.low == pytest.approx(1 - 0.1135, abs=1e-4)


def test_scorers_without_answers_have_no_majority() -> None:
    assert suite_result("s", [ScoredRow([True, True])], 2).maj_k is None
    assert suite_result("s", [ScoredRow([True], ["1"])], 1).maj_k is None
