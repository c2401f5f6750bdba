"""Runs all micro-batches of a call through Megatron-core's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybridrl.engine.chunked_function import Hidden
from hybridrl.engine.logits_functions import LogitsFunction
from hybridrl.engine.megatron.forward import Arranger, Compared, Outputs, RankLayout, packed_parameters
from hybridrl.engine.megatron.parallel import ParallelState
from hybridrl.engine.micro_batched import OutputRequest, ShareOfLoss
from hybridrl.engine.microbatch import MicroBatchLayout, dummy_layout
from hybridrl.utils import device

Numbered = tuple[int, RankLayout]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The functions of logits that a call computes.

    Attributes:
        functions: each with the hidden states of the engine that it compares with, one for each micro-batch, or None.
    """

    functions: Sequence[tuple[LogitsFunction, Sequence[Hidden] | None]] = ()

    def of(self, number: int) -> Compared:
        """The functions with what they compare a micro-batch with."""
        return [(function, None if others is None else others[number]) for function, others in self.functions]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One layout's way through a pipeline: all at once, one forward one backward, or interleaved.

    Attributes:
        config: Megatron-core's configuration of the model.
        outputs: what the last stage computes; None on other stages.
    """

    state: ParallelState
    config: Any
    arranger: Arranger
    outputs: Outputs | None

    def forward_only(
        self,
        chunks: Sequence[nn.Module],
        layouts: Sequence[MicroBatchLayout],
        request: OutputRequest,
        comparison: Comparison,
    ) -> list[dict[str, torch.Tensor]] | None:
        """The outputs of each micro-batch, on the last stage; None on others."""

        def finish(output: torch.Tensor, numbered: Numbered) -> Any:
            assert self.outputs is not None
            number, layout = numbered
            return _instead_of_logits(output, self.outputs.compute(output, layout, request, comparison.of(number)))

        with torch.no_grad():
            outputs = self._run(chunks, layouts, request, finish, forward_only=True)
        return outputs[: len(layouts)] if self.state.is_last_stage else None

    def hidden(self, chunks: Sequence[nn.Module], layouts: Sequence[MicroBatchLayout]) -> list[Hidden] | None:
        """Return the inputs of the output layer of each micro-batch, also of those that a pipeline adds; see above."""

        def finish(output: torch.Tensor, numbered: Numbered, **_: Any) -> Hidden:
            assert self.outputs is not None
            return self.outputs.hidden(output)

        request = OutputRequest(("hidden",), 1.0)
        with torch.no_grad():
            hidden = self._run(chunks, layouts, request, finish, forward_only=True, collect_non_loss_data=True)
        return hidden if self.state.is_last_stage else None

    def forward_backward(
        self,
        wrapped: Sequence[nn.Module],
        layouts: Sequence[MicroBatchLayout],
        request: OutputRequest,
        share_of_loss: ShareOfLoss,
        comparison: Comparison,
    ) -> None:
        """Sum the gradients of all micro-batches' shares of the loss over all ranks that hold the parameters."""

        def finish(output: torch.Tensor, numbered: Numbered) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            assert self.outputs is not None
            number, layout = numbered
            loss = share_of_loss(number, self.outputs.compute(output, layout, request, comparison.of(number)))
            # Megatron-core frees what a stage computes after it was used, and refuses to free a view.
            return loss.clone(), torch.zeros((), dtype=torch.int, device=loss.device), {}

        self._run(wrapped, layouts, request, finish, forward_only=False)

    def _run(
        self,
        models: Sequence[nn.Module],
        layouts: Sequence[MicroBatchLayout],
        request: OutputRequest,
        finish: Callable[..., Any],
        **options: Any,
    ) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        interleaved = self.state.sizes.vpp > 1
        layouts = list(layouts)
        if interleaved:
            layouts += [_dummy_like(layouts[0]) for _ in range(-len(layouts) % self.state.sizes.pp)]
        shape = self.arranger.shape(layouts) if interleaved else None
        arranged = list(enumerate(self.arranger.arrange(layout, shape) for layout in layouts))

        def step(iterator: Iterator[Numbered], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            numbered = next(iterator)
            return self._forward(model, numbered[1], request), lambda output, **rest: finish(output, numbered, **rest)

        rows, width = shape or self.arranger.shape(layouts)
        iterators = [iter(arranged) for _ in models]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if interleaved else iterators[0],
            model=list(models) if interleaved else models[0],
            num_microbatches=len(arranged),
            seq_length=width,
            micro_batch_size=rows,
            **options,
        )
        device.synchronize()  # messages to other stages refer to memory that is released now
        return results

    def _forward(self, model: Any, layout: RankLayout, request: OutputRequest) -> torch.Tensor:
        arguments = {
            "input_ids": layout.input_ids,
            "position_ids": layout.position_ids,
            "attention_mask": None,
            "packed_seq_params": self._packed_parameters(layout),
        }
        if self.outputs is None or getattr(model, "module", model) is not self.outputs.chunk:
            hidden: torch.Tensor = model(**arguments)
            return hidden
        with self.outputs.selecting(layout, request):
            output: torch.Tensor = model(**arguments)
        return output

    def _packed_parameters(self, layout: RankLayout) -> Any:
        return packed_parameters(layout)


def _instead_of_logits(logits: torch.Tensor, outputs: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return the outputs of a pass without gradients in the form of a loss.

    Megatron-core keeps this form until the next micro-batch has passed; otherwise it would keep the logits.
    """
    return logits.new_zeros(()), torch.zeros((), dtype=torch.int, device=logits.device), outputs


def _dummy_like(layout: MicroBatchLayout) -> MicroBatchLayout:
    """A dummy micro-batch with the same fields."""
    dummy = dummy_layout()
    if layout.inputs is not None:
        dummy.inputs = {name: tensor.new_zeros(1, *tensor.shape[1:]) for name, tensor in layout.inputs.items()}
    return dummy
