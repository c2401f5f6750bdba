"""Settings of prime-rl: TOML files that follow `@`, and options after them, which win."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.compat.projects.project_settings import WrittenSetting
from hybridrl.errors import ConfigError

_OPTION = re.compile(r"--[A-Za-z]")


def settings_of_words(words: Sequence[str], folder: Path) -> list[WrittenSetting]:
    """Read the words after the program.

    Args:
        folder: the working directory, for the files.

    Raises:
        ConfigError: a file cannot be read.
    """
    tree: dict[str, Any] = {}
    words_by_name: dict[str, str] = {}
    rest = list(words)
    section = ""
    while rest:
        word = rest.pop(0)
        if word == "@" and rest:
            _merge(tree, _under(section, read_toml(folder / rest.pop(0))))
            section = ""
        elif _OPTION.match(word):
            option, equals, text = word[2:].partition("=")
            if not equals and rest[:1] == ["@"]:
                section = _name(option)
                continue
            values = [text] if equals else []
            while not equals and rest and not _OPTION.match(rest[0]) and rest[0] != "@":
                values.append(rest.pop(0))
            name, value = _value(option, values)
            _merge(tree, _under(name, value))
            words_by_name[name] = " ".join([word, *values])
    return [
        WrittenSetting(name, value, words_by_name.get(name) or f"{name} = {_toml(value)}")
        for name, value in leaves(tree)
    ]


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file.

    Raises:
        ConfigError: it does not exist, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML ({error})") from error


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a tree with their names in dots; an entry of a list of tables has its number in the name.

    An empty table is a setting, too: it turns its group on.
    """
    if isinstance(tree, Mapping) and (tree or not prefix):
        for name, value in tree.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else name)
    elif isinstance(tree, list) and tree and all(isinstance(item, Mapping) for item in tree):
        for number, item in enumerate(tree):
            yield from leaves(item, f"{prefix}.{number}")
    else:
        yield prefix, tree


def tree_under(settings: Sequence[WrittenSetting], prefix: str) -> dict[str, Any]:
    """The tables below a name, from the settings."""
    tree: dict[str, Any] = {}
    for item in settings:
        if item.name.startswith(f"{prefix}."):
            _merge(tree, _under(item.name.removeprefix(f"{prefix}."), item.value))
    return tree


def _name(option: str) -> str:
    return option.replace("-", "_")


def _value(option: str, values: Sequence[str]) -> tuple[str, Any]:
    if not values:
        parent, dot, last = option.rpartition(".")
        if last.startswith("no-"):
            return _name(f"{parent}{dot}{last[3:]}"), False
        return _name(option), True
    return _name(option), _parsed(values[0]) if len(values) == 1 else [_parsed(value) for value in values]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def _under(name: str, value: Any) -> Any:
    for part in reversed(name.split(".")) if name else ():
        value = {part: value}
    return value


def _merge(base: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        inner = base.get(name)
        if isinstance(inner, list) and isinstance(value, Mapping) and all(key.isdigit() for key in value):
            for number, each in value.items():  # an option of one entry of a list of tables
                if int(number) < len(inner):
                    _merge(inner[int(number)], each)
                else:
                    inner.append(each)
        elif isinstance(inner, dict) and isinstance(value, Mapping):
            _merge(inner, value)
        else:
            base[name] = dict(value) if isinstance(value, Mapping) else value


def _toml(value: Any) -> str:
    return "{}" if value == {} else json.dumps(value, ensure_ascii=False, default=str)
