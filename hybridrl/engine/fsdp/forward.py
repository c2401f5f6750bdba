"""The forward pass of one micro-batch: from its layout to the outputs of its response tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from hybridrl.algorithms.functional import rows_at_a_time, token_statistics
from hybridrl.engine.microbatch import MicroBatchLayout
from hybridrl.engine.prefix_plan import TreeLayout
from hybridrl.errors import ModelError
from hybridrl.models.attention import packed_row
from hybridrl.models.tree_attention import flat_row
from hybridrl.models.vision import placed_at


class SelectingHead:
    """Runs the model's own head only at selected positions.

    Logits are the largest tensor of a forward pass, and most positions (prompts, padding) need none. A forward
    pre-hook of the head picks the selected hidden states, so whatever the model does with the logits afterwards (soft
    caps, scales) still happens. Without a selection the head works as usual, so generation can use the same module.
    """

    def __init__(self, module: nn.Module):
        head = module.get_output_embeddings()  # type: ignore[operator]
        if head is None:
            raise ModelError(
                f"{type(module).__name__} has no output layer (get_output_embeddings() is None), so it cannot "
                "be trained here"
            )
        self._head = head
        self._selected: torch.Tensor | None = None
        self._used = False
        head.register_forward_pre_hook(self._select)

    @property
    def is_linear(self) -> bool:
        """Whether the head is a linear layer and nothing else."""
        return isinstance(self._head, nn.Linear) and type(self._head).forward is nn.Linear.forward

    @property
    def width(self) -> int:
        """The outputs of a linear head."""
        return int(self._head.out_features)

    @contextlib.contextmanager
    def selecting(self, positions: torch.Tensor) -> Iterator[None]:
        """Within the context, the head gets hidden states `[N, H]` at these positions of the flattened `[b * W]`."""
        self._selected, self._used = positions, False
        try:
            yield
            if not self._used:
                raise ModelError(
                    "the model computed its output without calling its output layer, so its positions cannot "
                    "be selected"
                )
        finally:
            self._selected = None

    @contextlib.contextmanager
    def replaced_by(self, compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Any]) -> Iterator[None]:
        """Within the context, the head returns `compute(hidden, weight, bias)`, for a linear head.

        It is still called as a module, so whatever is attached to it (gathering of shards, reduction of gradients)
        happens as usual.
        """
        head: Any = self._head
        head.forward = lambda hidden: compute(hidden, head.weight, head.bias)
        try:
            yield
        finally:
            del head.forward

    def _select(self, head: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._selected is None:
            return None
        self._used = True
        hidden = arguments[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._selected), *arguments[1:])


def response_logits(
    module: nn.Module,
    head: SelectingHead,
    layout: MicroBatchLayout,
    takes_boundaries: bool,
    sequence_group: ProcessGroup | None = None,
) -> torch.Tensor:
    """The head's outputs at the positions that predict the N response tokens: `[N, V]`, of a value head `[N, 1]`.

    Args:
        takes_boundaries: whether the model's attention gets the boundaries of packed sequences.
        sequence_group: the ranks that share the packed row, of which `layout` has this rank's tokens.
    """
    options: dict[str, Any] = {}
    config: Any = module.config
    packed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if layout.lengths is not None and takes_boundaries:
        packed = packed_row(shared_by=None if sequence_group is None else config)
        longest = max(layout.lengths)
        ends = (
            torch.tensor([0, *layout.lengths], dtype=torch.int32)
            .cumsum(0, dtype=torch.int32)
            .to(layout.input_ids.device, non_blocking=True)
        )
        options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    if isinstance(layout, TreeLayout):
        packed, options = flat_row(config), {"prefix_paths": layout.paths}
    if options and sequence_group is not None:
        options["sequence_group"] = sequence_group
    images = layout.images
    if images is not None:
        options |= images.tensors
    with packed, head.selecting(layout.selected), placed_at(None if images is None else images.places):
        logits: torch.Tensor = module(
            input_ids=layout.input_ids,
            position_ids=layout.position_ids,
            attention_mask=layout.attention_mask,
            use_cache=False,
            **options,
        ).logits
    return logits.reshape(-1, logits.shape[-1])


def compute_outputs(
    logits: torch.Tensor,
    layout: MicroBatchLayout,
    temperature: float,
    outputs: Collection[str],
    keeps_logits: bool = False,
    most_tokens: int | None = None,
) -> dict[str, torch.Tensor]:
    """`log_probs`, `entropy`, `sum_pi_squared` or `values` of N response tokens, float32 `[N]`; see `Fusing.outputs`.

    Args:
        logits: `[N, V]`; the backward pass may overwrite them.
        keeps_logits: something else reads the logits, so the backward pass does not overwrite them.
        most_tokens: most tokens whose statistics are computed at a time; None: as many as compute fast.
    """
    if "values" in outputs:
        return {"values": logits.reshape(-1).float()}
    labels = layout.labels if "log_probs" in outputs else None
    return token_statistics(
        logits,
        labels,
        temperature,
        entropy="entropy" in outputs,
        sum_pi_squared="sum_pi_squared" in outputs,
        # If nothing else reads the logits, their gradient may overwrite them.
        inplace_backward=not keeps_logits,
        chunk_size=rows_at_a_time(logits.device.type, len(logits), logits.shape[1], most_tokens),
    )
