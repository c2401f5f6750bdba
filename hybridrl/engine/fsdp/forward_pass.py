"""`ForwardPass` computes outputs of micro-batches, on one rank or on ranks that share sequences."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hybridrl.engine.batch_images import with_some_image
from hybridrl.engine.chunked_function import Hidden
from hybridrl.engine.fsdp.adapted import required_adapter
from hybridrl.engine.fsdp.forward import SelectingHead, compute_outputs, response_logits
from hybridrl.engine.fsdp.fusing import Fusing, fusing_requested
from hybridrl.engine.fsdp.sequence_parallel import SequenceParallel
from hybridrl.engine.fsdp.sharing import with_attention
from hybridrl.engine.fsdp.state import FSDPState
from hybridrl.engine.logits_functions import LogitsFunction
from hybridrl.engine.micro_batched import OutputRequest
from hybridrl.engine.microbatch import MicroBatchLayout, dummy_layout
from hybridrl.engine.prefix_plan import TreeLayout, small_tree
from hybridrl.models import attention, tree_attention
from hybridrl.models.vision import is_vision_model
from hybridrl.notify import notify
from hybridrl.utils import device, distributed


class ForwardPass:
    """Computes outputs of response tokens from micro-batches.

    Args:
        state: the model's weights.
        config: its Hugging Face configuration.
        sequences: how ranks share sequences; None: each rank has its own.
        model_type: see `FSDPEngine`.
        model: a `ModelConfig`.
        engine: an `FSDPConfig`.

    Attributes:
        fusing: computes outputs without logits, where the head allows it.
    """

    def __init__(
        self,
        state: FSDPState,
        config: PreTrainedConfig,
        sequences: SequenceParallel | None,
        model_type: str,
        model: Any,
        engine: Any,
    ) -> None:
        self._state, self._config, self._sequences = state, config, sequences
        self._path, self._most_tokens = str(model.path), engine.most_tokens
        self._head = SelectingHead(state.module)
        self._takes_boundaries = attention.takes_boundaries(str(config._attn_implementation))
        self._images_everywhere = is_vision_model(config) and state.sharded is not None
        self._fusing_requested = fusing_requested(model_type, model, engine)
        self.fusing = Fusing(state.module, self._head, self.logits, self._trial, self._most_tokens, self._path)

    def fuses(self, functions: Sequence[LogitsFunction]) -> bool:
        """Return whether outputs, with these functions, are computed without logits. The first call is collective."""
        if not self._fusing_requested or not self.fusing.supported:
            return False
        others = [function.other for function in functions]
        return all(other is None or other.forward_pass.fusing.supported for other in others)

    @functools.cached_property
    def follows_paths(self) -> bool:
        """Whether the model attends along the paths of a prefix tree. It is tried on two rows; warns if not."""
        layout, _ = self._own_part(small_tree())
        with attention.trial() as problems:
            self.response_logits(layout.to(device.current_device()))
        if problems and distributed.get_rank() == 0:
            notify(f"{self._path}: prefixes that rows share are computed for each row, because {problems[0]}")
        return not problems

    def outputs(
        self, layout: MicroBatchLayout, request: OutputRequest, functions: Sequence[LogitsFunction]
    ) -> dict[str, torch.Tensor]:
        """Return the outputs of a micro-batch, `[N]`; those of all ranks that share it.

        Args:
            functions: functions of logits, computed in addition to the statistics of tokens.
        """
        part, owned = self._own_part(layout)
        part = part.to(device.current_device())
        computed = self._compute(part, request, functions)
        if self._sequences is not None:
            computed = self._sequences.join(computed, owned)
        return part.of_rows(computed) if isinstance(part, TreeLayout) else computed

    def logits(self, layout: MicroBatchLayout) -> torch.Tensor:
        """Return the logits `[N, V]` of this rank's tokens, or the values `[N, 1]`."""
        group = None if self._sequences is None else self._sequences.group
        return response_logits(self._state.module, self._head, layout, self._takes_boundaries, group)

    @torch.no_grad()
    def response_logits(self, layout: MicroBatchLayout) -> torch.Tensor:
        """Return the logits `[N, V]` of this model on another engine's micro-batch, without gradient.

        Where ranks share sequences, `layout` has this rank's tokens.
        """
        with self.attention_for(layout):
            logits = self.logits(layout)
        self._state.reshard()
        return logits

    @torch.no_grad()
    def hidden(self, layout: MicroBatchLayout) -> Hidden:
        """Return the inputs of the output layer from which `response_logits` would be computed."""
        with self.attention_for(layout):
            hidden = self.fusing.hidden(layout, copies=self._state.sharded is not None)
        self._state.reshard()
        return hidden

    def for_all_ranks(self, layout: MicroBatchLayout) -> MicroBatchLayout:
        """Return the micro-batch, with an image added if it has none: every rank has to run the vision tower."""
        return with_some_image(layout, self._config) if self._images_everywhere else layout

    def attention_for(self, layout: MicroBatchLayout) -> contextlib.AbstractContextManager[None]:
        """Within the context, the attention that this micro-batch needs."""
        if not isinstance(layout, TreeLayout):
            return contextlib.nullcontext()
        return with_attention(self._state.module, tree_attention.TREE)

    @contextlib.contextmanager
    def attention_of_padded_rows(self) -> Iterator[None]:
        """Within the context, plain attention: flash attention would copy the whole cache for each token."""
        module: nn.Module = self._state.module
        config: Any = module.config
        if not attention.is_flash_attention(str(config._attn_implementation)):
            yield
            return
        with with_attention(module, attention.plain_attention(config)):
            yield

    def _trial(self) -> MicroBatchLayout:
        layout, _ = self._own_part(self.for_all_ranks(dummy_layout()))
        return layout.to(device.current_device())

    def _own_part(self, layout: MicroBatchLayout) -> tuple[MicroBatchLayout, torch.Tensor]:
        """Return this rank's tokens of a micro-batch, and the mask of its outputs."""
        if self._sequences is None:
            return layout, torch.ones_like(layout.selected, dtype=torch.bool)
        part, owned = self._sequences.split(layout)
        return layout.part(part) if isinstance(layout, TreeLayout) else part, owned

    def _compute(
        self, layout: MicroBatchLayout, request: OutputRequest, functions: Sequence[LogitsFunction]
    ) -> dict[str, torch.Tensor]:
        """Return the outputs of this rank's tokens."""

        def of_other(read: Callable[[ForwardPass, MicroBatchLayout], Any], function: LogitsFunction) -> Any:
            if function.other is None:
                return None
            other: ForwardPass = function.other.forward_pass
            base = other is self  # the model without its adapter
            with required_adapter(self._state.adapter).off() if base else contextlib.nullcontext():
                return read(other, layout)

        if self.fuses(functions):
            compared = [(function, of_other(ForwardPass.hidden, function)) for function in functions]
            return self.fusing.outputs(layout, request.temperature, request.outputs, compared)
        others = [of_other(ForwardPass.response_logits, function) for function in functions]
        logits = self.logits(layout)
        outputs = compute_outputs(
            logits, layout, request.temperature, request.outputs, bool(functions), self._most_tokens
        )
        for function, other in zip(functions, others, strict=True):
            outputs |= function(logits, layout.inputs or {}, request.temperature, other)
        return outputs
