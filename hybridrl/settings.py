"""Declaring one setting: its default, its meaning and its limits. Standard library only."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hybridrl.registry import Registry

#: what a setting names. model: a folder, or a hub id; data: files, globs, addresses or data sets of the hub; file: a
#: file that is read; code: Python files or modules; output: a file or folder that is written; address: one
#: that is written
Place = Literal["model", "data", "file", "code", "output", "address"]


@dataclass(frozen=True)
class ValueLimits:
    """Constraints on a value in addition to its type.

    `choices` are the allowed names, `registry` holds further ones, `later` are known names that this build does not
    support, and `synonyms` are other spellings of a choice. `means` has pairs of null or false and the value that it
    stands for. The rest are bounds on a number (`ge` means greater or
    equal), applied to each element of a list. A user's module may add names to a registry, so `validate` refuses an
    unknown name only after importing that module.
    """

    choices: tuple[Any, ...] = ()
    later: tuple[Any, ...] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    means: tuple[tuple[Any, Any], ...] = ()
    registry: Registry[Any] | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def names(self) -> tuple[Any, ...]:
        """Every allowed name that is known so far."""
        return self.choices if self.registry is None else (*self.choices, *self.registry.names())


def key(
    default: Any,
    meaning: str,
    *,
    follows: Any = None,
    choices: tuple[Any, ...] = (),
    later: tuple[Any, ...] = (),
    synonyms: Mapping[str, str] | None = None,
    means: tuple[tuple[Any, Any], ...] = (),
    registry: Registry[Any] | None = None,
    path: str | None = None,
    needs: Any = None,
    read_by: Any = None,
    place: Place | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declare one setting of a group: `lr: float = key(1e-6, "learning rate", gt=0)`.

    Args:
        default: the value; lists and dicts are copied for every instance. `dataclasses.MISSING`: it must be set.
        meaning: one line for the user; it is printed in the reference table.
        follows: source of the default in a composed tree: an interpolation, or a container of interpolations.
        needs: what it depends on, see `hybridrl.config.schema.conditions`: a value that cannot act is refused. An empty
            tuple: nothing, not even what its group needs.
        read_by: of a mapping whose keys the user chooses: what checks them before a run, see
            `hybridrl.config.schema.mappings`.
        path: location of the setting below the group that reads it; None: in the group itself.
        place: what the value names, if it names something outside the configuration.
        choices, later, synonyms, means, registry, ge, gt, le, lt: see `ValueLimits`.
    """
    limits = ValueLimits(choices, later, synonyms or {}, means, registry, ge, gt, le, lt)
    metadata = {"meaning": meaning, "limits": limits, "follows": follows, "path": path, "needs": needs}
    metadata["read_by"] = read_by
    metadata["place"] = place
    if default is MISSING:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
