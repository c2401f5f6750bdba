"""Settings that cannot act: set to another value than the default, while what they depend on (`needs=`) is not there.

Such a setting is a fault that names it. verl's own scripts set some of them all the same; these are a notice
(`hybridrl/config/verl/idle.yaml`).
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.checks.branches import ConfigBranch, branches, value_at
from hybridrl.config.output import as_dict
from hybridrl.config.schema.conditions import Condition, Conditions, Unmet, conditions
from hybridrl.config.schema.node import Follow, ValueLimits, default_of, default_tree, is_group
from hybridrl.config.schema.root import ROOTS, RootConfig
from hybridrl.config.verl.tables import idle_notices

_FOLLOWS = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,[^${}]*)?\}")


@dataclass(frozen=True)
class Conditional:
    """A setting with the conditions of its own and of the groups that hold it.

    Attributes:
        key: the setting.
        limits: those of its value.
        needs: pairs of a condition and the group from which the condition names other settings.
    """

    key: str
    limits: ValueLimits
    needs: tuple[tuple[Condition, str], ...]


@dataclass
class Idle:
    """Settings that cannot act for one reason.

    Attributes:
        because, remedy: see `hybridrl.config.schema.conditions.Unmet`.
        settings: each with its value.
    """

    because: str
    remedy: str
    settings: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The sentences for the user."""
        several = len(self.settings) > 1
        assignments = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        remedy = f"{self.remedy[:1].upper()}{self.remedy[1:]}, or remove" if self.remedy else "Remove"
        return (
            f"{assignments} {'have' if several else 'has'} no effect, because {self.because}. {remedy} "
            f"{'them' if several else 'it'}"
        )


