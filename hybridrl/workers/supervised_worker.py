"""The worker of supervised training: fine-tuning, preference optimisation, reward models."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.config import SupervisedConfig
from hybridrl.config.entry_settings import engine_settings
from hybridrl.engine.capabilities import HasAdapters
from hybridrl.engine.train_engine import Engine, MicroBatching, create_train_engine
from hybridrl.protocol import DataProto
from hybridrl.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.utils.metrics import merge_metrics
from hybridrl.workers.losses import LossCounts
from hybridrl.workers.model_worker import COLLECTIVE_TIMEOUT_S, ModelWorker, as_output, micro_batching
from hybridrl.workers.objectives import ANSWER_LOG_PROBS, REF_LOG_PROBS, Objective
from hybridrl.workers.update_plan import UpdatePlan

TRAIN, VALIDATE = "train", "val"  # first parts of the names of metrics


class SupervisedWorker(ModelWorker):
    """One rank of the model that is trained.

    Args:
        config: the whole configuration of the run.
        timeout_s: how long a collective may wait for other ranks.
    """

    metric_prefix = TRAIN

    def __init__(self, config: SupervisedConfig, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        super().__init__(timeout_s)
        self.config = config
        self._reference: Engine | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(
        self, steps: int | None = None, reference: bool = False, overrides: Mapping[str, Any] | None = None
    ) -> None:
        """Build and shard the model; see `ModelWorker.build_engine`.

        Args:
            reference: also load a second copy of it, which stays as it is.
            overrides: entries of the model's config.json, where `model.override_config` sets none.
        """
        config = self.config
        self.model = replace(config.model, override_config={**(overrides or {}), **config.model.override_config})
        settings = engine_settings(config.engine, config.model.external_lib)
        self.objective = Objective(config.objective.loss_type, config.objective)
        self.build_engine(
            self.objective.model_type,
            config.engine.strategy,
            self.model,
            settings,
            config.optim,
            steps,
            updates_per_step=1,
        )
        if reference:
            frozen = settings.changed(forward_only=True)
            self._reference = create_train_engine(
                self.objective.model_type, config.engine.strategy, model=self.model, engine=frozen, optim=None
            )
            self._reference.initialize()
        self.place_in_mesh("model")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="model"), blocking=False)
    def update_model(self, batch: DataProto) -> DataProto:
        """One optimizer step on this rank's shard; see `ModelWorker.update`."""
        return self.update(batch, self._micro_batching(), self.objective.share(TRAIN))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="model"))
    def evaluate(self, batch: DataProto) -> DataProto:
        """Measure the objective on this rank's shard, without gradients.

        Args:
            batch: rows with an `UpdatePlan` of one mini-batch, whose counts are those of all validation data.

        Returns:
            A batch without rows whose meta `metrics` holds mergeable metrics.
        """
        plan = UpdatePlan.of(batch)
        plan.check(rows=len(batch), dp_size=self.engine.geometry.dp_size)
        (planned,) = plan.mini_batches
        with self.loaded("evaluate"):
            outputs = self.engine.infer(batch, self._micro_batching(), outputs=(self.objective.output,))
        rows = batch.batch["response_mask"].any(dim=1)  # others are copies that fill a rank up
        metrics: dict[str, Any] = {}
        if outputs and bool(rows.any()):
            real_outputs = {name: tensor[rows].double() for name, tensor in outputs.items()}
            counts = LossCounts(planned.tokens, planned.sequences)
            _, metrics = self.objective.share(VALIDATE)(
                real_outputs, batch.select_idxs(rows.nonzero()[:, 0].numpy()), counts
            )
        return DataProto(meta_info={"metrics": merge_metrics([metrics])})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="model"))
    def compute_answers(self, batch: DataProto) -> DataProto:
        """`answer_log_probs` [B]: the log-probability of each row's answer under the model as it is."""
        with self.loaded("compute_answers"):
            return self._answers(self.engine, batch, ANSWER_LOG_PROBS)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="model"))
    def compute_reference(self, batch: DataProto) -> DataProto:
        """`ref_answer_log_probs` [B]: the log-probability of each row's answer under the reference.

        The reference is the second copy of the model, if there is one; the model without its adapter with
        `dpo.reference=adapter`; else the model as it is.
        """
        engine = self._reference or self.engine
        with self.loaded("compute_reference", engine=engine):
            if self.config.reference == "adapter":
                assert isinstance(self.engine, HasAdapters)  # checked at start-up
                with self.engine.without_adapter():
                    return self._answers(engine, batch, REF_LOG_PROBS)
            return self._answers(engine, batch, REF_LOG_PROBS)

    def _answers(self, engine: Engine, batch: DataProto, field: str) -> DataProto:
        """The log-probability of each row's answer under an engine's model, as the field `field` [B]."""
        outputs = engine.infer(batch, replace(self._micro_batching(), rows_together=1), outputs=("log_probs",))
        return as_output({name: log_probs.sum(dim=1) for name, log_probs in outputs.items()}, log_probs=field)

    def _micro_batching(self) -> MicroBatching:
        data, together = self.config.data, self.objective.rows_together
        size = data.micro_batch_size_per_gpu * together
        micro = micro_batching(size, data.use_dynamic_bsz, data.max_token_len_per_gpu, key="data.max_token_len_per_gpu")
        return replace(micro, rows_together=together)
