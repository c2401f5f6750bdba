"""`verl.utils.hdfs_io`: operations on local files and on those of addresses, as preparation scripts call them."""

from __future__ import annotations

import os
import shutil
from typing import Any

from hybridrl.errors import DataError
from hybridrl.utils.remote_files import file_system
from hybridrl.verl_compat.utils.fs import is_non_local

__all__ = ["copy", "exists", "makedirs"]


def exists(path: str, **kwargs: Any) -> bool:
    """Return whether there is a file or folder."""
    if not is_non_local(path):
        return os.path.exists(path)
    system, name = file_system(path)
    return bool(system.exists(name))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Make a folder with its parents."""
    if not is_non_local(name):
        os.makedirs(name, mode=mode, exist_ok=exist_ok)
        return
    system, path = file_system(name)
    system.makedirs(path, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> str:
    """Copy a file or folder within this machine, to an address or from one, and return where it is.

    Raises:
        DataError: both are addresses.
    """
    if is_non_local(src) and is_non_local(dst):
        raise DataError(f"{src}: copy it to a local folder first, and then to {dst}")
    if is_non_local(src):
        system, path = file_system(src)
        system.get(path, dst, recursive=bool(system.isdir(path)))
        return dst
    if is_non_local(dst):
        system, path = file_system(dst)
        system.put(src, path, recursive=os.path.isdir(src))
        return dst
    if os.path.isdir(src):
        return str(shutil.copytree(src, dst, dirs_exist_ok=bool(kwargs.get("dirs_exist_ok", False))))
    return str(shutil.copy(src, dst))
