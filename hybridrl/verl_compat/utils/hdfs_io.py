"""`verl.utils.hdfs_io`: the operations on local files, as preparation scripts call them."""

from __future__ import annotations

import os
import shutil
from typing import Any

from hybridrl.verl_compat.utils.fs import copy_to_local

__all__ = ["copy", "exists", "makedirs"]


def exists(path: str, **kwargs: Any) -> bool:
    """Return whether a local path exists."""
    return os.path.exists(copy_to_local(path))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Make a local folder with its parents."""
    os.makedirs(copy_to_local(name), mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> str:
    """Copy a local file or folder, and return where it is."""
    source, target = copy_to_local(src), copy_to_local(dst)
    if os.path.isdir(source):
        return str(shutil.copytree(source, target, dirs_exist_ok=bool(kwargs.get("dirs_exist_ok", False))))
    return str(shutil.copy(source, target))
