"""The worker for supervised fine-tuning of a language model."""

from typing import Any

import torch

from hybridrl.config import SFTTrainerConfig
from hybridrl.config.strategies import engine_settings
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.protocol import DataProto
from hybridrl.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.utils.metrics import Metric
from hybridrl.workers.forecast import Forecast, forecast_model
from hybridrl.workers.losses import LossCounts
from hybridrl.workers.model_worker import COLLECTIVE_TIMEOUT_S, ModelWorker, as_output, micro_batching


class SupervisedWorker(ModelWorker):
    """One rank of the model that is fine-tuned.

    Args:
        config: the whole configuration of the run.
        timeout_s: how long a collective may wait for other ranks.
    """

    metric_prefix = "train"

    def __init__(self, config: SFTTrainerConfig, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        super().__init__(timeout_s)
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, steps: int | None = None) -> None:
        """Build and shard the model; see `ModelWorker.build_engine`."""
        config = self.config
        self.build_engine(
            "language_model",
            config.engine.strategy,
            config.model,
            engine_settings(config.engine, config.model.external_lib),
            config.optim,
            steps,
            updates_per_step=1,
        )
        self.place_in_mesh("model")

    def forecast_model(self, config: SFTTrainerConfig, ranks: int) -> Forecast | None:
        """What the model will take of a device like this one; see `hybridrl.workers.forecast`."""
        return forecast_model(config, ranks)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="model"), blocking=False)
    def update_model(self, batch: DataProto) -> DataProto:
        """One optimizer step on this rank's shard; see `ModelWorker.update`."""
        return self.update(batch, self._micro_batching(), sft_loss)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="model"))
    def compute_nll(self, batch: DataProto) -> DataProto:
        """`nll` [B]: the negative log-likelihood of each row, summed over the tokens that are trained on."""
        with self.loaded("compute_nll"):
            outputs = self.engine.infer(batch, self._micro_batching(), outputs=("log_probs",))
        summed = {name: -log_probs.sum(dim=1) for name, log_probs in outputs.items()}
        return as_output(summed, log_probs="nll")

    def _micro_batching(self) -> MicroBatching:
        data = self.config.data
        return micro_batching(data.micro_batch_size_per_gpu, data.use_dynamic_bsz, data.max_token_len_per_gpu)


def sft_loss(
    outputs: dict[str, torch.Tensor], batch: DataProto, counts: LossCounts
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A micro-batch's share of the mean negative log-likelihood over the N trained tokens of the whole mini-batch.

    L = -1/N sum_t m_t log pi(y_t | y_<t)
    """
    mask = batch.batch["response_mask"]
    loss = -torch.where(mask.bool(), outputs["log_probs"], 0.0).sum() / counts.tokens
    return loss, {"train/loss": Metric(loss.detach(), kind="sum")}
