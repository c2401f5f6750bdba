"""The load-balancing loss of routers in an update (`fsdp_config.router_aux_loss_coef`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from hybridrl.engine.fsdp.sequence_parallel import SequenceParallel
from hybridrl.engine.microbatch import MicroBatchLayout
from hybridrl.engine.shared_sum import SharedSum
from hybridrl.errors import ModelError
from hybridrl.models.model_config import config_of
from hybridrl.models.routers import RouterLogits, check_overrides, load_balancing, why_no_router_loss
from hybridrl.utils import distributed
from hybridrl.utils.metrics import Metric

KEY = "router_aux_loss_coef"


def check_router_loss(model: Any, engine: Any) -> None:
    """Refuse a model without routers, and settings that the loss cannot be combined with.

    Args:
        model: a `ModelConfig`.
        engine: an `FSDPConfig`.

    Raises:
        ModelError: the message names the key.
    """
    coefficient = engine.router_aux_loss_coef
    check_overrides(model.override_config, f"set fsdp_config.{KEY} (fsdp.{KEY} of the critic, engine.{KEY} of SFT)")
    if not coefficient:
        return
    if engine.forward_only:
        problem: str | None = "this model is not trained (forward_only=True)"
    elif engine.use_torch_compile:
        problem = "the logits of compiled routers are not collected (use_torch_compile=True)"
    else:
        problem = why_no_router_loss(config_of(model))
    if problem:
        raise ModelError(f"{KEY}={coefficient}: {problem}; set it to 0, or change that")


class RouterLoss:
    """Adds `coefficient` times the load-balancing loss of `hybridrl.models.routers` to an update.

    The loss of an update is the mean of those of its micro-batches, weighted by their real tokens, prompts included,
    over all ranks:

        loss = sum_m (N_m / N) * load_balancing(micro-batch m),    N = sum_m N_m

    Shares of it add up like those of the policy loss, so that its gradient does not depend on which rank computes a
    micro-batch, nor on packing or padding. A token that rows share counts as often as without sharing. The loss itself
    is no mean over tokens: it is a product of two of them. So it does depend on how the update is cut into
    micro-batches, as in any implementation that sees one at a time: smaller ones enforce balance within fewer tokens.

    Args:
        module: the model.
        coefficient: weight of the loss.
        top_k: experts per token.
        sequences: the ranks that share each sequence with this one; None if none does.
    """

    def __init__(
        self, module: nn.Module, coefficient: float, top_k: int, sequences: SequenceParallel | None = None
    ) -> None:
        self._sequences = sequences
        self._routers = RouterLogits(module)
        self._coefficient, self._top_k = coefficient, top_k
        self.router_logits: list[torch.Tensor] = []
        self._tokens = 0.0
        self._value: torch.Tensor | float = 0.0
        self._load: torch.Tensor | None = None

    def begin(self, layouts: Sequence[MicroBatchLayout], group: ProcessGroup | None) -> None:
        """Count the real tokens of an update.

        Args:
            layouts: all micro-batches of this rank.
            group: one rank of each shard of the update.
        """
        own = torch.tensor(sum(int(layout.row_counts().sum()) for layout in layouts), device="cpu")
        self._tokens = float(sum(int(count) for count in distributed.all_gather(own, group)))
        self._value, self._load = 0.0, None
        self.router_logits = []  # of a micro-batch that memory did not suffice for

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Collect the logits of the micro-batch that is computed in this context."""
        with self._routers.collected() as logits:
            yield
        self.router_logits = logits

    def share(self, layout: MicroBatchLayout) -> torch.Tensor:
        """The micro-batch's share of the loss, times the coefficient; 0 for a dummy."""
        rows, sequences = layout.row_counts(), self._sequences
        own = rows if sequences is None else sequences.part(rows)
        wrong = [len(logits) for logits in self.router_logits if len(logits) != len(own)]
        if wrong:
            raise ModelError(
                f"{KEY}={self._coefficient}: a router of this model records {wrong[0]} rows of logits for {len(own)} "
                "tokens, which is not the form that the loss is defined for; set it to 0"
            )
        summed = None if sequences is None else lambda part: SharedSum.apply(part, sequences.group)
        loss, load = load_balancing(self.router_logits, own, self._top_k, summed)
        self.router_logits = []
        share = loss * (float(rows.sum()) / max(self._tokens, 1.0))
        self._value = self._value + share.detach()
        self._load = load if self._load is None else self._load + load
        return share * self._coefficient

    def metrics(self, group: ProcessGroup | None) -> dict[str, Metric]:
        """The loss without the coefficient, and how evenly all tokens of the update are spread over experts.

        `router_load_max` is the load of the busiest expert of any layer over the mean load of its layer, 1 if all are
        alike. `router_idle_frac` is the share of experts that no token chose.
        """
        assert self._load is not None  # there is at least one micro-batch, if only a dummy
        load = torch.stack(distributed.all_gather(self._load.detach().cpu(), group)).sum(0)
        relative = load / load.mean(dim=1, keepdim=True).clamp(min=1e-9)
        return {
            "router_aux_loss": Metric(self._value, kind="sum"),
            "router_load_max": Metric(float(relative.max()), kind="max"),
            "router_idle_frac": Metric(float((load == 0).float().mean())),
        }
