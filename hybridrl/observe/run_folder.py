"""Writes what makes a run reproducible into its folder before it starts: settings, versions, machine."""

import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config import as_dict as config_as_dict
from hybridrl.config.places import with_absolute_places, with_masked_addresses
from hybridrl.config.repeat import CONFIG as CONFIG
from hybridrl.config.repeat import STARTED_IN
from hybridrl.config.repeat import VERSIONS as VERSIONS
from hybridrl.config.schema.node import ConfigNode
from hybridrl.errors import UserError
from hybridrl.observe.jsonl import plain
from hybridrl.utils.files import write_text
from hybridrl.utils.urls import masked_text
from hybridrl.version import __version__

CHANGES = "config_changes.yaml"
#: names the best checkpoint (`trainer.best_metric`): `metric`, `value`, `step`, `checkpoint`
BEST = "best_checkpoint.json"


def as_dict(config: Any) -> dict[str, Any]:
    """Convert a configuration (dataclass, OmegaConf node or mapping) to nested plain data."""
    if isinstance(config, ConfigNode):  # includes the settings of user-registered extensions
        return plain(config_as_dict(config))
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return as_dict(dataclasses.asdict(config))
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        return as_dict(OmegaConf.to_container(config, resolve=True))
    if not isinstance(config, Mapping):
        raise TypeError(f"a configuration is a dataclass, an OmegaConf node or a mapping, not {type(config).__name__}")
    return plain(config)


def settings_of(config: Any) -> dict[str, Any]:
    """Convert a configuration to nested plain data, with absolute paths, as `config.yaml` has it."""
    tree = as_dict(config)
    return with_absolute_places(tree, type(config)) if isinstance(config, ConfigNode) else tree


def shown_settings(config: Any) -> dict[str, Any]:
    """Convert a configuration to nested plain data without the credentials of addresses, for services and digests."""
    tree = as_dict(config)
    return with_masked_addresses(tree, type(config)) if isinstance(config, ConfigNode) else tree


def write_run_info(folder: str | Path, config: Any, *, resumed: bool = False) -> None:
    """Write `config.yaml` (resolved settings) and `versions.json` (see `versions`) into the run's folder.

    Settings that name files and folders of this machine have absolute paths in `config.yaml`, so that the run can be
    repeated from another folder. A resumed run keeps the `config.yaml` of its first start; `config_changes.yaml` next
    to it has what changed since (`hybridrl.trainer.settings_change`). `versions.json` always describes the current
    start.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (resumed and (folder / CONFIG).exists()):
        (folder / CHANGES).unlink(missing_ok=True)
        write_text(folder / CONFIG, yaml.safe_dump(settings_of(config), sort_keys=False, allow_unicode=True, width=120))
    write_text(folder / VERSIONS, json.dumps(versions(), indent=1, ensure_ascii=False) + "\n")


def read_changes(folder: str | Path) -> list[dict[str, Any]]:
    """Return the entries of `config_changes.yaml`, oldest first: `after_step`, `time` and `changes` by key.

    Raises:
        UserError: the file cannot be read.
    """
    path = Path(folder) / CHANGES
    if not path.is_file():
        return []
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or []
        for entry in entries:
            int(entry["after_step"])
            for change in entry["changes"].values():
                change["was"], change["now"]
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}): restore it or remove it") from error
    return list(entries)


def versions() -> dict[str, Any]:
    """Return versions of hybridrl, Python, platform, devices and every package, and the git commit if there is one."""
    return {
        "hybridrl": __version__,
        "git_commit": _git_commit(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": _device(),
        "cpus": os.cpu_count(),
        "host": platform.node(),
        "command": [masked_text(word) for word in sys.argv],
        STARTED_IN: os.getcwd(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "packages": dict(sorted(_packages().items(), key=lambda item: item[0].lower())),
    }


def _packages() -> dict[str, str]:
    """The version of every installed package.

    Only the first lines of its metadata are read. `importlib.metadata` parses all of it, descriptions included, as a
    mail: 0.2 s of processor time for 230 packages, at the start of each run.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        header = re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]
        fields = dict(re.findall(r"^(Name|Version):[ \t]*(.*?)[ \t\r]*$", header, re.MULTILINE))
        if len(fields) == 2:
            versions.setdefault(fields["Name"], fields["Version"])
    return versions


def _device() -> dict[str, Any]:
    import torch

    from hybridrl.utils import device

    kind, count = device.get_device_name(), device.device_count()
    return {"kind": kind, "count": count, "names": device.device_names(), "torch_cuda": torch.version.cuda}


def _git_commit() -> str | None:
    """Return the commit of the tree that contains this package, with `+changes` if files differ, else None."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        # A package installed inside another repository is not part of that repository.
        if not git("ls-files", "--", str(Path(__file__).resolve())):
            return None
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
