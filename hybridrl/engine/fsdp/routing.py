"""Router replay: the experts of tokens are recorded in one pass and replayed in another (`actor.router_replay`).

Shapes: T tokens of a micro-batch (padding included), L layers with experts, E experts, K experts per token.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from hybridrl.errors import ModelError
from hybridrl.models.model_config import config_of
from hybridrl.models.routers import experts_of, routers_of, try_router, why_no_routers


def check_routing(model: Any, engine: Any) -> None:
    """Refuse a model without routers, and settings that cannot be combined with replay.

    Args:
        model: a `ModelConfig`.
        engine: an `FSDPConfig`.

    Raises:
        ModelError: the model or a setting prevents replay; the message names it.
    """
    if model.share_prefixes:
        problem: str | None = "model.share_prefixes=True computes tokens once that rows share; set it to False"
    elif engine.ulysses_sequence_parallel_size > 1:
        size = engine.ulysses_sequence_parallel_size
        problem = f"ulysses_sequence_parallel_size={size} splits rows over ranks; set it to 1"
    elif engine.use_torch_compile:
        problem = "use_torch_compile=True compiles the routers; set it to False"
    else:
        config = config_of(model)
        problem = why_no_routers(config)
        if problem is None and not hasattr(config.get_text_config(), "num_experts_per_tok"):
            problem = "its configuration has no num_experts_per_tok"
        elif problem is None and getattr(config.get_text_config(), "topk_method", None) == "group_limited_greedy":
            problem = "topk_method=group_limited_greedy gives experts outside of the groups chosen now no weight"
        elif problem is None:
            problem = _routing_unsupported_reason(config)
    if problem is not None:
        raise ModelError(f"the experts of {model.path} cannot be recorded and replayed: {problem}")


def _routing_unsupported_reason(config: PreTrainedConfig) -> str | None:
    """Return why a model's routers do not choose by one `torch.topk`; None if they do, or if that cannot be tried."""
    experts, top_k = experts_of(config)
    with _Choice(experts, top_k, None) as choice:
        trial = try_router(config, 3)
    if trial is None or len(choice.chosen) == 1:
        return None
    return f"its router, {type(trial[0]).__name__}, does not choose {top_k} of {experts} experts by one torch.topk"


class Routing:
    """Records and replaces the choices of a model's routers.

    A router chooses with `torch.topk` over its E experts. In a replay, its indices are the given ones and its values
    those of the current scores at these indices; what the router makes of them (softmax, normalisation, scaling) is
    the model's own code, and gradients flow as they do without a replay.

    Args:
        module: a model of transformers, sharded or not.
        config: its configuration.
    """

    def __init__(self, module: nn.Module, config: PreTrainedConfig) -> None:
        self._experts, self._top_k = experts_of(config)
        self._dtype = torch.uint8 if self._experts <= 256 else torch.int16
        self._recorded: list[torch.Tensor] | None = None
        self._replayed: torch.Tensor | None = None
        for layer, router in enumerate(routers_of(module)):
            router.forward = functools.partial(self._route, type(router).__name__, router.forward, layer)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[torch.Tensor]]:
        """Within the context, each layer adds the experts that it uses, integers `[T, K]`."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextlib.contextmanager
    def replayed(self, experts: torch.Tensor) -> Iterator[None]:
        """Within the context, tokens use these experts, `[T, L, K]`."""
        self._replayed = experts
        try:
            yield
        finally:
            self._replayed = None

    def _route(self, name: str, forward: Callable[..., Any], layer: int, *arguments: Any, **named: Any) -> Any:
        if self._recorded is None and self._replayed is None:
            return forward(*arguments, **named)
        replayed = None if self._replayed is None else self._replayed[:, layer].long()
        with _Choice(self._experts, self._top_k, replayed) as choice:
            output = forward(*arguments, **named)
        if len(choice.chosen) != 1:
            raise ModelError(
                f"{name} does not choose {self._top_k} of {self._experts} experts by one torch.topk, so its choice "
                "cannot be recorded and replayed; set actor_rollout_ref.actor.router_replay.mode=disabled"
            )
        if self._recorded is not None:
            self._recorded.append(choice.chosen[0].to(self._dtype))
        return output


class _Choice(TorchFunctionMode):
    """Records the result of `topk` over all experts, and puts given experts in its place."""

    def __init__(self, experts: int, top_k: int, replayed: torch.Tensor | None) -> None:
        super().__init__()
        self._experts, self._top_k, self._replayed = experts, top_k, replayed
        self.chosen: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        if function not in (torch.topk, torch.Tensor.topk):
            return result
        scores: torch.Tensor = arguments[0] if arguments else (named or {})["input"]
        if scores.ndim != 2 or scores.shape[-1] != self._experts or result.indices.shape[-1] != self._top_k:
            return result
        if self._replayed is not None:
            if self._replayed.shape != result.indices.shape:
                raise ModelError(
                    f"routed_experts has {list(self._replayed.shape)} experts for a layer's tokens, whose router "
                    f"chooses {list(result.indices.shape)}"
                )
            result = torch.return_types.topk((scores.gather(-1, self._replayed), self._replayed))
        self.chosen.append(result.indices)
        return result
