"""A configuration as plain containers and as YAML, to be kept with a run."""

import dataclasses
from typing import Any

from omegaconf import OmegaConf

from hybridrl.config.schema.node import ConfigNode


def as_dict(config: ConfigNode) -> dict[str, Any]:
    """Nested plain containers with the values of a configuration; a copy."""
    return dataclasses.asdict(config)


def to_yaml(config: ConfigNode) -> str:
    """The resolved configuration as YAML; `--config-path DIR --config-name NAME` reads it back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(as_dict(config)))
