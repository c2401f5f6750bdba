"""Attention over the flat row of a prefix tree: a token attends to the tokens before it on its path.

Keys and values of each run are gathered along its path, so memory grows with the sum of the rows' lengths, as without
sharing, and never with the square of the flat row. A run then is causal attention with more keys than queries: query i
sees the first `before + i + 1` keys. On a GPU that is one call of a kernel (`hybridrl.utils.varlen`); elsewhere, and
where no kernel applies, attention runs over one block of a run at a time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybridrl.models import attention
from hybridrl.models.prefix_tree import PrefixTree, Run
from hybridrl.models.ulysses import heads_to_tokens, tokens_to_heads
from hybridrl.utils import device, varlen

#: name of this module's attention in transformers; without a tree it is that of packed rows
TREE = "hybridrl_tree"
_APART = "model.share_prefixes=False"
#: most queries of a block: its mask is small, and of a run's own keys it computes few that no query sees
_BLOCK = 256
#: cells of a score matrix that take as long as a call of their own
_CALL = 2048

_sharing: ContextVar[bool] = ContextVar("hybridrl_sharing", default=False)
#: the layers that followed paths in the innermost `flat_row`
_followed: ContextVar[list[type]] = ContextVar("hybridrl_followed")


def sharing_unsupported_reason(config: PreTrainedConfig) -> str | None:
    """Return why a prefix of this model's sequences cannot be computed once for all of them; None if it can.

    A token's state must depend on the tokens before it alone, and attention must be the only path between tokens.
    """
    return attention.packing_unsupported_reason(config) or attention.replacing_unsupported_reason(config)


class Paths:
    """The paths of a prefix tree, for attention. Layers get them as an argument, also when they are recomputed."""

    def __init__(self, runs: Sequence[Run], pieces: Sequence[int]) -> None:
        self.runs = list(runs)
        self.pieces = list(pieces)
        self.masks: dict[tuple[Any, ...], torch.Tensor] = {}
        self._boundaries: tuple[torch.Tensor, torch.Tensor] | None = None
        self._joined: list[list[Run]] | None = None

    @classmethod
    def of(cls, tree: PrefixTree) -> Paths:
        return cls(tree.runs, tree.pieces)

    def padded(self, tokens: int) -> Paths:
        """The paths of a flat row with further tokens at its end, which are a path of their own."""
        if not tokens:
            return self
        end = sum(self.pieces)
        return Paths([*self.runs, Run(end, end + tokens, 0, (len(self.pieces),))], [*self.pieces, tokens])

    def mask(self, queries: int, before: int, window: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return the mask added to a block's scores, `[queries, before + queries]`; None if all keys before count."""
        if before == 0 and not 0 < window < queries:
            return None
        name = (window, like.dtype, like.device)
        if name not in self.masks:
            self.masks[name] = self._whole_mask(window, like)
        whole = self.masks[name]
        offset = whole.shape[1] - _BLOCK - before
        return whole[:queries, offset : offset + before + queries]

    def _whole_mask(self, window: int, like: torch.Tensor) -> torch.Tensor:
        """The mask of a full block of the longest path. Those of all others are parts of it."""
        before = max(run.before + run.stop - run.start for run in self.runs)
        visible = torch.ones(_BLOCK, before + _BLOCK, dtype=torch.bool, device=like.device).tril(before)
        if window:
            visible = visible.triu(before - window + 1)
        return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, float("-inf"))

    def joined(self) -> list[list[Run]]:
        """Consecutive runs, of which each list is computed as one, because the runs are short and share their keys."""
        if self._joined is None:
            self._joined, pieces, apart = [], set[int](), 0
            for run in self.runs:
                keys = run.before + run.stop - run.start
                if self._joined:
                    first = self._joined[-1][0].start
                    wider = sum(self.pieces[number] for number in pieces | set(run.pieces))
                    cells = apart + (run.stop - run.start) * keys + _CALL
                    if run.stop - first <= _BLOCK and (run.stop - first) * wider <= cells:
                        self._joined[-1].append(run)
                        pieces, apart = pieces | set(run.pieces), cells
                        continue
                self._joined.append([run])
                pieces, apart = set(run.pieces), (run.stop - run.start) * keys
        return self._joined

    def joined_mask(self, number: int, window: int, like: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """The pieces of the runs of `joined()[number]`, and which of their tokens each query sees, added to scores."""
        runs, name = self.joined()[number], (number, window, like.dtype, like.device)
        pieces = sorted({piece for run in runs for piece in run.pieces})
        if name not in self.masks:
            ends = list(itertools.accumulate(self.pieces[piece] for piece in pieces))
            columns = dict(zip(pieces, zip([0, *ends], ends, strict=False), strict=True))
            hidden = np.ones((runs[-1].stop - runs[0].start, ends[-1]), dtype=bool)
            for run in runs:
                path = np.concatenate([np.arange(*columns[piece]) for piece in run.pieces])
                queries = run.stop - run.start
                visible = np.tri(queries, len(path), run.before, dtype=bool)
                if window:
                    visible ^= np.tri(queries, len(path), run.before - window, dtype=bool)
                hidden[run.start - runs[0].start : run.stop - runs[0].start, path] = ~visible
            scores = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
            self.masks[name] = scores.to(like.device)
        return pieces, self.masks[name]

    def boundaries(self, target: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the boundaries of each run's queries and of its gathered keys, int32 [runs + 1] each."""
        if self._boundaries is None:
            queries = [0, *(run.stop for run in self.runs)]
            keys = [0, *itertools.accumulate(run.before + run.stop - run.start for run in self.runs)]
            self._boundaries = (
                torch.tensor(queries, dtype=torch.int32, device=target),
                torch.tensor(keys, dtype=torch.int32, device=target),
            )
        return self._boundaries


@contextlib.contextmanager
def flat_row(config: PreTrainedConfig) -> Iterator[None]:
    """Make no attention mask within the context: the attention gets the paths instead.

    Args:
        config: of the model that is called in the context.

    Raises:
        ModelError: not every layer used the paths; not within `attention.trial`.
    """
    token, followed_token = _sharing.set(True), _followed.set([])
    try:
        yield
        layers, followed = config.get_text_config().num_hidden_layers, len(_followed.get())
    finally:
        _followed.reset(followed_token)
        _sharing.reset(token)
    if followed < layers:
        following = f"layers of this {config.model_type} model compute attention along the paths of a prefix tree"
        attention.refuse(f"{followed} of the {layers} {following}", _APART)


def _mask(**arguments: Any) -> torch.Tensor | None:
    if _sharing.get():
        return attention.mask_of_window(**arguments)
    mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[attention.VARLEN](**arguments)
    return mask


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    prefix_paths: Paths | None = None,
    sequence_group: ProcessGroup | None = None,
    **further: Any,
) -> tuple[torch.Tensor, None]:
    """An attention of transformers: query `[B, H, S, D]`, key and value `[B, G, S, D]`, result `[B, S, H, D]`.

    Args:
        sequence_group: the ranks that share the flat row; the tensors hold this rank's part of its tokens.

    Raises:
        ModelError: a flat row comes without its paths, or with something that this attention does not compute.
    """
    if prefix_paths is None:
        if _sharing.get():
            attention.refuse(f"{type(module).__name__} does not pass on the paths of a prefix tree", _APART)
            return attention.zeros(query, value), None
        options = {"sliding_window": sliding_window, "is_causal": is_causal, "sequence_group": sequence_group}
        result: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS[attention.VARLEN](
            module, query, key, value, attention_mask, scaling, **options, **further
        )
        return result
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unknown = attention.not_computed(attention_mask, further)
    unknown += ["dropout"] if further.get("dropout") else []
    unknown += [] if causal else ["attention to later tokens"]
    if unknown:
        problem = "which attention along the paths of a prefix tree does not compute"
        attention.refuse(f"{type(module).__name__} uses {', '.join(unknown)}, {problem}", _APART)
        return attention.zeros(query, value), None
    if _sharing.get():  # not while a layer is computed again
        _followed.get().append(type(module))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if sequence_group is not None:
        query, key, value = tokens_to_heads(query, key, value, sequence_group)
    out = tree_attention(query, key, value, prefix_paths, scaling, attention.window_of(attention_mask, sliding_window))
    if sequence_group is not None:
        out = heads_to_tokens(out, sequence_group)
    return out[None], None


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paths: Paths, scale: float, window: int = 0
) -> torch.Tensor:
    """Causal attention along the paths of a flat row, `[L, H, D of value]`.

    Args:
        query: `[L, H, D]`; key and value are `[L, G, ...]`, where G divides H. Heads of values may have another size.
        scale: factor of the scores.
        window: how many tokens of its path one attends to, itself included; 0 for all before it.
    """
    size = value.shape[-1]
    query, key, value = attention.of_one_size(query, key, value)
    on_kernel = (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= attention.LARGEST_HEAD
        and kernel_sees_paths()
    )
    attend = by_kernel if on_kernel else _by_blocks
    return attend(query, key, value, paths, scale, window)[:, :, :size]


