"""The routers of a mixture-of-experts model: where they are, their logits, and how evenly they use the experts.

Shapes: L layers with experts, T tokens of a micro-batch (padding included), E experts, K experts per token.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils.output_capturing import OutputRecorder

from hybridrl.errors import ModelError
from hybridrl.models.attention import model_class_of

LOGITS = "router_logits"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
#: entries of config.json by which transformers adds the loss to its own training loss, which is not used here
OF_TRANSFORMERS = ("output_router_logits", "router_aux_loss_coef")


def why_no_routers(config: PreTrainedConfig) -> str | None:
    """Return why the routers of a model cannot be found; None if they can."""
    model_class = model_class_of(config)
    if model_class is None:
        return "it is not a plain causal language model of transformers"
    if not isinstance(_recorder(model_class), OutputRecorder):
        return f"{model_class.__name__} of transformers has no layers with experts whose router's logits it records"
    return None


def why_no_router_loss(config: PreTrainedConfig) -> str | None:
    """Return why a model has no load-balancing loss of its routers; None if it has."""
    text = config.get_text_config()
    missing = [name for name in ("router_aux_loss_coef", "num_experts_per_tok") if not hasattr(text, name)]
    if missing:
        return f"transformers defines no such loss for {text.model_type} (its configuration has no {missing[0]})"
    return why_no_routers(config) or _why_other_logits(config)


def _why_other_logits(config: PreTrainedConfig) -> str | None:
    """Return why a model's recorded logits are not one row per token; None if they are, or if that cannot be tried."""
    tokens = 3
    router_run = try_router(config, tokens)
    if router_run is None:
        return None
    router, output = router_run
    logits = output if isinstance(output, torch.Tensor) else output[_recorder(model_class_of(config)).index]
    if logits.numel() == tokens * logits.shape[-1]:
        return None
    shape = list(logits.shape)
    return f"{type(router).__name__} records logits {shape} for {tokens} tokens; the loss needs a row per token"


def try_router(config: PreTrainedConfig, tokens: int) -> tuple[nn.Module, Any] | None:
    """Run the first router of a model without weights, on the meta device.

    Args:
        config: of a model for which `why_no_routers` is None.
        tokens: how many hidden states it gets.

    Returns:
        The router and its output; None for a router that cannot be called with hidden states alone.
    """
    size = config.get_text_config().hidden_size
    with torch.device("meta"), contextlib.suppress(Exception):  # any of this family's own code; the first pass decides
        router = routers_of(model_class_of(config)(copy.deepcopy(config)))[0]
        hidden = torch.empty(tokens, size, dtype=next(router.parameters()).dtype)
        for inputs in (hidden, hidden[None]):  # most families put the tokens of all rows in one dimension
            with contextlib.suppress(ValueError):
                return router, router(inputs)
    return None


def check_overrides(override: Mapping[str, Any], instead: str) -> None:
    """Refuse what would ask transformers for the loss, because its own training loss is not used.

    Args:
        instead: what to do.

    Raises:
        ModelError: the message names the entry.
    """
    for name in OF_TRANSFORMERS:
        if override.get(name):
            raise ModelError(f"model.override_config.{name}={override[name]} has no effect in training; {instead}")


