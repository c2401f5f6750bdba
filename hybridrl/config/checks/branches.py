"""The parts of a configuration that have a dataclass of settings: the tree itself, and mappings that are read as one.

These are the settings of roles (`roles.NAME`), of a reward manager, of single reward functions, and of teachers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.config.entry_settings import read_own
from hybridrl.config.roles import ROLES
from hybridrl.config.schema.conditions import Unmet
from hybridrl.config.schema.reward import RewardPartConfig
from hybridrl.config.schema.root import EvaluationConfig, PPOTrainerConfig, RootConfig, SuiteEvaluationConfig
from hybridrl.config.teachers import teachers_of
from hybridrl.errors import ConfigError
from hybridrl.registry import REWARD_MANAGERS


@dataclass(frozen=True)
class ConfigBranch:
    """A part of a configuration.

    Attributes:
        where: its name in the tree; empty for the whole tree.
        value: the settings.
        raw: the values that were set; None for the whole tree, where the defaults tell.
        unused: why nothing reads it; None where something does.
    """

    where: str
    value: Any
    raw: Mapping[str, Any] | None = None
    unused: Unmet | None = None

    @property
    def settings(self) -> type:
        """The dataclass of its settings."""
        return type(self.value)

    @property
    def prefix(self) -> str:
        """The prefix of its settings' names."""
        return f"{self.where}." if self.where else ""

    def lookup(self, config: RootConfig, name: str) -> Any:
        """The value of a setting of this branch, or of the tree; `...` if there is none."""
        if self.where and name.startswith(self.prefix):
            return value_at(self.value, name.removeprefix(self.prefix))
        return value_at(config, name)

    def sets(self, path: str) -> bool:
        """Whether a setting of this branch was set; always true in the whole tree."""
        return self.raw is None or value_at(self.raw, path) is not ...


def value_at(config: Any, name: str) -> Any:
    """The value of a dotted key or property; `...` if the tree has none."""
    for part in name.split("."):
        config = config.get(part, ...) if isinstance(config, Mapping) else getattr(config, part, ...)
        if config is ...:
            return ...
    return config


def branches(config: RootConfig) -> Iterator[ConfigBranch]:
    """Yield the whole tree, then the others. Those with faults are left out: another check reports them."""
    yield ConfigBranch("", config)
    if isinstance(config, PPOTrainerConfig):
        yield from _of_roles(config)
        yield from _of_manager(config)
        yield from _of_teachers(config)
    if isinstance(config, PPOTrainerConfig | EvaluationConfig | SuiteEvaluationConfig):
        for name, raw in config.reward.functions.items():
            yield from _read(RewardPartConfig, raw, f"reward.functions.{name}", config)


def _read(
    settings: type, raw: Any, where: str, config: RootConfig, unused: Unmet | None = None
) -> Iterator[ConfigBranch]:
    if isinstance(raw, Mapping):
        value, faults = read_own(settings, raw, f"{where}.", config)
        if value is not None and not faults:
            yield ConfigBranch(where, value, raw, unused)


def _of_roles(config: PPOTrainerConfig) -> Iterator[ConfigBranch]:
    for spec in ROLES.values():
        if spec.settings is None:
            continue
        unused = None
        if not spec.needed(config):
            estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
            unused = Unmet(
                f"the role {spec.name} takes no part in this run ({estimator})", "choose what needs the role"
            )
        yield from _read(spec.settings, config.roles.get(spec.name) or {}, spec.where, config, unused)


def _of_manager(config: PPOTrainerConfig) -> Iterator[ConfigBranch]:
    manager = config.reward.reward_manager
    if manager.source == "register" and REWARD_MANAGERS.is_builtin(manager.name):
        settings = REWARD_MANAGERS.settings(manager.name)
        if settings is not None:
            yield from _read(settings, config.reward.reward_kwargs or {}, "reward.reward_kwargs", config)


def _of_teachers(config: PPOTrainerConfig) -> Iterator[ConfigBranch]:
    if not config.distillation.enabled:
        return
    try:
        teachers = teachers_of(config).teachers
    except ConfigError:
        return
    for teacher in teachers:
        yield ConfigBranch(teacher.where, teacher.settings, config.distillation.teacher_models[teacher.name])
