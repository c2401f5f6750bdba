"""Reads YAML files that list tools, loops, environments or simulated users, and finds the classes that they name."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybridrl.config.convert import nearest
from hybridrl.errors import RolloutError
from hybridrl.registry import Registry
from hybridrl.utils.user_code import load_class


def entries_of(path: str, key: str, group: str | None, form: str) -> Sequence[Any]:
    """The entries of a file `{group: [...]}`, or of a file that is a list.

    Args:
        path: of the file.
        key: the setting that holds it, for messages.
        group: the name of the list; None: the file is the list.
        form: what an entry looks like, for messages.

    Raises:
        RolloutError: there is no such file, it is no YAML, or it has no such list.
    """
    where, file = f"{key}={path}", Path(path).expanduser()
    if not file.is_file():
        raise RolloutError(f"{where}: there is no such file")
    try:
        whole = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except Exception as error:  # errors of YAML and OmegaConf have no common base
        raise RolloutError(f"{where}: it is not readable YAML: {type(error).__name__}: {error}") from error
    entries = (whole.get(group) if isinstance(whole, Mapping) else None) if group is not None else whole
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        expected = f"a list of entries {form}" if group is None else f"{{{group}: [...]}} with entries {form}"
        raise RolloutError(f"{where}: it must be {expected}")
    return entries


def class_of(name: str, where: str, registry: Registry[Any], base: type = object) -> Any:
    """The class of a registered name, or at MODULE.CLASS or MODULE:CLASS.

    Raises:
        RolloutError: there is none, or it is not derived from `base`.
    """
    if name in registry.names():
        return registry.get(name)
    path, _, short = name.rpartition(":" if ":" in name else ".")
    if not path:
        registered = ", ".join(registry.names())
        raise RolloutError(f"{where}: unknown {registry.kind} {name!r}; choose from {registered}, or MODULE.CLASS")
    return load_class(path, short, where, f"{where}: class_name", base, RolloutError)


def checked_config(config: Any, names: Iterable[str] | None, where: str) -> dict[str, Any]:
    """The entry `config` of an entry, empty where there is none.

    Args:
        names: those that something reads; None: that is not known.

    Raises:
        RolloutError: it is no mapping, or has other entries.
    """
    if not isinstance(config, Mapping | None):
        raise RolloutError(f"{where}: config is {config!r}, and must be a mapping")
    values = {str(name): value for name, value in (config or {}).items()}
    accepted = None if names is None else sorted(names)
    if accepted is None:
        return values
    unread = [name for name in values if name not in (*accepted, "type")]  # entries of verl's tools have a type
    if unread:
        listed = f"; there are: {', '.join(accepted)}" if accepted else "; it takes none"
        faults = [
            f"config.{name}={values[name]}: nothing reads it{nearest(name, accepted) or listed}" for name in unread
        ]
        raise RolloutError(f"{where}: {'; '.join(faults)}; remove it, or correct its name")
    return values


def parameter_names(cls: Any) -> list[str] | None:
    """The names of the arguments that a class takes; None: any, or that is not known."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY]


def named_entries(path: str, key: str, group: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The entries `{name, class_name, config}` of a file, as name -> (class name, config).

    Raises:
        RolloutError: the file or an entry is wrong, or two entries have one name.
    """
    form = "{name: NAME, class_name: NAME or MODULE.CLASS, config: {...}}"
    entries: dict[str, tuple[str, dict[str, Any]]] = {}
    for number, entry in enumerate(entries_of(path, key, group, form)):
        where = f"{key}={path}: {group}[{number}]"
        fields = {"name", "class_name", "config"}
        if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str) or set(entry) - fields:
            raise RolloutError(f"{where} is {entry!r}, and must be {form}")
        name = str(entry.get("name") or entry["class_name"])
        if name in entries:
            raise RolloutError(f"{where}: an earlier entry is called {name}, too; rename one")
        entries[name] = (entry["class_name"], checked_config(entry.get("config"), None, where))
    return entries
