"""What all workers with a model share: process group, dispatch mesh, updates, checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from hybridrl.config import FSDPConfig, ModelConfig, OptimConfig
from hybridrl.engine.train_engine import Engine, MicroBatching, TrainEngines
from hybridrl.errors import ModelError
from hybridrl.protocol import DataProto
from hybridrl.single_controller import Dispatch, Worker, register
from hybridrl.utils.distributed import init_process_group
from hybridrl.utils.metrics import Metric, merge_metrics
from hybridrl.workers.loss_prepass import LossPrepass
from hybridrl.workers.losses import CountedLossFn, LossCounts
from hybridrl.workers.update_plan import UpdatePlan

COLLECTIVE_TIMEOUT_S = 600.0  # verl's nccl_timeout


class ModelWorker(Worker):
    """A rank of a group that holds one trainable model.

    Args:
        timeout_s: how long a collective may wait for other ranks before it fails.
    """

    engine: Engine
    metric_prefix: ClassVar[str]

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        address, port = self.get_master_addr_port()
        init_process_group(self.rank, self.world_size, address, int(port), timeout_seconds=timeout_s)

    def build_engine(
        self,
        model_type: str,
        strategy: str,
        model: ModelConfig,
        engine: FSDPConfig,
        optim: OptimConfig | None,
        steps: int | None,
        updates_per_step: int,
    ) -> None:
        """Build, load and shard this rank's model.

        Args:
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
        self.engine = TrainEngines.create(model_type, strategy, model=model, engine=engine, optim=optim)
        self.engine.initialize()

    def place_in_mesh(self, mesh_name: str) -> None:
        """Register which shard of a batch this rank gets in calls that are dispatched over `mesh_name`."""
        geometry = self.engine.geometry
        self._register_dispatch_collect_info(mesh_name, dp_rank=geometry.dp_rank, is_collect=geometry.collects)

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
        with self.engine.loaded(optimizer=True):
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
        return DataProto(meta_info={"metrics": merge_metrics(results)})

    def _named(self, name: str) -> str:
        """The engine's own metrics (`grad_norm`, `lr`, ...) under the name of the role."""
        return name if "/" in name else f"{self.metric_prefix}/{name}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str, contents: Sequence[str]) -> None:
        """Write this rank's part of `contents` ("model", "optimizer", "extra", "hf_model") into `folder`."""
        with self.engine.loaded(optimizer="optimizer" in contents):
            self.engine.save(Path(folder), contents)

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
        with self.engine.loaded(optimizer="optimizer" in contents):
            self.engine.load(Path(folder), contents)


def micro_batching(size: int | None, dynamic: bool, max_tokens: int) -> MicroBatching:
    """Micro-batches by token budget if `dynamic`, otherwise with a fixed number of sequences."""
    return MicroBatching(max_tokens=max_tokens) if dynamic else MicroBatching(size=size)


def as_output(tensors: Mapping[str, torch.Tensor], **names: str) -> DataProto:
    """What a worker method returns: a batch without rows on ranks whose engine computes no outputs.

    Args:
        names: the field that an output of the engine becomes, where it has another name.
    """
    if not tensors:
        return DataProto()
    return DataProto.from_dict(tensors={names.get(name, name): tensor for name, tensor in tensors.items()})


def _per_update(metric: Metric, updates: int) -> Metric:
    """A loss is summed over micro-batches and ranks, but averaged over the updates of a step."""
    return Metric(metric.value / updates, metric.weight, metric.kind) if metric.kind == "sum" else metric