def check_idle(config: RootConfig, others: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return a sentence for each fault and each notice about settings that cannot act.

    Args:
        others: faults that were found already; what one of them begins with is not reported twice.
    """
    reported = {name for fault in others for name in fault.split("=")[0].split(":")[:1]}
    by_reason: dict[tuple[str, str, bool], Idle] = {}
    for branch in branches(config):
        for key, value, unmet in _idle_in(branch, config, reported):
            noticed = _is_noticed(type(config), key)
            reason = Idle(unmet.because, unmet.remedy)
            settings = by_reason.setdefault((unmet.because, unmet.remedy, noticed), reason).settings
            settings[key] = str(value)
    faults = [idle.text() for (_, _, noticed), idle in by_reason.items() if not noticed]
    return faults, [idle.text() for (_, _, noticed), idle in by_reason.items() if noticed]


def _idle_in(branch: ConfigBranch, config: RootConfig, reported: Collection[str]) -> Iterator[tuple[str, Any, Unmet]]:
    """Yield the settings of a branch that cannot act: name, value and the first reason."""
    if branch.unused is not None:
        yield from ((f"{branch.prefix}{name}", value, branch.unused) for name, value in (branch.raw or {}).items())
        return
    own_data = value_at(config, "data.custom_cls.path") not in (..., None)  # such a class may read any setting of data
    tree: dict[str, Any] | None = None
    for item in conditional(branch.settings, branch.prefix):
        if item.key in reported or (own_data and item.key.startswith("data.")):
            continue
        for condition, group in item.needs:
            unmet = condition.unmet(group, functools.partial(branch.lookup, config))
            if unmet is None:
                continue
            value = branch.lookup(config, item.key)
            tree = as_dict(config) if tree is None else tree
            if value is not ... and _is_set(branch, config, item, value, tree):
                yield item.key, value, unmet
            break  # the first reason is enough


def acts(branch: ConfigBranch, config: RootConfig, key: str) -> bool:
    """Whether everything is there that a setting of a branch depends on."""
    lookup = functools.partial(branch.lookup, config)
    needs = next((item.needs for item in conditional(branch.settings, branch.prefix) if item.key == key), ())
    return all(condition.unmet(group, lookup) is None for condition, group in needs)


@functools.cache
def conditional(cls: type, prefix: str = "") -> tuple[Conditional, ...]:
    """Every setting of a dataclass that depends on something.

    Args:
        prefix: what the names of its settings begin with.
    """
    return tuple(_conditional(cls, prefix, ()))


def _conditional(
    cls: type, prefix: str, outer: tuple[tuple[Condition, str], ...], inner: Mapping[str, Conditions] | None = None
) -> Iterator[Conditional]:
    group = prefix[:-1]
    for item in dataclasses.fields(cls):
        own = item.metadata.get("needs")
        further = conditions((inner or {}).get(item.name))
        needs = () if own == () else (*outer, *((each, group) for each in (*conditions(own), *further)))
        name = f"{prefix}{item.name}"
        if is_group(item):
            yield from _conditional(item.type, f"{name}.", needs, item.metadata.get("inner"))  # type: ignore[arg-type]
        elif needs:
            yield Conditional(name, item.metadata.get("limits", ValueLimits()), needs)


def default_at(config: RootConfig, key: str) -> Any:
    """The value that a setting of a composed tree has unless it is set."""
    return default_of_key(type(config), Conditional(key, ValueLimits(), ()), as_dict(config))


def default_of_key(root: type, item: Conditional, tree: Mapping[str, Any]) -> Any:
    """The value that a setting has unless it is set; a default that follows another setting has that one's value."""
    default: Any = _at(_defaults(root), item.key)
    if "${" not in str(default):
        return default
    value: Any = ...
    if isinstance(default, str) and (followed := _FOLLOWS.fullmatch(default)) is not None:
        near = f"{item.key.rpartition('.')[0]}{followed[1]}" if followed[1].startswith(".") else followed[1]
        value = value_at(tree, near)
    if value is ...:
        value = _resolved(item.key, default, tree)
    return item.limits.synonyms.get(value, value) if isinstance(value, str) else value


def _is_set(branch: ConfigBranch, config: RootConfig, item: Conditional, value: Any, tree: Mapping[str, Any]) -> bool:
    """Whether a setting was set to something else than its default. Null sets nothing.

    A program may assign a setting that others follow, after which these only seem to be set: what they have counts only
    if they were set themselves.
    """
    if value is None:
        return False
    if branch.where:
        path = item.key.removeprefix(branch.prefix)
        default = _declared_default(branch.settings, path)
        return branch.sets(path) and ("${" in str(default) or value != default)
    follows = "${" in str(_at(_defaults(branch.settings), item.key))
    return (not follows or item.key in config.set_keys) and value != default_of_key(type(config), item, tree)


def _declared_default(settings: type, path: str) -> Any:
    """The default of a setting of a dataclass, which other settings may lack; an interpolation where it follows."""
    name, _, rest = path.partition(".")
    item = next(each for each in dataclasses.fields(settings) if each.name == name)
    if not rest:
        return default_of(item)
    changed = (item.metadata.get("changed") or {}).get(rest, ...)
    if changed is not ...:
        return changed.interpolation if isinstance(changed, Follow) else changed
    assert isinstance(item.type, type)
    return _declared_default(item.type, rest)


def _at(tree: Mapping[str, Any], key: str) -> Any:
    return functools.reduce(lambda inner, part: inner[part], key.split("."), tree)


@functools.cache
def _defaults(root: type) -> dict[str, Any]:
    return default_tree(root)


def _resolved(key: str, default: Any, tree: Mapping[str, Any]) -> Any:
    """The value of any interpolation."""
    values = OmegaConf.create(dict(tree))
    OmegaConf.update(values, key, default, merge=False)
    try:
        value = OmegaConf.select(values, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return default


@functools.cache
def _noticed_in(root: type) -> tuple[str, ...]:
    name = next(name for name, cls in ROOTS.items() if cls is root)
    return tuple(key for roots, keys in idle_notices() if name in roots for key in keys)


def _is_noticed(root: type, key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _noticed_in(root))
