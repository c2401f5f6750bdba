"""The Triton kernels of a softmax's statistics, run by Triton's interpreter, against float64.

Triton reads the variable when it is imported, so these tests run in a process of their own, which the last one starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hybridrl.algorithms import functional
from hybridrl.algorithms.functional import token_statistics
from hybridrl.algorithms.linear_statistics import linear_token_statistics, tiles_of

VARIABLE = "TRITON_INTERPRET"
interpreted = pytest.mark.skipif(os.environ.get(VARIABLE) != "1", reason="the test that runs this file sets it")


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The library computes with the kernels, also on a CPU, 16 words at a time."""
    from hybridrl.algorithms import softmax_kernels

    monkeypatch.setattr(functional, "kernels_for", lambda logits: softmax_kernels)
    monkeypatch.setattr("hybridrl.algorithms.linear_statistics.kernels_for", lambda logits: softmax_kernels)
    for name in ("statistics", "gradient"):
        monkeypatch.setattr(getattr(softmax_kernels, name), "__defaults__", (16,))
    return softmax_kernels


def found(logits: torch.Tensor, labels: torch.Tensor, temperature: float, inplace: bool = False) -> list[torch.Tensor]:
    """Values and the gradient of a function of them."""
    source = logits.detach().clone().requires_grad_()
    values = token_statistics(
        source * 1.0, labels, temperature, entropy=True, sum_pi_squared=True, inplace_backward=inplace
    )
    (values["log_probs"] * values["entropy"].detach() + values["entropy"] * 0.3).sum().backward()
    assert source.grad is not None
    return [*(value.detach().double() for value in values.values()), source.grad.double()]


@interpreted
@pytest.mark.parametrize("vocabulary", [31, 16, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("inplace", [True, False])
def test_values_and_gradients(on_kernels: ModuleType, vocabulary: int, temperature: float, inplace: bool) -> None:
    draw = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(6, vocabulary, generator=draw)
    labels = torch.randint(vocabulary, (6,), generator=draw)
    logits[1, :16] = -torch.inf  # all words of the first block are excluded, but that of the label
    logits[1, labels[1]] = 0.0
    mine = found(logits, labels, temperature, inplace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "kernels_for", lambda logits: None)
        exact = found(logits.double(), labels, temperature)
    for value, expected in zip(mine, exact, strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-5, atol=2e-6)


@interpreted
@pytest.mark.parametrize("wanted", [("log_probs",), ("entropy",), ("sum_pi_squared",)])
def test_each_alone(on_kernels: ModuleType, wanted: tuple[str, ...]) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(5) if wanted == ("log_probs",) else None
    options = {name: True for name in wanted if name != "log_probs"}
    values = token_statistics(logits, labels, **options)
    log_p = logits.double().log_softmax(-1)
    exact = {
        "log_probs": log_p[torch.arange(5), torch.arange(5)],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "sum_pi_squared": (2 * log_p).exp().sum(-1),
    }
    assert set(values) == set(wanted)
    torch.testing.assert_close(values[wanted[0]].double(), exact[wanted[0]], rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("bias", [True, False])
def test_without_whole_logits(on_kernels: ModuleType, bias: bool, cap: float | None) -> None:
    """Tiles that hold a token's label and tiles that do not."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=draw), torch.randn(50, 8, generator=draw)
    offset = torch.randn(50, generator=draw) if bias else None
    labels = torch.randint(50, (9,), generator=draw)
    if offset is not None:
        offset[labels[0]] = -torch.inf  # an excluded word
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors = [None if x is None else x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight, offset)]
        with pytest.MonkeyPatch.context() as patch:
            if dtype == torch.float64:
                patch.setattr("hybridrl.algorithms.linear_statistics.kernels_for", lambda logits: None)
            options: dict[str, Any] = {"entropy": True, "chunk_size": 2, "multiplier": 1.2, "soft_cap": cap}
            values = linear_token_statistics(*tensors, labels, 0.8, **options)  # type: ignore[arg-type]
            (values["log_probs"] - 0.2 * values["entropy"]).sum().backward()
        results.append([values["log_probs"], values["entropy"], *(x.grad for x in tensors if x is not None)])
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 700, 14336])
@pytest.mark.parametrize("elements", [1 << 10, 1 << 23, 1 << 27])
def test_tiles_cover_everything_once_and_begin_at_even_addresses(tokens: int, elements: int) -> None:
    words = 151936
    covered, tiles = 0, tiles_of(tokens, words, elements)
    for part, columns in tiles:
        rows = len(range(*part.indices(tokens)))
        sizes = [len(range(*column.indices(words))) for column in columns]
        assert max(sizes) * rows <= elements
        assert len(sizes) == 1 or sizes[0] < 128 or all(column.start % 128 == 0 for column in columns)
        covered += rows * sum(sizes)
    assert covered == tokens * words


@pytest.mark.slow(8)
def test_the_kernels_in_triton_s_interpreter(finish) -> None:
    pytest.importorskip("triton", reason="Triton comes with vLLM, SGLang, and torch for GPUs")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(Path(__file__))]
    command += ["-k", "not interpreter and not tiles"]
    ended: subprocess.CompletedProcess[str] = finish(command, limit=200, env={**os.environ, VARIABLE: "1"})
    assert ended.returncode == 0 and "19 passed" in ended.stdout and "skipped" not in ended.stdout, ended.stdout[-3000:]
