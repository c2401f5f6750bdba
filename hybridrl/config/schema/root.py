"""The whole trees: `ppo_trainer`, those of supervised training, `generation`, `evaluation` and `suite_evaluation`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hybridrl.config.schema.actor import ActorConfig, RefConfig
from hybridrl.config.schema.algorithm import AlgorithmConfig
from hybridrl.config.schema.conditions import A_CRITIC, TRAINS, PartNeed, entry_has, on
from hybridrl.config.schema.critic import CriticConfig
from hybridrl.config.schema.data import (
    DataConfig,
    EvaluationDataConfig,
    GenerationDataConfig,
    LabelledDataConfig,
    PairsDataConfig,
    SFTDataConfig,
    SupervisedDataConfig,
)
from hybridrl.config.schema.distillation import DistillationConfig
from hybridrl.config.schema.engine import CheckpointConfig, OptimConfig
from hybridrl.config.schema.mappings import Unchecked
from hybridrl.config.schema.megatron import SFTEngineConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.node import ConfigNode, group, key
from hybridrl.config.schema.objective import DPOConfig, KTOConfig, ObjectiveConfig, RMConfig, SFTObjectiveConfig
from hybridrl.config.schema.profiler import GlobalProfilerConfig, RoleProfilerConfig
from hybridrl.config.schema.reward import RewardConfig, ScoringConfig
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.trainer import (
    JobConfig,
    PlacementConfig,
    PlannedPlacementConfig,
    RayConfig,
    SFTRunConfig,
    SkipConfig,
    TrainerConfig,
)
from hybridrl.registry import ADV_ESTIMATORS, INFERENCE_ENGINES, OBJECTIVES, POLICY_LOSSES

#: groups of files in `configs/` that choose a training engine for all roles
MODEL_ENGINES = ("dp", "megatron")


#: the run has a reference policy
_REFERENCE = PartNeed(
    "use_reference",
    "no reference policy takes part",
    "set actor_rollout_ref.actor.use_kl_loss=True or algorithm.use_kl_in_reward=True",
)
#: the reference policy is a model of its own
_OWN_REFERENCE = PartNeed(
    "has_reference_model", "the reference is the policy without its adapter, so no second model is loaded", ""
)


@dataclass
class ActorRolloutRefConfig(ConfigNode):
    """`actor_rollout_ref`: the policy in training, in generation and as the reference."""

    model: ModelConfig = group(ModelConfig, needs=entry_has(".rollout.name", INFERENCE_ENGINES, "takes_weights"))
    actor: ActorConfig = group(ActorConfig, needs=TRAINS)
    ref: RefConfig = group(
        RefConfig,
        needs=(TRAINS, _REFERENCE),
        inner=dict.fromkeys(("strategy", "fsdp_config", "megatron"), _OWN_REFERENCE),
    )
    rollout: RolloutConfig = group(RolloutConfig)
    nccl_timeout: int = key(600, "seconds a collective operation may take", gt=0)


@dataclass
class PPOTrainerConfig(ConfigNode):
    """`ppo_trainer`: all settings of `python -m hybridrl.trainer.main_ppo`."""

    model_engine: str = key("dp", "training engine of every role that chooses none; dp: fsdp2", choices=MODEL_ENGINES)
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig)
    critic: CriticConfig = group(CriticConfig, needs=A_CRITIC)
    roles: dict[str, Any] = key(
        {},
        "settings of roles that a module of external_lib registers, by role",
        read_by=Unchecked("hybridrl.config.roles reads each as the dataclass of its role"),
    )
    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    data: DataConfig = group(DataConfig)
    reward: RewardConfig = group(RewardConfig)
    distillation: DistillationConfig = group(DistillationConfig, needs=on("distillation.enabled"))
    trainer: TrainerConfig = group(TrainerConfig)
    skip: SkipConfig = group(SkipConfig)
    placement: PlannedPlacementConfig = group(PlannedPlacementConfig)
    ray_kwargs: RayConfig = group(RayConfig)
    global_profiler: GlobalProfilerConfig = group(GlobalProfilerConfig)

    @property
    def profiled(self) -> bool:
        """Whether ranks of some role are profiled."""
        profilers = [self.actor_rollout_ref.actor.profiler, self.critic.profiler]
        own = [role.get("profiler") for role in self.roles.values() if isinstance(role, Mapping)]
        return any(profiler.enable and (profiler.all_ranks or profiler.ranks) for profiler in profilers) or any(
            isinstance(profiler, Mapping)
            and profiler.get("enable")
            and (profiler.get("all_ranks") or profiler.get("ranks"))
            for profiler in own
        )

    @property
    def use_critic(self) -> bool:
        """Whether the run has a value model."""
        if self.critic.enable is not None:
            return self.critic.enable
        return "values" in ADV_ESTIMATORS.metadata(self.algorithm.adv_estimator).needs

    @property
    def use_reference(self) -> bool:
        """Whether the run has a reference policy: for a KL in the reward or in the loss, or for the policy loss."""
        actor = self.actor_rollout_ref.actor
        needs = POLICY_LOSSES.metadata(actor.policy_loss.loss_mode).needs
        return self.algorithm.use_kl_in_reward or actor.use_kl_loss or "ref_log_prob" in needs

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference policy is a model of its own. With LoRA it is the policy without its adapter."""
        return self.use_reference and not self.actor_rollout_ref.model.adapted


