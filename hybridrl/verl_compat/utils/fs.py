"""`verl.utils.fs`: files are local here, and hub names are left to transformers and datasets."""

from __future__ import annotations

import os
from typing import Any

from hybridrl.errors import DataError

__all__ = ["copy_to_local", "is_non_local", "local_mkdir_safe"]


def is_non_local(path: str) -> bool:
    """Return whether a path names a file on HDFS."""
    return path.startswith("hdfs://")


def copy_to_local(src: str | os.PathLike[str], cache_dir: str | None = None, **kwargs: Any) -> str:
    """Return the path itself.

    Args:
        cache_dir, kwargs: verl's arguments for files on HDFS.

    Raises:
        DataError: the file is on HDFS, or `use_shm` asks for a copy in shared memory.
    """
    if is_non_local(str(src)) or kwargs.get("use_shm"):
        raise DataError(f"{src}: hybridrl copies no files from HDFS or into shared memory; name a local file")
    return str(src)


def local_mkdir_safe(path: str | os.PathLike[str]) -> str:
    """Make a folder with its parents, unless it exists, and return its absolute path."""
    os.makedirs(path, exist_ok=True)
    return os.path.abspath(path)
