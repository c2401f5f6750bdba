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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridrl.errors import AlgorithmError, ConfigError, DataError, ModelError, RewardError, RolloutError, UserError
from hybridrl.utils.python_source import parsed
from hybridrl.utils.user_code import OBJECT_SUFFIX, load_entries, load_module, load_object

_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class EntryMetadata:
    """Metadata of an entry, available before it is imported.

    Attributes:
        settings: dataclass of its own settings, or its location as `module:Class`. The settings belong to the group
            that holds the key by which the entry is chosen.
    """

    settings: type | str | None = None


@dataclass(frozen=True, kw_only=True)
class EstimatorMetadata(EntryMetadata):
    """An advantage estimator.

    Attributes:
        needs: inputs that it requires in addition to rewards, mask and uid: `values` requires a critic,
            `reward_baselines` a greedy response to each prompt, `prompt_values` rewards from 0 to 1, `old_log_probs`
            the pass that computes them, `sum_pi_squared` the setting `actor.calculate_sum_pi_squared`.
        compares_samples: it compares the samples of one prompt with each other.
        alone: with one sample per prompt, which has no others to compare with, the advantage is the score itself.
            False: it needs two samples of each prompt.
        smallest_group: samples of a prompt that it needs. None: 2 if it compares samples, else 1. Where samples are
            missing, a prompt with fewer left is not trained on; `rollout.n` must not be smaller, unless it is 1 and
            `alone` is true.
        unbiased: for groups of any size from the smallest, the sum of its advantages times the gradients of the
            log-probabilities, divided by the size, is the gradient of the expected reward on average. Samples that are
            missing at random then cost nothing but variance. False: with fewer samples its formula holds for those
            that are left.
        reads_components: it reads the components of the reward (`algorithm.gdpo_reward_keys`) and not their sum.
    """

    needs: tuple[str, ...] = ()
    compares_samples: bool = False
    alone: bool = False
    smallest_group: int | None = None
    unbiased: bool = False
    reads_components: bool = False

    def __post_init__(self) -> None:
        if self.smallest_group is not None and self.smallest_group < 1:
            raise AlgorithmError(f"smallest_group={self.smallest_group}: an estimator needs at least 1 sample")

    @property
    def fewest_samples(self) -> int:
        """Samples of a prompt that it needs."""
        return self.smallest_group or (2 if self.compares_samples else 1)


@dataclass(frozen=True, kw_only=True)
class LossMetadata(EntryMetadata):
    """A policy loss.

    Attributes:
        needs: `old_log_probs`: the pass that computes them is never skipped; `ref_log_prob`: the run has a reference
            policy, and the loss is called with `ref_log_prob=`.
        requires: settings of `actor.policy_loss` that have no default and must be set for this loss.
        samplers_old: its old log-probabilities are the sampler's, so no pass of the policy computes any before the
            update. `algorithm.rollout_correction.bypass_mode` chooses it, not `policy_loss.loss_mode`.
        prepare, prepare_needed, whole_sequences: see `hybridrl.algorithms.register_policy_loss`; those of a built-in
            loss are known once it is imported.
        compares_samples: it compares the samples of one prompt with each other, so `rollout.n` is at least 2. It has a
            `prepare`, which gets the prompt of each row.
    """

    needs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    samplers_old: bool = False
    prepare: Callable[..., Any] | None = None
    prepare_needed: Callable[[Any], bool] | None = None
    whole_sequences: bool | Callable[[Any], bool] = False
    compares_samples: bool = False

    def __post_init__(self) -> None:
        if unknown := set(self.needs) - {"old_log_probs", "ref_log_prob"}:
            raise AlgorithmError(f"needs={sorted(unknown)}: a policy loss may need old_log_probs and ref_log_prob")


@dataclass(frozen=True, kw_only=True)
class DistillationMetadata(EntryMetadata):
    """A distillation loss.

    Attributes:
        reads: log-probabilities of the sampled `tokens`, of the teacher's `top` tokens, or of the `vocabulary`.
        direct: its gradient leads to the teacher. False: it is only a reward, for `use_policy_gradient`.
    """

    reads: str = "tokens"
    direct: bool = True

    def __post_init__(self) -> None:
        if self.reads not in ("tokens", "top", "vocabulary"):
            raise AlgorithmError(f"reads={self.reads!r}: a distillation loss reads tokens, top or vocabulary")


@dataclass(frozen=True, kw_only=True)
class DatumMetadata(EntryMetadata):
    """A loss of datums, which clients of the training server choose for each request.

    Attributes:
        inputs: names of the tensors, one number per target token, that a datum brings for it.
        config: names of its numbers, with their defaults; None: a request must set it.
        several_targets: a position may have several target tokens.
    """

    inputs: tuple[str, ...] = ()
    config: Mapping[str, float | None] = field(default_factory=dict)
    several_targets: bool = False


@dataclass(frozen=True, kw_only=True)
class ManagerMetadata(EntryMetadata):
    """A reward manager. Its settings belong to `reward.reward_kwargs`.

    Attributes:
        runs_functions: it asks reward functions. False: it takes the rewards that sessions bring along.
    """

    runs_functions: bool = True


