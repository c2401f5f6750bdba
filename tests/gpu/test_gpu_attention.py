"""Kernels of attention over packed rows: against plain attention in float32, and against each other in time.

Those of the package flash-attn-4 are tested where it is installed and made for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HALF_BILLION
from gpu_helpers import batch_of, check_errors, lognormal, seconds

from hybridrl.engine import MicroBatching
from hybridrl.utils import device, varlen

pytestmark = pytest.mark.timeout(300)
KERNELS = pytest.mark.parametrize("kernel", [varlen.by_pytorch, varlen.by_package], ids=["PyTorch", "flash-attn-4"])
LENGTHS = [300, 1, 129, 70]
#: heads, heads of keys, their size, and how many tokens one attends to
SHAPES = [(14, 2, 64, 0), (12, 2, 128, 0), (4, 4, 128, 50), (4, 1, 256, 0), (4, 2, 80, 0)]


def is_there(kernel: Callable[..., torch.Tensor]) -> None:
    if kernel is varlen.by_package and not varlen.has_package():
        pytest.skip("flash-attn-4 is not installed, or not made for this GPU")


def tensors_of(tokens: int, keys: int, heads: int, groups: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(count, number, size, device="cuda", dtype=torch.bfloat16, generator=generator, requires_grad=True)
        for count, number in ((tokens, heads), (keys, groups), (keys, groups))
    ]


def boundaries(lengths: list[int]) -> torch.Tensor:
    return varlen.row_boundaries(lengths).cuda()


def both_ways(
    attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor], rows: varlen.PackedRows
) -> list[torch.Tensor]:
    """The output, and the gradients of the sum of its products with fixed numbers."""
    scale = tensors[0].shape[2] ** -0.5
    out = attend(*tensors, rows, scale)
    weights = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, tensors, weights.to(out.dtype))]


@pytest.mark.parametrize("kernel", [varlen.by_pytorch, varlen.varlen_attention], ids=["PyTorch", "what is used"])
@pytest.mark.parametrize("more_keys", [0, 200])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_compute_what_plain_attention_does(kernel, more_keys: int, shape: tuple[int, int, int, int]) -> None:
    """The package's gradients for heads of 80 were wrong on an H200 (4.0.0b36), which `package_works` has to notice."""
    heads, groups, size, window = shape
    of_keys = [length + more_keys for length in LENGTHS]
    rows = varlen.PackedRows(boundaries(LENGTHS), max(LENGTHS), window, boundaries(of_keys), max(of_keys))
    tensors = tensors_of(sum(LENGTHS), sum(of_keys), heads, groups, size)
    exact = both_ways(varlen.one_by_one, [tensor.detach().float().requires_grad_() for tensor in tensors], rows)
    for one, other in zip(both_ways(kernel, tensors, rows), exact, strict=True):
        assert float((one.float() - other).norm() / other.norm()) < 0.02


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_the_package_is_used_where_it_is_there(shape: tuple[int, int, int, int]) -> None:
    is_there(varlen.by_package)
    heads, groups, size, window = shape
    assert varlen.package_works(varlen.Heads(size, heads, groups, windowed=window > 0), False)


@KERNELS
def test_deterministic_gradients(kernel) -> None:
    is_there(kernel)
    rows = varlen.PackedRows(boundaries([2048] * 4), 2048)
    tensors = tensors_of(8192, 8192, 14, 2, 64)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (both_ways(kernel, tensors, rows) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("rows_of", [1, 4])
def test_time_of_the_package(figures, rows_of: int) -> None:
    """Forward and backward over 16,384 tokens with the heads of Qwen2.5 1.5B."""
    is_there(varlen.by_package)
    lengths = [16384 // rows_of] * rows_of
    rows, tensors = varlen.PackedRows(boundaries(lengths), lengths[0]), tensors_of(16384, 16384, 12, 2, 128)
    taken = [
        seconds(lambda kernel=kernel: both_ways(kernel, tensors, rows), times=5)
        for kernel in (varlen.by_package, varlen.by_pytorch)
    ]
    figures(flash_attn_4_ms=1e3 * taken[0], flash_attn_4_ratio=taken[0] / taken[1])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_log_probs_of_a_model(half_billion: Path, figures, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """With the package against PyTorch's kernel, both against float32."""
    from engine_helpers import make_engine

    is_there(varlen.by_package)
    batch, micro = batch_of(lognormal(12, 300, 1500), HALF_BILLION["vocab_size"]), MicroBatching(max_tokens=16384)
    mask = batch.batch["response_mask"].bool()

    def log_probs(**settings: Any) -> torch.Tensor:
        found = make_engine(half_billion, **settings).infer(batch, micro)["log_probs"][mask]
        device.empty_cache()
        return found

    found = log_probs(use_torch_compile=compiled)
    exact = log_probs(dtype="float32")
    monkeypatch.setattr(varlen, "package_function", lambda: None)
    figures(**check_errors(found, log_probs(), exact))
