"""Copies of a run's checkpoints behind an address of fsspec: `ADDRESS/global_step_N/...`.

The manifest of a checkpoint is written after its other files and removed before them. A checkpoint without one, or with
half of one, was not uploaded completely and is never taken.
"""

from __future__ import annotations

import errno
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.checkpoint.manifest import MANIFEST, Manifest, manifest_of, read_manifest
from hybridrl.checkpoint.store import RunStore
from hybridrl.errors import CheckpointError, DiskFullError, RemoteFileError
from hybridrl.utils.files import replacing
from hybridrl.utils.remote_files import file_system, reason_of, with_retries
from hybridrl.utils.urls import masked

T = TypeVar("T")
_FOLDER = re.compile(r"global_step_(\d+)")
_THREADS = 4  # files that are transferred at once
_WAITS_S = (1.0, 4.0, 16.0, 60.0)  # before a call is tried again


class RemoteStore:
    """The checkpoints of one run behind an address.

    Args:
        url: `s3://BUCKET/FOLDER` or another address that can be written.
        wait: waits so many seconds before a call is repeated; may raise to give up.

    Attributes:
        url: the address without credentials, for messages.

    Raises:
        RemoteFileError: the package for the address is missing, or the address is refused.
    """

    def __init__(self, url: str, wait: Callable[[float], object] = time.sleep) -> None:
        self.url = masked(url).rstrip("/")
        self._system, root = file_system(url)
        self._root = root.rstrip("/")
        self._wait = wait

    def address(self, step: int) -> str:
        """Return the address of a step's checkpoint, for messages."""
        return f"{self.url}/global_step_{step}"

    def check_writable(self) -> None:
        """Write and remove a file.

        Raises:
            RemoteFileError: that is refused.
        """
        probe = f"{self._root}/.probe.{secrets.token_hex(4)}"

        def write() -> None:
            self._with_parent(probe, lambda: self._system.pipe_file(probe, b"x"))
            self._system.rm_file(probe)

        self._call(write, self.url, _WAITS_S[:2])

    def manifests(self) -> tuple[dict[int, Manifest], list[int]]:
        """Return the manifests of complete checkpoints by step, and the steps of others."""
        complete, others = {}, []
        for step in self._steps():
            text = self._read(f"global_step_{step}/{MANIFEST}")
            try:
                complete[step] = manifest_of(json.loads(text or b""), f"{self.address(step)}/{MANIFEST}")
            except (ValueError, CheckpointError):
                others.append(step)
        return complete, others

    def upload(self, folder: Path, check: Callable[[], object] = lambda: None) -> None:
        """Copy a finished checkpoint. What was uploaded of its step before is no checkpoint from the start on.

        Args:
            check: called before each file; may raise to give up.

        Raises:
            RemoteFileError: a file cannot be written, also after several attempts.
        """
        names = [*read_manifest(folder).files]
        self._remove_file(f"{folder.name}/{MANIFEST}")

        def copy(name: str) -> None:
            check()
            self.put(folder / name, f"{folder.name}/{name}")

        _in_threads(copy, names)
        copy(MANIFEST)

    def put(self, file: Path, name: str) -> None:
        """Copy a file to `ADDRESS/NAME`.

        Raises:
            RemoteFileError: it cannot be written, also after several attempts.
        """
        path, size = f"{self._root}/{name}", file.stat().st_size

        def copy() -> None:
            self._with_parent(path, lambda: self._system.put_file(str(file), path))
            self._system.invalidate_cache()
            arrived = self._system.info(path)["size"]
            if arrived != size:
                raise OSError(errno.EIO, f"{arrived} of {size} bytes arrived")

        self._call(copy, f"{self.url}/{name}")

    def download(self, step: int, store: RunStore) -> Path:
        """Copy a checkpoint into the folder of a run, verified by its hashes, and return where it is.

        Raises:
            RemoteFileError: a file cannot be read.
            CheckpointError: the checkpoint is incomplete or corrupt.
            DiskFullError: there is no space for it.
        """
        with store.receiving(step) as folder:

            def copy(name: str) -> None:
                if not self.get(f"global_step_{step}/{name}", folder / name):
                    raise CheckpointError(f"{self.address(step)} is incomplete: {name} is missing")

            copy(MANIFEST)
            names = [*read_manifest(folder).files]
            for name in names:
                if ".." in Path(name).parts or Path(name).is_absolute():
                    raise CheckpointError(f"{self.address(step)}: its manifest names {name}, which is outside of it")
            _in_threads(copy, names)
        return store.folder(step)

    def get(self, name: str, file: Path) -> bool:
        """Copy `ADDRESS/NAME` to a file, and return whether it is there.

        Raises:
            RemoteFileError: it cannot be read, also after several attempts.
            DiskFullError: there is no space for it.
        """
        path = f"{self._root}/{name}"

        def copy() -> bool:
            self._system.invalidate_cache()
            try:
                size = self._system.info(path)["size"]
                with replacing(file) as temporary:
                    self._system.get_file(path, str(temporary))
                    arrived = temporary.stat().st_size
                    if arrived != size:
                        raise OSError(errno.EIO, f"{arrived} of {size} bytes arrived")
            except FileNotFoundError:
                return False
            return True

        file.parent.mkdir(parents=True, exist_ok=True)
        return self._call(copy, f"{self.url}/{name}")

    def remove(self, steps: Iterable[int]) -> None:
        """Remove checkpoints, each one's manifest first.

        Raises:
            RemoteFileError: that is refused.
        """
        for step in steps:
            self._remove_file(f"global_step_{step}/{MANIFEST}")
            path = f"{self._root}/global_step_{step}"
            self._call(lambda path=path: self._remove_folder(path), self.address(step))  # type: ignore[misc]

    def _remove_folder(self, path: str) -> None:
        self._system.invalidate_cache()
        if self._system.exists(path):
            self._system.rm(path, recursive=True)

    def _remove_file(self, name: str) -> None:
        path = f"{self._root}/{name}"

        def remove() -> None:
            self._system.invalidate_cache()
            if self._system.exists(path):
                self._system.rm_file(path)

        self._call(remove, f"{self.url}/{name}")

    def _steps(self) -> list[int]:
        def listing() -> list[Any]:
            self._system.invalidate_cache()
            try:
                return list(self._system.ls(self._root, detail=False))
            except FileNotFoundError:
                return []

        names = (str(path).rstrip("/").rpartition("/")[2] for path in self._call(listing, self.url))
        return sorted(int(match[1]) for match in map(_FOLDER.fullmatch, names) if match)

    def _read(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            self._system.invalidate_cache()
            try:
                return bytes(self._system.cat_file(f"{self._root}/{name}"))
            except FileNotFoundError:
                return None

        return self._call(read, f"{self.url}/{name}")

    def _with_parent(self, path: str, write: Callable[[], object]) -> None:
        """Write a file; make its folder where a file system has folders and does not make them itself."""
        try:
            write()
        except FileNotFoundError:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            write()

    def _call(self, work: Callable[[], T], address: str, waits_s: Sequence[float] | None = None) -> T:
        try:
            return with_retries(work, _WAITS_S if waits_s is None else waits_s, self._wait)
        except (RemoteFileError, DiskFullError):
            raise
        except Exception as error:  # of the client of any service
            raise RemoteFileError(f"{address}: {reason_of(error)}") from None


def _in_threads(function: Callable[[str], object], names: Iterable[str]) -> None:
    """Call a function with each name, several at a time. After an error the rest is left out."""
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(function, name) for name in names]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
