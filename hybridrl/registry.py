"""Registries of everything chosen by name: advantage estimators, losses, reward managers and engines.

The metadata of a built-in entry are written once, as literal arguments of the decorator that registers it. They are
read from its source, so the configuration knows them and every name without importing torch. The entry itself is
imported on first use. A user's entry registers itself when its module is imported, or is named as `module:attribute`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridrl.errors import AlgorithmError, ConfigError, DataError, ModelError, RewardError, RolloutError, UserError
from hybridrl.utils.entry_metadata import (
    AgentLoopMetadata,
    DatumMetadata,
    DistillationMetadata,
    EntryMetadata,
    EstimatorMetadata,
    ImportMetadata,
    InferenceMetadata,
    LossMetadata,
    ManagerMetadata,
    ObjectiveMetadata,
    SuiteMetadata,
    TraceMetadata,
    TrainMetadata,
)
from hybridrl.utils.python_source import parsed
from hybridrl.utils.user_code import OBJECT_SUFFIX, load_entries, load_module, load_object

_PACKAGE = Path(__file__).resolve().parent


F = TypeVar("F", bound=EntryMetadata)


@dataclass(frozen=True)
class _Declared:
    """A built-in entry as declared in its source."""

    module: str
    literals: dict[str, Any]
    computed: frozenset[str]  # those that are known only once the module is imported


class Registry(Generic[F]):
    """Entries of one kind.

    Args:
        kind: what an entry is, for messages.
        key: the setting that selects an entry.
        decorators: functions that register an entry, as the source calls them; the last one is for user code.
        files: pattern of the source files that hold the built-in entries, relative to the package.
        metadata: class of an entry's metadata.
        error: class of the errors that are raised.
    """

    def __init__(
        self, kind: str, key: str, decorators: Iterable[str], files: str, metadata: type[F], error: type[UserError]
    ) -> None:
        self.kind, self.key, self.decorators, self.error = kind, key, tuple(decorators), error
        self._files, self._metadata_class = files, metadata
        #: the entries that were imported, by name
        self.objects: dict[str, Any] = {}
        self._metadata: dict[str, F] = {}

    def add(self, name: str, entry: Any, metadata: F) -> None:
        """Register an entry under a name; registering the same entry again has no effect.

        Raises:
            UserError: the name belongs to another entry or to a built-in one.
        """
        existing = self.objects.get(name)
        conflict = existing is not None and not self.has_same(name, entry)
        if not conflict and existing is None and name in self._declared:
            conflict = _module(entry) != self._declared[name].module
        if conflict or ":" in name:
            holder = f"{_module(existing)}.{_qualname(existing)}" if existing is not None else "a built-in entry"
            raise self.error(f"{self.kind} {name!r} is registered already, as {holder}; choose another name.")
        locations = [other for other, value in self.objects.items() if value is existing and ":" in other]
        for each in (name, *locations):
            self.objects[each], self._metadata[each] = entry, metadata

    def has_same(self, name: str, entry: Any) -> bool:
        """Whether a name belongs to this entry, or to one that was defined at the same place."""
        existing = self.objects.get(name)
        return existing is not None and (existing is entry or _origin(existing) == _origin(entry))

    def remove(self, name: str) -> None:
        """Forget an entry that was registered; nothing happens if there is none of this name."""
        self.objects.pop(name, None)
        self._metadata.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """Every name that may be chosen, the built-in ones first."""
        names = dict.fromkeys((*self._declared, *(name for name in self.objects if ":" not in name)))
        return tuple(name for name in names if not getattr(self.metadata(name), "samplers_old", False))

    def knows(self, name: str) -> bool:
        """Whether there is an entry of this name, or the name is a location (`module:attribute`)."""
        return name in self.objects or name in self._declared or ":" in name

    def is_builtin(self, name: str) -> bool:
        """Whether the entry comes with the library."""
        return name in self._declared

    def metadata(self, name: str) -> F:
        """The metadata of an entry, without importing a built-in one; the defaults for a name that `get` refuses."""
        if name in self._metadata:
            return self._metadata[name]
        if name in self.objects:  # registered directly
            return self._metadata_class()
        if name in self._declared:
            return self._metadata_class(**self._declared[name].literals)
        try:
            self.get(name)
        except UserError:
            return self._metadata_class()
        return self._metadata.get(name) or self._metadata_class()

    def settings(self, name: str) -> type | None:
        """The dataclass of an entry's own settings."""
        if name not in self._metadata and name in self._declared and "settings" in self._declared[name].computed:
            self.get(name)
        settings = self.metadata(name).settings
        return load_object(settings, None, self.key, self.key, self.error) if isinstance(settings, str) else settings

    def get(self, name: str) -> Any:
        """Import and return the entry of a name.

        Raises:
            UserError: there is no such entry; the message lists the known ones.
        """
        if name in self.objects:
            return self.objects[name]
        if ":" in name:
            entry = load_object(name, None, self.key, self.key, self.error)
            other = self._registered(entry)
            self._metadata[name] = self._metadata_class() if other is None else self.metadata(other)
            self.objects[name] = entry if other is None else self.objects[other]
            return self.objects[name]
        if name in self._declared:
            importlib.import_module(self._declared[name].module)
            return self.objects[name]
        names = sorted({*self._declared, *(other for other in self.objects if ":" not in other)})
        raise self.error(
            f"{self.key} is {name!r}; choose from {', '.join(names)}. Your own is "
            f"added with {self.decorators[-1]}(name), in a module that actor_rollout_ref.model.external_lib names, or "
            "named itself as module:attribute."
        )

    def _registered(self, entry: Any) -> str | None:
        """The name of an entry, also if it was registered when its file was loaded in the other way."""
        same = [name for name, value in self.objects.items() if value is entry]
        if not same and "<" not in _qualname(entry):  # several functions may be called <lambda> or <locals>.f
            same = [name for name, value in self.objects.items() if _origin(value) == _origin(entry)]
        return same[0] if same else None

    @functools.cached_property
    def _declared(self) -> dict[str, _Declared]:
        """The built-in entries, read from their source."""
        allowed = {field.name for field in fields(self._metadata_class)}
        entries: dict[str, _Declared] = {}
        for file in sorted(_PACKAGE.glob(self._files)):
            text = file.read_text(encoding="utf-8")
            if not any(f"{name}(" in text for name in self.decorators):
                continue
            module = ".".join(file.relative_to(_PACKAGE.parent).with_suffix("").parts)
            for node in ast.walk(parsed(text)):
                if not isinstance(node, ast.Call) or _dotted(node.func) not in self.decorators or not node.args:
                    continue
                name = node.args[0]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    keywords = {item.arg: item.value for item in node.keywords if item.arg in allowed}
                    literals = {
                        str(key): value for key, node_ in keywords.items() if (value := _literal(node_)) is not ...
                    }
                    entries[name.value] = _Declared(module, literals, frozenset(map(str, keywords)) - literals.keys())
        return entries


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    """The value of a literal; `...` for any expression that must be computed."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...


def _module(entry: Any) -> str:
    return getattr(entry, "__module__", "")


def _qualname(entry: Any) -> str:
    return getattr(entry, "__qualname__", repr(entry))


def _origin(entry: Any) -> tuple[str, str]:
    """Where an entry is defined. A file may be loaded by its path and, as another module, by its name."""
    file = getattr(sys.modules.get(_module(entry)), "__file__", None)
    return os.path.realpath(file) if file else _module(entry), _qualname(entry)


def import_external_lib(name: str | None) -> None:
    """Import the modules of `model.external_lib` (comma separated), which may register user code.

    A file of pickled entries (`hybridrl.registered_entries`) among them has its entries registered.

    Raises:
        ModelError: one of them cannot be imported, or raises an error on import.
    """
    for part in filter(None, (part.strip() for part in (name or "").split(","))):
        if part.endswith(OBJECT_SUFFIX):
            load_entries(part, "model.external_lib", ModelError)
        else:
            load_module(part, "model.external_lib", ModelError)


ADV_ESTIMATORS = Registry(
    "advantage estimator",
    "algorithm.adv_estimator",
    ("outcome_estimator", "register_adv_est"),
    "algorithms/advantages/*.py",
    EstimatorMetadata,
    AlgorithmError,
)
POLICY_LOSSES = Registry(
    "policy loss",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    ("policy_loss", "register_policy_loss"),
    "algorithms/policy_losses/*.py",
    LossMetadata,
    AlgorithmError,
)
DISTILLATION_LOSSES = Registry(
    "distillation loss",
    "distillation.distillation_loss.loss_mode",
    ("register_distillation_loss",),
    "algorithms/distillation.py",
    DistillationMetadata,
    AlgorithmError,
)
DATUM_LOSSES = Registry(
    "loss of datums",
    "loss_fn",
    ("register_datum_loss",),
    "algorithms/datum_losses.py",
    DatumMetadata,
    AlgorithmError,
)
REWARD_MANAGERS = Registry(
    "reward manager",
    "reward.reward_manager.name",
    ("register_reward_manager",),
    "reward/**/*.py",
    ManagerMetadata,
    RewardError,
)
INFERENCE_ENGINES = Registry(
    "rollout engine",
    "actor_rollout_ref.rollout.name",
    ("register_inference_engine",),
    "rollout/**/*.py",
    InferenceMetadata,
    RolloutError,
)
TRAIN_ENGINES = Registry(
    "training engine",
    "actor_rollout_ref.actor.strategy",
    ("register_train_engine",),
    "engine/*/*.py",
    TrainMetadata,
    ModelError,
)
OBJECTIVES = Registry(
    "training objective",
    "loss_type",
    ("register_objective",),
    "workers/objectives.py",
    ObjectiveMetadata,
    AlgorithmError,
)

CURRICULA = Registry(
    "curriculum",
    "data.mixture.curriculum.name",
    ("register_curriculum",),
    "data/curricula.py",
    EntryMetadata,
    DataError,
)
MEGATRON_FAMILIES = Registry(
    "model family",
    "model_type of config.json",
    ("register_family",),
    "engine/megatron/families/*.py",
    EntryMetadata,
    ModelError,
)
AGENT_LOOPS = Registry(
    "agent loop",
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    ("register",),
    "agents/loops/*.py",
    AgentLoopMetadata,
    RolloutError,
)
TOOL_PARSERS = Registry(
    "format of tool calls",
    "actor_rollout_ref.rollout.multi_turn.format",
    ("register_tool_parser",),
    "chat/parsers/*.py",
    EntryMetadata,
    RolloutError,
)
TOOLS = Registry(
    "tool",
    "class_name of multi_turn.tool_config_path",
    ("register_tool",),
    "agents/tools/*.py",
    EntryMetadata,
    RolloutError,
)
INTERACTIONS = Registry(
    "simulated user",
    "class_name of multi_turn.interaction_config_path",
    ("register_interaction",),
    "agents/interactions/*.py",
    EntryMetadata,
    RolloutError,
)
TRACES = Registry(
    "service for traces",
    "actor_rollout_ref.rollout.trace.backend",
    ("register_trace_backend",),
    "observe/traces/*.py",
    TraceMetadata,
    RolloutError,
)
ENVIRONMENTS = Registry(
    "environment",
    "actor_rollout_ref.rollout.agent.default_environment",
    ("register_environment",),
    "agents/environments/*.py",
    EntryMetadata,
    RolloutError,
)

IMPORTED_PROJECTS = Registry(
    "project",
    "the project of hybridrl import",
    ("imported_project",),
    "compat/*/*.py",
    ImportMetadata,
    ConfigError,
)

SUITES = Registry(
    "benchmark suite",
    "suite:NAME",
    ("register_suite",),
    "data/suites/*.py",
    SuiteMetadata,
    DataError,
)

MAPPING_READERS = Registry(
    "reader of a mapping",
    "read_by of a setting",
    ("reads_mapping",),
    "*/mappings.py",
    EntryMetadata,
    ConfigError,
)


def has_replicas(rollout_name: str) -> bool:
    """Whether `rollout.name` is an engine in its own processes with its own weights; not assumed of `auto`."""
    return INFERENCE_ENGINES.knows(rollout_name) and INFERENCE_ENGINES.metadata(rollout_name).has_replicas


def may_have_replicas(rollout_name: str) -> bool:
    """Whether `rollout.name` is such an engine, or stands for one that is chosen later, as `auto` does."""
    return not INFERENCE_ENGINES.knows(rollout_name) or has_replicas(rollout_name)


def is_endpoint(rollout_name: str) -> bool:
    """Whether `rollout.name` is an external server, which does not accept weights."""
    return INFERENCE_ENGINES.knows(rollout_name) and not INFERENCE_ENGINES.metadata(rollout_name).takes_weights


def with_inputs(metadata: EstimatorMetadata, inputs: Iterable[str]) -> EstimatorMetadata:
    """`metadata` extended by the inputs that the function itself names."""
    return replace(metadata, needs=tuple(dict.fromkeys((*metadata.needs, *inputs))))
