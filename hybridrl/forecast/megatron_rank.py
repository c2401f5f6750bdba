"""The memory that `MegatronEngine` will take: one rank's part of the model on the meta device, and its schedule.

A process of its own computes it (`hybridrl.forecast.megatron_process`), because it is a rank of a group that
does not exist, and does not use a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridrl.engine.megatron import build
from hybridrl.engine.megatron.forward import Outputs, packing_unsupported_reason
from hybridrl.engine.megatron.parallel import ParallelSizes, ParallelState, import_parallel_state, stages_differ
from hybridrl.engine.megatron.pipeline import Comparison
from hybridrl.engine.megatron.sharded_optimizer import gradient_buffers, shards_of, usable_settings
from hybridrl.engine.micro_batched import OutputRequest
from hybridrl.engine.microbatch import PREFERRED_CELLS, MicroBatchLayout
from hybridrl.engine.optim.optimizer import state_bytes
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.forecast import megatron_process
from hybridrl.forecast.meta_tensors import layer_rows, logits_rows, peak_of
from hybridrl.forecast.sizes import Forecast, Workload
from hybridrl.models.kinds import KINDS
from hybridrl.models.model_config import config_of
from hybridrl.registry import import_external_lib
from hybridrl.utils import device

_DISPATCHER = "alltoall"


@dataclass(frozen=True, slots=True)
class ForecastDevice:
    """Properties of the device that the model will be on.

    Attributes:
        kind: `cuda` or `cpu`.
        triton: whether it runs the kernels of this package.
        engine: whether layers are those of Transformer Engine.
        packed: whether sequences share a row.
    """

    kind: str
    triton: bool
    engine: bool
    packed: bool


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """Request to the forecast process: arguments of `forecast`, with a dtype independent of the device."""

    model_type: str
    model: Any
    engine: Any
    optim: Any
    ranks: int
    work: Workload
    target: ForecastDevice


def forecast(model_type: str, model: Any, engine: Any, optim: Any, ranks: int, work: Workload) -> Forecast | None:
    """Return the forecast of one of `ranks` ranks: a rank of the pipeline stage that takes the most memory.

    It is computed in another process; see `compute`.

    Raises:
        ModelError: the model, its layout or a setting cannot be used.
    """
    largest_stage: Forecast | None = megatron_process.call(request_for(model_type, model, engine, optim, ranks, work))
    return largest_stage


def request_for(model_type: str, model: Any, engine: Any, optim: Any, ranks: int, work: Workload) -> ForecastRequest:
    """The request of a process with a device of the kind that the model will be on."""
    dtype = build.dtype_of(engine)
    packed = bool(model.use_remove_padding) and device.is_gpu()
    if packed:
        config = config_of(model)
        packed = packing_unsupported_reason(ParallelSizes.of(engine), dtype, config) is None
    target = ForecastDevice(device.get_device_name(), device.runs_triton(), build.has_transformer_engine(), packed)
    engine = replace(engine, dtype=str(dtype).removeprefix("torch."))
    return ForecastRequest(model_type, model, engine, None if engine.forward_only else optim, ranks, work, target)


def compute(request: ForecastRequest) -> Forecast | None:
    """The forecast, in a process without a process group and without a GPU.

    Returns:
        None if tokens reach experts in a way that cannot be computed without values.

    Raises:
        ModelError: the model, its layout or a setting cannot be used.
    """
    model, trains = request.model, request.optim is not None
    import_external_lib(model.external_lib)
    import_parallel_state()
    plan = build.plan_of(model, request.engine, request.model_type, trains, here=False)
    sizes = ParallelSizes.of(request.engine)
    sizes.check(request.ranks, plan.model_fields)
    if plan.model_fields.get("moe_token_dispatcher_type", _DISPATCHER) != _DISPATCHER:
        return None
    forecasts = [_Stage(request, plan, sizes, stage).forecast() for stage in _largest_stages(sizes, plan.model_fields)]
    peaks = [of_stage.update if trains else of_stage.without_gradients for of_stage in forecasts]
    largest = forecasts[peaks.index(max(peaks))]
    without_gradients = max(of_stage.without_gradients for of_stage in forecasts)
    module = KINDS[request.model_type].build(plan.hf_config, build.dtype_of(request.engine), model.trust_remote_code)
    return replace(
        largest,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        # Another stage may take more in a pass.
        pass_activations=largest.pass_activations + without_gradients - largest.without_gradients,
    )


def _largest_stages(sizes: ParallelSizes, model_fields: Any) -> list[int]:
    """The stages of which one takes the most.

    Of stages with the same layers, those in between hold fewer micro-batches than the first, and neither the
    embedding nor logits.
    """
    return list(range(sizes.pp)) if stages_differ(model_fields) else sorted({0, sizes.pp - 1})


class _Stage:
    """One rank of a pipeline stage."""

    def __init__(self, request: ForecastRequest, plan: build.Blueprint, sizes: ParallelSizes, stage: int) -> None:
        self._request, self._plan, self._sizes, self._stage = request, plan, sizes, stage
        self._kind = request.target.kind

    def forecast(self) -> Forecast:
        from hybridrl.forecast.megatron_meta import on_meta, rank_alone

        request = self._request
        with rank_alone(self._rank(), request.ranks):
            self._state = ParallelState(self._sizes)
            with self._state.activate(), on_meta(int(self._plan.model_fields.get("moe_router_topk") or 0)):
                self._build()
                activations, logits = self._of_update() if request.optim is not None else (0, 0)
                inferred = 0 if request.work.infer is None else self._peak(request.work.infer, training=False)
            masters, states, copied = self._of_optimizer()
        engine, gradients = request.engine, sum(gradient.nbytes for gradient in self._gradients)
        weights = sum(storage.nbytes() for storage in {p.untyped_storage() for p in self._parameters})
        return Forecast(
            parameters=0,
            weights=weights,
            masters=masters,
            states=states,
            gradients=gradients,
            gathered=0,
            activations=max(activations, copied - logits),  # one after the other
            logits=logits,
            pass_activations=inferred,
            kept_weights=0 if engine.param_offload else weights,
            kept_states=0 if engine.optimizer_offload else states + masters,
            kept_gradients=0 if engine.grad_offload else gradients,
        )

    def _rank(self) -> int:
        """A rank of the stage; of those that share sequences, one that predicts as many response tokens as any."""
        work, sizes = self._request.work, self._sizes
        part = 0 if 2 * work.response <= work.prompt + work.response else sizes.cp - 1
        return self._stage * (self._request.ranks // sizes.pp) + part * sizes.tp

    def _build(self) -> None:
        from hybridrl.forecast.megatron_meta import MetaArranger, MetaSchedule, prepare

        request, target, state = self._request, self._request.target, self._state
        settings = request.engine
        config = build.transformer_config(self._plan, self._sizes, settings.sequence_parallel, build.dtype_of(settings))
        config.deallocate_pipeline_outputs = self._kind == "cuda"
        config.variable_seq_lengths = False  # else stages would send their shapes to each other
        if target.engine:
            config.bias_activation_fusion = self._plan.model_fields.get("bias_activation_fusion", True)
        self._chunks = build.build_chunks(self._plan, config, state)
        self._wrapped: list[Any] = []
        if request.optim is not None:
            distributed, overrides = settings.use_distributed_optimizer, settings.override_ddp_config
            self._wrapped = build.wrap_chunks(self._chunks, config, distributed, overrides)
        if not self._wrapped:
            for chunk in self._chunks:
                chunk.requires_grad_(False)
        prepare(self._chunks, self._kind == "cuda", target.engine)
        self._parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        self._gradients = gradient_buffers(self._wrapped)
        outputs, split = None, config.sequence_parallel
        if self._chunks[-1].post_process:
            fused = bool(request.model.use_fused_kernels)
            outputs = Outputs.of(self._chunks[-1], state, self._plan, split, fused, settings.most_tokens)
        self._schedule = MetaSchedule(state, config, MetaArranger(state, split, target.packed), outputs)

    def _of_update(self) -> tuple[int, int]:
        """Activations of an update without logits, and what logits add to the peak."""
        micro = self._request.work.update
        assert micro is not None
        everything = self._peak(micro, training=True)
        if self._schedule.outputs is None:
            return everything, 0
        body = min(self._peak(micro, training=True, response=1), everything)
        return body, everything - body

    def _peak(self, micro: MicroBatching, training: bool, response: int | None = None) -> int:
        """Bytes of a pass over the micro-batches that are on the way at once; if `training`, forward and backward.

        Args:
            response: response tokens per row whose outputs are computed; None for all.
        """
        work, kind = self._request.work, KINDS[self._plan.model_type]
        outputs = kind.outputs
        if kind.predicts_tokens:
            outputs = ("log_probs", "entropy") if work.entropy else ("log_probs",)
        request, comparison = OutputRequest(outputs, 1.0), Comparison()
        layouts = self._layouts(micro, work.response if response is None else response, training)
        self._set_chunk_size(len(layouts[0].selected))
        for chunk in self._chunks:
            chunk.train(training)

        def run() -> None:
            if training:
                self._schedule.forward_backward(self._wrapped, layouts, request, _sum_of, comparison)
            else:
                self._schedule.forward_only(self._chunks, layouts, request, comparison)

        try:
            buffers = [buffer for chunk in self._chunks for buffer in chunk.buffers()]
            return peak_of(run, *self._parameters, *buffers, *self._gradients)
        finally:
            for parameter in self._parameters:
                parameter.grad = None
            self._state.release_buffers()

    def _layouts(self, micro: MicroBatching, response: int, training: bool) -> list[MicroBatchLayout]:
        """Return copies of the largest micro-batch, as many as a rank holds at most at once."""
        work, sizes, packed = self._request.work, self._sizes, self._request.target.packed
        length = work.prompt + work.response
        shard = work.rows * sizes.tp * sizes.pp * sizes.cp  # rows of all ranks with the same part of a batch
        rows = min(shard, micro.size or shard)
        if micro.max_tokens:
            rows = min(rows, micro.max_tokens * sizes.cp // length)
        if not packed:
            rows = min(rows, PREFERRED_CELLS[self._kind] // length)
        rows = max(1, rows)
        # Stage s of p begins the backward passes after p - s forward passes. Without gradients, what a stage
        # sends on is there until the next micro-batch has passed.
        at_once = sizes.pp - self._stage if training else 2
        count = min(-(-shard // rows), at_once)
        if sizes.vpp > 1:  # all stages get further micro-batches, so that each group of them is complete
            count = 2 * sizes.pp
        ids, positions = torch.zeros(rows, length, dtype=torch.int64), torch.arange(length).expand(rows, length)
        starts = torch.arange(rows)[:, None] * length + length - 1
        selected = (starts - response + torch.arange(response)).reshape(-1)
        labels, lengths = torch.zeros_like(selected), [length] * rows if packed else None
        if packed:
            ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
        return [MicroBatchLayout(ids, positions, selected, labels, lengths)] * count

    def _set_chunk_size(self, tokens: int) -> None:
        outputs = self._schedule.outputs
        if outputs is None or not KINDS[self._plan.model_type].predicts_tokens:
            return
        words = len(self._chunks[-1].shared_embedding_or_output_weight())  # type: ignore[operator]
        triton = self._request.target.triton and self._sizes.tp == 1
        if outputs.fused:
            outputs.chunk_size = layer_rows(self._kind, triton, words, outputs.most_tokens)
        else:
            outputs.chunk_size = logits_rows(self._kind, triton, tokens, self._plan.vocabulary, outputs.most_tokens)

    def _of_optimizer(self) -> tuple[int, int, int]:
        """Bytes of separate master weights, of the optimizer's state, and of the gradients that a step converts."""
        if self._request.optim is None:
            return 0, 0, 0
        shards = list(shards_of(self._wrapped, self._state, self._request.engine.use_distributed_optimizer))
        masters = [shard.master for shard in shards]
        separate = sum(shard.master.nbytes for shard in shards if shard.master.dtype != shard.parameter.dtype)
        copied = sum(shard.master.nbytes for shard in shards if shard.gradient.dtype != shard.master.dtype)
        return separate, state_bytes(masters, usable_settings(self._request.optim)), copied


def _sum_of(_: int, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.sum() for part in outputs.values()]).sum()
