"""The forward pass of one micro-batch: from its layout to the outputs of its response tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from hybridrl.algorithms.functional import full_kl_from_logits, token_statistics
from hybridrl.engine.microbatch import Layout
from hybridrl.errors import ModelError


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
        self._selected: torch.Tensor | None = None
        self._used = False
        head.register_forward_pre_hook(self._select)

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

    def _select(self, head: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._selected is None:
            return None
        self._used = True
        hidden = arguments[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._selected), *arguments[1:])


def response_logits(module: nn.Module, head: SelectingHead, layout: Layout, flash_attention: bool) -> torch.Tensor:
    """The head's outputs at the positions that predict the N response tokens: `[N, V]`, of a value head `[N, 1]`."""
    options: dict[str, Any] = {}
    if layout.lengths is not None and flash_attention:
        # With these, the kernel need not find the boundaries in every layer, which would wait for the device.
        longest = max(layout.lengths)
        ends = (
            torch.tensor([0, *layout.lengths], dtype=torch.int32)
            .cumsum(0, dtype=torch.int32)
            .to(layout.input_ids.device)
        )
        options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    with head.selecting(layout.selected):
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
    layout: Layout,
    temperature: float,
    outputs: Collection[str],
    reference_logits: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """`log_probs`, `entropy`, `sum_pi_squared`, `ref_kl` or `values` of N response tokens, float32 `[N]`.

    Args:
        logits: `[N, V]`; the backward pass may overwrite them.
        reference_logits: of the reference policy, for `ref_kl`.
    """
    if "values" in outputs:
        return {"values": logits.reshape(-1).float()}
    labels = layout.labels if "log_probs" in outputs else None
    found = token_statistics(
        logits,
        labels,
        temperature,
        entropy="entropy" in outputs,
        sum_pi_squared="sum_pi_squared" in outputs,
        # If nothing else reads the logits, their gradient may overwrite them.
        inplace_backward=reference_logits is None,
    )
    if reference_logits is not None:
        found["ref_kl"] = full_kl_from_logits(logits, reference_logits, temperature=temperature)
    return found
