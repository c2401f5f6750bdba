"""Telling a failing disk from a failing program."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DISK = _FULL | {errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ESTALE, errno.ENXIO}
# What writers that are not Python's own say when a write fails: safetensors ("... (os error 28)"), torch's zip writer.
_PHRASES_FULL = ("os error 28", "os error 27", "os error 122", "no space left", "disk quota", "file too large")
_PHRASES_DISK = (*_PHRASES_FULL, "os error 5)", "os error 30)", "file write failed", "unexpected pos")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and what a Ray worker raised."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop(0)
        if isinstance(current, BaseException) and id(current) not in seen:
            seen.add(id(current))
            yield current
            context = None if current.__suppress_context__ else current.__context__
            queue += [current.__cause__, context, getattr(current, "cause", None)]


@dataclass(frozen=True)
class DiskFailure:
    """What the disk refused: one line of text, and whether it was for want of room (space, quota, size limit)."""

    text: str
    full: bool


def disk_failure(error: BaseException) -> DiskFailure | None:
    """What the disk refused, if it is the disk and not the program that is at fault; else None."""
    links = list(_chain(error))
    for link in links:
        if isinstance(link, OSError) and link.errno in _DISK:
            return DiskFailure(f"{type(link).__name__}: {link}", link.errno in _FULL)
    # An error that came through Ray has the worker's traceback as its text: the line that speaks of the disk will do.
    for line in (line for link in links for line in reversed(str(link).splitlines())):
        if any(phrase in line.lower() for phrase in _PHRASES_DISK):
            return DiskFailure(line.strip(), any(phrase in line.lower() for phrase in _PHRASES_FULL))
    return None
