"""Which settings of a run differ from the defaults."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.places import same_place
from hybridrl.config.resolvers import register_resolvers
from hybridrl.config.schema.node import declared, default_tree
from hybridrl.config.schema.root import ROOTS


@dataclass(frozen=True)
class Difference:
    """A setting with its value and its default; `is_own` for a key that the schema does not have."""

    key: str
    value: Any
    default: Any
    is_own: bool = False


def differences(config: Mapping[str, Any]) -> list[Difference]:
    """Return the settings of a resolved configuration that differ from the defaults, in its order.

    A setting whose default is another setting's value differs only if it has another value than that.

    Args:
        config: nested plain values, as in a run's `config.yaml`; its groups tell which program it is of.
    """
    root = max(ROOTS.values(), key=lambda cls: len(set(default_tree(cls)) & set(config)))
    if len(set(default_tree(root)) & set(config)) < 2:
        return []  # not a configuration of a program
    register_resolvers()
    fields = declared(root)
    settings = set(fields)
    defaults = dict(leaves(default_tree(root), settings))
    values = OmegaConf.create(dict(config))
    changed = []
    for key, value in leaves(config, settings):
        if key not in defaults:
            changed.append(Difference(key, value, None, is_own=True))
            continue
        default = defaults[key]
        if "${" in str(default):
            default = _resolved(values, key, default, value)
            if isinstance(default, str):  # what it follows may be a synonym; the value is in canonical spelling
                default = fields[key].metadata["limits"].synonyms.get(default, default)
        if not same_place(default, value):
            changed.append(Difference(key, value, default))
    return changed


def leaves(tree: Mapping[str, Any], settings: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting by its dotted key with its value; a free-form mapping is one setting."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in settings:
            yield from leaves(value, settings, f"{key}.")
        else:
            yield key, value


def _resolved(values: Any, key: str, default: Any, value: Any) -> Any:
    """Return the value that an interpolation at `key` has among the other values."""
    OmegaConf.update(values, key, default, merge=False)
    try:
        selected = OmegaConf.select(values, key)
        return OmegaConf.to_container(selected, resolve=True) if OmegaConf.is_config(selected) else selected
    except OmegaConfBaseException:
        return default
    finally:
        OmegaConf.update(values, key, value, merge=False)
