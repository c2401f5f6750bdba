"""The test for samples that are not missing at random: no false alarm over many seeds, power, and the bound."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.missingness import Dependence, bias_bound, ranks

PROMPTS, SAMPLES, STEPS = 16, 8, 10


def one_window(seed: int, kind: str, value: str, steps: int = STEPS) -> Dependence:
    """A window of steps: responses whose lengths and rewards drift, of prompts of different difficulty.

    Args:
        kind: which attempts are missing. random: each with 5 %; left out: the same with 10 %, and they are not
            generated again, so that groups differ in size; prompts: whole prompts with 3 %, as where a node fails;
            drifting: at random, by a share that grows while responses become longer; long: of long responses; easy: of
            prompts with high rewards.
        value: length, or reward: the mean of the prompt's judged samples, refills included.
    """
    draw, test = np.random.default_rng(seed), Dependence()
    for step in range(steps):
        missing, values, prompts = [], [], []
        for prompt in range(PROMPTS):
            hard = draw.normal()
            gone, judged, attempts = draw.random() < 0.03, [], []
            while len(attempts if kind == "left out" else judged) < SAMPLES:
                length = np.exp(5 + step / steps + 0.5 * hard + draw.normal())
                reward = float(draw.random() < 1 / (1 + np.exp(1 + hard)))
                share = {
                    "random": 0.05,
                    "left out": 0.1,
                    "drifting": 0.002 * (1 + 4 * step),
                    "prompts": float(gone and len(attempts) < SAMPLES),
                    "long": 0.2 if length > 600 else 0.01,
                    "easy": 0.15 if hard < -0.7 else 0.02,
                }[kind]
                attempts.append((draw.random() < share, length))
                if not attempts[-1][0]:
                    judged.append(reward)
            missing += [lost for lost, _ in attempts]
            mean = float(np.mean(judged))
            values += [length if value == "length" else mean for _, length in attempts]
            prompts += [prompt] * len(attempts)
        test.add(missing, ranks(values) if value == "length" else values, prompts)
    return test


@pytest.mark.parametrize("value", ["length", "reward"])
@pytest.mark.parametrize("kind", ["random", "left out", "drifting", "prompts"])
def test_no_false_alarm_where_samples_are_missing_at_random(kind, value) -> None:
    """Of 100 windows, at a level of 5 % 5 alarms are expected, and at most 13 in 999 of 1000 such experiments."""
    p_values = [one_window(seed, kind, value).p_value for seed in range(100)]
    assert sum(p < 0.05 for p in p_values) <= 13
    assert min(p_values) > 1e-4


@pytest.mark.parametrize(("kind", "value"), [("long", "length"), ("easy", "reward")])
def test_missingness_that_depends_on_the_sample_is_found(kind, value) -> None:
    tests = [one_window(seed, kind, value, steps=25) for seed in range(20)]
    assert all(test.p_value < 5e-4 and test.total > 0 for test in tests)


def test_too_few_samples_are_not_tested() -> None:
    test = Dependence()
    test.add([True] * 5 + [False] * 5, [9.0] * 5 + [1.0] * 5, list(range(10)))
    assert test.missing == 5 and test.z == 0 and test.p_value == 1
    before = test.state()
    for lost in ([False] * 3, [True] * 3, []):
        test.add(lost, [1.0, 2.0, 3.0][: len(lost)], list("abc")[: len(lost)])
    assert test.state() == before


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_ranks_are_means_of_equal_values(values: list[int], random) -> None:
    found = ranks(values)
    for value, rank in zip(values, found, strict=True):
        below, equal = sum(other < value for other in values), values.count(value)
        assert rank * max(len(values) - 1, 1) == pytest.approx(below + (equal - 1) / 2)
    order = list(range(len(values)))
    random.shuffle(order)
    assert ranks([values[i] for i in order]).tolist() == found[order].tolist()


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(-3, 3)), min_size=2, max_size=6).filter(
        lambda rows: sum(weight for weight, _, _ in rows) > 0.1
    )
)
def test_the_bound_holds_for_any_policy_and_any_way_to_be_missing(rows: list[tuple[float, float, float]]) -> None:
    """Complete enumeration of the responses: their probability, how often they are missing, and their reward."""
    pi, lost, reward = np.array(rows).T
    pi = pi / pi.sum()
    share = float(pi @ lost)
    if share > 1 - 1e-6:
        return
    judged = pi * (1 - lost) / (1 - share)
    distance = np.abs(judged - pi).sum() / 2
    assert distance == pytest.approx(pi @ np.abs(lost - share) / (2 * (1 - share)), abs=1e-9)
    assert distance <= share + 1e-9
    bound = bias_bound(round(share * 1_000_000), 1_000_000, float(reward.min()), float(reward.max()))
    assert abs(float((judged - pi) @ reward)) <= bound + 1e-5


def test_the_bound_is_reached() -> None:
    """Every response with the largest reward is missing: training sees the lowest alone."""
    for share, lowest, largest in itertools.product((0.05, 0.5), (-1.0, 0.0), (1.0, 2.0)):
        mean = (1 - share) * lowest + share * largest
        assert mean - lowest == pytest.approx(bias_bound(round(100 * share), 100, lowest, largest))
