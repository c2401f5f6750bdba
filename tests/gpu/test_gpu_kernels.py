"""Triton kernels and Liger's kernels on the GPU: the numbers of PyTorch's own operations, in less time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HALF_BILLION
from gpu_helpers import batch_of, check_errors, lognormal, seconds

from hybridrl.algorithms.functional import kernels_for, token_statistics
from hybridrl.algorithms.linear_statistics import linear_token_statistics
from hybridrl.engine import MicroBatching

pytestmark = pytest.mark.timeout(300)
VOCABULARY = HALF_BILLION["vocab_size"]
MICRO = MicroBatching(max_tokens=16384)
#: of values and of gradients, which are stored in the dtype of the logits
TOLERANCES = {torch.float32: (2e-5, 1e-6), torch.bfloat16: (2e-5, 1e-3)}


def statistics(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    logits = logits.detach().requires_grad_()
    found = token_statistics(logits, labels, 1.3, entropy=True, sum_pi_squared=True)
    (weights[0] * found["log_probs"] + weights[1] * found["entropy"]).sum().backward()
    assert logits.grad is not None
    return [*(value.detach().double() for value in found.values()), logits.grad.double()]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_statistics_are_those_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(64, VOCABULARY, device="cuda")).to(dtype)
    logits[:, 5:9] = -torch.inf  # as some models exclude words
    labels = torch.randint(10, VOCABULARY, (64,), device="cuda")
    weights = torch.randn(2, 64, device="cuda")
    assert kernels_for(logits) is not None and kernels_for(logits.double()) is None
    found, exact = statistics(logits, labels, weights), statistics(logits.double(), labels, weights)
    of_values, of_gradients = TOLERANCES[dtype]
    for value, expected in zip(found[:-1], exact[:-1], strict=True):
        torch.testing.assert_close(value, expected, rtol=of_values, atol=of_values)
    torch.testing.assert_close(found[-1], exact[-1], rtol=8e-3 if dtype == torch.bfloat16 else 1e-4, atol=of_gradients)


def test_statistics_without_logits_are_those_with_them() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3000, 256, device="cuda", dtype=torch.bfloat16)
    weight = (0.1 * torch.randn(VOCABULARY, 256, device="cuda")).bfloat16()
    labels = torch.randint(0, VOCABULARY, (3000,), device="cuda")
    found = []
    for whole in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        given = (h @ w.t(), labels) if whole else (h, w, None, labels)
        values = (token_statistics if whole else linear_token_statistics)(*given, entropy=True)  # type: ignore[operator]
        (values["log_probs"] + 0.1 * values["entropy"]).sum().backward()
        found.append([values["log_probs"], values["entropy"], h.grad, w.grad])
    for tiled, expected in zip(*found, strict=True):
        error = float((tiled.float() - expected.float()).norm() / expected.float().norm())
        assert error < 1e-2, error


def test_speed_of_statistics(figures) -> None:
    """Against one pass over the logits forward, and reading and writing them backward."""
    logits = torch.randn(8192, VOCABULARY, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (8192,), device="cuda")

    def both() -> None:
        token_statistics(logits, labels)["log_probs"].sum().backward()
        logits.grad = None

    taken = seconds(both, times=5)
    other = torch.empty_like(logits)
    copied = seconds(lambda: other.copy_(logits.detach()), times=5)
    figures(statistics_ms=1e3 * taken, statistics_over_1_5_copies=taken / (1.5 * copied))


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_a_model_with_liger_computes_the_same(half_billion: Path, figures) -> None:
    from engine_helpers import make_engine, policy_loss

    batch = batch_of(lognormal(16, 300, 1000), VOCABULARY)
    mask = batch.batch["response_mask"].bool()
    sgd = {"optimizer": "SGD", "lr": 1.0, "clip_grad": 0.0, "weight_decay": 0.0, "lr_scheduler_type": "constant"}
    log_probs, gradients, times = {}, {}, {}
    for liger in (True, False):
        engine: Any = make_engine(half_billion, optim={**sgd, "lr_warmup_steps": 0}, model={"use_liger": liger})
        assert ("Liger" in type(engine.module.model.norm).__name__ + repr(engine.module.model.norm.forward)) == liger
        before = {name: tensor.clone() for name, tensor in engine.export_weights()}
        log_probs[liger] = engine.infer(batch, MICRO)["log_probs"][mask]
        engine.train_batch(batch, MICRO, policy_loss)
        gradients[liger] = torch.cat([(before[n] - t).flatten() for n, t in engine.export_weights()])
        times[liger] = seconds(lambda engine=engine: engine.train_batch(batch, MICRO, policy_loss))
        del engine, before
    exact = make_engine(half_billion, dtype="float32").infer(batch, MICRO)["log_probs"][mask]
    figures(**check_errors(log_probs[True], log_probs[False], exact), liger_ratio=times[True] / times[False])
    alike = float(torch.nn.functional.cosine_similarity(gradients[True], gradients[False], dim=0))
    figures(gradient_cosine=alike)
    assert alike > 0.99
