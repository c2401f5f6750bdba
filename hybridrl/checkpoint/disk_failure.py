"""Distinguishes a failing disk from a failing program."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from hybridrl.utils.files import NO_SPACE

_DISK = NO_SPACE | {errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ESTALE, errno.ENXIO}
# Messages of failed writes that do not raise OSError: safetensors ("... (os error 28)"), torch's zip writer.
_PHRASES_FULL = ("os error 28", "os error 27", "os error 122", "no space left", "disk quota", "file too large")
_PHRASES_DISK = (*_PHRASES_FULL, "os error 5)", "os error 30)", "file write failed", "unexpected pos")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, the errors it was raised from, and the error of a Ray worker."""
    visited: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop(0)
        if isinstance(current, BaseException) and id(current) not in visited:
            visited.add(id(current))
            yield current
            context = None if current.__suppress_context__ else current.__context__
            queue += [current.__cause__, context, getattr(current, "cause", None)]


@dataclass(frozen=True)
class DiskFailure:
    """A disk error: one line of text, and whether the cause is a lack of space (space, quota, size limit)."""

    text: str
    full: bool


def disk_failure(error: BaseException) -> DiskFailure | None:
    """Return the disk error if the disk is at fault, and None if the program is."""
    links = list(_chain(error))
    for link in links:
        if isinstance(link, OSError) and link.errno in _DISK:
            return DiskFailure(f"{type(link).__name__}: {link}", link.errno in NO_SPACE)
    # An error that came through Ray has the worker's traceback as its text. The line about the disk is enough.
    for line in (line for link in links for line in reversed(str(link).splitlines())):
        if any(phrase in line.lower() for phrase in _PHRASES_DISK):
            return DiskFailure(line.strip(), any(phrase in line.lower() for phrase in _PHRASES_FULL))
    return None
