r"""`1 < x < 2` and the interval `(1, 2)` are one answer; `y=2, x=1` is the pair `(1, 2)`."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.reward.score.answers import same_answer

SAME = [
    ("1<x<2", "(1,2)"),
    ("2>x>1", "(1,2)"),
    (r"1 \le x < 2", "[1,2)"),
    (r"x\in(1,2)", "1<x<2"),
    (r"x \in [0,1]", r"0\le x\le 1"),
    ("x>1", r"(1,\infty)"),
    ("0<x", r"(0,\infty)"),
    (r"x \leq 3", r"(-\infty, 3]"),
    (r"x>1 \text{ and } x<2", "(1,2)"),
    (r"x \ge 2 \text{ or } x \le -2", r"(-\infty,-2]\cup[2,\infty)"),
    (r"k<0 \text{ or } k>4", r"k \in (-\infty,0) \cup (4,\infty)"),
    (r"\frac{1}{2}<x<\frac{3}{2}", "(0.5,1.5)"),
    ("y=2, x=1", "(1,2)"),
    (r"x=1 \text{ and } y=2", "(1,2)"),
    ("b=4,a=3,c=5", "(3,4,5)"),
    ("x_2=5, x_1=3", "(3,5)"),
]
OTHER = [
    ("1<x<2", "[1,2]"),
    ("1<x<2", "(2,1)"),
    ("1<x<2", "1,2"),
    ("1<x<2", "1<y<2"),
    ("1<x<2", r"(1,\infty)"),
    ("x>1", "1"),
    ("x>1", "[1,\\infty)"),
    ("x<1", "x>1"),
    (r"x \neq 3", "3"),
    ("x<1 or x>2", "(1,2)"),
    ("y=2, x=1", "(2,1)"),
    ("x=1, y=2", "(2,1)"),
    ("b=4,a=3,c=5", "(4,3,5)"),
]


@pytest.mark.parametrize(("answer", "reference"), SAME)
def test_two_writings_of_one_answer(answer: str, reference: str) -> None:
    assert same_answer(answer, reference) and same_answer(reference, answer)


@pytest.mark.parametrize(("answer", "reference"), OTHER)
def test_another_answer(answer: str, reference: str) -> None:
    assert not same_answer(answer, reference) and not same_answer(reference, answer)


@given(
    st.fractions(-9, 9, max_denominator=4),
    st.fractions(Fraction(1, 4), 9, max_denominator=4),
    st.sampled_from(["<", r"\le "]),
    st.sampled_from(["<", r"\le "]),
    st.sampled_from("(["),
    st.sampled_from(")]"),
)
def test_brackets_say_whether_the_ends_belong(low, width, left, right, opening, closing) -> None:
    high = low + width
    reference = f"{opening}{low},{high}{closing}"
    same = (left == "<", right == "<") == (opening == "(", closing == ")")
    assert same_answer(f"{low}{left}x{right}{high}", reference) == same