class RouterLogits:
    """Collects the logits of a model's routers, in the order of its layers.

    Args:
        module: a model of transformers, sharded or not.

    Raises:
        ModelError: it has no routers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._collected: list[torch.Tensor] | None = None
        recorder = _recorder(module)
        routers = routers_of(module)
        self._index = recorder.index
        for router in routers:
            router.register_forward_hook(self._collect)

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[torch.Tensor]]:
        """Collect the logits `[T, E]` of each router within the context, with their gradient.

        Layers that are computed again in a backward pass outside of the context add nothing.
        """
        self._collected = []
        try:
            yield self._collected
        finally:
            self._collected = None

    def _collect(self, router: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if self._collected is not None:
            logits = output if isinstance(output, torch.Tensor) else output[self._index]
            self._collected.append(logits.reshape(-1, logits.shape[-1]))


def load_balancing(
    logits: Sequence[torch.Tensor],
    rows: torch.Tensor,
    top_k: int,
    summed: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The load-balancing loss of transformers (equations 4 to 6 of arXiv 2101.03961), and the tokens of each expert.

        loss = E * sum_i f_i P_i,    f_i = #(l, t, k: k-th choice of token t in layer l is i) / (L N),
                                     P_i = sum_(l, t) softmax(logits_lt)_i / (L N)

    over the N real tokens t of all layers l together. It is K where all experts are used alike. f has no gradient.
    A token that several rows share counts once for each of them.

    Args:
        logits: of each layer, `[T, E]`.
        rows: `[T]` how many rows hold each token, 0 on padding.
        top_k: K.
        summed: the sum of a tensor over the ranks that hold parts of the tokens; None if there is one.

    Returns:
        The loss, 0 without real tokens, and how many tokens chose each expert, `[L, E]`, without gradient.
    """
    weight = rows.to(logits[0].device, torch.float32)
    counts, mass = [], []
    for layer in logits:
        probabilities = torch.softmax(layer, dim=-1, dtype=torch.float32)
        expert_ids = probabilities.detach().topk(top_k, dim=-1).indices.flatten()
        counts.append(weight.new_zeros(layer.shape[-1]).scatter_add_(0, expert_ids, weight.repeat_interleave(top_k)))
        mass.append(weight @ probabilities)
    totals = torch.cat([torch.stack(counts), torch.stack(mass), weight.sum().expand(len(logits), 1)], 1)
    if summed is not None:
        totals = summed(totals)
    experts = logits[0].shape[-1]
    load, masses, tokens = totals.split([experts, experts, 1], 1)
    choices = tokens.detach().sum().clamp(min=1)
    loss = experts * ((load.detach().sum(0) / choices) * (masses.sum(0) / choices)).sum()
    return loss, load.detach()


def routers_of(module: nn.Module) -> list[nn.Module]:
    """The routers of a model of transformers, in the order of its layers.

    Raises:
        ModelError: it has none.
    """
    routers = router_layers(module)
    if not routers:
        raise ModelError(f"{type(module).__name__} has no routers of experts whose logits transformers records")
    return routers


def router_layers(module: nn.Module) -> list[nn.Module]:
    """The routers of a model of transformers; none for a model without experts."""
    recorder = _recorder(module)
    return list(_routers(module, recorder)) if isinstance(recorder, OutputRecorder) else []


def layers_with_routers(config: PreTrainedConfig) -> list[int]:
    """The numbers of the decoder layers that have a router, in order; the model is built on the meta device.

    Raises:
        ModelError: it has no routers, or they are not in numbered layers.
    """
    if reason := why_no_routers(config):
        raise ModelError(reason)
    with torch.device("meta"):
        module = model_class_of(config)(copy.deepcopy(config))
    routers = {id(router) for router in routers_of(module)}
    matches = [_LAYER.search(f".{name}.") for name, part in module.named_modules() if id(part) in routers]
    if not all(matches):
        raise ModelError(f"the routers of {type(module).__name__} are not in layers with numbers")
    return [int(match[1]) for match in matches if match]


def experts_of(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of experts of a layer, and the number of them that a token uses.

    Raises:
        ModelError: the configuration does not say it under a known name.
    """
    text: Any = config.get_text_config()
    keys = ("n_routed_experts", "num_local_experts", "num_experts")
    names = [name for name in keys if getattr(text, name, None)]
    if not names:
        raise ModelError(
            f"the configuration of {text.model_type} has none of {', '.join(keys)}: how many experts are there?"
        )
    return int(getattr(text, names[0])), int(text.num_experts_per_tok)


def _recorder(model: Any) -> Any:
    """Return transformers' recorder of the logits of a model's routers; None if it has none."""
    return (getattr(model, "_can_record_outputs", None) or {}).get(LOGITS)


def _routers(module: nn.Module, recorder: OutputRecorder) -> Iterator[nn.Module]:
    for name, part in module.named_modules():
        if isinstance(part, recorder.target_class) and name.endswith(recorder.layer_name or ""):
            yield part
