"""The critic's worker: values of the states before each response token, and their regression to the returns."""

from hybridrl.config import CriticConfig
from hybridrl.config.entry_settings import engine_settings
from hybridrl.protocol import DataProto
from hybridrl.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.workers.losses import value_loss_fn
from hybridrl.workers.model_worker import (
    COLLECTIVE_TIMEOUT_S,
    SEQUENCE_FIELDS,
    ModelWorker,
    as_output,
    micro_batching,
)


class CriticWorker(ModelWorker):
    """One rank of the critic.

    Args:
        config: the `critic` part of the configuration.
        timeout_s: how long a collective may wait for other ranks.
    """

    metric_prefix = "critic"

    def __init__(self, config: CriticConfig, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        super().__init__(timeout_s)
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, steps: int | None = None, updates_per_step: int = 1) -> None:
        """Build and shard the value model; see `ModelWorker.build_engine`."""
        config = self.config
        settings = engine_settings(config, config.model.external_lib)
        self.build_engine("value_model", config.strategy, config.model, settings, config.optim, steps, updates_per_step)
        self.place_in_mesh("critic")

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"),
        blocking=False,
        reads=SEQUENCE_FIELDS,
        writes=("values",),
    )
    def compute_values(self, batch: DataProto) -> DataProto:
        """`values` [B, T]: V of the state before each response token."""
        config = self.config
        micro = micro_batching(
            config.forward_micro_batch_size_per_gpu,
            config.use_dynamic_bsz,
            config.forward_max_token_len_per_gpu,
            key="critic.forward_max_token_len_per_gpu",
        )
        with self.loaded("compute_values"):
            outputs = self.engine.infer(batch, micro, temperature=1.0, outputs=("values",))
        return as_output(outputs)

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"),
        blocking=False,
        reads=(*SEQUENCE_FIELDS, "response_mask", "values", "returns"),
    )
    def update_critic(self, batch: DataProto) -> DataProto:
        """One optimizer step for each mini-batch of this rank's shard; see `ModelWorker.update`."""
        config = self.config
        micro = micro_batching(
            config.ppo_micro_batch_size_per_gpu,
            config.use_dynamic_bsz,
            config.ppo_max_token_len_per_gpu,
            key="critic.ppo_max_token_len_per_gpu",
        )
        return self.update(
            batch,
            micro,
            value_loss_fn(config),
        )
