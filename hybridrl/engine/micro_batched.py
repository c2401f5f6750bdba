"""`MicroBatchedEngine`: what every engine shares that computes a batch micro-batch by micro-batch."""

from __future__ import annotations

import functools
import gc
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from tensordict import TensorDict

from hybridrl.engine.capabilities import ReplaysRouting
from hybridrl.engine.logits_functions import LogitsFunction
from hybridrl.engine.loss_scale import LossScale
from hybridrl.engine.microbatch import BatchPlan, MicroBatchLayout, dummy_layout, fields
from hybridrl.engine.prefix_plan import PrefixPlan
from hybridrl.engine.train_engine import Engine, LossFn, MicroBatching, NonFiniteError
from hybridrl.errors import MicroBatchError, ModelError, is_out_of_memory
from hybridrl.models.kinds import KINDS
from hybridrl.models.prefix_tree import WORTHWHILE_SHARE
from hybridrl.models.work import Work
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import ROUTED_EXPERTS
from hybridrl.utils import device, distributed
from hybridrl.utils.metrics import Metric, as_metrics, merge_metrics

BUDGET_KEYS = (
    "ppo_max_token_len_per_gpu, log_prob_max_token_len_per_gpu or data.max_token_len_per_gpu (or the micro-batch size)"
)
_OTHER_REMEDIES = (
    "set model.enable_gradient_checkpointing, model.use_fused_kernels, param_offload and optimizer_offload"
)
USUAL_CAUSES = "Usual causes: a NaN reward or advantage, log-probabilities of -inf, a learning rate too high"


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """Request of a forward pass: the outputs for each of the N response tokens of a micro-batch.

    Attributes:
        outputs: names, see `Engine.infer`.
        temperature: the logits are divided by it.
        function: computes some of the outputs from the logits.
    """

    outputs: tuple[str, ...]
    temperature: float
    function: LogitsFunction | None = None


Computed = TypeVar("Computed")

# Number of a micro-batch and its outputs, each `[N]`, to that micro-batch's share of the loss.
ShareOfLoss = Callable[[int, dict[str, torch.Tensor]], torch.Tensor]


