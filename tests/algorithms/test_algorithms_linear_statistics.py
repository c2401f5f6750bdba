"""Statistics from hidden states and a linear layer, against the same statistics from its whole output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from raising import raises_with
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridrl.algorithms import AlgorithmError, linear_statistics, token_statistics
from hybridrl.algorithms.linear_statistics import linear_token_statistics

TOKENS, FEATURES, VOCABULARY = 13, 8, 31


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, FEATURES), (VOCABULARY, FEATURES), (VOCABULARY,)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*(tensor.requires_grad_() for tensor in made[:2]), made[2].requires_grad_() if bias else None]


LABELS = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("chunk", [1, 4, TOKENS, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wanted", [("log_probs",), ("entropy",), ("log_probs", "entropy", "sum_pi_squared")])
def test_values_and_gradients_are_those_of_whole_logits(chunk: int, bias: bool, wanted: tuple[str, ...]) -> None:
    options: dict[str, Any] = {
        "labels": LABELS if "log_probs" in wanted else None,
        "temperature": 0.7,
        "entropy": "entropy" in wanted,
        "sum_pi_squared": "sum_pi_squared" in wanted,
    }
    weights = torch.randn(2, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = []
    for chunked in (False, True):
        hidden, weight, offset = tensors = inputs(bias=bias)
        assert hidden is not None and weight is not None
        if chunked:
            values = linear_token_statistics(hidden, weight, offset, chunk_size=chunk, **options)
        else:
            values = token_statistics(torch.nn.functional.linear(hidden, weight, offset), **options)
        assert set(values) == set(wanted)
        differentiable = [values[name] for name in ("log_probs", "entropy") if name in wanted]
        sum((w * value).sum() for w, value in zip(weights, differentiable, strict=False)).backward()  # type: ignore[union-attr]
        found.append([*(values[name].detach() for name in wanted), *(t.grad for t in tensors if t is not None)])
    for whole, chunked_value in zip(*found, strict=True):
        torch.testing.assert_close(chunked_value, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("multiplier", "cap"), [(0.3, None), (1.0, 1.5), (0.7, 1.5)])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("wanted", [("log_probs",), ("log_probs", "entropy", "sum_pi_squared")])
def test_a_scale_and_a_soft_cap(multiplier: float, cap: float | None, chunk: int, wanted: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"labels": LABELS, "temperature": 0.7, "entropy": "entropy" in wanted}
    options["sum_pi_squared"] = "sum_pi_squared" in wanted
    found = []
    for tiled in (False, True):
        hidden, weight, offset = tensors = inputs()
        assert hidden is not None and weight is not None
        if tiled:
            change: dict[str, Any] = {"multiplier": multiplier, "soft_cap": cap}
            values = linear_token_statistics(hidden, weight, offset, chunk_size=chunk, **change, **options)
        else:
            logits = torch.nn.functional.linear(hidden, weight, offset) * multiplier
            values = token_statistics(logits if cap is None else cap * torch.tanh(logits / cap), **options)
        sum(values[name].square().sum() for name in wanted[:2]).backward()  # type: ignore[union-attr]
        found.append([*(values[name].detach() for name in wanted), *(t.grad for t in tensors if t is not None)])
    for whole, tiles in zip(*found, strict=True):
        torch.testing.assert_close(tiles, whole, rtol=1e-12, atol=1e-12)


def test_gradients_equal_finite_differences() -> None:
    def loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        found = linear_token_statistics(hidden, weight, bias, LABELS, 1.3, entropy=True, chunk_size=5)
        return (found["log_probs"] * found["entropy"]).sum()

    assert torch.autograd.gradcheck(loss, inputs())


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen: int) -> None:
    tensors = inputs(bias=False)
    (off := tensors[frozen]).requires_grad_(False)  # type: ignore[union-attr]
    linear_token_statistics(*tensors, labels=LABELS)["log_probs"].sum().backward()  # type: ignore[arg-type]
    assert off is not None and off.grad is None and tensors[1 - frozen].grad is not None  # type: ignore[union-attr]


def test_bfloat16_sums_over_chunks_in_float32() -> None:
    """One token per chunk: with sums in bfloat16 the gradient of the weights would be off by percents."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(512, FEATURES, generator=generator).bfloat16()
    weight = (torch.randn(VOCABULARY, FEATURES, generator=generator) / 4).bfloat16().requires_grad_()
    labels = torch.randint(0, VOCABULARY, (512,), generator=generator)
    linear_token_statistics(hidden, weight, labels=labels, chunk_size=1)["log_probs"].sum().backward()
    exact = weight.detach().double().requires_grad_()
    token_statistics(hidden.double() @ exact.t(), labels)["log_probs"].sum().backward()
    assert weight.grad is not None and exact.grad is not None
    assert (weight.grad.double() - exact.grad).norm() < 5e-3 * exact.grad.norm()


