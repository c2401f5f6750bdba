"""Files behind addresses of all file systems of fsspec: `s3://`, `gs://`, `abfs://`, `hdfs://`, `https://`, ...

A file is fetched once to a cache of this machine. The place there depends on the address and on what the server says
of the content (ETag, generation, times, size), so an object that changed is fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from hybridrl.errors import DiskFullError, RemoteFileError
from hybridrl.notify import notify
from hybridrl.utils.files import NO_SPACE, cache_folder, replacing
from hybridrl.utils.urls import is_masked, is_web, masked, masked_text, scheme_of

T = TypeVar("T")

#: what file systems call the digest, version and times of an object
_VERSION_FIELDS: tuple[str, ...] = (
    "ETag",
    "etag",
    "Content-MD5",
    "Digest",
    "md5Hash",
    "checksum",
    "generation",
    "VersionId",
    "version_id",
)
_VERSION_FIELDS += ("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "modified", "created", "ino")
_WAITS_S = (0.5, 2.0)  # before reading is tried again
_NOTICE_FROM = 256 * 2**20
_MAGIC = "*?["
_NO_ACCESS = (401, 403, 407)
_NO_CREDENTIALS = ("NoCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError", "NoAuthTokenError")
_NEVER_BETTER = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError, ImportError, TypeError)
#: files that this process has fetched of servers that say nothing of the content
_unversioned: dict[str, Path] = {}


@dataclass(frozen=True)
class RemoteFile:
    """A file on a file system of fsspec.

    Attributes:
        system: the file system.
        path: the file there.
        url: its address without credentials, for messages.
        key: what names the file in the cache.
    """

    system: Any = field(repr=False)
    path: str = field(repr=False)
    url: str
    key: str = field(repr=False)

    def __str__(self) -> str:
        return self.url


def file_system_class(url: str) -> type:
    """Return the class for the file system of an address. Nothing is asked of another machine.

    Raises:
        RemoteFileError: the scheme means nothing to fsspec, or its package is not installed.
    """
    from fsspec import get_filesystem_class

    scheme = scheme_of(url)
    if is_masked(url):
        raise RemoteFileError(f"{url}: the credentials were left out when this address was written; give it in full")
    try:
        system: type = get_filesystem_class(scheme)
    except ValueError:
        raise RemoteFileError(
            f"{masked(url)}: no file system of fsspec is called {scheme}. Addresses begin with s3://, gs://, abfs://, "
            "hdfs://, https:// or another of its names"
        ) from None
    except ImportError as error:
        raise RemoteFileError(
            f"{masked(url)}: the package for {scheme}:// is not installed: {_first_line(error)}. "
            "pip install 'hybridrl[remote]' brings s3fs, gcsfs and adlfs"
        ) from None
    return system


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path there. It takes credentials where its package looks for them.

    Raises:
        RemoteFileError: see `file_system_class`, or the file system refuses the address.
    """
    from fsspec.core import url_to_fs

    file_system_class(url)
    try:
        system, path = url_to_fs(url)
    except Exception as error:  # of the client of any service
        raise RemoteFileError(f"{masked(url)}: {reason_of(error)}") from None
    return system, str(path)


def matching(url: str) -> list[RemoteFile]:
    """Return the files that an address names: itself, or the matches of a pattern, by name.

    Raises:
        RemoteFileError: the files cannot be listed, or nothing matches the pattern.
    """
    system, path = file_system(url)
    if not any(sign in (path.partition("?")[0] if is_web(url) else path) for sign in _MAGIC):
        return [RemoteFile(system, path, masked(url), url)]
    if is_web(url):
        raise RemoteFileError(f"{masked(url)}: HTTP names one file, and cannot list those of a pattern. Name each file")

    def listing() -> dict[str, dict[str, Any]]:
        system.invalidate_cache()
        return {path: system.info(path)} if system.isfile(path) else system.glob(path, detail=True)

    entries = _tried(listing, url)
    names = sorted(str(name) for name, entry in entries.items() if entry["type"] == "file")
    if not names:
        raise RemoteFileError(
            f"{masked(url)}: no object has such a name, or they may not be listed with these credentials"
        )
    pairs = zip(reversed(url), reversed(path), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))  # of both, at the end
    before, inner = url[: len(url) - same], path[: len(path) - same]
    addresses = [before + name.removeprefix(inner) for name in names]
    return [RemoteFile(system, name, masked(address), address) for name, address in zip(names, addresses, strict=True)]


def local_copy(file: RemoteFile) -> Path:
    """Return the copy of a file in the cache of this machine, fetched unless there is one of the present content.

    Any number of processes may call it at once: one fetches, the others wait for it.

    Raises:
        RemoteFileError: there is no such object, it may not be read, it is a folder, or there is no space for it.
    """
    if file.key in _unversioned and _unversioned[file.key].is_file():
        return _unversioned[file.key]
    try:
        return _tried(lambda: _copy_of_now(file), file.url)
    except DiskFullError:
        raise RemoteFileError(_no_space(file, None)) from None


def _copy_of_now(file: RemoteFile) -> Path:
    """The copy of what the file holds now."""
    entry = _entry(file)
    if entry["type"] == "directory":
        raise RemoteFileError(f"{file}: is a folder; name the files in it, such as {file.url.rstrip('/')}/*.parquet")
    folder, version = _cache() / _short_digest(file.key), _version(entry)
    name = PurePosixPath(file.path.partition("?")[0] if is_web(file.url) else file.path).name
    target = folder / (version or f"fetched-{os.getpid()}") / (name or "file")
    with _locked(folder):
        if version is None or not target.is_file():
            _fetch(file, target, entry)
    if version is None:
        _unversioned[file.key] = target
    return target


