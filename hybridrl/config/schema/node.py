"""The building blocks of a group of settings: a dataclass whose fields have a default, a meaning and limits.

A default that follows another key has two forms: the interpolation that Hydra composes and resolves, and a plain value.
The plain value makes a group built directly in Python (`OptimConfig(lr=1e-4)`) usable as it is.
"""

import copy
import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Self

from hybridrl.errors import ConfigError
from hybridrl.settings import ValueLimits as ValueLimits
from hybridrl.settings import key as key


@dataclass
class ConfigNode:
    """Base of every group; it can also be read like a mapping, for user code written for a DictConfig.

    Only settings can be assigned: a misspelt name is refused, because nothing would ever read it.

    If the group chooses an entry that the user registered with a dataclass of settings, `own` is an instance of that
    dataclass, and its fields are attributes of the group.
    """

    own: ClassVar[Any] = None
    #: of a whole configuration: the keys that the command line, a file or a program has set
    set_keys: ClassVar[frozenset[str]] = frozenset()

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("own")
        if own is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no setting {name}")
        return getattr(own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "own" and name not in self.__dataclass_fields__:
            if self.own is not None and name in self:
                setattr(self.own, name, value)
                return
            close = difflib.get_close_matches(name, list(self.keys()), n=3, cutoff=0.5)
            hint = f"; nearest: {', '.join(close)}" if close else ""
            raise ConfigError(f"{type(self).__name__} has no setting {name}{hint}")
        object.__setattr__(self, name, value)

    def changed(self, **values: Any) -> Self:
        """A copy with other values of some settings. Unlike `dataclasses.replace`, it keeps `own`."""
        other = copy.copy(self)
        for name, value in values.items():
            setattr(other, name, value)
        return other

    def get(self, name: str, default: Any = None) -> Any:
        """The setting called `name`, or `default` if this group has none."""
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in tuple(self.keys())

    def keys(self) -> Iterator[str]:
        """Names of the settings, in the order of their declaration."""
        own = () if self.own is None else dataclasses.fields(self.own)
        yield from dict.fromkeys(field.name for field in (*dataclasses.fields(self), *own))


@dataclass(frozen=True)
class Follow:
    """A default taken from another key: the interpolation for the tree, and the value to use without a tree."""

    interpolation: str
    value: Any


def group(cls: type, meaning: str = "", *, needs: Any = None, inner: Any = None, **changed: Any) -> Any:
    """Declare a sub-group of type `cls`, with the defaults in `changed` in place of the class's own (or `Follow`s).

    `needs` has the conditions of each of its settings, see `hybridrl.config.schema.conditions`. An empty tuple: none,
    not even those of the groups around it. `inner` has further conditions by the name of a setting of the group.
    """
    plain = {name: value.value if isinstance(value, Follow) else value for name, value in changed.items()}

    def build() -> Any:
        return cls(**copy.deepcopy(plain))

    metadata = {"meaning": meaning, "changed": changed, "needs": needs, "inner": inner or {}}
    return dataclasses.field(default_factory=build, metadata=metadata)


def is_group(field: "dataclasses.Field[Any]") -> bool:
    """Whether a field is a sub-group rather than a setting."""
    return isinstance(field.type, type) and dataclasses.is_dataclass(field.type)


def is_free(field: "dataclasses.Field[Any]") -> bool:
    """Whether a field is a mapping whose keys the user chooses."""
    return "dict" in str(field.type)


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """The plain default of a setting."""
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    raise TypeError(f"{field.name} has no default")


def default_tree(cls: type, changed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The defaults of a group for Hydra: nested plain containers, with interpolation strings for keys that follow."""
    changed = changed or {}
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if is_group(field):
            tree[field.name] = default_tree(field.type, field.metadata.get("changed"))  # type: ignore[arg-type]
        elif field.name in changed:
            value = changed[field.name]
            tree[field.name] = value.interpolation if isinstance(value, Follow) else copy.deepcopy(value)
        else:
            tree[field.name] = copy.deepcopy(field.metadata.get("follows")) or default_of(field)
    return tree


def declared(cls: type, prefix: str = "") -> dict[str, "dataclasses.Field[Any]"]:
    """Every setting below `cls` by its dotted key; sub-groups are traversed, a free-form mapping is one setting."""
    return {f"{prefix}{name}": field for name, field in _declared(cls).items()}


@functools.cache
def _declared(cls: type) -> dict[str, "dataclasses.Field[Any]"]:
    fields: dict[str, dataclasses.Field[Any]] = {}
    for field in dataclasses.fields(cls):
        if is_group(field):
            fields.update(declared(field.type, f"{field.name}."))  # type: ignore[arg-type]
        else:
            fields[field.name] = field
    return fields
