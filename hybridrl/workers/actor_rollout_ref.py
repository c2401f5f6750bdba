"""The policy's worker: it trains the policy, generates with it, or both, or holds the reference policy."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import ray
import torch

from hybridrl.config import ActorRolloutRefConfig
from hybridrl.config.entry_settings import engine_settings
from hybridrl.engine.capabilities import ComparesVocabulary, ExportsShards, GeneratesInPlace, HasAdapters
from hybridrl.engine.train_engine import Engine
from hybridrl.errors import RolloutError
from hybridrl.hybrid_engine.send_shards import ShardSender
from hybridrl.hybrid_engine.stream import TransferReport, send_adapter, stream
from hybridrl.hybrid_engine.transports import UpdateTarget, transports_to
from hybridrl.layouts.topology import Layout
from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.loading import resolve_dtype
from hybridrl.models.model_config import config_of
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import ROUTED_EXPERTS
from hybridrl.registry import INFERENCE_ENGINES
from hybridrl.rollout.hf.rollout import HFRollout
from hybridrl.rollout.inference_engine import in_place_engine
from hybridrl.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.workers.distillation import Distillation, computing
from hybridrl.workers.loss_prepass import LossPrepass
from hybridrl.workers.losses import FULL_KL, PolicyLoss, policy_loss_fn
from hybridrl.workers.model_worker import (
    COLLECTIVE_TIMEOUT_S,
    SEQUENCE_FIELDS,
    ModelWorker,
    as_output,
    micro_batching,
)
from hybridrl.workers.teacher import TeacherWorker
from hybridrl.workers.update_plan import UpdatePlan


@dataclass(frozen=True)
class WorkerRole:
    """Tasks of a worker with one of verl's role strings.

    Attributes:
        mesh: the dispatch mesh of its passes and updates.
        trains: it has an optimizer.
        generates: `generate_sequences` may be called.
        frozen: it is the reference policy, whose weights never change and reach no inference engine.
    """

    mesh: str = "actor"
    trains: bool = False
    generates: bool = False
    frozen: bool = False


#: what each string means that the argument `role` may be; they are verl's
WORKER_ROLES = {
    "actor": WorkerRole(trains=True),
    "actor_rollout": WorkerRole(trains=True, generates=True),
    "rollout": WorkerRole(generates=True),
    "ref": WorkerRole(mesh="ref", frozen=True),
}


class ActorRolloutRefWorker(ModelWorker):
    """One rank of the policy ("actor", "actor_rollout", "rollout") or of the frozen reference policy ("ref").

    Args:
        config: the `actor_rollout_ref` part of the configuration.
        role: one of `WORKER_ROLES`. "rollout" generates with the model's own weights and has no optimizer; its settings
            are those of `actor`. A reference policy in the same pool is a second worker in the same process.
        timeout_s: how long a collective may wait for other ranks.
    """

    metric_prefix = "actor"

    def __init__(self, config: ActorRolloutRefConfig, role: str, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        if role not in WORKER_ROLES:
            raise ValueError(f"role is {role!r}; an ActorRolloutRefWorker plays one of {', '.join(WORKER_ROLES)}")
        super().__init__(timeout_s)
        self.config = config
        self.role, self.worker_role = role, WORKER_ROLES[role]
        self.rollout: HFRollout | None = None
        self._shard_sender: ShardSender | None = None
        self._warned_of_streaming = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, steps: int | None = None, updates_per_step: int = 1) -> None:
        """Build and shard the model; see `ModelWorker.build_engine`."""
        config = self.config
        part = config.ref if self.worker_role.frozen else config.actor
        optim = config.actor.optim if self.worker_role.trains else None
        settings = engine_settings(part, config.model.external_lib)
        self.build_engine("language_model", part.strategy, config.model, settings, optim, steps, updates_per_step)
        self.place_in_mesh(self.worker_role.mesh)
        if self._is_own_reference:
            self.place_in_mesh("ref")
        if not self.worker_role.frozen:
            self.place_in_generation_mesh("rollout")  # each rank generates with whole weights, rows of its own

    @property
    def _is_own_reference(self) -> bool:
        """Whether the policy without its adapter is the reference policy."""
        return not self.worker_role.frozen and self.config.model.adapted

    @property
    def reference(self) -> Engine | None:
        """The engine of the reference policy, if it is in the same process."""
        if self._is_own_reference:
            return self.engine
        workers = (worker for worker in self.fused_worker_dict.values() if isinstance(worker, ActorRolloutRefWorker))
        return next((worker.engine for worker in workers if worker.worker_role.frozen), None)

    @contextmanager
    def _with_reference(self, needed: bool) -> Iterator[None]:
        """Within the context and if `needed`, the reference policy is on the device and compared with this policy."""
        if not needed:
            yield
            return
        if self.reference is None:
            raise RuntimeError("KL form full needs a reference policy in the actor's own process; there is none")
        assert isinstance(self.engine, ComparesVocabulary)  # checked at start-up, by check_kl_form
        self.engine.compare_with(self.reference)
        with nullcontext() if self.reference is self.engine else self.reference.loaded(optimizer=False):
            yield

    @contextmanager
    def _base_alone(self) -> Iterator[None]:
        """Within the context, a policy with an adapter computes without it."""
        if not self._is_own_reference:
            yield
            return
        assert isinstance(self.engine, HasAdapters)  # checked at start-up, by check_engine
        with self.engine.without_adapter():
            yield

    @contextmanager
    def _with_teacher(self, distillation: Distillation | None) -> Iterator[None]:
        """Within the context, the engine computes distillation's inputs; a teacher in this process gives its logits."""
        if distillation is None:
            yield
            return
        workers = [worker for worker in self.fused_worker_dict.values() if isinstance(worker, TeacherWorker)]
        function = distillation.function(workers[0].engines if workers else [])
        compared = contextlib.nullcontext() if function is None or function.other is None else function.other.loaded()
        with computing(self.engine, function), compared:
            yield

    def _build_rollout(self) -> HFRollout:
        model, engine = self.config.model, self.engine
        tokenizer = tokenizer_of(model)
        assert isinstance(engine, GeneratesInPlace)  # checked at start-up, by resolve_rollout
        in_place: type[HFRollout] = INFERENCE_ENGINES.get(in_place_engine(self.config.rollout.name))
        return in_place(
            self.config.rollout,
            engine=engine,
            eos_token_ids=eos_token_ids(model.path, config_of(model), tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            tokenizer=tokenizer,
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses generated with the training weights in place, with the sampler's log-probabilities.

        See `Rollout.generate`.
        """
        if not self.worker_role.generates:
            raise RuntimeError(
                f"generate_sequences was called on a group whose role is {self.role!r}, which cannot generate"
            )
        if self.rollout is None:
            self.rollout = self._build_rollout()
        with self.loaded("generate_sequences"):
            return self.rollout.generate(prompts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, targets: Sequence[UpdateTarget]) -> TransferReport:
        """Send the current weights to inference engines that are waiting for them.

        See `hybridrl.hybrid_engine.send_shards` and, for what cannot be planned, `hybridrl.hybrid_engine.stream`.
        """
        rollout = self.config.rollout
        dtype = resolve_dtype(rollout.dtype, "rollout.dtype")
        bucket_bytes = rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
        with self.loaded("send_weights"):
            if self.config.model.adapted and rollout.lora_transfer == "adapter":
                assert isinstance(self.engine, HasAdapters)  # checked at start-up, by check_engine
                return send_adapter(self.engine.adapter_config(), self.engine.export_adapter(dtype), targets)
            if self._plans(targets, dtype, bucket_bytes):
                assert isinstance(self.engine, ExportsShards) and self._shard_sender is not None
                return self._shard_sender.send(self.engine.export_shards(dtype), targets)
            return stream(
                self.engine.export_weights(dtype),
                transports_to(targets, ray.get_runtime_context().get_node_id()),
                total_bytes=self.engine.weight_bytes(dtype),
                bucket_bytes=bucket_bytes,
            )

    def _plans(self, targets: Sequence[UpdateTarget], dtype: torch.dtype, bucket_bytes: int) -> bool:
        """Whether these engines get their weights by a plan (`rollout.checkpoint_engine.method`).

        Raises:
            RolloutError: a plan is required by the setting, and cannot be made.
        """
        method = self.config.rollout.checkpoint_engine.method
        if method == "streamed":
            return False
        if not isinstance(self.engine, ExportsShards):
            reason: str | None = f"{type(self.engine).__name__} exports whole tensors only"
        elif self.config.model.adapted:
            reason = "the adapter is merged into whole tensors (model.lora_rank)"
        else:
            if self._shard_sender is None:
                how = self.config.rollout.checkpoint_engine
                self._shard_sender = ShardSender(
                    dtype, bucket_bytes, self.engine.copy_of_model, how.check_weights, how.delta
                )
            reason = self._shard_sender.unsupported_reason(self.engine.export_shards(dtype), targets)
        if reason is None:
            return True
        key = "actor_rollout_ref.rollout.checkpoint_engine.method"
        if method == "planned":
            raise RolloutError(f"{key}=planned cannot be done: {reason}; set auto or streamed")
        for name in ("check_weights", "delta"):
            if getattr(self.config.rollout.checkpoint_engine, name):
                raise RolloutError(
                    f"actor_rollout_ref.rollout.checkpoint_engine.{name}=true needs weights that are sent by a plan: "
                    f"{reason}; set it to false"
                )
        if not self._warned_of_streaming and self.rank == 0:
            self._warned_of_streaming = True
            notify(f"weights are streamed to the engines as whole tensors ({key}=auto): {reason}")
        return False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def training_layout(self) -> Layout | None:
        """Return the layout of the policy on the ranks; None if weights cannot be sent by a plan."""
        return self.engine.training_layout if isinstance(self.engine, ExportsShards) else None

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"),
        blocking=False,
        reads=SEQUENCE_FIELDS,
        writes=("old_log_probs", "entropys", "sum_pi_squared", "ref_kl", ROUTED_EXPERTS),
    )
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """`old_log_probs` and `entropys` [B, T] under the current weights, at the temperature in `meta_info`.

        With `actor.calculate_sum_pi_squared` also `sum_pi_squared` [B, T], with `ref_kl` in `meta_info` the KL to the
        reference policy over the vocabulary, `ref_kl` [B, T], with `router_replay.mode=R2` `routed_experts`
        [B, S, L, K]. A batch that has this field is computed with its experts.
        """
        compares = bool(batch.meta_info.get("ref_kl", False))
        rollout = self.config.rollout
        micro = micro_batching(
            rollout.log_prob_micro_batch_size_per_gpu,
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_max_token_len_per_gpu,
            key="actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        )
        with self.loaded("compute_log_prob"), self._with_reference(compares):
            records = self.config.actor.router_replay.records_in_pass
            requested = (*self._statistics(), *(["ref_kl"] if compares else []), *([ROUTED_EXPERTS] if records else []))
            outputs = self.engine.infer(batch, micro, self._temperature(batch), outputs=requested)
        return as_output(outputs, log_probs="old_log_probs", entropy="entropys")

    def _statistics(self) -> tuple[str, ...]:
        """The outputs that the algorithm needs for each response token."""
        more = ("sum_pi_squared",) if self.config.actor.calculate_sum_pi_squared else ()
        return ("log_probs", "entropy", *more)

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"),
        blocking=False,
        reads=SEQUENCE_FIELDS,
        writes=("ref_log_prob",),
    )
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_prob` [B, T] under the reference weights, at the temperature in `meta_info`.

        The reference of a policy with an adapter is the policy without it.
        """
        ref = self.config.ref
        micro = micro_batching(
            ref.log_prob_micro_batch_size_per_gpu,
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_max_token_len_per_gpu,
            key="actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        )
        with self.loaded("compute_ref_log_prob"), self._base_alone():
            outputs = self.engine.infer(batch, micro, self._temperature(batch), outputs=("log_probs",))
        return as_output(outputs, log_probs="ref_log_prob")

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"),
        blocking=False,
        reads=(*SEQUENCE_FIELDS, "response_mask", "advantages"),
    )
    def update_actor(self, batch: DataProto) -> DataProto:
        """One optimizer step for each mini-batch of this rank's shard; see `ModelWorker.update`.

        The plan's `rollout_correction` and the actor's settings choose the loss.
        """
        plan = UpdatePlan.of(batch)
        actor, correction, distillation = self.config.actor, plan.rollout_correction, plan.distillation
        loss = PolicyLoss.of(actor, correction)
        micro = micro_batching(
            actor.ppo_micro_batch_size_per_gpu,
            actor.use_dynamic_bsz,
            actor.ppo_max_token_len_per_gpu,
            key="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        )
        # Without a pass for old log-probabilities, the entropy of the run is measured here.
        no_pass = "old_log_probs" not in batch.batch.keys() or loss.samplers_old
        needs_entropy = actor.entropy_coeff != 0 or actor.calculate_entropy or no_pass
        compares = actor.use_kl_loss and actor.kl_loss_type == FULL_KL
        loss_fn = policy_loss_fn(actor, correction)
        if distillation is not None:
            loss_fn = distillation.loss_fn(loss_fn, actor)
        with self._with_reference(compares), self._with_teacher(distillation):
            return self.update(
                batch,
                micro,
                loss_fn,
                entropy=needs_entropy,
                prepass=LossPrepass.of(loss, micro, batch),
                ref_kl=compares,
            )

    def _temperature(self, batch: DataProto) -> float:
        return float(batch.meta_info.get("temperature", self.config.rollout.temperature))
