"""The teachers of a run, read from `distillation.teacher_models`, and the fields that carry what they say."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.config.entry_settings import read_own
from hybridrl.config.schema.distillation import (
    INFERENCE_ENGINE_KEYS,
    DistillationConfig,
    TeacherModelConfig,
)
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.errors import ConfigError

#: [B] int64: the number of each row's teacher
TEACHER_INDEX = "teacher_index"
#: [B, T] log-probabilities of the sampled tokens, [B, T, K] those of the teacher's most likely tokens, and these tokens
LOG_PROBS, TOP_LOG_PROBS, TOP_IDS = "teacher_log_probs", "teacher_topk_log_probs", "teacher_topk_ids"
TEACHER_FIELDS = (LOG_PROBS, TOP_LOG_PROBS, TOP_IDS)

_WHERE = "distillation.teacher_models"


@dataclass(frozen=True)
class Teacher:
    """One teacher.

    Attributes:
        name: its name in `distillation.teacher_models`.
        model: what is loaded.
        settings: its settings.
    """

    name: str
    model: ModelConfig
    settings: TeacherModelConfig

    @property
    def where(self) -> str:
        """Where its settings are in the configuration."""
        return f"{_WHERE}.{self.name}"


@dataclass(frozen=True)
class Teachers:
    """The teachers of a run, of which their worker is made.

    Attributes:
        distillation: the settings that the teachers share.
        teachers: each of them, in the order of their numbers in `teacher_index`.
        external_lib: modules to import first.
    """

    distillation: DistillationConfig
    teachers: tuple[Teacher, ...]
    external_lib: str | None

    def numbers(self) -> Mapping[Any, int] | None:
        """The number of the teacher by the value of the column; None if one teacher has all rows."""
        if len(self.teachers) == 1:
            return None
        return {teacher.settings.key: number for number, teacher in enumerate(self.teachers)}


def teachers_of(config: PPOTrainerConfig) -> Teachers:
    """Return the teachers of a run.

    Raises:
        ConfigError: a setting of a teacher is unknown or does not fit.
    """
    teachers, faults = [], []
    for name, raw in config.distillation.teacher_models.items():
        settings, own = _settings_of(name, raw, config)
        faults += own
        if settings is not None:
            teachers.append(Teacher(name, _model_of(settings, config), settings))
    if faults:
        raise ConfigError(faults)
    return Teachers(config.distillation, tuple(teachers), config.actor_rollout_ref.model.external_lib)


def _settings_of(name: str, raw: Any, config: PPOTrainerConfig) -> tuple[TeacherModelConfig | None, list[str]]:
    where = f"{_WHERE}.{name}"
    if not isinstance(raw, Mapping):
        return None, [f"{where}={raw!r}: must be settings of a teacher, such as {where}.model_path=..."]
    values = dict(raw)
    inference = values.get("inference")
    if isinstance(inference, Mapping):
        values["inference"] = {key: value for key, value in inference.items() if key not in INFERENCE_ENGINE_KEYS}
    return read_own(TeacherModelConfig, values, f"{where}.", config)


def _model_of(settings: TeacherModelConfig, config: PPOTrainerConfig) -> ModelConfig:
    """A teacher's model: computed as the policy's is, so that both can read the same micro-batches."""
    policy = config.actor_rollout_ref.model
    attention = policy.override_config.get("attn_implementation")
    return ModelConfig(
        path=settings.model_path or "",
        external_lib=policy.external_lib,
        trust_remote_code=policy.trust_remote_code,
        override_config={} if attention is None else {"attn_implementation": attention},
        use_remove_padding=policy.use_remove_padding,
        use_fused_kernels=policy.use_fused_kernels,
        # True is for micro-batches of the policy, which losses over the vocabulary read; null acts for every teacher
        share_prefixes=policy.share_prefixes and config.distillation.reads == "vocabulary",
    )


def unread_keys(config: PPOTrainerConfig) -> Iterator[str]:
    """Yield the keys of verl's teachers that are set and have no effect in any run."""
    for name, raw in config.distillation.teacher_models.items():
        if not isinstance(raw, Mapping):
            continue
        inference = raw.get("inference") or {}
        if isinstance(inference, Mapping):
            yield from (f"{_WHERE}.{name}.inference.{key}" for key in inference if key in INFERENCE_ENGINE_KEYS)
