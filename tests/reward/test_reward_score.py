"""Built-in scorers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.reward import RewardError, default_compute_score
from hybridrl.reward.score import (
    SCORERS,
    check_ground_truth,
    geo3k,
    gsm8k,
    math_dapo,
    math_reward,
    math_verify,
    prime_math,
)
from hybridrl.reward.score.answers import last_boxed, same_answer


@pytest.mark.parametrize("truth", ["She has 7 and 11.\n#### 18", "18 eggs", "18%", "#### 18", "eighteen"])
def test_gsm8k_refuses_a_truth_that_no_answer_equals(truth: str) -> None:
    """The answers of the data set itself are whole solutions: each response scored 0, whatever it said."""
    with pytest.raises(RewardError) as caught:
        check_ground_truth(truth, "openai/gsm8k")
    assert truth[-5:] in str(caught.value) and "openai/gsm8k" in str(caught.value)
    assert ("write '18'" in str(caught.value)) == ("18" in truth)


@pytest.mark.parametrize("truth", ["18", "-3", "1,000", "0.5", "3/4", "1 1/2", "$18.50", "1.2.3", 18, 2.5, 1e21, "½"])
def test_gsm8k_takes_numbers_in_any_form(truth: object) -> None:
    check_ground_truth(truth, "openai/gsm8k")


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("5 + 6\n#### 11", "11", "11"),
        ("#### 1,234", "1234", "1234"),
        ("#### $18.", "18", "18"),
        ("#### -3.50 apples", "-3.50", "-3.50"),
        ("####7", "7", "7"),
        ("#### 1\n#### 2", "2", "2"),
        ("the answer is 12.", None, "12"),
        ("#### none, I have 4", None, "4"),
        ("no number ...", None, None),
        ("#### 5" + "x" * 301, None, None),
        ("#### 5" + " \n" * 301, "5", "5"),
        ("#### 1\u202f234\u00a0567", "1234567", "1234567"),
        ("#### 7 500", "7", "500"),
    ],
)
def test_gsm8k_extraction(text, strict, flexible):
    assert gsm8k.extract_solution(text) == strict
    assert gsm8k.extract_solution(text, method="flexible") == flexible


@pytest.mark.parametrize("truth", ["#### 12345", "Sorted. #### 12345 "])
def test_sort_refuses_a_truth_with_the_mark(truth):
    with pytest.raises(RewardError) as error:
        check_ground_truth(truth, "hybridrl/sort")
    assert "'12345'" in str(error.value)


def test_gsm8k_scores():
    assert gsm8k.compute_score("#### 18", "18") == 1.0
    assert gsm8k.compute_score("#### 18.00", "18") == 1.0
    assert gsm8k.compute_score("#### 19", "18", format_score=0.1) == 0.1
    assert gsm8k.compute_score("19", "18", format_score=0.1) == 0.0
    assert gsm8k.compute_score("so 18", "18", method="flexible", score=2.0) == 2.0
    assert gsm8k.compute_score("#### 1.2.3", "1.2.3") == 1.0
    with raises_with(RewardError, "method='loose'"):
        gsm8k.extract_solution("1", method="loose")


@settings(max_examples=100)
@given(number=st.integers(-(10**9), 10**9), text=st.text(max_size=50))
def test_gsm8k_finds_the_marked_number_after_any_text(number, text):
    assert default_compute_score("openai/gsm8k", f"{text}\n#### {number:,}", str(number)) == 1.0
    assert default_compute_score("openai/gsm8k", f"{text}\n#### {number + 1}", str(number)) == 0.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("#### 12345", 1.0),
        ("thinking #### 12345 \n", 1.0),
        ("#### 1#### 12345", 1.0),
        ("12345", 0.0),
        ("#### 123456", 0.0),
        ("####", 0.0),
        ("", 0.0),
    ],
)
def test_sort(text, score):
    assert default_compute_score("hybridrl/sort", text, "12345") == score


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"$\boxed{\{1, {2}\}}$.", r"\{1, {2}\}"),
        (r"\boxed 7$ done", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed{open", None),
        ("nothing", None),
    ],
)
def test_last_boxed(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\dfrac12", r"\frac{1}{2}", True),
        ("1/2", r"\frac{1}{2}", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("2+3x", "3x+2", True),
        ("x=5", "5", True),
        (r"\{2,1\}", r"\{1,2\}", True),
        ("(1,2)", "(2,1)", False),
        ("[1,2)", "(1,2]", False),
        ("1,234", "1234", True),
        (r"10\text{ cm}", "10", True),
        (r"90^\circ", "90", True),
        (r"50\%", "50", True),
        (r"\text{East}", "East", True),
        ("No", "no", True),
        (r"\text{no}", "No", True),
        ("No", "yes", False),
        ("6", "7", False),
        ("", "7", False),
        ("((((", "7", False),
        (r"\frac{1}{0}", "1", False),
    ],
)
def test_same_answer(answer, reference, same):
    assert same_answer(answer, reference) is same


@pytest.mark.parametrize(
    "bomb",
    [
        *("9^{9^{9^9}}", "9**9**9**9", "10^{1000000000}", "100000!", "((2!)!)!!", "(" * 5000, "1" * 5000),
        *("9^{9^{9}}", "9**9**9", r"\sqrt[3]{9^{9^9}}", r"\frac{1}{9^{9^9}}", r"\left(10^{10}\right)!", "(9^9)!"),
        r"\binom{1000000}{500000}",
    ],
)
def test_astronomic_answers_are_wrong_at_once(bomb):
    """Each of them would keep a parser or an integer power busy for hours; in a thread nothing could stop it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(same_answer(bomb, "3")), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert results == [False]


