"""`MicroBatchedEngine`: what every engine shares that computes a batch micro-batch by micro-batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict

from hybridrl.engine.microbatch import BatchPlan, Layout, dummy_layout, fields
from hybridrl.engine.train_engine import Engine, LossFn, MicroBatching, NonFiniteError
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.utils import device, distributed
from hybridrl.utils.metrics import Metric, as_metrics, merge_metrics

OUTPUTS = {
    "language_model": ("log_probs", "entropy", "sum_pi_squared", "ref_kl"),
    "value_model": ("values",),
}
USUAL_CAUSES = "Usual causes: a NaN reward or advantage, log-probabilities of -inf, a learning rate too high"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a forward pass computes for each of the N response tokens of a micro-batch.

    Attributes:
        outputs: names, see `Engine.infer`.
        temperature: the logits are divided by it.
    """

    outputs: tuple[str, ...]
    temperature: float


# Number of a micro-batch and its outputs, each `[N]`, to that micro-batch's share of the loss.
ShareOfLoss = Callable[[int, dict[str, torch.Tensor]], torch.Tensor]


class MicroBatchedEngine(Engine):
    """Plans micro-batches, spreads their outputs over `[B, T]`, and agrees on steps that are not finite.

    A subclass computes: `forward_only` and `forward_backward` get all micro-batches of a call, so the order in which
    they pass through the model (one after the other, or a pipeline's schedule) is its own. It also takes the optimizer
    step, by `gradient_norm`, `apply_gradients` and `discard_gradients`.

    Attributes:
        model_type: `language_model` or `value_model`.
        packed: whether micro-batches are packed into one row instead of padded.
    """

    model_type: str
    packed: bool = False

    # ------------------------------------------------------------------ what a subclass provides

    @abstractmethod
    def forward_only(self, layouts: Sequence[Layout], wanted: Wanted) -> Sequence[dict[str, torch.Tensor]] | None:
        """The outputs of each micro-batch, `[N]`, without gradients; None on ranks that compute no outputs."""

    @abstractmethod
    def forward_backward(self, layouts: Sequence[Layout], wanted: Wanted, share_of_loss: ShareOfLoss) -> None:
        """Add the gradients of every micro-batch's share of the loss.

        On ranks that compute outputs, `share_of_loss` is called once per micro-batch, and its result is what to
        differentiate. The shares of all micro-batches and all data-parallel ranks are to be summed, not averaged.
        """

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """The norm of all gradients, over all ranks; the same on each."""

    def nonfinite_gradients(self) -> list[str]:
        """Names of the parameters whose gradient on this rank is not finite, for the error message."""
        return []

    @abstractmethod
    def discard_gradients(self) -> None:
        """Forget gradients that were computed."""

    @abstractmethod
    def apply_gradients(self, norm: torch.Tensor) -> None:
        """Clip by the norm, take an optimizer step and one of the schedule, and discard the gradients."""

    @abstractmethod
    def learning_rate(self) -> float | None:
        """The learning rate of the next step; None for an engine without an optimizer."""

    # ------------------------------------------------------------------ computing

    def infer(
        self,
        batch: DataProto,
        micro: MicroBatching,
        temperature: float = 1.0,
        outputs: Collection[str] = ("log_probs",),
    ) -> dict[str, torch.Tensor]:
        self._check_outputs(outputs)
        plan = BatchPlan(fields(batch), micro, self.packed)
        computed = self.forward_only(self._layouts(plan), Wanted(tuple(outputs), temperature))
        if computed is None:
            return {}
        return {name: plan.scatter([part[name] for part in computed[: len(plan.groups)]]) for name in outputs}

    def train_batch(
        self,
        batch: DataProto,
        micro: MicroBatching,
        loss_fn: LossFn,
        temperature: float = 1.0,
        entropy: bool = False,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        ref_kl: bool = False,
    ) -> dict[str, Metric]:
        lr = self.learning_rate()
        if lr is None:
            raise RuntimeError(
                "this engine was made without an optimizer (optim=None or forward_only), so it cannot train"
            )
        plan = BatchPlan(fields(batch), micro, self.packed)
        outputs: tuple[str, ...] = OUTPUTS["value_model"]
        if self.model_type == "language_model":
            outputs = ("log_probs", *(["entropy"] if entropy else []), *(["ref_kl"] if ref_kl else []))
        shares = _LossShares(plan, batch, loss_fn)
        self.discard_gradients()
        self.forward_backward(self._layouts(plan), Wanted(outputs, temperature), shares)
        norm, problem = self._check_step(shares.losses, plan.groups)
        if problem is None:
            self.apply_gradients(norm)
        else:
            self.discard_gradients()
            if on_nonfinite == "raise":
                raise problem
            notify(f"step skipped: {problem}", "warning")
        own = {
            "grad_norm": Metric(norm),
            "lr": Metric(lr),
            "skipped_steps": Metric(float(problem is not None), kind="max"),
        }
        return merge_metrics([*shares.metrics, own])

    def _layouts(self, plan: BatchPlan) -> list[Layout]:
        """The micro-batches, then dummies until this rank has as many as the data-parallel rank with the most."""
        count = max(1, distributed.all_reduce_max(len(plan.groups), group=self.geometry.dp_group))
        missing = count - len(plan.groups)
        return [*(plan.layout(rows) for rows in plan.groups), *(dummy_layout() for _ in range(missing))]

    def _check_outputs(self, outputs: Collection[str]) -> None:
        known = OUTPUTS[self.model_type]
        unknown = sorted(set(outputs) - set(known))
        if unknown or not outputs:
            raise ValueError(
                f"a {self.model_type} computes {', '.join(known)}; asked for {', '.join(unknown) or 'nothing'}"
            )

    def _check_step(
        self, losses: Sequence[torch.Tensor], groups: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, NonFiniteError | None]:
        """The norm of the gradients, and the error that all ranks agree on if it or any loss is not finite."""
        norm = self.gradient_norm()
        finite_losses = torch.isfinite(torch.stack(list(losses))).tolist() if losses else []
        bad_loss = bool(distributed.all_reduce_max(int(not all(finite_losses))))
        if not bad_loss and bool(torch.isfinite(norm)):
            return norm, None
        bad_rows = [row for rows, fine in zip(groups, finite_losses, strict=False) if not fine for row in rows]
        gathered = distributed.all_gather_object((bad_rows, self.nonfinite_gradients()))
        rows_by_rank = [rows for rows, _ in gathered]
        names = sorted({name for _, found in gathered for name in found})
        what = "loss" if bad_loss else "gradient"
        places = "; ".join(f"rank {rank}: sequences {_first(rows)}" for rank, rows in enumerate(rows_by_rank) if rows)
        message = f"the {what} of this step is not finite (gradient norm {float(norm)})"
        message += f", {places}" if places else f", first in {_first(names)}"
        message += ". Parameters and optimizer are unchanged. " + USUAL_CAUSES
        return norm, NonFiniteError(message, what, rows_by_rank, names[:16])


