"""Files that are whole or not there: written to a temporary file, made durable, renamed."""

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
    """A file to write in place of `path`: yields a path next to it, which takes its name on success.

    A reader, or a process that is killed, sees the old content or the new, never a part. The content is durable when
    the block is left; on an exception the old file stays and nothing is left next to it.
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
