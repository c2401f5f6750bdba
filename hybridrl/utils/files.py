"""Atomic file writes: a file is written under a temporary name, made durable, and renamed."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from hybridrl.errors import DiskFullError

#: a write fails because the disk, a quota or a size limit leaves no space for it
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a rename is on disk only when its folder is)."""
    _sync(folder)


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    _sync(path)


def use_umask(path: Path) -> None:
    """Give a file the permissions that the umask gives to new files.

    safetensors creates its files as temporary ones, which only their owner may read.
    """
    probe = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        os.chmod(path, os.fstat(descriptor).st_mode & 0o777)
    finally:
        os.close(descriptor)
        probe.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Return the folder for what can be made again: `hybridrl` in `XDG_CACHE_HOME`, or in `~/.cache`.

    Raises:
        RuntimeError: this user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridrl"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which is renamed to `path` on success.

    A reader, or a process that is killed, sees either the old or the new content, never a part of it. The content is
    durable when the block ends. On an exception the old file is kept and the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with explaining_full_disk(path):
            yield temporary
            sync_file(temporary)
            os.replace(temporary, path)
            sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically and durably (UTF-8)."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and durably."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def check_writable(folder: Path) -> None:
    """Create a folder where it is missing, and write and remove a file in it.

    Raises:
        OSError: it cannot be created or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"x")
    finally:
        probe.unlink(missing_ok=True)


def remedy_for_full_disk(folder: Path) -> str:
    """Return how much space is left where a folder is, and what to change in a run's settings."""
    free = shutil.disk_usage(folder).free / 2**20 if Path(folder).is_dir() else 0.0
    return (
        f"{free:.0f} MiB are free there (a quota or file size limit may be lower): make room, keep fewer checkpoints "
        "(trainer.max_actor_ckpt_to_keep), or move trainer.default_local_dir"
    )


@contextlib.contextmanager
def explaining_full_disk(path: Path) -> Iterator[None]:
    """Name the file and the remedy if there is no space left for what the block writes.

    Raises:
        DiskFullError: there is none. Other errors pass through.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise DiskFullError(
            f"{path} could not be written: {error.strerror}. {remedy_for_full_disk(path.parent)}"
        ) from error