@pytest.mark.parametrize(
    ("answer", "reference"), [("2^{3^2}", "512"), ("2^{2^3}", "256"), (r"\binom{2024}{2}", "2047276"), ("(2+1)!", "6")]
)
def test_small_powers_of_powers_are_computed(answer, reference):
    assert same_answer(answer, reference)


def test_answers_are_compared_in_any_thread():
    """math-verify's own time limits raise outside a main thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(math_reward.compute_score(r"\boxed{\frac{3}{6}}", "1/2")))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_math_families():
    assert math_reward.compute_score(r"\boxed{2} no \boxed{\frac{2}{4}}", r"\frac{1}{2}") == 1.0
    assert math_reward.compute_score("1/2", r"\frac{1}{2}") == 0.0
    assert math_verify.compute_score(r"\boxed{0.5}", r"\boxed{1/2}") == 1.0
    assert math_verify.compute_score("no box", "1", timeout_score=-0.5) == -0.5
    assert prime_math.compute_score("The answer is $\\frac12$.", "0.5") == {
        "score": 1.0,
        "acc": True,
        "pred": r"\frac12",
    }
    assert prime_math.compute_score("hm", "0.5") == {"score": 0.0, "acc": False, "pred": "[INVALID]"}
    thought = "<think>because</think> so \\boxed{4}"
    assert geo3k.compute_score(thought, "4") == pytest.approx(1.0)
    assert geo3k.compute_score("\\boxed{4}", "4") == pytest.approx(0.9)
    assert geo3k.compute_score(thought, "5", format_score=0.2) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("text", "correct", "pred"),
    [
        ("Answer: 34", True, "34"),
        ("answer : $34$", True, "34"),
        ("Answer: 1\nAnswer: \\boxed{34}", True, "34"),
        ("**Answer: 34**", True, "34"),
        ("Answer\uff1a34", True, "34"),
        ("Answer: `34`", True, "34"),
        ("Answer: 1. Or Answer: 34", True, "34"),
        ("Answer: 34" + " \n" * 300, True, "34"),
        ("Answer: 35", False, "35"),
        ("34", False, "[INVALID]"),
        ("Answer: 34" + "\n" + "x" * 300, False, "[INVALID]"),
    ],
)
def test_math_dapo(text, correct, pred):
    assert math_dapo.compute_score(text, "34") == {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def test_math_dapo_strict_box():
    assert math_dapo.compute_score(r"\boxed{34}", "34", strict_box_verify=True)["acc"]
    assert not math_dapo.compute_score(r"\boxed{34.0}", "34", strict_box_verify=True)["acc"]
    assert not math_dapo.compute_score(r"\boxed{34}" + "x" * 100, "34", strict_box_verify=True)["acc"]
    paused = r"\boxed{34}" + "x" * 100 + r"\boxed{1}"
    assert math_dapo.compute_score(paused, "1", strict_box_verify=True, pause_tokens_index=[0, 1, 2, 110])["acc"]


# answers of hybridrl/colours are letters (tests/data/test_data_preprocess.py), those of others programs
OTHERWISE = {"hybridrl/colours", "gpqa", "humaneval", "ifeval", "livecodebench"}
OTHERWISE |= {name for name, module in SCORERS.items() if module == "programs"}


@pytest.mark.parametrize("source", [name.replace("*", "2024") for name in SCORERS if name not in OTHERWISE])
def test_every_known_source_scores(source):
    form = "<think>x</think> <answer>{0}</answer> \\boxed{{{0}}}\nAnswer: {0} #### {0}"
    right, wrong = form.format(7), form.format(8)
    if source == "hiyouga/geometry3k":
        assert default_compute_score(source, right, "7") > default_compute_score(source, wrong, "7")
        return
    scores = [default_compute_score(source, text, "7") for text in (right, wrong)]
    good, bad = (s["score"] if isinstance(s, dict) else s for s in scores)
    assert good == 1.0 and bad <= 0.0


def test_arguments_reach_the_scorer():
    assert default_compute_score("openai/gsm8k", "it is 7", "7") == 0.0
    assert default_compute_score("openai/gsm8k", "it is 7", "7", method="flexible") == 1.0


@pytest.mark.parametrize("source", ["", None, "my/data"])
def test_unknown_source_lists_the_known_ones_and_the_way_out(source):
    with pytest.raises(RewardError) as caught:
        default_compute_score(source, "x", "y")
    for part in (
        "openai/gsm8k",
        "aime*",
        "reward.custom_reward_function.path",
        "compute_score(data_source, solution_str",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("<answer>The  Eiffel tower!</answer>", 1.0),
        ("<answer>Paris</answer> no: <answer>eiffel tower</answer>", 1.0),
        ("<answer>eiffel tower</answer> no: <answer>Paris</answer>", 0.1),
        ("<answer>La Tour\nEiffel</answer>", 1.0),
        ("the Eiffel tower", 0.0),
        ("<answer></answer>", 0.1),
        ("<answer>eiffel", 0.0),
    ],
)
def test_search_r1_compares_the_last_answer_with_each_reference(solution, score):
    answers = ["Eiffel Tower", "la tour eiffel"]
    for truth in ({"target": answers}, answers, np.array(answers), json.dumps({"target": answers})):
        assert default_compute_score("searchR1_nq", solution, truth, format_score=0.1) == score
    assert default_compute_score("searchR1_nq", "<answer>Lutz</answer>", {"target": "Lutz"}) == 1.0


@pytest.mark.parametrize("truth", [None, "", {}, {"target": []}, [""], ["The"], {"target": [3]}, 7])
def test_search_r1_refuses_a_truth_that_no_answer_equals(truth):
    with pytest.raises(RewardError, match=r"the ground truth is .*must be text, a list of texts"):
        check_ground_truth(truth, "searchR1_nq")


def test_settings_of_a_sandbox_are_for_scorers_that_run_programs():
    assert default_compute_score("openai/gsm8k", "#### 4", "4", sandbox_fusion_url="http://x", memory_limit_mb=9) == 1


def test_scorers_and_pool_processes_import_nothing_heavy():
    code = (
        "import sys, hybridrl.reward.processes.reward_child, hybridrl.reward.score.gsm8k, hybridrl.reward.score.exact, "
        "hybridrl.reward.score.math_dapo\n"
        "print([m for m in ('torch', 'numpy', 'ray', 'transformers', 'sympy', 'asyncio') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
