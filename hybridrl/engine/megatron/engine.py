"""`MegatronEngine`: language and value models on Megatron-core."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridrl.engine.capabilities import (
    ComparesVocabulary,
    ComputesFromLogits,
    CopiesState,
    ExportsShards,
    WeightShard,
)
from hybridrl.engine.chunked_function import Hidden
from hybridrl.engine.logits_functions import FullKL, LogitsFunction
from hybridrl.engine.megatron import build, checkpoint, hf_weights
from hybridrl.engine.megatron.first_weights import dist_checkpoint_of, load_first_masters, load_first_weights
from hybridrl.engine.megatron.forward import Arranger, Outputs, packing_unsupported_reason
from hybridrl.engine.megatron.mapping import WeightMap
from hybridrl.engine.megatron.offload import DiscardedStorages, MegatronOffload, OffloadedStorages
from hybridrl.engine.megatron.parallel import KEYS, ParallelSizes, ParallelState, import_parallel_state
from hybridrl.engine.megatron.pipeline import Comparison, Schedule
from hybridrl.engine.megatron.sharded_optimizer import ShardedOptimizer, usable_settings
from hybridrl.engine.megatron.state import MegatronState
from hybridrl.engine.micro_batched import MicroBatchedEngine, OutputRequest, ShareOfLoss
from hybridrl.engine.microbatch import MicroBatchLayout
from hybridrl.engine.saved_parts import HFModel, Parts, State
from hybridrl.engine.train_engine import Engine, Geometry, register_train_engine
from hybridrl.errors import ModelError
from hybridrl.layouts.topology import MegatronLayout
from hybridrl.models.kinds import KINDS
from hybridrl.models.routers import check_overrides
from hybridrl.models.work import work_of
from hybridrl.notify import notify
from hybridrl.utils import device, distributed


@register_train_engine(
    "megatron",
    settings="hybridrl.config.schema.megatron:MegatronConfig",
    layout="hybridrl.layouts.topology:MegatronLayout",
)
class MegatronEngine(MicroBatchedEngine, ComparesVocabulary, ComputesFromLogits, CopiesState, ExportsShards):
    """A decoder of Megatron-core with the weights of a Hugging Face model, or its backbone with a value head.

    Args:
        model_type: `language_model` or `value_model`.
        model: A `ModelConfig`.
        engine: A `MegatronConfig`: the layout, precision, offload, overrides of Megatron-core's settings.
        optim: An `OptimConfig`, or None for an engine that only computes.

    Attributes:
        sizes: how many ranks share the model, and how.
        state: this rank's place among them.
        chunks: this rank's parts of the model, one per virtual stage.
        weight_map: which parts of which Hugging Face tensors they hold.
        config: the model's Hugging Face configuration.
        vocabulary: tokens of its output layer.
        optimizer: None for an engine that only computes.
        model_state: the weights and the optimizer, as they are saved, loaded and offloaded.
        reference: the engine that `ref_kl` is measured against.
    """

    reference: MegatronEngine | None = None

    def __init__(self, model_type: str, model: Any, engine: Any, optim: Any = None):
        self.model_type = model_type
        self.model_config = model
        self.engine_config = engine
        self.optim_config = None if engine.forward_only else optim
        self.sizes = ParallelSizes.of(engine)
        self.state: ParallelState
        self.chunks: list[nn.Module]
        self.weight_map: WeightMap
        self.optimizer: ShardedOptimizer | None = None
        self.model_state: MegatronState
        self._wrapped: list[nn.Module] = []

    # ------------------------------------------------------------------ building

    @classmethod
    def check(cls, model: Any, engine: Any, ranks: int, optim: Any = None) -> None:
        check_overrides(model.override_config, "strategy=megatron adds no auxiliary loss of routers; leave it out")
        import_parallel_state()
        plan = build.plan_of(model, engine, "language_model", trains=optim is not None, here=device.is_gpu())
        sizes = ParallelSizes.of(engine)
        sizes.check(ranks, plan.model_fields)
        build.transformer_config(plan, sizes, engine.sequence_parallel, build.dtype_of(engine))
        build.check_ddp_overrides(engine.override_ddp_config)
        if optim is not None:
            cls.check_optimizer(optim)

    @classmethod
    def check_optimizer(cls, optim: Any) -> None:
        super().check_optimizer(usable_settings(optim))

    @classmethod
    def check_first_weights(cls, model: Any, engine: Any) -> None:
        if dist_checkpoint_of(model.path, engine) is None:
            super().check_first_weights(model, engine)

    def initialize(self) -> None:
        model, engine = self.model_config, self.engine_config
        import_parallel_state()
        self.dtype = build.dtype_of(engine)
        if distributed.get_rank() == 0:
            _warn_without_effect(model)
        trains = self.optim_config is not None
        plan = build.plan_of(model, engine, self.model_type, trains)
        self.config = plan.hf_config
        self.sizes.check(distributed.get_world_size(), plan.model_fields)
        self.state = ParallelState(self.sizes)
        with self.activate():
            settings = build.transformer_config(plan, self.sizes, engine.sequence_parallel, self.dtype)
            self.chunks = build.build_chunks(plan, settings, self.state)
            self.weight_map = WeightMap(plan.family, self.config, self.chunks, model_type=self.model_type)
            exporter = hf_weights.Exporter(self.weight_map)
            load_first_weights(self.weight_map, model.path, engine)
            if trains:
                self._make_trainable(settings)
            else:
                for chunk in self.chunks:
                    chunk.requires_grad_(False)
        self.vocabulary = plan.vocabulary
        self.schedule = self._make_schedule(settings, plan)
        self._set_mode(training=False)
        device.manual_seed(engine.seed + distributed.get_rank())
        offload = self._make_offload()
        self.model_state = MegatronState(self.chunks, self.weight_map, exporter, self.optimizer, offload)
        offload.unload(changed=True)
        device.empty_cache()  # what loading and converting left would count as used while an engine is started

    def _make_trainable(self, settings: Any) -> None:
        engine = self.engine_config
        distributed_optimizer = engine.use_distributed_optimizer
        self._wrapped = build.wrap_chunks(self.chunks, settings, distributed_optimizer, engine.override_ddp_config)
        self.optimizer = ShardedOptimizer(self._wrapped, self.state, self.optim_config, distributed_optimizer)
        if self.optimizer.separate_masters():
            load_first_masters(self.weight_map, self.model_config.path, engine, self.optimizer.shards)

    def _make_schedule(self, settings: Any, plan: build.Blueprint) -> Schedule:
        self.packed = bool(self.model_config.use_remove_padding) and self.may_pack()
        if self.packed:
            self.work = work_of(self.config)
        arranger = Arranger(self.state, settings.sequence_parallel, self.packed)
        outputs, fused = None, bool(self.model_config.use_fused_kernels)
        if self.chunks[-1].post_process:
            most = self.engine_config.most_tokens
            outputs = Outputs.of(self.chunks[-1], self.state, plan, settings.sequence_parallel, fused, most)
            idle = ["model.use_fused_kernels"] if fused and outputs.why_whole else []
            if most is not None and not KINDS[self.model_type].predicts_tokens:
                idle.append("entropy_from_logits_with_chunking")
            if idle and self.state.tp_rank == 0 and self.state.dp_cp_group.rank() == 0:
                notify(f"{self.model_config.path}: {', '.join(idle)} has no effect, because {outputs.why_whole}")
        return Schedule(self.state, settings, arranger, outputs)

    def may_pack(self) -> bool:
        """Whether attention can keep the sequences of a packed row apart; on a GPU, warn if not."""
        reason = packing_unsupported_reason(self.sizes, self.dtype, self.config) if device.is_gpu() else None
        if reason and distributed.get_rank() == 0:
            notify(
                f"sequences of {self.model_config.path} are padded to the longest of their micro-batch and not packed "
                f"(model.use_remove_padding): {reason}"
            )
        return reason is None

    def _make_offload(self) -> MegatronOffload:
        engine, optimizer = self.engine_config, self.optimizer
        parameters = states = gradients = None
        if engine.param_offload:
            parameters = OffloadedStorages(lambda: [p.detach() for chunk in self.chunks for p in chunk.parameters()])
        if optimizer is not None and engine.optimizer_offload:
            states = OffloadedStorages(lambda: [*optimizer.separate_masters(), *optimizer.state_tensors()])
        if optimizer is not None and engine.grad_offload:
            gradients = DiscardedStorages(optimizer.gradient_buffers)
        return MegatronOffload(parameters, gradients, states)

    @property
    def geometry(self) -> Geometry:
        return self.state.geometry

    def activate(self) -> AbstractContextManager[None]:
        """Within the context, Megatron-core's parallel state is this engine's."""
        return self.state.activate()

    # ------------------------------------------------------------------ computing

    def forward_only(
        self, layouts: Sequence[MicroBatchLayout], request: OutputRequest
    ) -> list[dict[str, torch.Tensor]] | None:
        comparison = self._comparison(layouts, request)
        with self.activate():
            return self.schedule.forward_only(self.chunks, layouts, request, comparison)

    def forward_backward(
        self, layouts: Sequence[MicroBatchLayout], request: OutputRequest, share_of_loss: ShareOfLoss
    ) -> None:
        comparison = self._comparison(layouts, request)
        self._set_mode(training=True)
        with self.activate():
            self.schedule.forward_backward(self._wrapped, layouts, request, share_of_loss, comparison)
        self._set_mode(training=False)

    def _comparison(self, layouts: Sequence[MicroBatchLayout], request: OutputRequest) -> Comparison:
        """The functions of logits among the outputs. The engines that they compare with read the micro-batches here.

        Of those, the hidden states of all response tokens of the call are kept on the last stage, and no logits.
        """
        functions = [] if request.function is None else [request.function]
        if "ref_kl" in request.outputs:
            if self.reference is None:
                raise RuntimeError("ref_kl needs a reference policy; call compare_with first")
            functions.append(FullKL(self.reference))
        return Comparison(
            [(function, None if function.other is None else function.other.hidden(layouts)) for function in functions]
        )

    def hidden(self, layouts: Sequence[MicroBatchLayout]) -> list[Hidden] | None:
        """Return the inputs of this engine's output layer for another engine's micro-batches; None on early stages."""
        with self.activate():
            return self.schedule.hidden(self.chunks, layouts)

    @contextlib.contextmanager
    def computing(self, function: LogitsFunction) -> Iterator[None]:
        self._check_chunks("a loss over the vocabulary")
        if function.other is not None:
            check_same_layout(self, function.other, "a loss over the vocabulary", "distillation.megatron")
        self._function = function
        try:
            yield
        finally:
            self._function = None

    def compare_with(self, reference: Engine) -> None:
        self._check_chunks("KL form full")
        check_same_layout(self, reference, "KL form full", "actor_rollout_ref.ref.megatron")
        assert isinstance(reference, MegatronEngine)
        self.reference = reference

    def _check_chunks(self, function: str) -> None:
        outputs = self.schedule.outputs
        if outputs is not None and outputs.why_whole is not None:
            raise ModelError(
                f"{self.model_config.path}: {function} with strategy=megatron computes logits by chunks of tokens, and "
                f"cannot, because {outputs.why_whole}; use strategy=fsdp2"
            )

    def _set_mode(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    # ------------------------------------------------------------------ stepping

    def gradient_norm(self) -> torch.Tensor:
        assert self.optimizer is not None
        return self.optimizer.gradient_norm()

    def nonfinite_gradients(self) -> list[str]:
        return self.model_state.nonfinite_gradients()

    def discard_gradients(self) -> None:
        self.model_state.discard_gradients()

    def apply_gradients(self, norm: torch.Tensor) -> None:
        assert self.optimizer is not None
        self.model_state.offload.wait_for_state()
        with self.activate():
            self.optimizer.step(norm)
        self.discard_gradients()

    def learning_rate(self) -> float | None:
        return None if self.optimizer is None else float(self.optimizer.optimizer.param_groups[0]["lr"])

    # ------------------------------------------------------------------ weights

    @contextlib.contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        self.model_state.offload.load(updates=optimizer)
        try:
            yield
        finally:
            if optimizer:
                self._set_mode(training=False)
                self.discard_gradients()  # those of an interrupted backward pass
            self.model_state.offload.unload()
            self.state.release_buffers()
            device.empty_cache()  # free activations, so that other processes can use their memory

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model_state.exporter.export(dtype)

    def export_shards(self, dtype: torch.dtype | None = None) -> Iterator[WeightShard]:
        yield from hf_weights.export_shards(self.weight_map)

    @property
    def copy_of_model(self) -> int:
        return self.state.dp_cp_group.rank()

    @property
    def training_layout(self) -> MegatronLayout:
        sizes = self.sizes
        dp = sizes.dp(distributed.get_world_size())
        return MegatronLayout(sizes.tp, sizes.pp, dp, sizes.cp, sizes.ep, sizes.etp, sizes.vpp)

    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        return self.model_state.exporter.bytes(dtype)

    def first_step_bytes(self) -> int:
        if self.optimizer is None or self.engine_config.optimizer_offload:
            return 0
        return self.optimizer.first_step_bytes()

    # ------------------------------------------------------------------ checkpoints

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        with self.activate():
            self._parts().state(contents, copy=False).write(Path(folder))
            distributed.barrier()

    def copy_state(self, contents: Sequence[str]) -> State:
        with self.activate():
            return self._parts().state(contents, copy=True)

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        with self.activate():
            self._parts().load(Path(folder), contents)
        self.model_state.offload.unload(changed=True)
        distributed.barrier()

    def _parts(self) -> Parts:
        model = HFModel(self.model_type, self.model_config, self.config)
        return checkpoint.parts(self.model_state, model, self.engine_config.seed)


def check_same_layout(engine: MegatronEngine, other: Engine, function: str, where: str) -> None:
    """Refuse an engine whose hidden states of a micro-batch are not where this one's are.

    Args:
        function: the setting whose function compares the two models, for messages.
        where: the settings of the other one.

    Raises:
        ModelError: it is no engine on Megatron-core, or it has another layout, other packing or another vocabulary.
    """
    if not isinstance(other, MegatronEngine):
        raise ModelError(f"{function} compares both models on the same micro-batches, so both need strategy=megatron")
    for name in ("tp", "pp", "vpp", "cp"):
        own, theirs = getattr(engine.sizes, name), getattr(other.sizes, name)
        if own != theirs:
            raise ModelError(
                f"{function} compares both models where the output layer is, so both need the same {KEYS[name]}: "
                f"{where} has {theirs} and actor_rollout_ref.actor.megatron {own}"
            )
    if engine.packed != other.packed or engine.vocabulary != other.vocabulary:
        raise ModelError(
            f"{function} compares both models token by token, so both need the same use_remove_padding and vocabulary: "
            f"the model of {where} has packed={other.packed} and {other.vocabulary} tokens, the policy {engine.packed} "
            f"and {engine.vocabulary}"
        )
    other._check_chunks(function)


def _warn_without_effect(model: Any) -> None:
    """Name the entry of a model's configuration that Megatron-core does not read."""
    if "attn_implementation" in model.override_config:
        notify(f"{model.path}: model.override_config.attn_implementation has no effect on Megatron-core")
