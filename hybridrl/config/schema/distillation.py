"""Settings of distillation from teachers: `distillation`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema import choices
from hybridrl.config.schema.conditions import PartNeed, above, entry_has, is_set, on
from hybridrl.config.schema.engine import FSDPConfig, strategy_key
from hybridrl.config.schema.mappings import Unchecked
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.node import ConfigNode, Follow, group, key
from hybridrl.config.schema.serving import ServingConfig
from hybridrl.registry import DISTILLATION_LOSSES, POLICY_LOSSES

#: settings of verl's inference engines that have no effect on a teacher
INFERENCE_ENGINE_KEYS = (
    "data_parallel_size",
    "disable_log_stats",
    "limit_images",
    "load_format",
    "skip_tokenizer_init",
)


#: rows have different teachers
_SEVERAL = PartNeed("distillation.has_several_teachers", "one teacher has all rows", "add another teacher")
#: a training engine computes teachers
_COMPUTED = PartNeed("distillation.computes_teachers", "an inference engine serves the teachers", "")


@dataclass
class TeacherInferenceConfig(ServingConfig):
    """`distillation.teacher_models.NAME.inference`: how a teacher computes."""

    dtype: str | None = key(  # type: ignore[assignment]  # null is a value of this one only
        None,
        "dtype of the computation; null: distillation.fsdp_config.dtype, of an inference engine auto",
        choices=(*choices.DTYPES, "auto", "float16"),
        synonyms=choices.DTYPE_SYNONYMS,
    )
    temperature: float | None = key(
        None, "what the teacher's logits are divided by; null: actor_rollout_ref.rollout.temperature", gt=0
    )
    max_num_batched_tokens: int = key(8192, "most tokens per micro-batch; a longer sequence is computed alone", gt=0)
    max_num_seqs: int = key(1024, "most sequences per micro-batch", gt=0)
    max_model_len: int | None = key(
        None, "tokens that the teacher can read; null: not checked, of an inference engine those of the data", gt=0
    )
    prompt_length: int | None = key(None, "the same as data.max_prompt_length", gt=0)
    response_length: int | None = key(None, "the same as data.max_response_length", gt=0)


@dataclass
class TeacherModelConfig(ConfigNode):
    """`distillation.teacher_models.NAME`: a teacher."""

    model_path: str | None = key(None, "directory in Hugging Face format, or a hub id; must be set", place="model")
    num_replicas: int = key(
        0,
        "with inference.name: replicas; 0: the teachers divide their own pool equally, and fill that of the policy. "
        "Without, no effect: a teacher is spread over all processes of its pool",
        ge=0,
        needs=is_set(".inference.name"),
    )
    inference: TeacherInferenceConfig = group(TeacherInferenceConfig)
    # last, because it hides the function that declares settings
    key: str | None = key(
        None, "rows whose column teacher_key has this value are the teacher's; null: all", needs=_SEVERAL
    )


@dataclass
class DistillationLossConfig(ConfigNode):
    """`distillation.distillation_loss`."""

    loss_mode: str = key("k3", "distillation loss by its registered name", registry=DISTILLATION_LOSSES)
    topk: int = key(
        32,
        "losses over the teacher's most likely tokens: how many",
        gt=0,
        needs=entry_has(".loss_mode", DISTILLATION_LOSSES, "reads", "top"),
    )
    use_policy_gradient: bool = key(
        False, "the negative loss of a token is its advantage in a policy loss; false: the loss is minimised itself"
    )
    use_task_rewards: bool = key(
        True, "add the policy's loss on the rewards; false: the policy learns from teachers alone"
    )
    distillation_loss_coef: float = key(
        1.0, "weight of the distillation loss in addition to that on rewards", ge=0, needs=on(".use_task_rewards")
    )
    loss_max_clamp: float | None = key(None, "largest absolute value of a token's loss; null: no limit", gt=0)
    log_prob_min_clamp: float | None = key(
        None,
        "losses over several tokens: smallest log-probability of both models; null: no limit",
        lt=0,
        needs=entry_has(".loss_mode", DISTILLATION_LOSSES, "reads", "top", "vocabulary"),
    )
    policy_loss_mode: str = key(
        "vanilla",
        "use_policy_gradient: policy loss by its registered name",
        registry=POLICY_LOSSES,
        needs=on(".use_policy_gradient"),
    )
    clip_ratio: float = key(0.2, "use_policy_gradient: clip range of that loss", ge=0, needs=on(".use_policy_gradient"))
    clip_ratio_low: float = key(0.2, "use_policy_gradient: below 1", ge=0, needs=on(".use_policy_gradient"))
    clip_ratio_high: float = key(0.2, "use_policy_gradient: above 1", ge=0, needs=on(".use_policy_gradient"))


@dataclass
class DistillationConfig(ConfigNode):
    """`distillation`."""

    enabled: bool = key(False, "learn from teachers", needs=())
    teacher_models: dict[str, Any] = key(
        {},
        "teachers by a name of your choice; see the settings of a teacher",
        read_by=Unchecked("hybridrl.config.teachers reads them as TeacherModelConfig"),
    )
    teacher_key: str = key("data_source", "column of the data that says which teacher a row has", needs=_SEVERAL)
    n_gpus_per_node: int = key(8, "processes of the teachers' own pool on each machine", gt=0, needs=above(".nnodes"))
    nnodes: int = key(0, "machines of that pool; 0: teachers take turns with the policy in its processes", ge=0)
    distillation_loss: DistillationLossConfig = group(DistillationLossConfig)
    strategy: str = strategy_key(follows="${actor_rollout_ref.actor.strategy}", needs=_COMPUTED)
    fsdp_config: FSDPConfig = group(
        FSDPConfig,
        needs=_COMPUTED,
        forward_only=True,
        strategy=Follow("${distillation.strategy}", "fsdp2"),
        ulysses_sequence_parallel_size=Follow(
            "${oc.select:actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size,1}", 1
        ),
    )
    megatron: MegatronConfig = group(
        MegatronConfig, needs=_COMPUTED, forward_only=True, strategy=Follow("${distillation.strategy}", "fsdp2")
    )

    @property
    def computes_teachers(self) -> bool:
        """Whether a training engine computes the teachers: no inference engine serves them."""
        inference_groups = [
            teacher.get("inference") for teacher in self.teacher_models.values() if isinstance(teacher, Mapping)
        ]
        return not any(isinstance(inference, Mapping) and inference.get("name") for inference in inference_groups)

    @property
    def has_several_teachers(self) -> bool:
        """Whether rows have different teachers."""
        return len(self.teacher_models) > 1

    @property
    def reads(self) -> str:
        """The tensors that the loss reads, see `hybridrl.utils.entry_metadata.DistillationMetadata`."""
        return DISTILLATION_LOSSES.metadata(self.distillation_loss.loss_mode).reads