class MicroBatchedEngine(Engine):
    """Plans micro-batches, spreads their outputs over `[B, T]`, and agrees on steps that are not finite.

    A subclass computes: `forward_only` and `forward_backward` get all micro-batches of a call, so the order in which
    they pass through the model (one after the other, or a pipeline's schedule) is its own. It also takes the optimizer
    step, by `gradient_norm`, `apply_gradients` and `discard_gradients`.

    Attributes:
        model_type: a name in `KINDS`.
        packed: whether micro-batches are packed into one row instead of padded.
        work: what a sequence costs this model, for micro-batches that take about the same time.
        shares_prefixes: whether tokens that rows of a micro-batch share are computed once; each of its micro-batches
            is a `TreeLayout` then. None: in the calls in which it pays.
        loss_scale: what `forward_backward` multiplies the loss by, and divides the gradients by; None: nothing.
    """

    model_type: str
    packed: bool = False
    work: Work = Work()
    shares_prefixes: bool | None = False
    loss_scale: LossScale | None = None
    _function: LogitsFunction | None = None  # within `computing` of an engine with `ComputesFromLogits`
    _pass_metrics: Mapping[str, Metric] = MappingProxyType({})

    @functools.cached_property
    def _budgets(self) -> dict[str, int]:
        """Tokens per micro-batch that memory was sufficient for, by the kind of call that ran out of it."""
        return {}

    # ------------------------------------------------------------------ what a subclass provides

    @abstractmethod
    def forward_only(
        self, layouts: Sequence[MicroBatchLayout], request: OutputRequest
    ) -> Sequence[dict[str, torch.Tensor]] | None:
        """The outputs of each micro-batch, `[N]`, without gradients; None on ranks that compute no outputs."""

    @abstractmethod
    def forward_backward(
        self, layouts: Sequence[MicroBatchLayout], request: OutputRequest, share_of_loss: ShareOfLoss
    ) -> None:
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

    def update_metrics(self) -> dict[str, Metric]:
        """Metrics of the last `forward_backward`, further than those of the loss function; collective."""
        return {}

    @abstractmethod
    def learning_rate(self) -> float | None:
        """The learning rate of the next step; None for an engine without an optimizer."""

    def follows_paths(self) -> bool:
        """Whether the model computes prefix trees, where `shares_prefixes` is None; collective."""
        return True

    # ------------------------------------------------------------------ computing

    def infer(
        self,
        batch: DataProto,
        micro: MicroBatching,
        temperature: float = 1.0,
        outputs: Collection[str] = ("log_probs",),
    ) -> dict[str, torch.Tensor]:
        self._check_outputs(outputs)
        function = None if self._function is None or not set(self._function.outputs) & set(outputs) else self._function
        request = OutputRequest(tuple(outputs), temperature, function)

        def compute(plan: BatchPlan) -> tuple[Sequence[dict[str, torch.Tensor]] | None, dict[str, Metric]]:
            layouts = self._layouts(plan, function)
            return self.forward_only(layouts, request), prefix_savings(plan, layouts)

        tree = self._may_be_tree(batch, micro, request)
        plan, (computed, savings) = self._within_memory("infer", batch, micro, compute, tree)
        self._pass_metrics = merge_metrics([self._pass_metrics, savings])
        if computed is None:
            return {}
        parts_by_output = {name: [part[name] for part in computed] for name in outputs}
        return {
            name: plan.scatter_tokens(parts) if name == ROUTED_EXPERTS else plan.scatter(parts)
            for name, parts in parts_by_output.items()
        }

    def pop_pass_metrics(self) -> dict[str, Metric]:
        metrics, self._pass_metrics = dict(self._pass_metrics), {}
        return metrics

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
        kind = KINDS[self.model_type]
        outputs = kind.outputs
        if kind.predicts_tokens:
            outputs = ("log_probs", *(["entropy"] if entropy else []), *(["ref_kl"] if ref_kl else []))
            outputs += self._function.outputs if self._function is not None else ()
        request = OutputRequest(outputs, temperature, self._function)

        def add_gradients(plan: BatchPlan) -> _LossShares:
            shares = _LossShares(plan, batch, loss_fn)
            self.discard_gradients()
            layouts = self._layouts(plan, self._function)
            self.forward_backward(layouts, request, shares)
            shares.metrics.append(prefix_savings(plan, layouts))
            return shares

        tree = self._may_be_tree(batch, micro, request)
        compute = functools.partial(self._within_memory, "train_batch", batch, micro, add_gradients, tree)
        shares, norm, problem = self._at_a_fitting_scale(compute)
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
            **({} if self.loss_scale is None else {"loss_scale": Metric(self.loss_scale.value)}),
            **self.update_metrics(),
        }
        return merge_metrics([*shares.metrics, own])

    def compute_gradients(
        self,
        batch: DataProto,
        micro: MicroBatching,
        loss_fn: LossFn,
        outputs: Collection[str],
        temperature: float = 1.0,
    ) -> NonFiniteError | None:
        """Leave the gradients of a batch in the parameters, in place of those before, and take no step.

        Args:
            outputs: what `loss_fn` reads; see `infer`.

        Returns:
            The error if the loss or a gradient is not finite, the same on every rank; then there are no gradients.
        """
        self._check_outputs(outputs)
        request = OutputRequest(tuple(outputs), temperature, self._function)

        def add_gradients(plan: BatchPlan) -> _LossShares:
            shares = _LossShares(plan, batch, loss_fn)
            self.discard_gradients()
            self.forward_backward(self._layouts(plan, self._function), request, shares)
            return shares

        tree = self._may_be_tree(batch, micro, request)
        plan, shares = self._within_memory("train_batch", batch, micro, add_gradients, tree)
        _, problem = self._check_step(shares.losses, plan.groups)
        if problem is not None:
            self.discard_gradients()
        return problem

    def _at_a_fitting_scale(
        self, compute: Callable[[], tuple[BatchPlan, _LossShares]]
    ) -> tuple[_LossShares, torch.Tensor, NonFiniteError | None]:
        """Compute the gradients of a step; if they overflow in float16, again with half the scale of the loss.

        Returns:
            The losses, the norm of the gradients, and the error if it or a loss is not finite. If no scale makes the
            gradients finite, the scale stays as it was.
        """
        scale = self.loss_scale
        before = None if scale is None else scale.state()
        while True:
            plan, shares = compute()
            norm, problem = self._check_step(shares.losses, plan.groups)
            if scale is None or before is None:
                return shares, norm, problem
            if problem is None:
                scale.count()
                return shares, norm, None
            if problem.quantity == "loss" or not scale.halve():
                scale.load(before)
                return shares, norm, problem

    def _within_memory(
        self, call: str, batch: DataProto, micro: MicroBatching, compute: Callable[[BatchPlan], Computed], tree: bool
    ) -> tuple[BatchPlan, Computed]:
        """Plan and compute; after an out-of-memory error, plan smaller micro-batches and compute all of them again.

        An error in a backward pass leaves part of a micro-batch's gradients, so the whole call is repeated, without
        the gradients so far. Its result is that of a call that began with the smaller micro-batches. Later calls begin
        with them. With several ranks nothing is repeated here, because the others wait in collectives of the failed
        micro-batch. They end with the failed rank, and the program begins again from its last checkpoint
        (`hybridrl.trainer.repeating`).

        Raises:
            ModelError: memory is not sufficient for one sequence.
            MicroBatchError: several ranks compute together.
        """
        limit = self._budgets.get(call)
        while True:
            if limit is not None:
                micro = replace(micro, max_tokens=min(limit, micro.max_tokens or limit))
            plan = self.plan_batch(batch, micro, tree)
            try:
                return plan, compute(plan)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                limit = plan.halved_budget()
                if limit is None:
                    raise _too_long(error, plan) from error
                if distributed.get_world_size() > 1:
                    raise _smaller_needed(error, plan, call, micro, limit, self.geometry.cp_size) from error
                reason = _first_line(error)
            self._budgets[call] = limit
            gc.collect()  # what the error held
            device.empty_cache()
            notify(
                f"{call} ran out of memory and is repeated with at most {limit} tokens per micro-batch, as later ones "
                f"are: {reason}. To begin with this limit, {_lower(micro.key, limit)}",
                "warning",
            )

    def _may_be_tree(self, batch: DataProto, micro: MicroBatching, request: OutputRequest) -> bool:
        """Whether micro-batches of this call may be prefix trees; the same on every rank.

        With `shares_prefixes` None, they are not where something belongs to the tokens of single rows, or another
        model reads the micro-batches and computes no trees.
        """
        if self.shares_prefixes is not None:
            return self.shares_prefixes
        function = request.function
        others = [function.other if function is not None else None]
        others += [getattr(self, "reference", None)] if "ref_kl" in request.outputs else []
        return not (
            ROUTED_EXPERTS in request.outputs
            or (batch.batch is not None and ROUTED_EXPERTS in batch.batch.keys())
            or (function is not None and function.fields)
            or any(isinstance(other, MicroBatchedEngine) and not other.may_share() for other in others)
        )

    def may_share(self) -> bool:
        """Whether this engine computes prefix trees; collective."""
        return self.shares_prefixes is not False and (self.shares_prefixes is True or self.follows_paths())

    def _pays(self, plan: PrefixPlan) -> bool:
        """Whether the micro-batches of all ranks save enough tokens; the same on every rank."""
        own = torch.tensor([plan.computed_tokens, plan.row_tokens], device="cpu")
        computed, rows = torch.stack(distributed.all_gather(own, self.geometry.dp_group)).sum(0).tolist()
        return computed < (1 - WORTHWHILE_SHARE) * rows

    def plan_batch(self, batch: DataProto, micro: MicroBatching, tree: bool = True) -> BatchPlan:
        """The micro-batches of this rank's rows; ranks that share sequences hold a part of the tokens each.

        Args:
            tree: the result of `_may_be_tree`.
        """
        if micro.max_tokens is not None:
            micro = replace(micro, max_tokens=micro.max_tokens * self.geometry.cp_size)
        if tree and self.shares_prefixes is not False:
            plan = PrefixPlan(fields(batch), micro, self.work)
            if self.shares_prefixes or (self._pays(plan) and self.follows_paths()):
                return plan
        return BatchPlan(fields(batch), micro, self.packed, self.work)

    def _layouts(self, plan: BatchPlan, function: LogitsFunction | None) -> list[MicroBatchLayout]:
        """The micro-batches, on each data-parallel rank as many as on the rank with the most.

        A rank with too few rows adds dummies. Each has the fields that the function reads.
        """
        count = max(1, distributed.all_reduce_max(len(plan.groups), group=self.geometry.dp_group))
        if count > len(plan.groups):
            plan.balance(count)
        missing = count - len(plan.groups)
        layouts = [*(plan.layout(rows) for rows in plan.groups), *(dummy_layout() for _ in range(missing))]
        if function is not None and function.fields:
            empty = plan.token_inputs([], function.fields)
            for number, layout in enumerate(layouts):
                if number < len(plan.groups):
                    layout.inputs = plan.token_inputs(plan.groups[number], function.fields)
                else:
                    layout.inputs = {name: tensor.new_zeros(1, *tensor.shape[1:]) for name, tensor in empty.items()}
        return layouts

    def _check_outputs(self, outputs: Collection[str]) -> None:
        computable = (*KINDS[self.model_type].outputs, *([ROUTED_EXPERTS] if isinstance(self, ReplaysRouting) else []))
        computable += () if self._function is None else self._function.outputs
        unknown = sorted(set(outputs) - set(computable))
        if unknown or not outputs:
            raise ValueError(
                f"a {self.model_type} computes {', '.join(computable)}; asked for {', '.join(unknown) or 'nothing'}"
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
        names = sorted({name for _, parameters in gathered for name in parameters})
        quantity = "loss" if bad_loss else "gradient"
        places = "; ".join(f"rank {rank}: sequences {_first(rows)}" for rank, rows in enumerate(rows_by_rank) if rows)
        message = f"the {quantity} of this step is not finite (gradient norm {float(norm)})"
        message += f", {places}" if places else f", first in {_first(names)}"
        message += ". Parameters and optimizer are unchanged. " + USUAL_CAUSES
        return norm, NonFiniteError(message, quantity, rows_by_rank, names[:16])


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
            cells = mask.reshape(*mask.shape, *(1 for _ in flat.shape[1:]))
            grids[name] = torch.zeros(*mask.shape, *flat.shape[1:], device=target).masked_scatter(cells, flat)
        part = DataProto(
            batch=TensorDict(self.plan.slice_tensors(rows, columns, target), batch_size=[len(rows)]),
            non_tensor_batch={name: array[rows] for name, array in self.batch.non_tensor_batch.items()},
            meta_info={**self.batch.meta_info, "response_width": self.plan.response_width},
        )
        loss, metrics = self.loss_fn(grids, part)
        self.losses.append(loss.detach())
        self.metrics.append(as_metrics(metrics, sum(self.plan.token_counts[row] for row in rows)))
        return loss


def prefix_savings(plan: BatchPlan, layouts: Sequence[MicroBatchLayout]) -> dict[str, Metric]:
    """Return how much a call saved by computing shared tokens once; empty if its micro-batches are no prefix trees.

    FLOPs are left out where those of the model's family are not known.
    """
    if not isinstance(plan, PrefixPlan) or not plan.row_tokens:
        return {}
    metrics = {"shared_prefix_frac": Metric(plan.shared_tokens, plan.row_tokens)}
    if plan.work.is_exact:
        computed, apart = plan.flops(layouts)
        metrics["shared_flops_frac"] = Metric(1 - computed / apart, apart)
    return metrics


def _too_long(error: Exception, plan: BatchPlan) -> ModelError:
    """The error for a call that ran out of memory though each micro-batch is a single sequence."""
    tokens = max(map(plan.tokens, plan.groups), default=0)
    return ModelError(
        f"rank {distributed.get_rank()} ran out of memory, and a micro-batch of {tokens} tokens is a single sequence; "
        f"shorten sequences (data.max_response_length), or {_OTHER_REMEDIES}. {_first_line(error)}"
    )


def _smaller_needed(
    error: Exception, plan: BatchPlan, call: str, micro: MicroBatching, limit: int, ranks: int
) -> MicroBatchError:
    """The error for a call on several ranks that ran out of memory.

    Args:
        limit: tokens that cut the largest micro-batch in two.
        ranks: those that share sequences.
    """
    largest = max(plan.groups, key=plan.tokens)
    return MicroBatchError(
        f"rank {distributed.get_rank()} ran out of memory in {call}, whose largest micro-batch there has "
        f"{len(largest)} sequences with {plan.tokens(largest)} tokens. Other ranks wait for this one, so the "
        f"micro-batch cannot be repeated: {_lower(micro.key, max(1, limit // ranks))}, or {_OTHER_REMEDIES}. "
        f"{_first_line(error)}",
        key=micro.key,
        tokens=2 * limit // ranks,
        ranks=ranks,
        by_tokens=micro.size is None,
    )


def _lower(key: str, limit: int) -> str:
    return f"set {key}={limit}" if key else f"lower {BUDGET_KEYS} to {limit} tokens"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _first(items: Sequence[Any], count: int = 8) -> str:
    text = ", ".join(str(item) for item in items[:count])
    return text + (f" and {len(items) - count} more" if len(items) > count else "")