def _gathered(tensor: torch.Tensor, paths: Paths) -> list[list[torch.Tensor]]:
    """The pieces of each run's path. Pieces are views, so that their gradients add up piece by piece."""
    pieces = tensor.split(paths.pieces)
    return [[pieces[number] for number in run.pieces] for run in paths.runs]


def by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    paths: Paths,
    scale: float,
    window: int,
    attend: Callable[..., torch.Tensor] = varlen.varlen_attention,
) -> torch.Tensor:
    """All runs in one call of a kernel of `hybridrl.utils.varlen`."""
    of_queries, of_keys = paths.boundaries(query.device)
    longest = max(run.stop - run.start for run in paths.runs)
    longest_keys = max(run.before + run.stop - run.start for run in paths.runs)
    key, value = (torch.cat([piece for path in _gathered(t, paths) for piece in path]) for t in (key, value))
    rows = varlen.PackedRows(of_queries, longest, window, of_keys, longest_keys)
    return attend(query, key, value, rows, scale)


def _by_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paths: Paths, scale: float, window: int
) -> torch.Tensor:
    """Short runs together, and of a long run one block after the other."""
    pieces = [tensor.split(paths.pieces) for tensor in (key, value)]
    queries = query.split([runs[-1].stop - runs[0].start for runs in paths.joined()])
    outs = []
    for number, (runs, q) in enumerate(zip(paths.joined(), queries, strict=True)):
        needed: Sequence[int]
        masks: list[torch.Tensor | None]
        if len(runs) == 1:
            needed, blocks = runs[0].pieces, blocks_of(runs[0], window)
            masks = [paths.mask(part.stop - part.start, before, window, query) for part, before in blocks]
        else:
            needed, joined = paths.joined_mask(number, window, query)
            blocks, masks = [(slice(0, len(q)), joined.shape[1] - len(q))], [joined]
        k, v = (
            torch.cat([chunks[piece] for piece in needed]) if len(needed) > 1 else chunks[needed[0]]
            for chunks in pieces
        )
        for (part, before), mask in zip(blocks, masks, strict=True):
            end = before + part.stop - part.start
            a, b, c = (t.transpose(0, 1)[None] for t in (q[part], k[:end], v[:end]))
            out = scaled_dot_product_attention(a, b, c, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def blocks_of(run: Run, window: int) -> list[tuple[slice, int]]:
    """The queries of each block of a run, and the number of keys before them; one block if no mask is needed."""
    count = run.stop - run.start
    if run.before == 0 and not 0 < window < count:
        return [(slice(0, count), 0)]
    starts = range(0, count, _BLOCK)
    return [(slice(start, min(start + _BLOCK, count)), run.before + start) for start in starts]


@functools.cache
def kernel_sees_paths() -> bool:
    """Whether PyTorch's kernel gives the last query all keys where there are more keys than queries; tried once."""
    if not device.supports_varlen_attention():
        return False
    paths = Paths([Run(0, 3, 0, (0,)), Run(3, 5, 3, (0, 1))], [3, 2])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 1, 8, generator=generator) for _ in range(3))
    expected = _by_blocks(q, k, v, paths, 1.0, 0)
    q, k, v = (tensor.to(device.current_device(), torch.bfloat16) for tensor in (q, k, v))
    actual = by_kernel(q, k, v, paths, 1.0, 0, varlen.by_pytorch).float().cpu()
    return bool(torch.allclose(actual, expected, atol=0.1))


AttentionInterface.register(TREE, _attention)
AttentionMaskInterface.register(TREE, _mask)
