"""null for settings that are lists or mappings."""

import dataclasses
import typing
from typing import Any

import pytest

from hybridrl.config import load_config
from hybridrl.config.convert import build
from hybridrl.config.schema.node import is_group
from hybridrl.config.schema.root import ROOTS


def nulls_of(cls: Any) -> dict[str, Any]:
    """null for every list and mapping of a group."""
    types, tree = typing.get_type_hints(cls), dict[str, Any]()
    for field in dataclasses.fields(cls):
        if is_group(field):
            tree[field.name] = nulls_of(types[field.name])
        elif typing.get_origin(types[field.name]) in (list, dict):
            tree[field.name] = None
    return tree


def check_empty(config: Any, tree: dict[str, Any]) -> int:
    number = 0
    for name, value in tree.items():
        if isinstance(value, dict):
            number += check_empty(getattr(config, name), value)
        else:
            assert getattr(config, name) in ([], {}), name
            number += 1
    return number


@pytest.mark.parametrize("root", sorted(ROOTS))
def test_null_is_an_empty_list_or_mapping(root: str) -> None:
    tree, faults = nulls_of(ROOTS[root]), dict[str, str]()
    config = build(ROOTS[root], tree, faults, {})
    assert not faults
    assert check_empty(config, tree) > 0


@pytest.mark.parametrize("root", ["ppo_trainer", "sft_trainer", "dpo_trainer", "kto_trainer", "rm_trainer"])
def test_no_validation_files(root: str) -> None:
    assert load_config(root, ["data.val_files=null"]).data.val_files == []
