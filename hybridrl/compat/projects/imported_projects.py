"""Registers projects whose scripts `hybridrl import` reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hybridrl.compat.projects.run_report import RunReport
from hybridrl.registry import IMPORTED_PROJECTS
from hybridrl.utils.entry_metadata import ImportMetadata

#: takes a script with its arguments, and returns a report for each run in it
ProjectReader = Callable[[Sequence[str]], list[RunReport]]
R = TypeVar("R", bound=ProjectReader)


def imported_project(name: str, *, reads: str = "") -> Callable[[R], R]:
    """Register a function that reads the scripts of a project.

    Args:
        name: the word after `hybridrl import`.
        reads: the kinds of scripts, for `hybridrl import --help`.
    """

    def register(reader: R) -> R:
        IMPORTED_PROJECTS.add(name, reader, ImportMetadata(reads=reads))
        return reader

    return register
