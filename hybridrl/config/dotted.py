"""Values of a configuration at dotted paths."""

from collections.abc import MutableMapping
from typing import Any


def get_key(config: Any, key: str) -> Any:
    """The value at a dotted path; with an empty one, `config`."""
    for name in filter(None, key.split(".")):
        config = getattr(config, name)
    return config


def set_key(config: Any, key: str, value: Any) -> None:
    """Set the value at a dotted path, whose parts are attributes or keys of mappings, which are added if needed."""
    *where, name = key.split(".")
    for part in where:
        if isinstance(config, MutableMapping) and config.get(part) is None:
            config[part] = {}
        config = config[part] if isinstance(config, MutableMapping) else getattr(config, part)
    if isinstance(config, MutableMapping):
        config[name] = value
    else:
        setattr(config, name, value)
