"""A configuration as plain containers and as YAML, to be stored with a run."""

import dataclasses
from typing import Any

from omegaconf import OmegaConf

from hybridrl.config.schema.node import ConfigNode


def as_dict(config: ConfigNode) -> dict[str, Any]:
    """Copy the values of a configuration into nested plain containers."""
    tree = dataclasses.asdict(config)
    _add_own(config, tree)
    return tree


def _add_own(node: ConfigNode, tree: dict[str, Any]) -> None:
    """Add the settings of user-registered entries next to those of the group."""
    if node.own is not None:
        tree |= {key: value for key, value in dataclasses.asdict(node.own).items() if key not in tree}
    for field in dataclasses.fields(node):
        if isinstance(part := getattr(node, field.name), ConfigNode):
            _add_own(part, tree[field.name])


def to_yaml(config: ConfigNode) -> str:
    """The resolved configuration as YAML; `--config-path DIR --config-name NAME` reads it back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(as_dict(config)))