@dataclass(frozen=True, kw_only=True)
class InferenceMetadata(EntryMetadata):
    """A generation engine.

    Attributes:
        packages: packages that it needs.
        in_place: it generates with the training weights, in the training workers.
        takes_weights: it accepts new weights, so a policy can be trained with it.
        serves: its replicas can be served over HTTP (`rollout.server`, `rollout.prometheus`).
        auto: its position in the order in which `rollout.name=auto` tries engines on a GPU; 0: never.
        install: how to install it, for messages.
        reserves_of_total: it takes `rollout.gpu_memory_utilization` of a device's whole memory, not of what is free.
        records_routing: it returns the experts of each token (`routed_experts`) where the meta of prompts asks for it.
        takes_adapters: it applies an adapter (LoRA) that it is sent next to weights that it has.
        sees_images: it generates from the images of prompts (`multi_modal_inputs`).
        scores: it serves classifiers with one label (`EngineSpec.task` is `score`).
        reads: it returns log-probabilities of prompts and of the likeliest tokens there (`EngineSpec.task` is `read`).
        constrains: it keeps responses to a JSON schema (`SamplingParams.json_schema`).
    """

    packages: tuple[str, ...] = ()
    in_place: bool = False
    takes_weights: bool = True
    serves: bool = True
    auto: int = 0
    install: str = ""
    reserves_of_total: bool = False
    records_routing: bool = False
    takes_adapters: bool = False
    sees_images: bool = False
    scores: bool = False
    reads: bool = False
    constrains: bool = False

    @property
    def has_replicas(self) -> bool:
        """Whether it runs in its own processes with its own weights."""
        return self.takes_weights and not self.in_place


@dataclass(frozen=True, kw_only=True)
class TrainMetadata(EntryMetadata):
    """A training engine.

    Attributes:
        model_types: what it can train: `language_model`, `value_model`, `reward_model`, `step_model`.
        layout: class of the layouts in which it holds a model, a `layouts.topology.Layout`, or its location as
            `module:Class`; None: it exports whole tensors only.
    """

    model_types: tuple[str, ...] = ("language_model", "value_model")
    layout: type | str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentLoopMetadata(EntryMetadata):
    """An agent loop.

    Attributes:
        only_answers: it answers each prompt once, without tools and simulated users.
        reads: what it has in its sessions, whose settings it reads: `tools`, `environments`, or `gateway` for agents
            that call the run's server.
    """

    only_answers: bool = False
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TraceMetadata(EntryMetadata):
    """A service for traces of rollouts.

    Attributes:
        packages: packages that it needs.
        install: how to install them, for messages.
    """

    packages: tuple[str, ...] = ()
    install: str = ""


@dataclass(frozen=True, kw_only=True)
class ImportMetadata(EntryMetadata):
    """A project whose scripts `hybridrl import` reads.

    Attributes:
        reads: the kinds of its scripts, for `--help`.
    """

    reads: str = ""


@dataclass(frozen=True, kw_only=True)
class SuiteMetadata(EntryMetadata):
    """A benchmark suite.

    Attributes:
        hub: its data set on the hub, `ORG/NAME@CONFIG:SPLIT`; "": it is read from local copies only.
        files: names of its files in a local copy, as globs; `SPLIT.jsonl` and the like are tried besides.
        columns: columns that a row must have; names that published copies use for one column are separated by `|`,
            and the row has the value under the first of them.
        sampling: the sampling that results are usually reported with, for people.
        licence: of the data, and where the data are from, for people.
    """

    hub: str = ""
    files: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    sampling: str = ""
    licence: str = ""


#: what an objective of supervised training computes with, and the tree whose runs choose it
OBJECTIVE_KINDS = {"tokens": "sft_trainer", "pairs": "dpo_trainer", "labels": "kto_trainer", "scores": "rm_trainer"}


@dataclass(frozen=True, kw_only=True)
class ObjectiveMetadata(EntryMetadata):
    """An objective of supervised training.

    Attributes:
        kind: of which rows: `tokens`: of the tokens of conversations; `pairs`: of the log-probabilities of pairs of
            answers; `labels`: of those of answers with a label; `scores`: of the rewards of pairs of answers.
        reference: it compares the log-probabilities with those of the model before training.
        reads: the settings of its group that it reads; to set another one is a fault.
        margins: it reads the margins of pairs (`data.margin_key`).
        kl_baseline: it reads the step's estimate of the KL to the reference, of prompts and answers of other rows.
        likelihood: the likelihood of chosen answers is added to it with a coefficient of 1 unless one is set.
    """

    kind: str = "tokens"
    reference: bool = False
    reads: tuple[str, ...] = ()
    margins: bool = False
    kl_baseline: bool = False
    likelihood: bool = False

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVE_KINDS:
            raise AlgorithmError(f"kind={self.kind!r}: an objective is of one of {', '.join(OBJECTIVE_KINDS)}")


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
