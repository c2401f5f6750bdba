"""Outputs of response tokens without logits `[N, V]` as a whole (`model.use_fused_kernels`).

Legend: N response tokens, H features, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybridrl.algorithms.linear_statistics import linear_token_statistics, rows_at_a_time
from hybridrl.engine.chunked_function import Hidden, chunked_function
from hybridrl.engine.fsdp.forward import SelectingHead
from hybridrl.engine.logit_change import LogitChange, left_out
from hybridrl.engine.logits_functions import LogitsFunction
from hybridrl.engine.microbatch import MicroBatchLayout
from hybridrl.notify import notify
from hybridrl.utils import distributed

#: functions of logits, each with what the output layer of the engine reads that it compares with
Compared = Sequence[tuple[LogitsFunction, Hidden | None]]
_STATISTICS = ("log_probs", "entropy", "sum_pi_squared")
#: a logit beyond usual ones
_FURTHEST = 64.0


class ChangedOutputError(Exception):
    """The model does something with the output of its head that is not known, so that it must compute logits."""


def fusing_requested(model_type: str, model: Any, engine: Any) -> bool:
    """Whether the settings ask for outputs without logits; warn of settings that a value model does not read.

    Args:
        model: a `ModelConfig`.
        engine: an `FSDPConfig`.
    """
    requested = bool(model.use_fused_kernels)
    if model_type == "language_model":
        return requested
    if requested:
        warn_unfused(model.path, "a value model has no logits")
    if engine.most_tokens is not None:
        warn_unfused(model.path, "a value model has no logits", "entropy_from_logits_with_chunking")
    return False


def warn_unfused(path: str, reason: str, setting: str = "model.use_fused_kernels") -> None:
    """Warn, on the first rank, that a setting has no effect."""
    if distributed.get_rank() == 0:
        notify(f"{path}: {setting} has no effect, because {reason}")


class Fusing:
    """Lets a model's output layer return what is wanted of its logits, in place of them.

    Args:
        module: the model.
        head: of the model.
        forward: the model's forward pass, which returns what the head does, `[N, ...]`.
        trial: returns a micro-batch to try the model with.
        most_tokens: a tile of statistics is at most as large as the logits of so many tokens; None: as large as
            computes fast.
        source: the model's path, for notices.
    """

    def __init__(
        self,
        module: nn.Module,
        head: SelectingHead,
        forward: Callable[[MicroBatchLayout], torch.Tensor],
        trial: Callable[[], MicroBatchLayout],
        most_tokens: int | None = None,
        source: str = "",
    ) -> None:
        self._module, self._head, self._forward, self._most_tokens = module, head, forward, most_tokens
        self._trial, self._source = trial, source
        #: what it does to its logits, once `unsupported_reason` has found out
        self._change: LogitChange | None = None

    @functools.cached_property
    def supported(self) -> bool:
        """Whether logits are a linear layer's output or a supported change of it; warn if not. Collective trial."""
        reason = self.unsupported_reason(self._trial())
        if reason is not None:
            warn_unfused(self._source, reason)
        return reason is None

    def outputs(
        self, layout: MicroBatchLayout, temperature: float, requested: Collection[str], compared: Compared = ()
    ) -> dict[str, torch.Tensor]:
        """Return the statistics of tokens among `requested`, and the outputs of the functions, `[N, ...]`.

        All that has a gradient passes through the output of the module, so that what is attached to the head (gathering
        of shards) happens before its backward pass.

        Raises:
            ChangedOutputError: the model would do something else with the logits than `unsupported_reason` found. That
                it leaves out words of them is not noticed here.
        """
        aside: dict[str, torch.Tensor] = {}
        shapes: dict[str, torch.Size] = {}
        returned: list[tuple[torch.Tensor, int]] = []

        def compute(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            hidden = Hidden(states, weight, bias, self._change)
            outputs = _statistics(hidden, layout, temperature, requested, self._most_tokens)
            for function, other in compared:
                outputs |= chunked_function(function, hidden, layout.inputs or {}, temperature, other)
            aside.update({name: value for name, value in outputs.items() if not value.is_floating_point()})
            differentiable = {name: value for name, value in outputs.items() if name not in aside}
            shapes.update({name: value.shape[1:] for name, value in differentiable.items()})
            joined = torch.cat(
                [value.reshape(len(value), value.shape[1:].numel()) for value in differentiable.values()], dim=1
            )
            returned.append((joined, joined._version))
            return joined

        output = self._unchanged(compute, layout)
        own, version = returned[0]
        # A change that is left out may copy its input, times 1.
        same = self._change is not None or output.data_ptr() == own.data_ptr()
        if not same or output.shape != own.shape or own._version != version:
            raise ChangedOutputError
        parts = output.split([math.prod(shape) for shape in shapes.values()], dim=1)
        outputs = {
            name: part.reshape(len(part), *shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        return outputs | aside

    def hidden(self, layout: MicroBatchLayout, copies: bool) -> Hidden:
        """Return the inputs from which the head would compute logits.

        Args:
            copies: the output layer is there during the forward pass alone, so it is copied.
        """
        captured: list[Hidden] = []

        def capture(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            parameters = [None if x is None else x.detach().clone() if copies else x.detach() for x in (weight, bias)]
            assert parameters[0] is not None
            captured.append(Hidden(states, parameters[0], parameters[1], self._change))
            return states

        with self._head.replaced_by(capture):
            self._forward(layout)
        return captured[0]

    def _unchanged(self, compute: Callable[..., torch.Tensor], layout: MicroBatchLayout) -> torch.Tensor:
        """Return the model's output with `compute(hidden, weight, bias)` for logits, without its change of logits."""
        without_change = contextlib.nullcontext() if self._change is None else left_out(self._module)
        with self._head.replaced_by(compute), without_change:
            return self._forward(layout)

    @torch.no_grad()
    def unsupported_reason(self, layout: MicroBatchLayout) -> str | None:
        """Return why the model has to compute logits, tried on the first token; None if it need not. Collective."""
        if not self._head.is_linear:
            return "its output layer is not a plain linear layer"
        changed = "it changes its logits after its output layer"
        # Each rank has to see what happens to an output, also one whose tokens have none.
        first_token = torch.zeros(1, dtype=torch.int64, device=layout.input_ids.device)
        layout = replace(layout, selected=first_token, labels=first_token)
        if self._forward(layout).shape[-1] != self._head.width:  # it cuts off words of padding
            return changed
        self._change = None
        with contextlib.suppress(ChangedOutputError):
            self.outputs(layout, 1.0, _STATISTICS[:1])
            return None
        self._change = LogitChange.described(self._module.config)
        if self._change is not None and self._changes_as(self._change, layout):
            return None
        self._change = None
        return changed

    def _changes_as(self, change: LogitChange, layout: MicroBatchLayout) -> bool:
        """Whether the model does this to logits and nothing else, and nothing at all where it is left out.

        It is tried with an output of the layer whose values are far apart, so that a soft cap shows.
        """
        probes: list[torch.Tensor] = []

        def probe(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            probes.append(torch.linspace(-_FURTHEST, _FURTHEST, len(weight), device=states.device)[None])
            return probes[-1].clone()

        with self._head.replaced_by(probe):
            logits = self._forward(layout)
        plain, expected = self._unchanged(probe, layout), change(probes[0])
        if logits.shape != expected.shape or logits.dtype != expected.dtype or not torch.equal(plain, probes[1]):
            return False
        return torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)


def _statistics(
    hidden: Hidden, layout: MicroBatchLayout, temperature: float, requested: Collection[str], most_tokens: int | None
) -> dict[str, torch.Tensor]:
    if not any(name in requested for name in _STATISTICS):
        return {}
    change = hidden.change or LogitChange()
    return linear_token_statistics(
        hidden.states,
        hidden.weight,
        hidden.bias,
        labels=layout.labels if "log_probs" in requested else None,
        temperature=temperature,
        entropy="entropy" in requested,
        sum_pi_squared="sum_pi_squared" in requested,
        chunk_size=rows_at_a_time(hidden.states.device.type, len(hidden.weight), most_tokens),
        multiplier=change.multiplier,
        soft_cap=change.soft_cap,
    )
