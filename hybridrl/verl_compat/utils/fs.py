"""`verl.utils.fs`: files of addresses are fetched once, and hub names are left to transformers and datasets."""

from __future__ import annotations

import os
from typing import Any

from hybridrl.errors import DataError
from hybridrl.utils.remote_files import local_copy, matching
from hybridrl.utils.urls import is_remote

__all__ = ["copy_to_local", "is_non_local", "local_mkdir_safe"]


def is_non_local(path: str) -> bool:
    """Return whether a path is an address of a file elsewhere, on HDFS or behind another scheme of fsspec."""
    return is_remote(path)


def copy_to_local(src: str | os.PathLike[str], cache_dir: str | None = None, **kwargs: Any) -> str:
    """Return a file's path on this machine: that of its copy in the library's cache, or the path itself.

    Args:
        cache_dir, kwargs: verl's arguments.

    Raises:
        RemoteFileError: a file behind an address cannot be fetched, or it is a folder.
        DataError: `use_shm` asks for a copy in shared memory.
    """
    if kwargs.get("use_shm"):
        raise DataError(f"{src}: hybridrl copies no files into shared memory; leave use_shm off")
    if not is_non_local(str(src)):
        return str(src)
    (file,) = matching(str(src))
    return str(local_copy(file))


def local_mkdir_safe(path: str | os.PathLike[str]) -> str:
    """Make a folder with its parents, unless it exists, and return its absolute path."""
    os.makedirs(path, exist_ok=True)
    return os.path.abspath(path)
