"""The reward model's worker: one score for each conversation, or for each of its steps."""

from hybridrl.config.entry_settings import engine_settings
from hybridrl.config.schema.reward import RewardModelConfig
from hybridrl.protocol import DataProto
from hybridrl.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.workers.model_worker import COLLECTIVE_TIMEOUT_S, ModelWorker, as_output, micro_batching


class RewardModelWorker(ModelWorker):
    """One rank of the reward model, a frozen value model.

    Args:
        config: the `reward.reward_model` part of the configuration.
        timeout_s: how long a collective may wait for other ranks.
    """

    metric_prefix = "reward_model"

    def __init__(self, config: RewardModelConfig, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        super().__init__(timeout_s)
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, steps: int | None = None, updates_per_step: int = 1) -> None:
        """Build and shard the model; see `ModelWorker.build_engine`."""
        config = self.config
        settings = engine_settings(config, config.model.external_lib)
        kind = "step_model" if config.steps.enable else "value_model"
        self.build_engine(kind, config.strategy, config.model, settings, None, steps, updates_per_step)
        self.place_in_mesh("reward_model")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model"), blocking=False)
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """`rm_scores` [B, T]: the head's output before each response token; T is 1 in a batch of `Conversations`."""
        config = self.config
        micro = micro_batching(
            config.micro_batch_size_per_gpu,
            config.use_dynamic_bsz,
            config.forward_max_token_len_per_gpu,
            key="reward.reward_model.forward_max_token_len_per_gpu",
        )
        with self.loaded("compute_rm_score"):
            outputs = self.engine.infer(batch, micro, temperature=1.0, outputs=("values",))
        return as_output(outputs, values="rm_scores")
