"""The whole trees: `ppo_trainer`, `sft_trainer`, `generation` and `evaluation`."""

from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema.actor import ActorConfig, RefConfig
from hybridrl.config.schema.algorithm import AlgorithmConfig
from hybridrl.config.schema.critic import CriticConfig
from hybridrl.config.schema.data import DataConfig, EvaluationDataConfig, GenerationDataConfig, SFTDataConfig
from hybridrl.config.schema.engine import CheckpointConfig, FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.node import ConfigNode, group, key
from hybridrl.config.schema.reward import RewardConfig, ScoringConfig
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.trainer import JobConfig, PlacementConfig, RayConfig, RunConfig, TrainerConfig


@dataclass
class ActorRolloutRefConfig(ConfigNode):
    """`actor_rollout_ref`: the policy as it trains, generates and stands as reference."""

    model: ModelConfig = group(ModelConfig)
    actor: ActorConfig = group(ActorConfig)
    ref: RefConfig = group(RefConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    nccl_timeout: int = key(600, "seconds a collective operation may take", gt=0)


@dataclass
class PPOTrainerConfig(ConfigNode):
    """`ppo_trainer`: everything that `python -m hybridrl.trainer.main_ppo` can be told."""

    model_engine: str = key("dp", "family of training engines; dp: FSDP2", choices=("dp",), later=("megatron",))
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig)
    critic: CriticConfig = group(CriticConfig)
    roles: dict[str, Any] = key({}, "settings of roles that a module of external_lib registers, by role")
    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    data: DataConfig = group(DataConfig)
    reward: RewardConfig = group(RewardConfig)
    trainer: TrainerConfig = group(TrainerConfig)
    placement: PlacementConfig = group(PlacementConfig)
    ray_kwargs: RayConfig = group(RayConfig)

    @property
    def use_critic(self) -> bool:
        """Whether a value model takes part."""
        return self.algorithm.adv_estimator == "gae" if self.critic.enable is None else self.critic.enable

    @property
    def use_reference(self) -> bool:
        """Whether a reference policy takes part: KL in the reward or in the loss."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss


@dataclass
class SFTTrainerConfig(ConfigNode):
    """`sft_trainer`: everything that `python -m hybridrl.trainer.main_sft` can be told."""

    model: ModelConfig = group(ModelConfig)
    engine: FSDPConfig = group(FSDPConfig)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    data: SFTDataConfig = group(SFTDataConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    trainer: RunConfig = group(RunConfig)
    placement: PlacementConfig = group(PlacementConfig, roles={"model": "global"})
    ray_kwargs: RayConfig = group(RayConfig)


@dataclass
class GenerationConfig(ConfigNode):
    """`generation`: everything that `python -m hybridrl.trainer.main_generation` can be told.

    `actor_rollout_ref` is that of `ppo_trainer`: the words of a training run are taken as they are, and what only
    trains (actor, ref) has no effect but for `actor.fsdp_config`, by which the hf rollout loads its model.
    """

    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig)
    data: GenerationDataConfig = group(GenerationDataConfig)
    trainer: JobConfig = group(JobConfig)
    placement: PlacementConfig = group(PlacementConfig, roles={"actor_rollout_ref": "global"})
    ray_kwargs: RayConfig = group(RayConfig)


@dataclass
class EvaluationConfig(ConfigNode):
    """`evaluation`: everything that `python -m hybridrl.trainer.main_eval` can be told."""

    data: EvaluationDataConfig = group(EvaluationDataConfig)
    reward: ScoringConfig = group(ScoringConfig)


RootConfig = PPOTrainerConfig | SFTTrainerConfig | GenerationConfig | EvaluationConfig

ROOTS: dict[str, type[RootConfig]] = {
    "ppo_trainer": PPOTrainerConfig,
    "sft_trainer": SFTTrainerConfig,
    "generation": GenerationConfig,
    "evaluation": EvaluationConfig,
}
#: trees that hold groups of another one under the same names: tree -> (the other, the groups)
SHARED_GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "generation": ("ppo_trainer", ("actor_rollout_ref", "data")),
}
