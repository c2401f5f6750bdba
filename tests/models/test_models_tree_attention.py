"""Attention along the paths of a tree, against a softmax over a dense mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen

from hybridrl.models import tree_attention
from hybridrl.models.prefix_tree import PrefixOrder, PrefixTree
from hybridrl.models.tree_attention import Paths

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=6)
HEADS, GROUPS, SIZE, SIZE_OF_VALUES = 4, 2, 6, 5


def tree_of(rows: list[list[int]]) -> PrefixTree:
    tokens = torch.full((len(rows), max(map(len, rows))), 7)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    return PrefixTree.of(PrefixOrder.of(tokens, [len(row) for row in rows]))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: PrefixTree, window: int) -> torch.Tensor:
    """By the textbook: each token's distance to the tokens of its path decides whether it sees them."""
    distance = torch.full((tree.tokens, tree.tokens), -1)
    for path in tree.paths:
        for place, token in enumerate(path):
            distance[token, path[: place + 1]] = torch.arange(place, -1, -1)
    seen = (distance >= 0) & ((distance < window) if window else torch.ones_like(distance, dtype=torch.bool))
    k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):  # type: ignore[no-untyped-def]
    """What PyTorch documents of its kernel for GPUs: the last query of a sequence sees its last key."""
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    outs = []
    for number in range(len(cu_seq_q) - 1):
        a, b = (t[ends[number] : ends[number + 1]] for t, ends in ((q, cu_seq_q), (k, cu_seq_k)))
        c = v[cu_seq_k[number] : cu_seq_k[number + 1]]
        b, c = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (b, c))
        distance = torch.arange(len(a))[:, None] + len(b) - len(a) - torch.arange(len(b))
        seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        scores = torch.einsum("qhd,khd->hqk", a, b) * scale
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), c))
    return torch.cat(outs)


@pytest.mark.parametrize("kernel", [False, True], ids=["blocks", "the kernel's arguments"])
@settings(max_examples=60)
@given(rows=ROWS, window=st.integers(0, 5), padding=st.integers(0, 2))
def test_values_and_gradients_are_those_of_a_dense_mask(
    kernel: bool, rows: list[list[int]], window: int, padding: int
) -> None:
    tree = tree_of(rows)
    generator = torch.Generator().manual_seed(len(rows))
    shapes = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, SIZE_OF_VALUES))
    inputs = [
        torch.randn(tree.tokens + padding, *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    paths = Paths.of(tree).padded(padding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "_BLOCK", 3)
        patch.setattr(varlen, "varlen_attn", varlen_attn)
        if kernel:
            found = tree_attention.by_kernel(*inputs, paths, 0.3, window)
        else:
            found = tree_attention.tree_attention(*inputs, paths, 0.3, window)
    found = found[: tree.tokens]  # what padding attends to does not matter
    expected = dense(*(t[: tree.tokens] for t in inputs), tree, window)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    gradients = [torch.autograd.grad(out.sin().sum(), inputs) for out in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


def test_the_mask_of_a_block_does_not_grow_with_the_square_of_a_row() -> None:
    rows = [[1] * 3000, [1] * 1000 + [2] * 2000]
    paths = Paths.of(tree_of(rows))
    like = torch.zeros(1)
    for run in paths.runs:
        for part, before in tree_attention.blocks_of(run, 0):
            paths.mask(part.stop - part.start, before, 0, like)
    assert [mask.numel() for mask in paths.masks.values()] == [256 * (3000 + 256)]