@dataclass
class SupervisedConfig(ConfigNode):
    """Settings that `sft_trainer`, `dpo_trainer`, `kto_trainer` and `rm_trainer` share."""

    #: the group that chooses the objective
    objective_group: ClassVar[str]

    model: ModelConfig = group(ModelConfig)
    engine: SFTEngineConfig = group(SFTEngineConfig)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    data: SupervisedDataConfig = group(SupervisedDataConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    trainer: SFTRunConfig = group(SFTRunConfig)
    placement: PlacementConfig = group(PlacementConfig, roles={"model": "global"})
    ray_kwargs: RayConfig = group(RayConfig)
    global_profiler: GlobalProfilerConfig = group(GlobalProfilerConfig)
    profiler: RoleProfilerConfig = group(RoleProfilerConfig)

    @property
    def profiled(self) -> bool:
        """Whether ranks of the model are profiled."""
        return self.profiler.enable and bool(self.profiler.all_ranks or self.profiler.ranks)

    @property
    def objective(self) -> ObjectiveConfig:
        """The settings of the objective that is minimised."""
        settings: ObjectiveConfig = getattr(self, self.objective_group)
        return settings

    @property
    def reference(self) -> str | None:
        """Where log-probabilities of the reference are from (`reference` of the objective); None if it needs none."""
        if not OBJECTIVES.metadata(self.objective.loss_type).reference:
            return None
        starts_as_base = self.model.lora_rank > 0 and self.model.lora_adapter_path is None
        configured: str | None = self.objective.get("reference")
        return configured or ("adapter" if starts_as_base else "model")


@dataclass
class SFTTrainerConfig(SupervisedConfig):
    """`sft_trainer`: all settings of `python -m hybridrl.trainer.main_sft`."""

    objective_group: ClassVar[str] = "sft"
    data: SFTDataConfig = group(SFTDataConfig)
    sft: SFTObjectiveConfig = group(SFTObjectiveConfig)


@dataclass
class DPOTrainerConfig(SupervisedConfig):
    """`dpo_trainer`: all settings of `python -m hybridrl.trainer.main_dpo`."""

    objective_group: ClassVar[str] = "dpo"
    optim: OptimConfig = group(OptimConfig, lr=1e-6)
    data: PairsDataConfig = group(PairsDataConfig)
    dpo: DPOConfig = group(DPOConfig)


@dataclass
class KTOTrainerConfig(SupervisedConfig):
    """`kto_trainer`: all settings of `python -m hybridrl.trainer.main_kto`."""

    objective_group: ClassVar[str] = "kto"
    optim: OptimConfig = group(OptimConfig, lr=1e-6)
    data: LabelledDataConfig = group(LabelledDataConfig)
    kto: KTOConfig = group(KTOConfig)


@dataclass
class RMTrainerConfig(SupervisedConfig):
    """`rm_trainer`: all settings of `python -m hybridrl.trainer.main_rm`."""

    objective_group: ClassVar[str] = "rm"
    data: PairsDataConfig = group(PairsDataConfig)
    rm: RMConfig = group(RMConfig)


@dataclass
class GenerationConfig(ConfigNode):
    """`generation`: all settings of `python -m hybridrl.trainer.main_generation`.

    `actor_rollout_ref` is that of `ppo_trainer`, so the overrides of a training run are accepted unchanged. Settings
    used only in training (actor, ref) have no effect, which a notice says, except `actor.fsdp_config`, with which the
    hf rollout loads its model.
    """

    #: what settings of training and of sessions need
    trains: ClassVar[bool] = False
    has_sessions: ClassVar[bool] = False

    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig)
    data: GenerationDataConfig = group(GenerationDataConfig)
    trainer: JobConfig = group(JobConfig)
    placement: PlacementConfig = group(PlacementConfig, roles={"actor_rollout_ref": "global"})
    ray_kwargs: RayConfig = group(RayConfig)


@dataclass
class EvaluationConfig(ConfigNode):
    """`evaluation`: all settings of `python -m hybridrl.trainer.main_eval`."""

    data: EvaluationDataConfig = group(EvaluationDataConfig)
    reward: ScoringConfig = group(ScoringConfig)


@dataclass
class SuiteEvaluationConfig(GenerationConfig):
    """`suite_evaluation`: all settings of `hybridrl eval --suite`: generation, and how responses are scored."""

    reward: ScoringConfig = group(ScoringConfig)


RootConfig = PPOTrainerConfig | SupervisedConfig | GenerationConfig | EvaluationConfig

ROOTS: dict[str, type[RootConfig]] = {
    "ppo_trainer": PPOTrainerConfig,
    "sft_trainer": SFTTrainerConfig,
    "dpo_trainer": DPOTrainerConfig,
    "kto_trainer": KTOTrainerConfig,
    "rm_trainer": RMTrainerConfig,
    "generation": GenerationConfig,
    "evaluation": EvaluationConfig,
    "suite_evaluation": SuiteEvaluationConfig,
}
#: trees that share groups with another tree under the same names: tree -> (other tree, groups)
SHARED_GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("dpo_trainer", "kto_trainer", "rm_trainer"),
        ("sft_trainer", ("model", "engine", "optim", "checkpoint", "trainer", "placement", "ray_kwargs")),
    ),
    **dict.fromkeys(("generation", "suite_evaluation"), ("ppo_trainer", ("actor_rollout_ref", "data"))),
}
