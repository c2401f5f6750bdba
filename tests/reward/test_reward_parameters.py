"""Parameters of reward functions: matched by name, columns of the data among them, or refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.reward import RewardError
from hybridrl.reward.function import RewardFunction, load
from hybridrl.reward.signature import BATCH_NAMES, SAMPLE_NAMES, RewardCall, Sample, understand

COLUMNS = {"question": "2 + 2", "answer": "4"}


def samples(columns: dict[str, Any] | None = None, count: int = 2) -> list[Sample]:
    return [
        Sample("source", f"text {n}", f"truth {n}", {"n": n}, columns=COLUMNS if columns is None else columns)
        for n in range(count)
    ]


def arguments(call: Any, columns: dict[str, Any] | None = None, form: Any = "sample", **kwargs: Any) -> dict[str, Any]:
    """What a function gets for the first sample, or for all samples."""
    how = understand(call, "f", kwargs, form, "r.py", "reward_kwargs")
    rows = samples(columns)
    return how.values(rows if how.form == "batch" else rows[:1])


def function(parameters: str, prefix: str = "") -> Any:
    scope: dict[str, Any] = {}
    exec(f"{prefix}def f({parameters}): return 0.0", scope)
    return scope["f"]


def test_a_response_that_is_called_otherwise_is_the_response() -> None:
    """Called by position, `response` was the data source, and the reward a constant 0."""

    def reward(response, answer, question): ...

    assert arguments(reward) == {"response": "text 0", "answer": "4", "question": "2 + 2"}
    assert arguments(reward, {"question": "q"}) == {"response": "text 0", "answer": "truth 0", "question": "q"}


@pytest.mark.parametrize("text", ["response", "solution", "prediction", "output"])
@pytest.mark.parametrize("truth", ["gt", "label", "target", "answer", "reference"])
@pytest.mark.parametrize("form", ["{text}, {truth}", "{truth}, {text}", "*, {truth}, {text}", "{text}, {truth}, /"])
def test_usual_names(text, truth, form) -> None:
    call = function(form.format(text=text, truth=truth))
    assert arguments(call, {}) == {text: "text 0", truth: "truth 0"}
    assert arguments(call, {truth: "a column"}) == {text: "text 0", truth: "a column"}
    with pytest.raises(RewardError, match=rf"{text!r}, which may be the response or the column.*solution_str"):
        arguments(call, {text: "a column"})


@pytest.mark.parametrize("truth", ["groundtruth", "gold_answer", "reference_answer", "expected_answer", "label"])
@pytest.mark.parametrize("default", ["", "=None", "=''"])
def test_a_ground_truth_that_is_called_otherwise_or_has_an_empty_default(truth, default) -> None:
    """It kept its default, and each response was compared with nothing."""
    call = function(f"solution_str, {truth}{default}")
    assert arguments(call, {}) == {"solution_str": "text 0", truth: "truth 0"}
    assert arguments(call, {truth: "a column"}) == {"solution_str": "text 0", truth: "a column"}
    batch = function(f"solution_strs, {truth}s{default}")
    assert arguments(batch, {})[f"{truth}s"] == ["truth 0", "truth 1"]


def test_empty_defaults_that_nothing_fills_are_named() -> None:
    call = function("solution_str, ground_thruth=None, extra_info=None, question='', level='all', label=None")
    how = understand(call, "f", {}, "sample", "r.py", "reward_kwargs")
    assert how.unfilled(["question"], has_ground_truth=True) == ["ground_thruth"]
    assert how.unfilled([], has_ground_truth=False) == ["ground_thruth", "question", "label"]
    assert understand(call, "f", {"ground_thruth": 1}, "sample", "r.py", "k").unfilled(["question"], True) == []


@pytest.mark.parametrize("text", ["solutions", "predictions", "outputs"])
def test_usual_names_of_lists(text) -> None:
    found = arguments(function(f"{text}, labels"), {})
    assert found == {text: ["text 0", "text 1"], "labels": ["truth 0", "truth 1"]}


def test_values_with_defaults_are_not_guessed() -> None:
    """A default says that the parameter is something else, such as the length that is aimed at."""
    assert arguments(function("solution_str, target=100, output=None"), {}) == {"solution_str": "text 0"}
    with pytest.raises(RewardError, match="no such column"):
        arguments(function("solution_str, ground_truth, answer"), {})
    with pytest.raises(RewardError, match="no such column"):
        arguments(function("solution_str, answer, label"), {})


@pytest.mark.parametrize("truth", ["gt", "label", "target", "answer", "reference", "truth", "gold"])
def test_a_ground_truth_that_may_be_left_out(truth) -> None:
    """It kept None for every sample, so that each was judged without a reference."""
    call = function(f"response, {truth}=None, weight=2")
    assert arguments(call, {}) == {"response": "text 0", truth: "truth 0"}
    assert arguments(call, {truth: "a column"}) == {"response": "text 0", truth: "a column"}
    if truth != "gold":
        assert arguments(function(f"responses, {truth}s=None"), {})[f"{truth}s"] == ["truth 0", "truth 1"]
    assert arguments(function(f"solution_str, ground_truth, {truth}=None"), {}).get(truth) is None


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ("queries, prompts, labels", "OpenRLHF's"),
        ("args, sample, **kwargs", "slime's"),
        ("completion, answer, info, state", "verifiers'"),
        ("completion, **kwargs", "verifiers'"),
        ("parser, completion, answer", "verifiers'"),
        ("response, output", "may each be the response"),
        ("question, answer", "no name tells"),
        ("a, b, c", "no name tells"),
        ("a, b, c, d", "no name tells"),
        ("data_source, text, gt, info", "no name tells"),
        ("*args", "no name tells"),
        ("ground_truth", "no name tells"),
        ("question, **kwargs", "no name tells"),
        ("prompts, **kwargs", "no name tells"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "async "])
def test_other_forms_are_refused_with_those_that_are_understood(parameters, named, prefix) -> None:
    with pytest.raises(RewardError, match=rf"(?s){named}.*compute_score\(data_source, solution_str.*completions"):
        arguments(function(parameters, prefix))


@pytest.mark.parametrize("name", ["trainer_state", "log_extra", "log_metric", "environments"])
def test_what_trls_trainer_provides(name) -> None:
    assert arguments(function(f"completions, {name}=None"), {}) == {"completions": ["text 0", "text 1"]}
    with pytest.raises(RewardError, match=rf"{name!r}.*no such column.*TRL's, which its own trainer provides"):
        arguments(function(f"completions, {name}"), {})
    with_all = arguments(function(f"prompts, completions, {name}=None, **kwargs"))
    assert with_all["answer"] == ["4", "4"] and name not in with_all


def test_partial_lambda_object_and_decorated() -> None:
    def scaled(response, answer, scale=1, difficulty=0): ...

    assert arguments(functools.partial(scaled, scale=3), {"scale": 9, "difficulty": 2, "answer": "4"}) == {
        "response": "text 0",
        "answer": "4",
        "difficulty": 2,
    }

    class Judge:
        def __call__(self, response, answer): ...

    @functools.wraps(scaled)
    def wrapped(*args, **kwargs): ...

    assert arguments(Judge()) == arguments(lambda response, answer: 0) == {"response": "text 0", "answer": "4"}
    assert arguments(wrapped)["response"] == "text 0"
    assert arguments(lambda *args, **kwargs: 0, {}).keys() == set(SAMPLE_NAMES)


def test_positions_count_where_the_function_has_no_names() -> None:
    assert list(arguments(function("a, b, c, d, /")).values()) == ["source", "text 0", "truth 0", {"n": 0}]
    assert arguments(function("a, b, c, /"), form="batch")["b"] == ["text 0", "text 1"]
    with raises_with(RewardError, "'question'"):
        arguments(function("question, b, c, /"))


def test_a_manager_of_lists_takes_no_single_response() -> None:
    with raises_with(RewardError, "'response'", "reward.reward_manager.name=batch", "solution_strs"):
        arguments(function("response, answer"), form="batch")


WORDS = st.sampled_from(
    [
        *(*SAMPLE_NAMES, *BATCH_NAMES, "responses", "completions", "prompts", "prompt", "response", "output"),
        *("solution", "answer", "gt", "labels", "question", "queries", "a", "b", "state", "sample", "completion"),
        "solutions",
    ]
)


@given(names=st.lists(WORDS, min_size=1, max_size=5, unique=True), stars=st.sampled_from(["", ", /", ", **kwargs"]))
def test_no_argument_depends_on_the_order_of_parameters(names, stars) -> None:
    """Any order of the same names gets the same values, or is refused."""

    def found(order: list[str]) -> Any:
        try:
            return arguments(function(", ".join(order) + stars))
        except RewardError:
            return None

    known = bool({*names} - {"a", "b", "question"})
    if known or stars != ", /":
        assert found(names) == found(sorted(names)) == found(sorted(names, reverse=True))


def test_what_a_process_reports_is_how_the_pool_checks(user_file) -> None:
    from hybridrl.reward.processes.pool import RewardPool

    path = user_file("def reward(response, answer, /): return float(response == 'text 0' and answer == '4')")
    with RewardPool(RewardFunction(path), 1, 10.0) as pool:
        pool.start(wait_for_one=True)
        (_, how), *_ = pool.calls
        assert how == load(RewardFunction(path)).how and isinstance(how, RewardCall)
        assert [one.score for one in pool.run(samples())] == [1.0, 0.0]
        with raises_with(RewardError, "'response'"):
            pool.run(samples({"response": "r", "answer": "4"}))


@pytest.mark.parametrize(
    ("parameters", "takes"),
    [
        ("solution_str", False),
        ("solution_str, question", False),
        ("completions, question", False),
        ("solution_str, ground_truth", True),
        ("solution_str, ground_truth=None", True),
        ("response, gt", True),
        ("responses, ground_truths", True),
        ("completions, ground_truth", True),
        ("completions, **kwargs", False),  # TRL's form has no such argument; a column of that name is the data's
        ("solution_str, **kwargs", True),
    ],
)
def test_a_function_says_whether_it_gets_the_ground_truth(parameters: str, takes: bool) -> None:
    """Only then is it told that rows have none."""
    how = understand(function(parameters), "f", {}, "sample", "r.py", "reward_kwargs")
    assert how.takes_ground_truth == takes
