"""Validation metrics against closed forms and against the definition, draw by draw."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.observe.step_metrics import (
    bootstrap_metric,
    calc_maj_val,
    process_validation_metrics,
    validation_metrics,
)
from hybridrl.observe.validation_metrics import pass_at_k

scores = st.floats(-5, 5, allow_nan=False)


@given(st.lists(scores, min_size=2, max_size=8), st.integers(1, 8))
@settings(max_examples=30)
def test_bootstrap_of_the_maximum_nears_its_closed_form(data: list[float], n: int) -> None:
    """E max of n draws with replacement from N sorted values: sum_i x_(i) ((i/N)^n - ((i-1)/N)^n)."""
    ordered, N = sorted(data), len(data)
    weights = [((i + 1) / N) ** n - (i / N) ** n for i in range(N)]
    expected = sum(x * w for x, w in zip(ordered, weights, strict=True))
    spread = sum(w * (x - expected) ** 2 for x, w in zip(ordered, weights, strict=True)) ** 0.5
    ((mean, std),) = bootstrap_metric(data, n, [np.max], n_bootstrap=4000)
    assert abs(mean - expected) <= 6 * spread / 4000**0.5 + 1e-9
    assert std == pytest.approx(spread, abs=0.1 * (max(data) - min(data)) + 1e-9)


def test_bootstrap_functions_see_the_same_draws() -> None:
    data = [0.0, 1.0, 5.0, 2.0]
    fast = bootstrap_metric(data, 3, [np.max, np.min, np.mean], seed=3)
    slow = bootstrap_metric(data, 3, [lambda d: max(d), lambda d: min(d), lambda d: sum(d) / len(d)], seed=3)
    assert np.allclose(fast, slow)
    assert bootstrap_metric(data, 3, [np.max], seed=4) != [fast[0]]


def test_bootstrap_leaves_global_random_state_alone() -> None:
    np.random.seed(0)
    random.seed(0)
    before = (np.random.get_state()[1].tolist(), random.getstate())
    bootstrap_metric([1.0, 2.0], 2, [np.max])
    validation_metrics(["a"] * 4, ["u"] * 4, {"acc": [0, 1, 0, 1], "pred": list("aabb")})
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before


@pytest.mark.parametrize(("data", "size"), [([], 1), ([1.0], 0)])
def test_bootstrap_of_nothing_is_refused(data: list[float], size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bootstrap_metric(data, size, [np.max])


def test_majority_vote() -> None:
    def votes(*pairs: tuple[object, float]) -> list[dict]:
        return [{"pred": pred, "val": val} for pred, val in pairs]

    assert calc_maj_val(votes(("a", 0), ("b", 1), ("b", 1)), "pred", "val") == 1
    assert calc_maj_val(votes(("a", 0), ("b", 1)), "pred", "val") == 0, "a tie goes to the first"
    assert calc_maj_val(votes(("b", 1), ("a", 0), ("a", 0), ("b", 1)), "pred", "val") == 1, "a tie goes to the first"
    assert calc_maj_val(votes(([1], 1), ([2], 0), ([1], 1)), "pred", "val") == 1, "answers may be lists"
    with pytest.raises(ValueError, match="at least one"):
        calc_maj_val([], "pred", "val")


prompts = st.lists(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(
            st.lists(scores, min_size=n, max_size=n), st.lists(st.sampled_from("abcd"), min_size=n, max_size=n)
        )
    ),
    min_size=1,
    max_size=5,
)


@given(prompts, st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_process_is_the_mean_over_prompts_of_the_definition(rows: list, shuffler: random.Random) -> None:
    """Prompts of different sizes, samples interleaved: grouping, every n, and the vote, against bootstrap_metric."""
    samples = [(f"u{i}", v, p) for i, (values, preds) in enumerate(rows) for v, p in zip(values, preds, strict=True)]
    order = sorted(range(len(samples)), key=lambda i: (shuffler.random(), i))
    # Samples of one prompt stay in their order; prompts are interleaved.
    queues = {f"u{i}": [s for s in samples if s[0] == f"u{i}"] for i in range(len(rows))}
    mixed = [queues[samples[i][0]].pop(0) for i in order]
    found = process_validation_metrics(
        ["src"] * len(mixed),
        [s[0] for s in mixed],
        {"acc": [s[1] for s in mixed], "pred": [s[2] for s in mixed]},
        seed=5,
    )["src"]["acc"]
    expected: dict[str, list[float]] = {}
    for values, preds in rows:
        n = len(values)
        expected.setdefault(f"mean@{n}", []).append(float(np.mean(values)))
        if n == 1:
            continue
        expected.setdefault(f"std@{n}", []).append(float(np.std(values)))
        data = [{"pred": p, "val": v} for p, v in zip(preds, values, strict=True)]
        for size in [s for s in (2, 4, 8) if s < n] + [n]:
            high, low = bootstrap_metric(values, size, [np.max, np.min], seed=5)
            (vote,) = bootstrap_metric(data, size, [lambda d: calc_maj_val(d, "pred", "val")], seed=5)
            for kind, (mean, std) in (("best", high), ("worst", low), ("maj", vote)):
                expected.setdefault(f"{kind}@{size}/mean", []).append(mean)
                expected.setdefault(f"{kind}@{size}/std", []).append(std)
    assert {name for name in found if not name.startswith("pass@")} == set(expected)
    for name, values in expected.items():
        assert found[name] == pytest.approx(float(np.mean(values)), abs=1e-9), name


def test_best_and_worst_bracket_the_mean_and_widen_with_n() -> None:
    rng = np.random.default_rng(0)
    found = process_validation_metrics(["s"] * 640, [str(i // 16) for i in range(640)], {"acc": rng.random(640)})["s"][
        "acc"
    ]
    best = [found[f"best@{n}/mean"] for n in (2, 4, 8, 16)]
    worst = [found[f"worst@{n}/mean"] for n in (2, 4, 8, 16)]
    assert worst == sorted(worst, reverse=True)
    assert best == sorted(best)
    assert worst[0] < found["mean@16"] < best[0]


def test_sources_are_kept_apart_and_equal_uids_of_two_sources_too() -> None:
    found = process_validation_metrics(["a", "b", "a"], ["u", "u", "u"], {"reward": [1.0, 5.0, 3.0]})
    assert found["a"]["reward"]["mean@2"] == 2.0
    assert found["b"]["reward"] == {"mean@1": 5.0}


def test_text_is_left_to_the_dumps_and_booleans_are_numbers() -> None:
    found = process_validation_metrics(["a"] * 2, ["u", "v"], {"acc": [True, np.bool_(False)], "note": ["x", "y"]})
    assert found == {"a": {"acc": {"mean@1": 0.5}}}


def test_samples_that_did_not_come_back_count_as_zero() -> None:
    expected = {("a", "u"): 2, ("a", "v"): 2, ("a", "lost"): 2}
    data = {"acc": [1.0, 1.0, 1.0], "pred": ["x", "x", "y"]}
    found = process_validation_metrics(["a"] * 3, ["u", "u", "v"], data, expected_acc_counts=expected)["a"]["acc"]
    assert found["mean@2"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found["maj@2/mean"] == pytest.approx((1 + 0.5 + 0) / 3, abs=0.03)
    with raises_with(ValueError, "'u'", "'a'", "2 samples", "expected_acc_counts", "says 1"):
        process_validation_metrics(["a"] * 2, ["u"] * 2, {"acc": [1, 1]}, expected_acc_counts={("a", "u"): 1})


def test_unequal_lists_are_named() -> None:
    with raises_with(ValueError, "reward", "1 entries", "2 samples"):
        process_validation_metrics(["a"] * 2, ["u"] * 2, {"reward": [1.0]})


def test_logged_names() -> None:
    data = {"acc": [1, 0, 1, 1], "reward": [0.5, 0, 1, 1], "pred": ["1", "2", "1", "1"]}
    found = validation_metrics(["gsm8k"] * 4, ["u"] * 4, data, num_turns=[1, 2, 3, 6])
    core = {name for name in found if name.startswith("val-core/")}
    assert core == {
        f"val-core/gsm8k/acc/{m}" for m in ("mean@4", "best@4/mean", "best@4/std", "maj@4/mean", "maj@4/std")
    }
    assert found["val-core/gsm8k/acc/mean@4"] == 0.75
    for name in ("acc/std@4", "acc/best@2/mean", "acc/worst@4/mean", "reward/mean@4", "reward/maj@2/mean"):
        assert f"val-aux/gsm8k/{name}" in found
    assert [found[f"val-aux/num_turns/{kind}"] for kind in ("min", "max", "mean")] == [1, 6, 3]
    assert "val-core/gsm8k/reward/mean@1" in validation_metrics(["gsm8k"], ["u"], {"reward": [0.5]})


@pytest.mark.parametrize(("other", "is_told"), [(None, True), ("yes", True), (0.0, False), (True, False)])
def test_a_mean_that_leaves_prompts_out_is_told(capsys, other, is_told):
    """A function that has no `acc` where it cannot read an answer would have an accuracy of 1."""
    source = f"source {other!r}"
    values = {"acc": [1.0, 1.0, other, 1.0], "pred": ["a", None, "b", "c"], "note": ["x", "y", "z", None]}
    process_validation_metrics([source] * 4 + ["else"], list("aabbc"), {k: [*v, None] for k, v in values.items()})
    told = capsys.readouterr().err
    assert (f"'acc' is no number for some samples of {source!r}" in told) == is_told
    assert "'pred'" not in told and "'note'" not in told and "'else'" not in told


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(sizes: tuple[int, int, int]) -> None:
    """By all draws of k of n samples without replacement."""
    n, right, k = sizes
    draws = list(itertools.combinations([1] * right + [0] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(max, draws)) / len(draws))


def test_pass_at_k_of_prompts_is_their_mean_and_only_of_zeros_and_ones() -> None:
    scores = {"u": [1, 0, 0, 0], "v": [1, 1, 1, 0], "w": [0, 0, 0, 0], "x": [True, True]}
    uids = [uid for uid, values in scores.items() for _ in values]
    values = [value for each in scores.values() for value in each]
    found = process_validation_metrics(["a"] * 14, uids, {"acc": values, "reward": [0.5, *values[1:]]})["a"]
    assert found["acc"]["pass@2"] == pytest.approx((0.5 + 1.0 + 0.0 + 1.0) / 4)
    assert found["acc"]["pass@4"] == pytest.approx((1.0 + 1.0 + 0.0) / 3)
    assert not any(name.startswith("pass@") for name in found["reward"])
    assert not any(
        name.startswith("pass@") for name in process_validation_metrics(["a"], ["u"], {"acc": [1]})["a"]["acc"]
    )
    for wrong in ((4, 1, 5), (4, 1, 0), (4, 5, 2)):
        with pytest.raises(ValueError, match="pass_at_k"):
            pass_at_k(*wrong)