class _LossShares:
    """Calls the loss function on each micro-batch, and keeps the losses and metrics."""

    def __init__(self, plan: BatchPlan, batch: DataProto, loss_fn: LossFn) -> None:
        self.plan = plan
        self.batch = batch
        self.loss_fn = loss_fn
        self.losses: list[torch.Tensor] = []
        self.metrics: list[dict[str, Metric]] = []

    def __call__(self, number: int, computed: dict[str, torch.Tensor]) -> torch.Tensor:
        if number >= len(self.plan.groups):  # a dummy: takes part in every collective and adds nothing
            return torch.stack([part.sum() for part in computed.values()]).sum() * 0.0
        rows, target = self.plan.groups[number], device.current_device()
        columns = self.plan.response_columns(rows)
        mask = self.plan.response_mask[torch.tensor(rows)][:, :columns].to(target, non_blocking=True)
        grids = {}
        for name, flat in computed.items():
            grids[name] = torch.zeros(mask.shape, device=target).masked_scatter(mask, flat)
        part = DataProto(
            batch=TensorDict(self.plan.slice_tensors(rows, columns, target), batch_size=[len(rows)]),
            non_tensor_batch={name: array[rows] for name, array in self.batch.non_tensor_batch.items()},
            meta_info={**self.batch.meta_info, "response_width": self.plan.response_width},
        )
        loss, metrics = self.loss_fn(grids, part)
        self.losses.append(loss.detach())
        self.metrics.append(as_metrics(metrics, sum(self.plan.token_counts[row] for row in rows)))
        return loss


def _first(items: Sequence[Any], count: int = 8) -> str:
    shown = ", ".join(str(item) for item in items[:count])
    return shown + (f" and {len(items) - count} more" if len(items) > count else "")
