"""Places that settings name outside the configuration: models, data, code, other files, and output folders.

A setting says so itself (`key(..., place=...)`). `config.yaml` in a run's folder has absolute places, so that it means
the same from another folder.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.data_names import dataset_name, local_files, suite_entry, suite_name
from hybridrl.config.roles import ROLES
from hybridrl.config.schema.distillation import TeacherModelConfig
from hybridrl.config.schema.node import declared, default_of
from hybridrl.config.schema.reward import RewardPartConfig
from hybridrl.settings import Place
from hybridrl.utils.urls import masked

_COMMAND = "actor_rollout_ref.rollout.agent.command"
_CODE_FILES = (".py", ".pkl")
#: mappings of groups by a name that the user chooses
_NAMED_BY_USERS = ("reward.functions.", "roles.", "distillation.teacher_models.")
#: kinds of places that may be addresses
_WITH_ADDRESSES = ("data", "output", "address")
_SCHEMAS = {"reward.functions.": RewardPartConfig, "distillation.teacher_models.": TeacherModelConfig}


def place_of(root: type, key: str) -> Place | None:
    """Return what the setting called `key` names; None: nothing."""
    field = _fields(root).get(key)
    if field is None and key.startswith(_NAMED_BY_USERS):
        field = _named_by_user(key)
    return None if field is None else field.metadata.get("place")


def _named_by_user(key: str) -> "dataclasses.Field[Any] | None":
    """The setting in a group that has a name of the user's, such as `reward.functions.NAME.path`."""
    prefix = next(prefix for prefix in _NAMED_BY_USERS if key.startswith(prefix))
    name, _, inner = key.removeprefix(prefix).partition(".")
    schema: type | None = _SCHEMAS.get(prefix)
    if schema is None:
        schema = ROLES[name].settings if name in ROLES else None
    return None if schema is None else _fields(schema).get(inner)


@functools.cache
def _fields(root: type) -> dict[str, "dataclasses.Field[Any]"]:
    return declared(root)


def with_absolute_places(tree: Mapping[str, Any], root: type) -> dict[str, Any]:
    """Return nested settings in which all that lies on this machine is named by absolute paths.

    Addresses have no credentials.

    Args:
        tree: plain nested values.
        root: the type of the configuration.
    """
    fields = _fields(root)
    renamed: dict[str, str] = {}

    def below(inner: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in inner.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and key not in fields:
                result[name] = below(value, f"{key}.")
            else:
                result[name] = absolute_value(root, key, value)
                if isinstance(value, str) and value != result[name] and place_of(root, key) == "model":
                    renamed[value] = result[name]
        return result

    result = below(tree, "")
    for key, field in fields.items():  # what is called as a model is, if it is given no other name
        *parents, last = key.split(".")
        group = functools.reduce(lambda inner, name: inner.get(name, {}), parents, result)
        if field.metadata.get("follows") and isinstance(group.get(last), str) and group[last] in renamed:
            group[last] = renamed[group[last]]
    return result


def absolute_value(root: type, key: str, value: Any) -> Any:
    """Return the value of a setting with absolute paths; names of hubs, modules and registries stay as they are.

    Addresses of data stay, too, without their credentials.
    """
    if isinstance(value, Mapping):
        return {name: absolute_value(root, f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [absolute_value(root, key, item) for item in value]
    if not isinstance(value, str) or not value or len(value) > 4096 or "\0" in value:
        return value
    if "://" in value:
        return masked(value) if place_of(root, key) in _WITH_ADDRESSES else value
    field = _fields(root).get(key)
    place = place_of(root, key)
    if place is not None:
        is_default = field is not None and not field.metadata.get("follows") and value == default_of(field)
        return value if is_default else _ABSOLUTE[place](value)
    if key == _COMMAND:
        return re.sub(r"\S+", lambda word: _absolute(word[0]) if _is_file(word[0]) else word[0], value)
    is_argument = (field is None and not key.startswith(_NAMED_BY_USERS)) or "reward_kwargs." in key
    return _absolute(value) if is_argument and ("/" in value or Path(value).suffix) and _exists(value) else value


def with_masked_addresses(tree: Mapping[str, Any], root: type, prefix: str = "") -> dict[str, Any]:
    """Return nested settings in which addresses of data have no credentials, see `hybridrl.utils.urls.masked`."""

    def of(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return with_masked_addresses(value, root, f"{key}.")
        if isinstance(value, list | tuple):
            return [of(item, key) for item in value]
        return masked(value) if isinstance(value, str) and place_of(root, key) in _WITH_ADDRESSES else value

    return {name: of(value, f"{prefix}{name}") for name, value in tree.items()}


def same_place(value: Any, other: Any) -> bool:
    """Whether two values are equal, or either is an absolute path that the other may stand for in some folder."""
    if value == other or not (isinstance(value, str) and isinstance(other, str)):
        return bool(value == other)
    short, long = sorted((value, other), key=os.path.isabs)
    parts = Path(short).parts
    return os.path.isabs(long) and not os.path.isabs(short) and bool(parts) and Path(long).parts[-len(parts) :] == parts


def _absolute(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


def _absolute_model(text: str) -> str:
    is_local = os.path.isdir(os.path.expanduser(text)) or text.startswith(("./", "../", "~"))
    return _absolute(text) if is_local else text


def _absolute_data(text: str) -> str:
    if (suite := suite_name(text)) is not None:
        return suite_entry(suite.name, None if suite.place is None else _absolute_data(suite.place))
    if local_files(text):
        return _absolute(text)
    dataset = dataset_name(text)
    folder = "" if dataset is None else dataset.name
    return _absolute(folder) + text[len(folder) :] if os.path.isdir(folder) and text.startswith(folder) else text


def _absolute_code(text: str) -> str:
    return (
        ",".join(_absolute_module(part.strip()) for part in text.split(",")) if "," in text else _absolute_module(text)
    )


def _absolute_module(text: str) -> str:
    path, sign, name = text.rpartition(":") if ":" in text else (text, "", "")
    is_file = path.endswith(_CODE_FILES) or "/" in path or _is_file(path)
    return f"{_absolute(path)}{sign}{name}" if is_file else text


_ABSOLUTE = {
    "model": _absolute_model,
    "data": _absolute_data,
    "file": _absolute,
    "code": _absolute_code,
    "output": _absolute,
    "address": lambda text: text,
}


def _is_file(text: str) -> bool:
    return os.path.isfile(os.path.expanduser(text))


def _exists(text: str) -> bool:
    return os.path.exists(os.path.expanduser(text))
