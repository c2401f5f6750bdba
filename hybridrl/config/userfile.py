"""A user's YAML file: partial or with a defaults list. Its names are checked and rewritten before Hydra reads it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.convert import nearest, put
from hybridrl.config.verl.keys import KeyBook, RewriteResult
from hybridrl.config.verl.tables import bases
from hybridrl.errors import ConfigError


@dataclass
class UserFile:
    """The contents of a user's file.

    Attributes:
        path: the file.
        tree: its settings, nested, under current names.
        defaults: its defaults list, with our base first.
        searchpath: further folders that it names for Hydra.
        origins: for each dotted key, a clause that states file and line.
        outcome: the result of rewriting its settings.
    """

    path: Path
    tree: dict[str, Any]
    defaults: list[Any]
    searchpath: list[str]
    origins: dict[str, str]
    outcome: RewriteResult


def read_user_file(
    root: str, folder: str | os.PathLike[str] | None, name: str | None, book: KeyBook, shipped: Path
) -> UserFile | None:
    """Find and read a user's file; return None if the name is that of the shipped base, here or in verl.

    Args:
        root: name of the base tree.
        folder: folder of the file, relative to the working directory; None: the shipped one.
        name: name of the file, with or without `.yaml`; None: that of the base.
        book: the keys of the base.
        shipped: folder of the shipped YAML.

    Raises:
        ConfigError: the folder or file does not exist, the file is not a YAML mapping, or it is a base of verl that is
            not supported yet.
    """
    path = _find(root, folder, name, shipped)
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
        loaded = OmegaConf.create(text) if text.strip() else OmegaConf.create({})
        tree = OmegaConf.to_container(loaded, resolve=False)
        lines = _lines(yaml.compose(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of settings, key: value")
    plain = {str(key): value for key, value in tree.items()}
    origins = {key: f" ({path}, line {line})" for key, line in lines.items()}
    defaults = plain.pop("defaults", None)
    hydra = plain.pop("hydra", None)
    searchpath = list(hydra.get("searchpath") or []) if isinstance(hydra, Mapping) else []
    outcome = book.rewrite(book.flatten(plain, origins))
    for item in outcome.assignments:
        origins[item.key] = item.origin
    settings: dict[str, Any] = {}
    for item in outcome.assignments:
        put(settings, item.key, item.value)
    entries = _with_base(root, defaults, path, shipped)
    return UserFile(path, settings, entries, searchpath, origins, outcome)


def _find(root: str, folder: str | os.PathLike[str] | None, name: str | None, shipped: Path) -> Path | None:
    location = os.fspath(folder) if folder is not None else None
    if location is not None and location.startswith("pkg://"):
        raise ConfigError(f"--config-path {location}: packages are not searched; give a folder")
    place = shipped if location is None else Path(location.removeprefix("file://")).expanduser().absolute()
    stem = (name or root).removesuffix(".yaml")
    if place == shipped and stem == root:
        return None
    if _is_base_of_verl(root, stem, place):
        return None
    if not place.is_dir():
        raise ConfigError(f"--config-path {location}: no such folder (looked for {place})")
    path = place / f"{stem}.yaml"
    if not path.is_file():
        there = sorted(file.stem for file in place.glob("*.yaml"))
        hint = nearest(stem, there) or (f"; there are {', '.join(there[:8])}" if there else "; it holds no YAML file")
        raise ConfigError(f"--config-name {stem}: {place} has no {stem}.yaml{hint}")
    return path


def _is_base_of_verl(root: str, stem: str, folder: Path) -> bool:
    """Whether `--config-path=config --config-name=STEM` or a defaults list means a base file that verl ships.

    Raises:
        ConfigError: it is, and this build has nothing that stands for it.
    """
    base = bases().get(stem)
    if base is None or base.tree != root or (folder / f"{stem}.yaml").is_file():
        return False
    if base.why:
        raise ConfigError(f"--config-name {stem}: not supported yet: {base.why}. {base.instead}")
    return folder.name == "config"


def base_choices(root: str, folder: str | os.PathLike[str] | None, name: str | None) -> list[str]:
    """The choices of config groups, as words, that a base file of verl makes which `--config-name` names."""
    place, stem = Path(folder or ".").absolute(), (name or root).removesuffix(".yaml")
    base = bases().get(stem)
    if base is None or base.tree != root or place.name != "config" or (place / f"{stem}.yaml").is_file():
        return []
    return [f"{group}={option}" for group, option in base.choices.items()]


def _with_base(root: str, defaults: Any, path: Path, shipped: Path) -> list[Any]:
    """Add our base to the defaults list, with the file's own settings last unless the list says otherwise."""
    if defaults is None:
        return [root, "_self_"]
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults must be a list")
    others = [entry for entry in defaults if isinstance(entry, str) and _is_other_base(root, entry, path)]
    entries = [entry for entry in defaults if entry not in others]
    entries += [] if "_self_" in entries else ["_self_"]
    overrides = [
        {f"override {group}": option} for entry in others for group, option in bases()[_stem(entry)].choices.items()
    ]
    if _reaches(root, entries, path.parent, {path}):
        return [*entries, *overrides]
    # a choice of a group that the base also chooses replaces the base's; Hydra expects such entries at the end
    choices = [entry for entry in entries if isinstance(entry, dict) and _is_shipped_choice(entry, shipped)]
    overridden = [{f"override {group}": option for group, option in entry.items()} for entry in choices]
    return [root, *(entry for entry in entries if entry not in choices), *overrides, *overridden]


def _is_other_base(root: str, entry: str, path: Path) -> bool:
    """Whether an entry of a defaults list is a base file of verl that the base here stands for.

    Raises:
        ConfigError: it is one that is not supported yet.
    """
    stem = _stem(entry)
    base = bases().get(stem)
    if stem == root or base is None or (path.parent / f"{stem}.yaml").is_file():
        return False
    if base.why:
        raise ConfigError(f"{path}: defaults: {entry}: not supported yet: {base.why}. Name {root} to train with FSDP2.")
    return base.tree == root


def _stem(entry: str) -> str:
    return entry.lstrip("/").removesuffix(".yaml")


def _is_shipped_choice(entry: dict[Any, Any], shipped: Path) -> bool:
    return all((shipped / str(group).split("@")[0]).is_dir() for group in entry)


def _reaches(root: str, entries: list[Any], folder: Path, visited: set[Path]) -> bool:
    """Whether a defaults list names the base, directly or through other files of the folder."""
    for entry in entries:
        if not isinstance(entry, str) or entry == "_self_":
            continue
        if entry.lstrip("/") == root:
            return True
        path = folder / f"{entry.removesuffix('.yaml')}.yaml"
        if path.is_file() and path not in visited:
            inner = OmegaConf.to_container(OmegaConf.load(path))
            below = inner.get("defaults") if isinstance(inner, dict) else None
            if isinstance(below, list) and _reaches(root, below, folder, visited | {path}):
                return True
    return False


def _lines(node: "yaml.Node | None", prefix: str = "") -> dict[str, int]:
    """Line numbers, from 1, of every dotted key of a YAML document."""
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            path = f"{prefix}{name.value}"
            lines[path] = name.start_mark.line + 1
            lines.update(_lines(value, f"{path}."))
    return lines
