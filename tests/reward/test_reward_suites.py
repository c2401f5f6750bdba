"""Graders of mathematics and multiple choice, against answers made by rule: right ones and near misses.

Which of them are right follows from how they are made, and not from a grader.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from raising import raises_with

from hybridrl.reward import RewardError, default_compute_score
from hybridrl.reward.score import check_ground_truth
from hybridrl.reward.score.choice_letter import LETTERS, letter_of

Case = tuple[str, str, bool]  # response, reference, whether it is right

NUMBERS = (0, 7, 18, 42, 99, 125, 640, 999)


def numbers_after_hashes() -> Iterator[Case]:
    """GSM8K: a number after `####`."""
    for number in (*NUMBERS, 1234, 70000, -5):
        reference = str(number)
        for text in (
            *(f"#### {number}", f"####{number}", f"So it is {number}.\n#### {number}.", f"#### {number}.0"),
            *(f"#### ${number}", f"#### {number} apples", f"#### {number:,}", f"#### **{number}**"),
            *(f"First #### 3, no:\n#### {number}", f"#### \\boxed{{{number}}}", f"#### {2 * number}/2"),
            f"#### The answer is {number}",
        ):
            yield text, reference, True
        for text in (
            *(
                f"#### {number + 1}",
                f"#### {number - 1}",
                f"#### {number}.5",
                f"#### {number}/7 + 1",
                f"#### {number}1",
            ),
            *(f"#### {number}\n#### {number + 2}", f"The answer is {number}", f"#### {number} or {number + 1}", "####"),
            *(f"#### {number}^2 + 1", "#### none", "", f"#### {number + 1} and not {number}", f"#### x = {number + 3}"),
            *(f"\\boxed{{{number}}}", f"#### {number} million and 1" if number else "#### 1 million"),
        ):
            yield text, reference, False


#: references of MATH-500, other spellings of the same, and other answers
WRITTEN = {
    "\\frac{1}{2}": (
        ("\\dfrac{1}{2}", "\\tfrac12", "1/2", "0.5", ".5", "\\frac{2}{4}", "x = \\frac{1}{2}", "$\\frac{1}{2}$"),
        ("\\frac{1}{3}", "2", "-\\frac{1}{2}", "0.05", "\\frac{1}{2}x", "1", "\\frac{2}{1}", "0.51"),
    ),
    "3\\sqrt{2}": (
        ("\\sqrt{18}", "3 \\sqrt{2}", "3\\sqrt 2", "3\\cdot\\sqrt{2}", "\\sqrt{2}\\cdot 3", "\\frac{6}{\\sqrt{2}}"),
        ("2\\sqrt{3}", "\\sqrt{6}", "3+\\sqrt{2}", "3", "\\sqrt{17}", "3\\sqrt[3]{2}"),
    ),
    "(3,4)": (("(3, 4)", "\\left(3,4\\right)", "\\left( 3, 4 \\right)"), ("(4,3)", "(3,5)", "(3,4,0)", "(-3,4)")),
    "12": (
        ("12.0", "12.", "12\\text{ cm}", "\\text{12}", "24/2", "12\\%", "3\\cdot 4", "2^2\\cdot 3", "\\$12", "+12"),
        ("-12", "21", "1.2", "12.5", "120", "12,13", "12x", "\\{12\\}+1", "11", "13", "1 2"),
    ),
    "\\pi": (("\\pi", "1\\pi", "\\frac{2\\pi}{2}"), ("3", "2\\pi", "\\pi^2", "-\\pi", "\\frac{\\pi}{2}")),
    "x^2+2x+1": (
        ("1+2x+x^2", "(x+1)^2", "x^2 + 2x + 1", "(1+x)(1+x)", "x(x+2)+1"),
        ("x^2+2x", "(x-1)^2", "x^2+x+1", "y^2+2y+1", "x^2+2x-1"),
    ),
    "\\text{Evelyn}": (("Evelyn", "\\text{ Evelyn }", "\\textbf{Evelyn}"), ("Carla", "Eve", "\\text{Briana}")),
    "1,234": (("1234", "1{,}234", "1 234", "1234.0"), ("1.234", "12,34", "123", "1,235")),
}


def expressions_in_boxes() -> Iterator[Case]:
    r"""MATH-500: an expression in the last `\boxed{}`."""
    for reference, (right, wrong) in WRITTEN.items():
        for answer in (reference, *right):
            yield f"We get $\\boxed{{{answer}}}$.", reference, True
            yield f"\\boxed{{no}} is wrong.\n\\[\\boxed{{{answer}}}\\]", reference, True
            yield f"Thus\n\n\\fbox{{{answer}}}", reference, True
            yield f"\\boxed{{ {answer} }} is what was asked, because all else fails.", reference, True
        for answer in wrong:
            yield f"We get $\\boxed{{{answer}}}$.", reference, False
            yield f"\\boxed{{{reference}}}, no:\n$$\\boxed{{{answer}}}$$", reference, False
        yield "I cannot solve this.", reference, False
        yield "", reference, False
        yield f"\\boxed{{{reference}", reference, False


def whole_numbers_in_boxes() -> Iterator[Case]:
    r"""AIME: a whole number below 1000, in a box or after `Answer:`."""
    for number in NUMBERS:
        reference = str(number)
        for answer in (number, f"{number:03d}", f"{number}.0", f" {number} ", f"\\text{{{number}}}", f"{number}^1"):
            yield f"Hence $\\boxed{{{answer}}}$.", reference, True
            yield f"Answer: {answer}", reference, True
            yield f"\\boxed{{1000}}\nAnswer: $\\boxed{{{answer}}}$", reference, True
        for answer in (number + 1, number - 1, f"{number}5", f"{number}.5", f"\\frac{{{number}}}{{7}} + 1", "n", "m+n"):
            yield f"Hence $\\boxed{{{answer}}}$.", reference, False
            yield f"Answer: {answer}", reference, False
            yield f"\\boxed{{{number}}}\nAnswer: {answer}", reference, False
        yield f"It may be {number}.", reference, False
        yield f"\\boxed{{{number}}}" + " and so on" * 60, reference, False  # beyond the end that is read


#: X is a letter, Y another
STATED = (
    *("Answer: X", "answer: X", "ANSWER: (X)", "**Answer: X**", "Answer: **X**", "**Answer:** X", "Answer: `X`", "X"),
    *("The answer is X.", "the correct answer is (X).", "The correct option is X", "The best choice is X) 5 m", "(X)"),
    *("$\\boxed{X}$", "\\boxed{\\text{X}}", "\\boxed{\\text{(X)}}", "The final answer is $\\boxed{\\mathbf{X}}$", "X."),
    *("Final answer: X", "Option X", "**X**", "So X is correct.", "Therefore, option (X) is the correct answer."),
    *(
        "I would choose X.",
        "X) 12 m",
        "Answer:\nX",
        "Answer: Y\nNo, that is wrong.\nAnswer: X",
        "Answer: X, Y is wrong",
    ),
    *("<think>Answer: Y</think>\nAnswer: X", "The answer is not Y.\nAnswer: X", "Y is incorrect.\n\nAnswer: X"),
    *(
        "Y seems right at first, but the answer is X",
        "Answer: X, since Y and Z do not hold",
        "Answer: X\n",
        "Answer : X",
    ),
    *("Y) 3\nZ) 4\n\nThe answer must be X", "Hence the answer is X; Y fails.", 'The answer is "X".', "Option X."),
)
UNCLEAR = (
    *("Answer: X or Y", "The answer is X and Y.", "\\boxed{X, Y}", "\\boxed{X} or \\boxed{Y}", "Answer: X/Y", ""),
    *("Answer: (X) or (Y)", "The answer is not X", "I do not know.", "Answer: X, Y", "Answer: 42", "Answer: either"),
    *("A) 1\nB) 2\nC) 3\nD) 4", "X is not correct", "Either X or Y is correct", "Answer: Xylene", "Answer: X-ray"),
    *("The answer is X1", "Answer: E", "Vitamin X", "Both X and Y are right", "Answer: X & Y"),
)


def letters() -> Iterator[Case]:
    """GPQA: each form with each letter, as the right and as a wrong answer, and forms that state none."""
    for number, letter in enumerate(LETTERS):
        other, third = LETTERS[(number + 1) % 4], LETTERS[(number + 2) % 4]
        for form in (*STATED, *UNCLEAR):
            text = form.replace("X", letter).replace("Y", other).replace("Z", third)
            yield text, letter, form in STATED
            yield text, other, False
            if form in STATED:
                yield f"Let us think.\n\n{text}", letter, True


@pytest.mark.parametrize(
    ("source", "cases"),
    [
        ("gsm8k", numbers_after_hashes),
        ("math500", expressions_in_boxes),
        ("aime24", whole_numbers_in_boxes),
        ("aime25", whole_numbers_in_boxes),
        ("gpqa", letters),
    ],
)
def test_answers_made_by_rule_are_graded_as_they_were_made(source: str, cases: object) -> None:
    made = list(cases())  # type: ignore[operator]
    assert len(made) >= 300 and {right for _, _, right in made} == {True, False}
    wrong = []
    for response, reference, right in made:
        check_ground_truth(reference, source)
        result = default_compute_score(source, response, reference)
        assert isinstance(result, dict) and result["acc"] == (result["score"] == 1.0)
        if result["acc"] != right:
            wrong.append((response, reference, right, result["pred"]))
    assert not wrong, f"{len(wrong)} of {len(made)}: {wrong[:20]}"


def test_forms_that_state_no_letter_are_read_as_none() -> None:
    for form in UNCLEAR:
        for letter, other in ("BC", "AD", "CA"):
            text = form.replace("X", letter).replace("Y", other)
            assert letter_of(text) is None, text


@pytest.mark.parametrize("truth", ["E", "a", "AB", "12", "(A)"])
def test_gpqa_refuses_a_truth_that_is_no_letter(truth: str) -> None:
    with raises_with(RewardError, "gpqa", repr(truth)):
        check_ground_truth(truth, "gpqa")
