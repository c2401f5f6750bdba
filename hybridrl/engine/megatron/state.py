"""`MegatronState`: an engine's weights under their Hugging Face names, its optimizer, and where all of it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hybridrl.engine.megatron.hf_weights import Exporter
from hybridrl.engine.megatron.mapping import LocalTensor, WeightMap
from hybridrl.engine.megatron.offload import MegatronOffload
from hybridrl.engine.megatron.sharded_optimizer import ShardedOptimizer


class MegatronState:
    """The weights of a model and the state of its optimizer.

    Args:
        chunks: this rank's parts of the model, one per virtual stage.
        weight_map: which slices of which Hugging Face tensors they hold.
        exporter: gathers whole tensors.
        optimizer: None for an engine that only computes.
        offload: brings weights and optimizer state to the device and back to main memory.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        weight_map: WeightMap,
        exporter: Exporter,
        optimizer: ShardedOptimizer | None,
        offload: MegatronOffload,
    ) -> None:
        self.weight_map, self.exporter = weight_map, exporter
        self.optimizer, self.offload = optimizer, offload
        self._chunks = chunks

    def entries(self) -> dict[tuple[int, str], LocalTensor]:
        """Return this rank's parameters and buffers, by the number of their chunk and their name in it."""
        return {(self._chunks.index(entry.chunk), entry.name): entry for entry in self.weight_map.entries}

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter, master weight or optimizer state, or its copy in main memory while it is offloaded.

        Writing to it changes the weights, wherever they are.
        """
        return self.offload.readable(tensor)

    def nonfinite_gradients(self) -> list[str]:
        """Return the Hugging Face names of tensors whose gradient on this rank is not finite."""
        assert self.optimizer is not None
        nonfinite = set(self.optimizer.nonfinite_gradients())
        return [piece.name for key, entry in self.entries().items() if key in nonfinite for piece in entry.pieces]

    def discard_gradients(self) -> None:
        """Forget gradients, where their memory is on the device."""
        if self.optimizer is not None and self.offload.has_gradients:
            self.optimizer.discard_gradients()
