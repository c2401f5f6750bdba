"""Checks that what a setting names outside the configuration is there: models, files and code (`key(..., place=...)`).

The settings are found by their declarations, so a new one is checked too. Data are checked with the rest of `data`.
Output folders are made by the run, where no file stands in their way.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.checks.branches import ConfigBranch, branches, value_at
from hybridrl.config.checks.idle import acts
from hybridrl.config.checks.paths import check_source, check_written_address
from hybridrl.config.schema.node import declared, default_of, default_tree
from hybridrl.config.schema.root import RootConfig
from hybridrl.utils.urls import is_remote, masked
from hybridrl.utils.user_code import can_import, names_file

#: settings of the kind `model` that take a folder, and no name of the hub
_FOLDERS = ("lora_adapter_path", "dist_checkpointing_path")


def check_places(config: RootConfig, faults: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each setting that names what is not there. Settings that cannot act are left out.

    Args:
        faults: what other checks have reported; a setting that they name is not reported again.
    """
    reported = {fault.partition("=")[0] for fault in faults}
    missing = {fault.partition("=")[2].partition(": ")[0] for fault in faults}
    defaults = default_tree(type(config))
    for branch in branches(config):
        if branch.unused is not None:
            continue
        for path, field in declared(branch.settings).items():
            key, value = f"{branch.prefix}{path}", value_at(branch.value, path)
            if not isinstance(value, str) or not value or key in reported:
                continue
            if value in missing and _follows(defaults, key):
                continue  # the setting that it follows is named
            if _is_default(branch, path, field, value) or not acts(branch, config, key):
                continue
            for fault in _faults(field.metadata.get("place"), key, value, config):
                missing.add(value)
                yield fault


def _is_default(branch: ConfigBranch, path: str, field: "dataclasses.Field[Any]", value: str) -> bool:
    return (branch.raw is not None and not branch.sets(path)) or value == default_of(field)


def _follows(defaults: Mapping[str, Any], key: str) -> bool:
    """Whether the default of a setting is the value of another one."""
    *groups, name = key.split(".")
    for group in groups:
        defaults = defaults.get(group, {})
    return "${" in str(defaults.get(name))


def _faults(place: str | None, key: str, value: str, config: RootConfig) -> Iterator[str]:
    if place == "model" and key.rpartition(".")[2] in _FOLDERS:
        if not Path(value).expanduser().is_dir():
            yield f"{key}={value}: no such folder (from {Path.cwd()})"
    elif place == "model":
        yield from check_source(key, value)
    elif place == "file":
        if not Path(value).expanduser().is_file():
            yield f"{key}={value}: no such file (from {Path.cwd()})"
    elif place == "output" and is_remote(value):
        remedy = "; trainer.remote_dir is for copies elsewhere" * (key == "trainer.default_local_dir")
        yield f"{key}={masked(value)}: must be on a local or mounted disk{remedy}"
    elif place == "address":
        yield from check_written_address(key, value)
    elif place == "output":
        yield from _check_output(key, Path(value).expanduser())
    elif place == "code":
        yield from check_code(key, value, is_imported_here=not _worker_environment(config))


def _check_output(key: str, path: Path) -> Iterator[str]:
    """Check that a folder for results can be made where no file is. Files for results have checks of their own."""
    is_folder = key.endswith(("_dir", ".save_path"))
    inside = [path, *path.parents] if is_folder else list(path.parents)
    if blocking := next((each for each in inside if each.exists() and not each.is_dir()), None):
        yield f"{key}={path}: {blocking} is a file; name a place in a folder"


def check_code(key: str, value: str, *, is_imported_here: bool = True) -> Iterator[str]:
    """Check that a Python file is there, or that a module's package can be imported. Nothing is run.

    Args:
        value: `FILE.py`, `FILE.py:NAME`, `FILE.pkl`, `MODULE`, `MODULE:NAME`, or several, with commas between them.
        is_imported_here: whether modules of this machine count; workers with an environment of their own may have more.
    """
    for part in filter(None, map(str.strip, value.split(","))):
        bare = part.removeprefix("pkg://")
        module = bare if ":" not in bare or Path(bare).expanduser().is_file() else bare.rpartition(":")[0]
        named = f"{key}={value}" + (f": {part}" if part != value else "")
        if bare == part and (names_file(module) or module.endswith(".pkl")):
            if not Path(module).expanduser().is_file():
                yield f"{named}: no such file (from {Path.cwd()})"
        elif is_imported_here and not can_import(module):
            yield f"{named}: neither a Python file (from {Path.cwd()}) nor a module that can be imported"


def _worker_environment(config: RootConfig) -> Mapping[str, Any]:
    """The environment that Ray makes for workers, which may have modules that are missing here."""
    ray_kwargs = getattr(config, "ray_kwargs", None)
    return {} if ray_kwargs is None else ray_kwargs.ray_init.get("runtime_env") or {}
