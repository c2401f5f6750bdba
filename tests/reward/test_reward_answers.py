"""Right and wrong answers for each grader that compares mathematics, and what its time limit counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.reward import default_compute_score
from hybridrl.reward.score import answers, gsm8k, math_dapo, search_r1
from hybridrl.reward.score.answers import same_answer
from hybridrl.scored import Reason, UnscoredError

RIGHT = [
    ("0.5", "50\\%"),
    ("50\\%", "0.5"),
    ("50", "50\\%"),
    ("50\\%", "50"),
    ("50%", "\\frac{1}{2}"),
    ("12.5%", "1/8"),
    ("\\frac12", "50\\%"),
    ("50 percent", "50\\%"),
    ("50\\text{ percent}", "50"),
    ("72 dollars", "72"),
    ("72\\text{ dollars}", "72"),
    ("\\$72", "72"),
    ("$72$", "72"),
    ("72 cm", "72"),
    ("72 cm^2", "72"),
    ("72\\text{ cm}^2", "72"),
    ("72\\ \\mathrm{cm}^2", "72"),
    ("72\\ \\text{m/s}", "72"),
    ("+5", "5"),
    ("−5", "-5"),
    ("–5", "-5"),
    ("－5", "-5"),
    ("-5.0", "-5"),
    ("5.", "5"),
    ("0.50", "0.5"),
    (".5", "0.5"),
    ("1,234,567", "1234567"),
    ("1{,}234", "1234"),
    ("1\\,234", "1234"),
    ("1 234", "1234"),
    ("1\\frac{1}{2}", "1.5"),
    ("1\\frac12", "\\frac{3}{2}"),
    ("1 1/2", "3/2"),
    ("\\tfrac{3}{2}", "1.5"),
    ("\\frac32", "1.5"),
    ("3/2", "\\frac{3}{2}"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("\\dfrac{1}{2}", ".5"),
    ("\\text{(B)}", "B"),
    ("(B)", "B"),
    ("\\text{B}", "B"),
    ("\\textbf{(B)}", "B"),
    ("B.", "B"),
    ("\\{1,2\\}", "\\{2, 1\\}"),
    ("(1, 2)", "(1,2)"),
    ("\\left(1,\\infty\\right)", "(1,\\infty)"),
    ("[0,1)", "[0, 1)"),
    ("(-\\infty,2]\\cup[3,\\infty)", "(-\\infty, 2] \\cup [3, \\infty)"),
    ("x \\in [0,1]", "[0,1]"),
    ("1,2", "2,1"),
    ("\\frac{\\pi}{2}", "\\pi/2"),
    ("3\\pi", "3 \\pi"),
    ("\\sqrt2", "\\sqrt{2}"),
    ("2^{10}", "1024"),
    ("10^{3}", "1000"),
    ("x=5", "5"),
    ("x = 5", "x=5"),
    ("90^\\circ", "90"),
    ("90^{\\circ}", "90^\\circ"),
    ("90\\text{ degrees}", "90"),
    ("90°", "90"),
    ("\\text{East}", "East"),
    ("east", "East"),
    ("3+4i", "4i+3"),
    ("1e3", "1000"),
    ("5\\text{ units}", "5"),
    ("1.5\\times10^3", "1500"),
    ("２", "2"),
    ("\\boxed{5}", "5"),
    ("**5**", "5"),
    ("5!", "120"),
    ("(5)", "5"),
    ("$1,234.50", "1234.5"),
    ("\\frac{1}{3}", "1/3"),
    ("0.333333333", "\\frac{1}{3}"),
]
WRONG = [
    ("50", "0.5"),
    ("0.5", "50"),
    ("0.5%", "50%"),
    ("5", "50%"),
    ("0.05", "50%"),
    ("500%", "50%"),
    ("0.5\\%", "\\frac{1}{200}x"),
    ("72 dollars", "73"),
    ("72", "7"),
    ("7 2", "72"),
    ("72 or 73", "72"),
    ("72 cm", "7.2"),
    ("-5", "5"),
    ("−5", "5"),
    ("5", "−5"),
    ("+5", "-5"),
    ("1,23", "123"),
    ("1,2", "12"),
    ("1, 234", "1234"),
    ("(1,234)", "1234"),
    ("1.234", "1234"),
    ("1\\frac{1}{2}", "0.5"),
    ("1\\frac12", "5.5"),
    ("1 1/2", "11/2"),
    ("2\\frac{1}{2}", "1"),
    ("(1,2)", "(2,1)"),
    ("[1,2)", "(1,2]"),
    ("(1,2)", "[1,2]"),
    ("1,2", "1"),
    ("\\{1,2\\}", "1"),
    ("\\{1,2\\}", "(1,2)"),
    ("A", "B"),
    ("(A)", "B"),
    ("AB", "A"),
    ("\\text{East}", "West"),
    ("x=5", "6"),
    ("y=5", "x=6"),
    ("0.33", "\\frac{1}{3}"),
    ("0.3", "1/3"),
    ("3.14", "\\pi"),
    ("x", "y"),
    ("5x", "5"),
    ("5 x", "5"),
    ("5\\pi", "5"),
    ("5i", "5"),
    ("2m", "2n"),
    ("\\sqrt{2}", "2"),
    ("5 and 6", "5"),
    ("not 72", "72"),
    ("", "5"),
    ("$", "5"),
    ("\\frac{1}{0}", "1"),
    ("about 5 or maybe 6 apples", "5"),
    ("3\\text{ or }4", "3"),
    ("5\\text{ hundred}", "5"),
    ("5 million", "5"),
    ("10^\\circ", "10 rad "),
    ("2 dozen", "2"),
    ("5k", "5"),
    ("1/2 x", "1/2"),
    ("5 km", "5 m"),
    ("5\\text{ cm}", "5\\text{ m}"),
    ("50 %", "5 %"),
    ("5 bananas or so 6", "5"),
]
BOXES = ("DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo", "numina_aops_forum")


def points(source: str, text: str, truth: str) -> bool:
    found = default_compute_score(source, text, truth)
    return (found["score"] if isinstance(found, dict) else found) > 0.5


#: answers that differ by the word, the power or the base behind one number
DIFFERENT = [
    ("10_2", "10_3"),
    ("101_{2}", "101_{3}"),
    ("3 cm^2", "3 cm^3"),
    ("5\\text{ m}^2", "5\\text{ m}^3"),
    ("10^3 m", "10^3 km"),
    ("5 AM", "5 PM"),
    ("12 noon", "12 midnight"),
    ("5 north", "5 south"),
    ("5 degrees Celsius", "5 degrees Fahrenheit"),
    ("3 xy", "3"),
    ("3 ab", "3"),
    ("3", "3 abc"),
    ("5 squared", "5"),
    ("2 cubed", "2"),
    ("5 factorial", "5"),
    ("5 less than", "5"),
    ("5 below zero", "5"),
    ("3 tens", "3"),
]
#: forms in which models write the same answer
WRITTEN = [
    ("\\text{6 hours}", "6"),
    ("\\text{(B)}", "B"),
    ("€5", "5"),
    ("5€", "5"),
    ("£1,250", "1250"),
    ("18 cm³", "18"),
    ("18 m²", "18"),
    ("x² + 1", "x^2+1"),
    ("√2", "\\sqrt{2}"),
    ("3√12", "6\\sqrt{3}"),
    ("√(x+1)", "\\sqrt{x+1}"),
    ("x ≤ 5", "x \\le 5"),
    ("5 men", "5"),
    ("5 PM", "5"),
    ("101_2", "101_2"),
    ("60 mph", "60 miles per hour"),
]


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT)
def test_words_powers_and_bases_make_another_answer(answer: str, reference: str) -> None:
    assert not same_answer(answer, reference) and not same_answer(reference, answer)
    assert same_answer(answer, answer)


@pytest.mark.parametrize(("answer", "reference"), WRITTEN)
def test_forms_in_which_models_write(answer: str, reference: str) -> None:
    assert same_answer(answer, reference)


@pytest.mark.parametrize(("answer", "reference"), RIGHT)
def test_right_answers(answer: str, reference: str) -> None:
    assert same_answer(answer, reference)


@pytest.mark.parametrize(("answer", "reference"), WRONG)
def test_wrong_answers(answer: str, reference: str) -> None:
    assert not same_answer(answer, reference)


@pytest.mark.parametrize("source", BOXES)
def test_every_grader_of_boxes(source: str) -> None:
    """The same table through the graders that find the answer themselves."""
    for answer, reference in RIGHT:
        if "boxed" not in answer:
            assert points(source, f"So it is $\\boxed{{{answer}}}$.", reference), (answer, reference)
    for answer, reference in WRONG:
        assert not points(source, f"So it is $\\boxed{{{answer}}}$.", reference), (answer, reference)


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        (r"so \boxed{72}", "72", True),
        (r"so \boxed{71} no \boxed{72}", "72", True),
        (r"so \boxed{73}", "72", False),
        ("Answer: 72 dollars", "72", True),
        ("Answer: $72$ dollars", "72", True),
        (r"Answer: \$72.", "72", True),
        ("Answer: **72**", "72", True),
        ("Answer: −72", "-72", True),
        ("Answer: 72 or 73", "72", False),
        ("Answer: 720 dollars", "72", False),
        ("72", "72", False),
        (r"\boxed{72} Answer: 71", "72", False),
    ],
)
def test_dapo(text: str, truth: str, right: bool) -> None:
    assert math_dapo.compute_score(text, truth)["score"] == (1.0 if right else -1.0)


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("#### +5", "5", True),
        ("#### −5", "-5", True),
        ("#### –5", "-5", True),
        ("#### －5", "-5", True),
        ("#### - 5", "-5", True),
        ("#### -$5", "-5", True),
        ("#### $-5", "-5", True),
        ("#### ５", "5", True),
        ("#### **5**", "5", True),
        ("#### 5,", "5", True),
        ("#### 1,234,567.", "1234567", True),
        ("#### 5", "+5", True),
        ("#### 36/2", "18", True),
        ("#### 5", "−5", False),
        ("#### −5", "5", False),
        ("#### 1/2", "1", False),
        ("#### 1,23", "123", False),
        ("#### 5.5", "55", False),
        ("#### 1/0", "1", False),
    ],
)
def test_gsm8k(text: str, truth: str, right: bool) -> None:
    assert gsm8k.compute_score(text, truth) == float(right)
    assert gsm8k.compute_score(text, truth, method="flexible") == float(right)


def test_the_number_behind_a_subtraction_has_no_sign() -> None:
    assert gsm8k.extract_solution("that is 10-5", method="flexible") == "5"
    assert gsm8k.extract_solution("between 3–5", method="flexible") == "5"


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("The “Beatles”", "beatles", True),
        ("semi–final", "semi-final", True),
        ("１９９９", "1999", True),
        ("don’t", "don't", True),
        ("1998", "1999", False),
        ("the Beatles or the Stones", "beatles", False),
    ],
)
def test_search_r1(answer: str, truth: str, right: bool) -> None:
    assert search_r1.compute_score(f"<answer>{answer}</answer>", truth) == float(right)


def test_an_expiry_is_unscored_and_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert same_answer(r"\frac{2}{4}", r"\frac{1}{2}")  # imports everything
    answer, reference = r"\frac{x^2-1}{x-1}", "x+1"
    monkeypatch.setattr(answers, "_LIMIT_S", 1e-3)
    for _ in range(2):
        with pytest.raises(UnscoredError) as error:
            same_answer(answer, reference)
        assert error.value.unscored.reason is Reason.TIMEOUT
    monkeypatch.setattr(answers, "_LIMIT_S", 30.0)
    assert same_answer(answer, reference)
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


_SCORES = """
import sys
from hybridrl.reward.score import answers, math_reward
answers._LIMIT_S = 1
assert math_reward.compute_score(r"\\boxed{\\frac{2}{4}}", "1/2") == 1
print("begun", flush=True)
scores = [math_reward.compute_score(rf"\\boxed{{\\frac{{{n}x+{2 * n}}}{{{n}}}}}", "x+2") for n in range(3, 150)]
print(sum(scores), flush=True)
"""


def test_a_stopped_process_loses_no_right_answer(tmp_path: Path) -> None:
    """Scoring takes seconds in all and is stopped within it for longer than the limit of one answer."""
    with subprocess.Popen([sys.executable, "-c", _SCORES], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        for _ in range(2):
            time.sleep(0.1)
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(2.5)
            os.kill(child.pid, signal.SIGCONT)
        assert child.stdout.readline() == f"{150 - 3}.0\n"
