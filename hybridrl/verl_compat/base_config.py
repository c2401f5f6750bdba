"""`verl.base_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar

__all__ = ["BaseConfig"]


@dataclass
class BaseConfig(Mapping[str, Any]):
    """A dataclass of settings that reads like a mapping and whose fields are set once.

    Attributes:
        _mutable_fields: fields that may be set again.
    """

    _mutable_fields: ClassVar[set[str]] = set()
    _target_: str = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name not in self._mutable_fields:
            raise FrozenInstanceError(f"{type(self).__name__}.{name} is set already, and is not in _mutable_fields")
        super().__setattr__(name, value)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field, or `default` if there is none of that name."""
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(dataclasses.fields(self))
