"""Sampling: the noise belongs to the sample; tokens follow the distribution whose log-probabilities are reported."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import UserError
from hybridrl.rollout.noise import stream_keys, uniforms
from hybridrl.rollout.sampling import SamplingParams, draw, truncate


def params(**changes) -> SamplingParams:
    return SamplingParams(
        **{"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 4} | changes
    )


def test_noise_does_not_depend_on_the_rows_beside() -> None:
    uids, samples = ["a", "b", "b", "c"], [0, 0, 1, 5]
    whole = uniforms(stream_keys(1, 7, "train", uids, samples), 16)
    for row in range(4):
        alone = uniforms(stream_keys(1, 7, "train", [uids[row]], [samples[row]]), 16)
        assert (whole[row] == alone[0]).all()


@pytest.mark.parametrize(
    "other",
    [
        (2, 7, "train", "a", 0),
        (1, 8, "train", "a", 0),
        (1, 7, "validate", "a", 0),
        (1, 7, "train", "b", 0),
        (1, 7, "train", "a", 1),
    ],
)
def test_every_part_of_the_key_changes_the_noise(other) -> None:
    seed, step, purpose, uid, sample = other
    first = uniforms(stream_keys(1, 7, "train", ["a"], [0]), 8)
    second = uniforms(stream_keys(seed, step, purpose, [uid], [sample]), 8)
    assert (first != second).all()


def test_noise_is_uniform_and_uncorrelated() -> None:
    noise = uniforms(stream_keys(0, 0, "train", [str(i) for i in range(2000)], [0] * 2000), 50)
    assert noise.min() >= 0 and noise.max() < 1
    counts, _ = np.histogram(noise, bins=20, range=(0, 1))
    expected = noise.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 50  # chi-squared, 19 degrees of freedom: p < 1e-4 beyond 48
    flat = noise - 0.5
    assert abs((flat[:, :-1] * flat[:, 1:]).mean()) < 5 / (12 * np.sqrt(noise.size))
    assert abs((flat[:-1] * flat[1:]).mean()) < 5 / (12 * np.sqrt(noise.size))


@pytest.mark.parametrize(
    "setting", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 1.7, "top_k": 5, "top_p": 0.9}]
)
def test_tokens_follow_the_reported_distribution(setting) -> None:
    torch.manual_seed(0)
    row = torch.randn(9)
    draws = 40_000
    noise = torch.from_numpy(uniforms(stream_keys(0, 0, "train", [str(i) for i in range(draws)], [0] * draws), 1)[:, 0])
    chosen = params(**setting)
    tokens, log_probs = draw(row.expand(draws, -1), chosen, noise)
    # An independent statement of the distribution: python loops over sorted probabilities.
    probs = torch.softmax(row.double() / chosen.temperature, 0)
    order = probs.argsort(descending=True).tolist()
    kept = order[: chosen.top_k] if chosen.top_k > 0 else order
    mass, nucleus = 0.0, []
    total = sum(float(probs[token]) for token in kept)
    for token in kept:
        if mass >= chosen.top_p:
            break
        nucleus.append(token)
        mass += float(probs[token]) / total
    expected = torch.zeros(9, dtype=torch.float64)
    expected[nucleus] = probs[nucleus] / probs[nucleus].sum()
    frequency = torch.bincount(tokens, minlength=9).double() / draws
    assert (frequency[expected == 0] == 0).all()
    assert (frequency - expected).abs().max() < 5 * (0.25 / draws) ** 0.5
    torch.testing.assert_close(log_probs.double(), expected[tokens].log(), atol=1e-5, rtol=0)


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.integers(2, 40), st.floats(0.05, 1.0), st.integers(1, 40))
def test_truncation_keeps_the_smallest_nucleus(seed, vocabulary, top_p, top_k) -> None:
    scores = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed))
    kept = truncate(scores, top_k, top_p).isfinite()
    assert (kept.sum(-1) >= 1).all() and (kept.sum(-1) <= max(top_k, 1)).all()
    for row in range(3):
        if top_p == 1.0:
            continue
        within = torch.softmax(scores[row].topk(min(top_k, vocabulary)).values.double(), 0)
        count = int(kept[row].sum())
        assert within[:count].sum() >= top_p - 1e-5
        assert count == 1 or within[: count - 1].sum() < top_p + 1e-5


def test_extreme_noise_never_draws_what_was_dropped() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0, float("-inf")]] * 2)
    tokens, log_probs = draw(logits, params(), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [0, 2] and log_probs.isfinite().all()


def test_greedy_takes_the_most_likely_token() -> None:
    logits = torch.randn(5, 11)
    tokens, log_probs = draw(logits, params(do_sample=False), torch.zeros(5, dtype=torch.float64))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).max(-1).values)


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": 0}, {"top_k": -3}])
def test_settings_out_of_range_are_refused(bad) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        params(**bad)


def test_a_draw_sums_nothing_in_an_order_that_matters(monkeypatch) -> None:
    """PyTorch's deterministic mode refuses cumulative sums of floating-point numbers on a GPU."""
    cumsum = torch.Tensor.cumsum

    def of_integers(self, *args, **options):
        assert not (options.get("dtype") or self.dtype).is_floating_point
        return cumsum(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "cumsum", of_integers)
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0)) * 3
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, _ = draw(logits, params(top_p=0.9), uniform)
    probs = truncate(logits, -1, 0.9).double().softmax(-1).numpy()
    rows = zip(probs, uniform.tolist(), strict=True)
    assert tokens.tolist() == [np.searchsorted(np.cumsum(row), u * row.sum(), side="right") for row, u in rows]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.5 - 2**-53, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, params(), uniform)[0].tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("vocabulary", [7, 1023, 1024, 1025, 5000])
def test_the_draw_inverts_the_whole_distribution(vocabulary) -> None:
    """It is searched block by block; the tokens are those of the cumulative sums over the whole vocabulary."""
    torch.manual_seed(vocabulary)
    logits = torch.randn(400, vocabulary) * 4
    logits[:50, vocabulary // 2 :] = float("-inf")
    uniform = torch.rand(400, dtype=torch.float64)
    uniform[:4] = torch.tensor([0.0, 1 - 2**-53, 0.5, 2**-60], dtype=torch.float64)
    tokens, _ = draw(logits, params(), uniform)
    masses = (logits.log_softmax(-1).exp().double() * 2.0**52).round().long()
    cumulative = masses.cumsum(-1)
    for row in range(400):
        wanted = int(float(uniform[row]) * int(cumulative[row, -1]))
        expected = int((cumulative[row] > wanted).int().argmax())
        assert int(tokens[row]) == expected
        assert masses[row, expected] > 0
