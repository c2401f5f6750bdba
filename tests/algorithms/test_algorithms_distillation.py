"""Distillation losses: values and gradients against the formulas in float64, and what is the same by definition."""

import math

import numpy as np
import pytest
import torch
from raising import raises_with

from hybridrl.algorithms.distillation import (
    distillation_losses,
    get_distillation_loss_fn,
    log_probs_at,
    register_distillation_loss,
    top_log_probs,
    vocabulary_losses,
)
from hybridrl.errors import AlgorithmError
from hybridrl.registry import DISTILLATION_LOSSES

N, V, K = 9, 13, 5
TOKENS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
TOP = ("forward_kl_topk", "reverse_kl_topk", "forward_kl_topk_tail", "reverse_kl_topk_tail")
VOCABULARY = ("forward_kl", "reverse_kl", "jsd")


def logits(seed: int) -> torch.Tensor:
    return 2.0 * torch.randn(N, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def expected(name: str, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The formulas, of log p and log q over the last dimension (or of a token)."""
    if name in ("kl", "k1"):
        return p - q
    if name == "abs":
        return np.abs(p - q)
    if name in ("mse", "k2"):
        return 0.5 * (p - q) ** 2
    if name in ("low_var_kl", "k3"):
        return np.minimum(np.exp(q - p) - 1 - (q - p), 10)
    if name.endswith("_tail"):
        p, q = (np.concatenate([x, np.log1p(-np.exp(x).sum(-1, keepdims=True))], -1) for x in (p, q))
    if name == "jsd":
        m = np.log((np.exp(p) + np.exp(q)) / 2)
        return 0.5 * ((np.exp(p) * (p - m)).sum(-1) + (np.exp(q) * (q - m)).sum(-1))
    if name.startswith("forward"):
        return (np.exp(q) * (q - p)).sum(-1)
    return (np.exp(p) * (p - q)).sum(-1)


def test_all_built_in_losses_are_here() -> None:
    ours = [name for name in DISTILLATION_LOSSES.names() if DISTILLATION_LOSSES.is_builtin(name)]
    assert sorted(ours) == sorted((*TOKENS, *TOP, *VOCABULARY))
    assert [DISTILLATION_LOSSES.metadata(name).reads for name in (*TOKENS[:1], *TOP, *VOCABULARY)] == [
        "tokens",
        *["top"] * 4,
        *["vocabulary"] * 3,
    ]
    assert [name for name in ours if not DISTILLATION_LOSSES.metadata(name).direct] == ["kl", "k1"]


@pytest.mark.parametrize("name", TOKENS)
def test_of_the_sampled_token(name: str) -> None:
    p, q = (log_softmax(logits(seed).numpy())[:, 3] for seed in (0, 1))
    own = torch.tensor(p, requires_grad=True)
    found = distillation_losses(name, own, torch.tensor(q), log_prob_min_clamp=-0.1)  # for several tokens only
    np.testing.assert_allclose(found.detach().numpy(), expected(name, p, q), rtol=1e-10)
    found.sum().backward()
    step = 1e-6
    slope = (expected(name, p + step, q) - expected(name, p - step, q)) / (2 * step)
    np.testing.assert_allclose(own.grad.numpy(), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [*TOP, *VOCABULARY])
@pytest.mark.parametrize("rows", [2, N])
def test_from_logits_a_chunk_at_a_time(name: str, rows: int, monkeypatch) -> None:
    """Value and gradient with other temperatures of both models, in chunks of two rows and in one."""
    monkeypatch.setattr("hybridrl.algorithms.distillation.rows_at_a_time", lambda *_: rows)
    own, teacher = logits(0).requires_grad_(), logits(1)
    temperatures = (0.7, 1.3)

    def of(z: np.ndarray) -> np.ndarray:
        p, q = log_softmax(z / temperatures[0]), log_softmax(teacher.numpy() / temperatures[1])
        if name in TOP:
            chosen = np.argsort(-q, axis=-1)[:, :K]
            p, q = (np.take_along_axis(x, chosen, -1) for x in (p, q))
        return expected(name, p, q)

    if name in TOP:
        log_q, ids = top_log_probs(teacher, K, temperatures[1])
        found = distillation_losses(name, log_probs_at(own, ids, temperatures[0]), log_q)
    else:
        found = vocabulary_losses(name, own, teacher, *temperatures)
    np.testing.assert_allclose(found.detach().numpy(), of(own.detach().numpy()), rtol=1e-9, atol=1e-12)
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    (found * weights).sum().backward()
    base, step = own.detach().numpy(), 1e-6
    for column in range(V):
        moved = np.zeros_like(base)
        moved[:, column] = step
        slope = weights.numpy() * (of(base + moved) - of(base - moved)) / (2 * step)
        np.testing.assert_allclose(own.grad.numpy()[:, column], slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("top", "whole"), [("forward_kl_topk", "forward_kl"), ("reverse_kl_topk", "reverse_kl")])
def test_all_tokens_are_the_vocabulary(top: str, whole: str) -> None:
    results = []
    for name in (top, f"{top}_tail", whole):
        own = logits(0).requires_grad_()
        if name == whole:
            found = vocabulary_losses(name, own, logits(1))
        else:
            log_q, ids = top_log_probs(logits(1), V)
            found = distillation_losses(name, log_probs_at(own, ids), log_q)
        found.sum().backward()
        results.append((found.detach(), own.grad))
    for found, gradient in results[:2]:
        torch.testing.assert_close(found, results[2][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradient, results[2][1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_rest_of_the_vocabulary_makes_it_a_divergence(count: int) -> None:
    """Over the tokens alone a KL may be negative; with the rest it lies between 0 and the whole one."""
    log_q, ids = top_log_probs(logits(1), count)
    log_p = log_probs_at(logits(0), ids)
    assert (distillation_losses("reverse_kl_topk", log_p, log_q) < 0).any()
    for name in ("forward_kl", "reverse_kl"):
        tail = distillation_losses(f"{name}_topk_tail", log_p, log_q)
        assert (tail >= 0).all() and (tail <= vocabulary_losses(name, logits(0), logits(1)) + 1e-12).all()


@pytest.mark.parametrize("name", [*TOP, *VOCABULARY])
def test_a_policy_that_is_the_teacher_learns_nothing(name: str) -> None:
    own = logits(0).requires_grad_()
    if name in TOP:
        log_q, ids = top_log_probs(own.detach(), V if name == "forward_kl_topk" else K)
        found = distillation_losses(name, log_probs_at(own, ids), log_q)
    else:
        found = vocabulary_losses(name, own, own.detach())
    assert found.abs().max() < 1e-12
    found.sum().backward()
    if name != "reverse_kl_topk":  # whose gradient there moves probability out of the top tokens
        assert own.grad.abs().max() < 1e-12


def test_impossible_tokens_and_the_clamp() -> None:
    own, teacher = logits(0), logits(1)
    teacher[:, 2] = own[:, 4] = -torch.inf
    own.requires_grad_()
    for name in VOCABULARY:
        found = vocabulary_losses(name, own, teacher)
        assert torch.isfinite(found).all() and (found > 0).all()
        (gradient,) = torch.autograd.grad(found.sum(), own)
        assert torch.isfinite(gradient).all()
    assert vocabulary_losses("jsd", own, teacher).max() < math.log(2)
    clamped = vocabulary_losses("forward_kl", own, teacher, log_prob_min_clamp=-3.0)
    p, q = (np.maximum(log_softmax(x.detach().numpy()), -3.0) for x in (own, teacher))
    np.testing.assert_allclose(clamped.detach().numpy(), (np.exp(q) * (q - p)).sum(-1), rtol=1e-9)


def test_half_precision_is_computed_in_float32_and_nothing_is_left_of_no_tokens() -> None:
    own, teacher = logits(0).bfloat16().requires_grad_(), logits(1).bfloat16()
    found = vocabulary_losses("reverse_kl", own, teacher)
    exact = vocabulary_losses("reverse_kl", own.detach().double(), teacher.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
    found.sum().backward()
    assert own.grad.dtype == torch.bfloat16
    none = torch.zeros(0, V, requires_grad=True)
    assert vocabulary_losses("jsd", none, none.detach()).shape == (0,)
    log_q, ids = top_log_probs(none.detach(), K)
    assert log_q.shape == ids.shape == (0, K) and log_probs_at(none, ids).shape == (0, K)


def test_what_does_not_fit_is_refused() -> None:
    with raises_with(AlgorithmError, "topk=14", "13 tokens"):
        top_log_probs(logits(0), V + 1)
    with pytest.raises(AlgorithmError, match=r"\(9, 13\).*\(9, 12\).*one of the same size"):
        vocabulary_losses("jsd", logits(0), logits(1)[:, 1:])
    with pytest.raises(AlgorithmError, match=r"both must be alike"):
        distillation_losses("k3", torch.zeros(2, 3), torch.zeros(2, 4))
    with raises_with(AlgorithmError, "k4", "forward_kl_topk"):
        get_distillation_loss_fn("k4")
    with raises_with(AlgorithmError, "reads='words'"):
        register_distillation_loss("of_words", reads="words")(lambda p, q: p)


def test_a_loss_of_ones_own() -> None:
    try:
        register_distillation_loss("squares", reads="top")(lambda p, q: (p - q).square().sum(-1))
        assert DISTILLATION_LOSSES.metadata("squares").reads == "top"
        found = distillation_losses("squares", torch.zeros(2, 3, K), torch.ones(2, 3, K))
        assert torch.equal(found, torch.full((2, 3), float(K)))
        register_distillation_loss("unreduced", reads="top")(lambda p, q: p - q)
        with pytest.raises(AlgorithmError, match=r"unreduced returned shape \(2, 3, 5\); it must be \(2, 3\)"):
            distillation_losses("unreduced", torch.zeros(2, 3, K), torch.ones(2, 3, K))
    finally:
        for name in ("squares", "unreduced"):
            DISTILLATION_LOSSES.remove(name)
