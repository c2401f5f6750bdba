"""A key-value cache that is written in place and drops finished rows.

The stock dynamic cache concatenates at every token, which copies everything. Here a layer owns a buffer with spare
capacity and gives attention a view of the filled part.

Shapes: B rows, H key-value heads, L tokens so far, D head size.
"""

from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

_HEADROOM = 64  # tokens: below this, growing by a quarter would still copy every few tokens


class InPlaceLayer(DynamicLayer):
    """Full attention over buffers [B, H, capacity, D]; `keys` and `values` are views of their first L tokens."""

    keys: torch.Tensor
    values: torch.Tensor
    is_initialized: bool

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._key_buffer: torch.Tensor | None = None
        self._value_buffer: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, H, n, D] and return the whole cache, [B, H, L + n, D]."""
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.is_initialized = True
            old = 0
        else:
            old = self.keys.shape[-2]
        new = old + key_states.shape[-2]
        if self._key_buffer is None or new > self._key_buffer.shape[-2]:
            capacity = new + max(_HEADROOM, new // 4)
            self._key_buffer = self._grown(self.keys if old else None, key_states, capacity)
            self._value_buffer = self._grown(self.values if old else None, value_states, capacity)
        assert self._value_buffer is not None
        self._key_buffer[:, :, old:new] = key_states
        self._value_buffer[:, :, old:new] = value_states
        self.keys = self._key_buffer[:, :, :new]
        self.values = self._value_buffer[:, :, :new]
        return self.keys, self.values

    @staticmethod
    def _grown(cached: torch.Tensor | None, like: torch.Tensor, capacity: int) -> torch.Tensor:
        batch, heads, _, size = like.shape
        buffer = like.new_empty((batch, heads, capacity, size))
        if cached is not None:
            buffer[:, :, : cached.shape[-2]] = cached
        return buffer

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep (or repeat) the rows `indices` [B'], with their spare capacity."""
        if not self.is_initialized or self._key_buffer is None or self._value_buffer is None:
            return
        length = self.keys.shape[-2]
        self._key_buffer = self._selected(self._key_buffer, indices, length)
        self._value_buffer = self._selected(self._value_buffer, indices, length)
        self.keys = self._key_buffer[:, :, :length]
        self.values = self._value_buffer[:, :, :length]

    @staticmethod
    def _selected(buffer: torch.Tensor, indices: torch.Tensor, length: int) -> torch.Tensor:
        _, heads, capacity, size = buffer.shape
        selected = buffer.new_empty((indices.shape[0], heads, capacity, size))
        selected[:, :, :length] = buffer[:, :, :length].index_select(0, indices)
        return selected


def make_cache(config: PretrainedConfig) -> DynamicCache:
    """The cache for the model's layer types; full-attention layers are written in place."""
    cache = DynamicCache(config=config)
    cache.layers = [InPlaceLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def select_rows(cache: DynamicCache, indices: torch.Tensor) -> None:
    """Keep the rows `indices` [B'] in every layer.

    Raises:
        NotImplementedError: a layer of the model (linear attention, say) cannot drop rows.
    """
    for layer in cache.layers:
        if hasattr(layer, "batch_select_indices"):
            layer.batch_select_indices(indices)
        else:
            layer.reorder_cache(indices)
