"""Atomic file writes: a file is written under a temporary name, made durable, and renamed."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a rename is on disk only when its folder is)."""
    _sync(folder)


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which is renamed to `path` on success.

    A reader, or a process that is killed, sees either the old or the new content, never a part of it. The content is
    durable when the block ends. On an exception the old file is kept and the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
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
