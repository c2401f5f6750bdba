"""`verl.utils.py_functional`: small helpers that no program here calls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from hybridrl.protocol.union import same
from hybridrl.verl_compat.utils.metric.utils import Metric

__all__ = [
    "append_to_dict",
    "convert_to_regular_types",
    "list_of_dict_to_dict_of_list",
    "rename_dict",
    "temp_env_var",
    "union_two_dict",
]


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value of `new_data` to the list (or the `Metric`) of its name in `data`, in place.

    The entries of a list are appended one by one. A name that does not start with `prefix` gets it.
    """
    for name, value in new_data.items():
        full = name if name.startswith(prefix) else f"{prefix}{name}"
        entries = data.setdefault(full, value.init_list() if isinstance(value, Metric) else [])
        if isinstance(value, list):
            entries.extend(value)
        else:
            entries.append(value)


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """Add the entries of the second to the first, in place, and return the first.

    Raises:
        AssertionError: a key of both has different values.
    """
    differing = [key for key in dict2 if key in dict1 and not same(dict1[key], dict2[key])]
    if differing:
        raise AssertionError(f"union_two_dict: {', '.join(map(repr, differing))} have different values on both sides")
    dict1.update(dict2)
    return dict1


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the entries under names with a prefix."""
    return {name if name.startswith(prefix) else f"{prefix}{name}": value for name, value in data.items()}


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return one dict with the values of all entries, which must have the same keys."""
    keys = list(list_of_dict[0]) if list_of_dict else []
    return {key: [entry[key] for entry in list_of_dict] for key in keys}


def convert_to_regular_types(obj: Any) -> Any:
    """Return OmegaConf containers, also nested ones, as plain dicts and lists."""
    if isinstance(obj, (DictConfig, ListConfig)):
        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, (list, tuple)):
        return type(obj)(convert_to_regular_types(entry) for entry in obj)
    if isinstance(obj, dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    return obj


@contextlib.contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable for the block, and restore what was there."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
