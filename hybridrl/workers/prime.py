"""PRIME's worker: process rewards of a language model against its frozen copy, learned from outcomes.

Shapes: B sequences, T response tokens.
"""

from dataclasses import replace
from typing import Any

import torch

from hybridrl.config.entry_settings import engine_settings
from hybridrl.config.schema.prime import PrimeConfig
from hybridrl.engine.train_engine import Engine, create_train_engine
from hybridrl.protocol import DataProto
from hybridrl.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.utils.metrics import Metric
from hybridrl.workers.losses import CountedLossFn, LossCounts
from hybridrl.workers.model_worker import COLLECTIVE_TIMEOUT_S, SEQUENCE_FIELDS, ModelWorker, as_output, micro_batching
from hybridrl.workers.update_plan import UpdatePlan

REFERENCE = "prime_ref_log_prob"


class PrimeWorker(ModelWorker):
    """One rank of the process reward model (Cui et al. 2025, arXiv 2502.01456).

    Args:
        config: `roles.prime`.
        timeout_s: how long a collective may wait for other ranks.
    """

    metric_prefix = "prime"

    def __init__(self, config: PrimeConfig, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        super().__init__(timeout_s)
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, steps: int | None = None, updates_per_step: int = 1) -> None:
        """Build and shard the model and its frozen copy; see `ModelWorker.build_engine`."""
        config = self.config
        settings = engine_settings(config, config.model.external_lib)
        self._reference: Engine = create_train_engine(
            "language_model", config.strategy, model=config.frozen, engine=settings.changed(forward_only=True)
        )
        self._reference.initialize()
        self.build_engine(
            "language_model", config.strategy, config.model, settings, config.optim, steps, updates_per_step
        )
        self.place_in_mesh("prime")

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="prime"),
        blocking=False,
        reads=SEQUENCE_FIELDS,
        writes=("process_rewards", REFERENCE),
    )
    def compute_process_rewards(self, batch: DataProto) -> DataProto:
        """`process_rewards` [B, T]: beta_train * (log pi - log pi_ref) of each response token; and log pi_ref."""
        reference = self._reference_log_probs(batch)
        with self.loaded("compute_process_rewards"):
            outputs = self.engine.infer(batch, self._micro, temperature=1.0, outputs=("log_probs",))
        if not outputs:  # not the last pipeline stage
            return as_output({})
        rewards = self.config.beta_train * (outputs["log_probs"] - reference[REFERENCE])
        return as_output({"process_rewards": rewards, **reference})

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="prime"),
        blocking=False,
        reads=(*SEQUENCE_FIELDS, "response_mask", "token_level_scores"),
    )
    def update_prime(self, batch: DataProto) -> DataProto:
        """One optimizer step for each mini-batch of this rank's shard; see `ModelWorker.update`."""
        if REFERENCE not in batch.batch.keys():
            batch.batch.update(self._reference_log_probs(batch))
        replace(UpdatePlan.of(batch), temperature=1.0).attach_to(batch)  # that of the process rewards
        return self.update(batch, self._micro, outcome_loss_fn(self.config))

    @property
    def _micro(self) -> Any:
        config = self.config
        return micro_batching(
            config.ppo_micro_batch_size_per_gpu,
            config.use_dynamic_bsz,
            config.ppo_max_token_len_per_gpu,
            key="roles.prime.ppo_max_token_len_per_gpu",
        )

    def _reference_log_probs(self, batch: DataProto) -> dict[str, torch.Tensor]:
        """log pi_ref as `prime_ref_log_prob` [B, T]; nothing except on the last pipeline stage."""
        with self._reference.loaded(optimizer=False):
            outputs = self._reference.infer(batch, self._micro, temperature=1.0, outputs=("log_probs",))
        return {REFERENCE: outputs["log_probs"]} if outputs else {}


def outcome_loss_fn(config: PrimeConfig) -> CountedLossFn:
    """Cross-entropy of a response's summed process rewards with whether it is right.

        z = beta_train * sum_t (log pi - log pi_ref),  L = -mean [y log sigmoid(z) + (1 - y) log(1 - sigmoid(z))]

    y is 1 if the sum of `token_level_scores` is above `correct_above`. The mean is over the responses of the
    mini-batch. Source: arXiv 2502.01456, equation 4.
    """

    def loss_fn(
        outputs: dict[str, torch.Tensor], batch: DataProto, counts: LossCounts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        fields = batch.batch
        mask = fields["response_mask"].bool()
        ratios = torch.where(mask, outputs["log_probs"] - fields[REFERENCE], 0.0)
        logits = config.beta_train * ratios.sum(-1)
        right = (torch.where(mask, fields["token_level_scores"], 0.0).sum(-1) > config.correct_above).to(logits.dtype)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, right, reduction="none")
        answered = mask.any(-1)
        loss = torch.where(answered, losses, 0.0).sum() / counts.sequences
        answered_logits, rows = logits.detach()[answered], float(answered.sum())
        agrees = ((answered_logits > 0) == right[answered].bool()).to(answered_logits.dtype)
        metrics = {
            "prime/loss": Metric(loss.detach(), kind="sum"),
            "prime/acc": Metric(agrees.mean(), rows),
            "prime/reward/mean": Metric(answered_logits.mean(), rows),
            "prime/right/mean": Metric(right[answered].mean(), rows),
        }
        return loss, metrics

    return loss_fn
