"""Base of all workers with a model: process group, dispatch mesh, updates, checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import ray
import torch

from hybridrl.config import EngineConfig, ModelConfig, OptimConfig
from hybridrl.engine.capabilities import CopiesState
from hybridrl.engine.train_engine import Engine, MicroBatching, create_train_engine
from hybridrl.errors import ModelError
from hybridrl.layouts.topology import GenerationLayout, MegatronLayout, paper_slot
from hybridrl.protocol import DataProto
from hybridrl.single_controller import Dispatch, Worker, register
from hybridrl.utils import device
from hybridrl.utils.background import BackgroundCall
from hybridrl.utils.distributed import init_process_group, use_interface_of
from hybridrl.utils.metrics import Metric, merge_metrics
from hybridrl.workers.loss_prepass import LossPrepass
from hybridrl.workers.losses import CountedLossFn, LossCounts
from hybridrl.workers.profiling import Profile, ProfileRequest
from hybridrl.workers.update_plan import UpdatePlan

COLLECTIVE_TIMEOUT_S = 600.0  # verl's nccl_timeout
#: fields that every pass of a model over prompts and responses reads
SEQUENCE_FIELDS = ("input_ids", "attention_mask", "responses")


class ModelWorker(Worker):
    """A rank of a group that holds one trainable model.

    Args:
        timeout_s: how long a collective may wait for other ranks before it fails.
    """

    engine: Engine
    metric_prefix: ClassVar[str]
    _reserved: torch.Tensor | None = None
    _writing: BackgroundCall | None = None
    _profile: Profile | None = None

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._peaks: dict[str, float] = {}
        self._pass_metrics: dict[str, dict[str, Metric]] = {}
        device.set_device(self.local_rank)
        address, port = self.get_master_addr_port()
        use_interface_of(ray.util.get_node_ip_address())
        init_process_group(self.rank, self.world_size, address, int(port), timeout_seconds=timeout_s)

    def build_engine(
        self,
        model_type: str,
        strategy: str,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimConfig | None,
        steps: int | None,
        updates_per_step: int,
    ) -> None:
        """Build, load and shard this rank's model.

        Args:
            engine: the settings that the engine of `strategy` reads; see `engine_settings`.
            steps: training steps of the run, the length of the learning-rate schedule where
                `optim.total_training_steps` sets none.
            updates_per_step: optimizer steps per training step. The settings of the schedule count training steps, the
                engine counts optimizer steps.
        """
        if optim is not None:
            total = optim.total_training_steps if optim.total_training_steps > 0 else (steps or -1)
            optim = replace(
                optim,
                total_training_steps=total * updates_per_step if total > 0 else total,
                lr_warmup_steps=optim.lr_warmup_steps * updates_per_step
                if optim.lr_warmup_steps > 0
                else optim.lr_warmup_steps,
            )
        self.engine = create_train_engine(model_type, strategy, model=model, engine=engine, optim=optim)
        self.engine.initialize()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reserve_memory(self, reserve: bool) -> int:
        """Hold the device memory that the first update will need, or release it; return its size in bytes.

        It is held while an inference engine starts, so that the engine leaves it free.
        """
        size = self.engine.first_step_bytes() if reserve and device.is_gpu() else 0
        self._reserved = torch.empty(size, dtype=torch.uint8, device=device.current_device()) if size else None
        device.empty_cache()
        return size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, request: ProfileRequest) -> None:
        """Record what this process does until `stop_profile`, if this rank is one of the request's."""
        if request.ranks is None or self.rank in request.ranks:
            self._profile = Profile.start(request, self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> str | None:
        """Write what was recorded, and return the file; None for a rank that recorded nothing."""
        recorded, self._profile = self._profile, None
        return None if recorded is None else recorded.finish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device_name(self) -> str:
        """Product name of this rank's device; see `hybridrl.utils.device.current_name`."""
        return device.current_name()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shares_prefixes(self) -> bool | None:
        """Whether this role's engine computes tokens once that rows share; None: where that saves enough tokens."""
        return getattr(self.engine, "shares_prefixes", False)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device_memory(self) -> dict[str, float]:
        """Memory of this rank's device; see `hybridrl.utils.device.memory_stats`."""
        return device.memory_stats()

    @contextmanager
    def loaded(self, method: str, optimizer: bool = False, engine: Engine | None = None) -> Iterator[None]:
        """`Engine.loaded`, with what is recorded for `pop_memory_peaks` and `pop_pass_metrics`.

        Args:
            method: the worker's method.
            optimizer: whether weights are updated.
            engine: another engine of this worker, which computes in place of its own.
        """
        engine = engine or self.engine
        device.reset_peak_memory()
        try:
            with engine.loaded(optimizer=optimizer):
                yield
        finally:
            peak = device.memory_stats()["max_memory_allocated_gb"]
            self._peaks[method] = max(peak, self._peaks.get(method, 0.0))
            if metrics := engine.pop_pass_metrics():
                self._pass_metrics[method] = merge_metrics([self._pass_metrics.get(method, {}), metrics])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pop_memory_peaks(self) -> dict[str, float]:
        """Return the peak of memory in GiB during each method since the last call; updates count as `update`."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pop_pass_metrics(self) -> dict[str, dict[str, Metric]]:
        """Return the metrics of the passes without gradients since the last call, by method."""
        metrics, self._pass_metrics = self._pass_metrics, {}
        return metrics

    def place_in_mesh(self, mesh_name: str) -> None:
        """Register this rank's place in the meshes of the engine's geometry.

        Calls over `mesh_name` split rows over the shards (3D_PROTO in HybridFlow's paper); the groups of
        `pipeline_mesh(mesh_name)` are the stages of the pipeline (3D_PP_ONLY).
        """
        geometry = self.engine.geometry
        self._register_dispatch_collect_info(mesh_name, dp_rank=geometry.dp_rank, is_collect=geometry.collects)
        first_of_stage = geometry.tp_rank == geometry.cp_rank == geometry.dp_rank == 0
        self._register_dispatch_collect_info(
            pipeline_mesh(mesh_name), dp_rank=geometry.pp_rank, is_collect=first_of_stage
        )

    def place_in_generation_mesh(self, mesh_name: str, tp: int = 1, pp: int = 1) -> None:
        """Register this rank's place in a mesh whose groups generate together (3D_ALL_MICRO_DP in the paper).

        The ranks that train one copy of the model form several generation groups, of `tp * pp` ranks each, which get
        rows of their own. The first rank of each group collects.

        Raises:
            ConfigError: `tp` or `pp` does not divide that of training.
        """
        at = self.engine.geometry
        training = MegatronLayout(tp=at.tp_size, cp=at.cp_size, dp=at.dp_size, pp=at.pp_size)
        generation = GenerationLayout(tp=tp, pp=pp, replicas=training.devices // (tp * pp))
        device = ((at.pp_rank * at.dp_size + at.dp_rank) * at.cp_size + at.cp_rank) * at.tp_size + at.tp_rank
        group, place = divmod(paper_slot(training, generation, device), generation.per_replica)
        self._register_dispatch_collect_info(mesh_name, dp_rank=group, is_collect=place == 0)

    def update(
        self,
        batch: DataProto,
        micro: MicroBatching,
        loss_fn: CountedLossFn,
        entropy: bool = False,
        prepass: LossPrepass | None = None,
        ref_kl: bool = False,
    ) -> DataProto:
        """One optimizer step for each mini-batch of the shard.

        Args:
            batch: this rank's rows, mini-batch after mini-batch, with an `UpdatePlan`.
            prepass: run on each mini-batch, over all ranks, before its update.
            ref_kl: the loss needs the KL to the reference policy over the vocabulary.

        Returns:
            A batch without rows whose meta `metrics` holds mergeable metrics.

        Raises:
            ValueError: there is no plan, or it does not use every row of this shard exactly once.
        """
        plan = UpdatePlan.of(batch)
        plan.check(rows=len(batch), dp_size=self.engine.geometry.dp_size)
        results: list[dict[str, Metric]] = []
        start = 0
        with self.loaded("update", optimizer=True):
            for planned in plan.mini_batches:
                mini_batch = batch[start : start + planned.rows]
                start += planned.rows
                if prepass is not None:
                    prepass.add_to(mini_batch, self.engine, planned.seed, plan.temperature)
                metrics = self.engine.train_batch(
                    mini_batch,
                    micro,
                    partial(loss_fn, counts=LossCounts(planned.tokens, planned.sequences, plan.response_length)),
                    temperature=plan.temperature,
                    entropy=entropy,
                    on_nonfinite="skip" if plan.skip_nonfinite else "raise",
                    ref_kl=ref_kl,
                )
                results.append(
                    {self._named(name): _per_update(metric, plan.updates) for name, metric in metrics.items()}
                )
        return DataProto(meta_info={"metrics": merge_metrics([*results, _memory_metrics()])})

    def _named(self, name: str) -> str:
        """The engine's own metrics (`grad_norm`, `lr`, ...) under the name of the role."""
        return name if "/" in name else f"{self.metric_prefix}/{name}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str, contents: Sequence[str], in_background: bool = False) -> None:
        """Write this rank's part of `contents` ("model", "optimizer", "extra", "hf_model") into `folder`.

        Offloaded state is written from main memory, because generation may be using the device.

        Args:
            in_background: copy the state to main memory, and return while a thread writes the copy; see `is_saving`.
        """
        if not in_background:
            self.engine.save(Path(folder), contents)
            return
        assert isinstance(self.engine, CopiesState)  # checked at start-up
        self.is_saving(wait=True)
        self._writing = BackgroundCall(partial(self.engine.copy_state(contents).write, Path(folder)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_saving(self, wait: bool = False) -> bool:
        """Return whether this rank is still writing what `save_checkpoint` copied.

        Args:
            wait: return once it is written.

        Raises:
            Exception: what failed while it was written, once.
        """
        if self._writing is not None and self._writing.done(wait):
            finished, self._writing = self._writing, None
            finished.result()
        return self._writing is not None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str, contents: Sequence[str]) -> None:
        """Read what `save_checkpoint` wrote, on any number of ranks.

        Raises:
            ModelError: `contents` lacks the model, so the run would continue with other weights than were saved.
        """
        if "model" not in contents:
            raise ModelError(
                f"{folder} cannot be resumed from: checkpoint.load_contents is {list(contents)}, without 'model'. "
                "Add it (and to checkpoint.save_contents), or start from the beginning with trainer.resume_mode=disable"
            )
        self.engine.load(Path(folder), contents)


def pipeline_mesh(mesh_name: str) -> str:
    """The mesh whose groups are the pipeline stages of the ranks in another mesh."""
    return f"{mesh_name}_pp"


def micro_batching(size: int | None, dynamic: bool, max_tokens: int, key: str = "") -> MicroBatching:
    """Micro-batches of at most `max_tokens` tokens, and unless `dynamic` of at most `size` sequences.

    The limit on tokens always holds: logits of eight sequences of 16,000 tokens would take 40 GB.

    Args:
        key: the setting that `max_tokens` comes from.
    """
    return MicroBatching(size=None if dynamic else size, max_tokens=max_tokens, key=key)


def as_output(tensors: Mapping[str, torch.Tensor], **names: str) -> DataProto:
    """Make the batch that a worker method returns; it has no rows on ranks whose engine computes no outputs.

    Args:
        names: the field that an output of the engine becomes, where it has another name.
    """
    if not tensors:
        return DataProto()
    return DataProto.from_dict(tensors={names.get(name, name): tensor for name, tensor in tensors.items()})


def _memory_metrics() -> dict[str, Metric]:
    """Memory of the update in GiB, under verl's names; the largest rank counts."""
    stats = device.memory_stats()
    names = ("max_memory_allocated_gb", "max_memory_reserved_gb")
    metrics = {f"perf/{name}": Metric(stats[name], kind="max") for name in names}
    return {**metrics, "perf/cpu_memory_used_gb": Metric(device.resident_memory(), kind="max")}


def _per_update(metric: Metric, updates: int) -> Metric:
    """A loss is summed over micro-batches and ranks, but averaged over the updates of a step."""
    return Metric(metric.value / updates, metric.weight, metric.kind) if metric.kind == "sum" else metric
