"""Attention over packed rows: which kernel is used, and plain attention, with which a kernel is compared.

A stand-in for the package flash-attn-4 computes on a CPU; `tests/gpu/test_gpu_attention.py` runs the package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from hybridrl.utils import device, varlen

#: what the package does, by its arguments; `{change}` spoils the result
PACKAGE = """
import torch

calls = []

def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                           window_size, deterministic):
    calls.append((window_size, deterministic))
    assert causal
    window = 0 if window_size[0] is None else window_size[0] + 1
    out = []
    for number in range(len(cu_seqlens_q) - 1):
        a, b = cu_seqlens_q[number : number + 2].tolist()
        c, d = cu_seqlens_k[number : number + 2].tolist()
        assert b - a <= max_seqlen_q and d - c <= max_seqlen_k
        repeat = q.shape[1] // k.shape[1]
        keys, values = (x[c:d].repeat_interleave(repeat, 1).float() for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys) * softmax_scale
        place, seen = torch.arange(d - c - (b - a), d - c)[:, None], torch.arange(d - c)[None]
        hidden = (seen > place) | ((seen <= place - window) if window else torch.zeros(1, dtype=torch.bool))
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", shares, values))
    result = torch.cat(out).to(q.dtype)
    {change}
    return result, None
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs the stand-in, on a machine that looks like one with a Hopper GPU."""

    def clear() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
            del sys.modules[name]
        varlen.package_function.cache_clear()
        varlen.package_works.cache_clear()

    def install(change: str = "", text: str = PACKAGE, capability: tuple[int, int] = (9, 0)) -> None:
        folder = tmp_path / "flash_attn" / "cute"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text.replace("{change}", change))
        info = tmp_path / "flash_attn_4-4.0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(device, "compute_capability", lambda: capability)
        clear()

    clear()
    yield install
    clear()


def tensors(tokens: int, keys: int, heads: int = 4, groups: int = 2, size: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, size), (keys, groups, size), (keys, groups, size))
    return [torch.randn(*shape, generator=generator, requires_grad=True) for shape in shapes]


def rows(lengths: list[int], window: int = 0) -> varlen.PackedRows:
    return varlen.PackedRows(varlen.row_boundaries(lengths), max(lengths), window)


def test_without_the_package_pytorch_computes(installed) -> None:
    assert not varlen.has_package()


def test_the_package_computes_what_plain_attention_does(installed, capsys: pytest.CaptureFixture[str]) -> None:
    installed()
    assert varlen.has_package()
    q, k, v = tensors(50, 50)
    for window in (0, 7):
        packed = rows([3, 40, 7], window)
        found, exact = varlen.varlen_attention(q, k, v, packed, 0.5), varlen.one_by_one(q, k, v, packed, 0.5)
        torch.testing.assert_close(found, exact)
        for one, other in zip(
            torch.autograd.grad(found.square().sum(), (q, k, v)),
            torch.autograd.grad(exact.square().sum(), (q, k, v)),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    calls = sys.modules["flash_attn.cute"].calls
    assert calls[-1][0] == (6, 0) and {call[0] for call in calls[:2]} == {(None, None)}
    assert "flash-attn-4" not in capsys.readouterr().err


def test_each_shape_of_heads_is_tried_once(installed) -> None:
    installed()
    for _ in range(2):
        for size in (8, 16):
            varlen.varlen_attention(*tensors(9, 9, size=size), rows([9]), 0.5)
    assert len(sys.modules["flash_attn.cute"].calls) == 2 + 4
    with torch.no_grad():
        varlen.varlen_attention(*tensors(9, 9), rows([9]), 0.5)
    assert len(sys.modules["flash_attn.cute"].calls) == 6 + 2  # without gradients
    varlen.varlen_attention(*tensors(9, 9), rows([9], window=3), 0.5)
    assert [call[0] for call in sys.modules["flash_attn.cute"].calls[8:]] == [(39, 0), (2, 0)]


def test_deterministic_kernels_are_tried_by_themselves(installed) -> None:
    """The package is told of it, and they are others than those that were tried before."""
    installed()
    for deterministic in (False, True, False):
        torch.use_deterministic_algorithms(deterministic)
        try:
            varlen.varlen_attention(*tensors(9, 9), rows([9]), 0.5)
        finally:
            torch.use_deterministic_algorithms(False)
    told = [call[1] for call in sys.modules["flash_attn.cute"].calls]
    assert told == [False, False, True, True, False]  # tried and used, tried and used, used


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("result = result * 1.1", "heads of size 8 its results are 0.1 away from those of plain attention"),
        ("result[0] = float('nan')", "its results are nan away"),
        ("result.register_hook(lambda gradient: gradient * float('nan'))", "its results are nan away"),
        ("result = result.detach()", "heads of size 8 fail (RuntimeError: "),
        ("result = result + (result - result.detach()) * 0.2", "0.2 away"),
        ("raise ValueError('no such kernel')", "heads of size 8 fail (ValueError: no such kernel)"),
    ],
)
def test_a_package_that_computes_something_else_is_not_used(
    installed, change: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(change)
    for _ in range(2):
        assert not varlen.package_works(varlen.Heads(8, 4, 2, torch.float32), False)
    told = capsys.readouterr().err
    assert told.count("the package flash-attn-4 is installed and not used") == 1
    assert said in told and "attention is computed by PyTorch" in told


def test_too_little_memory_for_the_try_is_not_the_packages_fault(installed) -> None:
    """The engine repeats the micro-batch with fewer tokens."""
    installed("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            varlen.package_works(varlen.Heads(8, 4, 2, torch.float32), False)


def test_a_package_that_cannot_be_imported_is_told(installed, capsys: pytest.CaptureFixture[str]) -> None:
    installed(text="import a_library_of_cuda_12")
    assert not varlen.has_package() and not varlen.has_package()
    told = capsys.readouterr().err
    assert told.count("it cannot be imported (ModuleNotFoundError: No module named 'a_library_of_cuda_12')") == 1


@pytest.mark.parametrize(
    ("capability", "there", "sizes"),
    [((8, 0), False, []), ((9, 0), True, [64, 128, 192, 256]), ((10, 3), True, [64, 128, 256]), ((12, 0), False, [])],
)
def test_which_gpus_and_heads_the_package_is_for(
    installed, capability: tuple[int, int], there: bool, sizes: list[int]
) -> None:
    installed(capability=capability)
    assert varlen.has_package() == there
    if there:
        found = [
            n
            for n in (64, 128, 192, 256)
            if varlen.package_works(varlen.Heads(n, 2, 1, torch.float32, gradient=False), False)
        ]
        assert found == sizes


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(0, 12),
    st.integers(1, 2),
)
def test_plain_attention_is_that_of_scores(lengths: list[tuple[int, int]], window: int, groups: int) -> None:
    """Against a softmax over the scores of all tokens of the row, most of which are hidden."""
    queries, keys = [count for count, _ in lengths], [count + before for count, before in lengths]
    q, k, v = tensors(sum(queries), sum(keys), 2, groups, 8)
    boundaries = [varlen.row_boundaries(part) for part in (queries, keys)]
    packed = varlen.PackedRows(boundaries[0], max(queries), window, boundaries[1], max(keys))
    found = varlen.one_by_one(q, k, v, packed, 0.3)
    of_query = torch.repeat_interleave(torch.arange(len(queries)), torch.tensor(queries))[:, None]
    of_key = torch.repeat_interleave(torch.arange(len(keys)), torch.tensor(keys))[None]
    place = torch.cat([torch.arange(n - c, n) for c, n in zip(queries, keys, strict=True)])[:, None]
    seen = torch.cat([torch.arange(n) for n in keys])[None]
    visible = (of_query == of_key) & (seen <= place) & ((seen > place - window) if window else True)
    k, v = (tensor.repeat_interleave(2 // groups, 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    shares = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("hqk,khd->qhd", shares, v), rtol=1e-4, atol=1e-5)


def test_a_compiled_layer_uses_the_package(installed) -> None:
    """Outside of the graphs, which are compiled once for all lengths."""
    installed()

    def layer(x: torch.Tensor, packed: varlen.PackedRows) -> torch.Tensor:
        q, k, v = (x * factor for factor in (1.0, 2.0, 3.0))
        return varlen.varlen_attention(q, k[:, :2], v[:, :2], packed, 0.5) + x

    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, dynamic=True, backend=counted)
    graphs = set()
    for lengths in ([30, 20], [5, 7, 40], [33]):
        x = tensors(sum(lengths), 1)[0]
        found, exact = compiled(x, rows(lengths)), layer(x, rows(lengths))
        torch.testing.assert_close(found, exact)
        found, exact = (torch.autograd.grad(out.square().sum(), x)[0] for out in (found, exact))
        torch.testing.assert_close(found, exact)
        graphs.add(counted.frame_count)
    assert len(graphs) == 1 and graphs.pop() <= 6  # 4; 17 if it is traced