def test_no_tensor_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocabulary = 200, 300
    monkeypatch.setitem(linear_statistics.CHUNK_ELEMENTS, "cpu", 10 * vocabulary)
    hidden = torch.randn(tokens, FEATURES, requires_grad=True)
    weight = torch.randn(vocabulary, FEATURES, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    for make, least, most in (
        (linear_token_statistics, 9 * vocabulary, 10 * vocabulary),
        (whole, tokens * vocabulary, tokens * vocabulary),
    ):
        with Largest() as largest:
            found = make(hidden, weight, labels=labels, entropy=True)
            (found["log_probs"] + found["entropy"]).sum().backward()
        assert least <= largest.elements <= most


def test_words_that_are_excluded_count_nothing() -> None:
    """A bias of -inf, on single words and on all words of a tile."""
    found = []
    for chunked in (False, True):
        hidden, weight, offset = inputs()
        assert hidden is not None and weight is not None and offset is not None
        excluded = torch.zeros(VOCABULARY, dtype=torch.bool)
        excluded[[*range(12), 20]] = True
        bias = offset.masked_fill(excluded, -torch.inf)
        options: dict[str, Any] = {"labels": LABELS.clamp(21), "entropy": True, "sum_pi_squared": True}
        if chunked:
            values = linear_token_statistics(hidden, weight, bias, chunk_size=1, **options)
        else:
            values = token_statistics(torch.nn.functional.linear(hidden, weight, bias), **options)
        (values["log_probs"] + values["entropy"]).sum().backward()
        found.append([*(value.detach() for value in values.values()), hidden.grad, weight.grad])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, TOKENS])
def test_an_excluded_word_has_a_log_probability_of_minus_infinity(chunk: int) -> None:
    """Whether others of its tile are excluded or not."""
    hidden, weight, offset = (tensor.detach() for tensor in inputs() if tensor is not None)
    offset[[*range(12), 20]] = -torch.inf
    labels = torch.tensor([0, 20, 25]).repeat(5)[:TOKENS]
    expected = token_statistics(torch.nn.functional.linear(hidden, weight, offset), labels)["log_probs"]
    assert torch.equal(expected == -torch.inf, labels < 21)
    found = linear_token_statistics(hidden, weight, offset, labels, chunk_size=chunk)["log_probs"]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, TOKENS])
def test_what_is_not_a_number_stays_so(chunk: int) -> None:
    hidden, weight, _ = (None if tensor is None else tensor.detach() for tensor in inputs(bias=False))
    assert hidden is not None and weight is not None
    hidden[3] = torch.nan
    options: dict[str, Any] = {"labels": LABELS, "entropy": True, "sum_pi_squared": True}
    for value in linear_token_statistics(hidden, weight, chunk_size=chunk, **options).values():
        assert value.isnan().nonzero().flatten().tolist() == [3]


def whole(hidden: torch.Tensor, weight: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    return token_statistics(hidden @ weight.t(), **options)


def test_shapes_that_do_not_fit_are_named() -> None:
    hidden, weight, _ = inputs(bias=False)
    assert hidden is not None and weight is not None
    with pytest.raises(AlgorithmError, match=r"\(13, 7\).*\(31, 8\)"):
        linear_token_statistics(hidden[:, 1:], weight, labels=LABELS)
    with pytest.raises(AlgorithmError, match=r"\(12,\)"):
        linear_token_statistics(hidden, weight, labels=LABELS[1:])
    with pytest.raises(AlgorithmError, match="temperature"):
        linear_token_statistics(hidden, weight, labels=LABELS, temperature=0.0)
    for wrong in ({"multiplier": 0.0}, {"soft_cap": -1.0}):
        with raises_with(AlgorithmError, "multiplier", "soft_cap"):
            linear_token_statistics(hidden, weight, labels=LABELS, **wrong)  # type: ignore[arg-type]
    empty = linear_token_statistics(hidden[:0], weight, labels=LABELS[:0])["log_probs"]
    assert empty.shape == (0,)
    empty.sum().backward()