def _fetch(file: RemoteFile, target: Path, entry: dict[str, Any]) -> None:
    """Copy a file, and check that it is whole and did not change meanwhile."""
    size = entry.get("size")
    target.parent.mkdir(exist_ok=True)
    if size is not None and shutil.disk_usage(target.parent).free < size:
        raise RemoteFileError(_no_space(file, size))
    if size is not None and size >= _NOTICE_FROM:
        notify(f"fetching {file} ({size / 2**30:.1f} GiB) into {_cache()}")
    with replacing(target) as temporary:
        file.system.get_file(file.path, str(temporary))
        arrived = temporary.stat().st_size
        if size is not None and arrived != size:
            raise OSError(errno.EIO, f"{arrived} of {size} bytes arrived")
        if _version(_entry(file)) != _version(entry):
            raise OSError(errno.EIO, "it changed while it was read")


def _entry(file: RemoteFile) -> dict[str, Any]:
    file.system.invalidate_cache()
    entry: dict[str, Any] = file.system.info(file.path)
    return entry


def _version(entry: dict[str, Any]) -> str | None:
    """A digest of what the file system says of an object's content; None if that is at most its size."""
    facts = [f"{name}={entry[name]}" for name in _VERSION_FIELDS if entry.get(name) is not None]
    return _short_digest(" ".join([*facts, f"size={entry.get('size')}"])) if facts else None


def _tried(work: Callable[[], T], url: str) -> T:
    try:
        return with_retries(work, _WAITS_S)
    except (RemoteFileError, DiskFullError):
        raise
    except Exception as error:  # of the client of any service
        raise RemoteFileError(f"{masked(url)}: {reason_of(error)}") from None


def with_retries(work: Callable[[], T], waits_s: Sequence[float], wait: Callable[[float], object] = time.sleep) -> T:
    """Call `work` until it succeeds, at most once more than there are waits.

    Args:
        waits_s: seconds before each further call.
        wait: waits so many seconds.

    Raises:
        Exception: that of the last call, or at once one that another call would raise too.
    """
    for seconds in waits_s:
        try:
            return work()
        except Exception as error:
            if is_permanent(error):
                raise
            wait(seconds)
    return work()


def is_permanent(error: Exception) -> bool:
    """Return whether the same call would fail again: no such object, no permission, no space, a missing package."""
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in (408, 425, 429)
    if _is_unreachable(error):
        return False
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return True
    is_ours = isinstance(error, RemoteFileError | DiskFullError)
    return is_ours or isinstance(error, _NEVER_BETTER) or _is_named(error, _NO_CREDENTIALS)


def reason_of(error: Exception) -> str:
    """Return a sentence on why a call of a file system failed, without credentials."""
    status, text = _status(error), _first_line(error)
    if _is_named(error, _NO_CREDENTIALS):
        return (
            f"there are no credentials for it ({text}). Give them where its package looks for them (see docs/data.md)"
        )
    if isinstance(error, PermissionError) or status in _NO_ACCESS:
        return f"it may not be accessed with these credentials ({text if status is None else f'status {status}'})"
    if status not in (None, 404):
        return f"the server answers with status {status}"
    if _is_unreachable(error):
        return f"cannot be reached ({_first_line(error.__cause__ or error)})"
    if isinstance(error, FileNotFoundError):
        return "no such object"
    if isinstance(error, OSError) and error.errno == errno.EIO:
        return f"{error.strerror}"
    return f"{type(error).__name__}: {text}"


def _status(error: BaseException | None) -> int | None:
    """The HTTP status that an error of a client stands for."""
    while error is not None:
        for name in ("status", "code", "status_code"):
            status = getattr(error, name, None)
            if isinstance(status, int) and 300 <= status < 600:
                return status
        error = error.__cause__
    return None


def _is_unreachable(error: Exception) -> bool:
    """Whether there was no connection, which fsspec's HTTP calls a missing file."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    return isinstance(cause, OSError | TimeoutError) and not isinstance(cause, FileNotFoundError | PermissionError)


def _is_named(error: BaseException | None, names: Sequence[str]) -> bool:
    while error is not None:
        if any(kind.__name__ in names for kind in type(error).__mro__):
            return True
        error = error.__cause__
    return False


def _first_line(error: BaseException) -> str:
    return masked_text((str(error).strip().splitlines() or [type(error).__name__])[0]).rstrip(".")


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _cache() -> Path:
    try:
        return cache_folder() / "files"
    except RuntimeError:
        raise RemoteFileError("there is no folder to fetch files to: set XDG_CACHE_HOME to one") from None


def _no_space(file: RemoteFile, size: int | None) -> str:
    needed = "" if size is None else f" of {size / 2**20:.0f} MiB"
    return (
        f"{file}: there is no space for a copy{needed} in {_cache()}: make room (what is there can be removed), or set "
        "XDG_CACHE_HOME to a folder on a larger disk"
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time into a folder. Where the disk has no locks, renaming alone keeps files whole."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = open(folder / ".lock", "a+")  # noqa: SIM115 (closed below, which also frees the lock)
    except OSError as error:
        raise RemoteFileError(
            f"{folder}: files cannot be fetched there ({error.strerror}): set XDG_CACHE_HOME to a folder that this "
            "user may write"
        ) from None
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        opened.close()
