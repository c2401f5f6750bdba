"""The error of this room, and telling a failing disk from a failing program."""

import errno
from collections.abc import Iterator

from hybridrl.utils.errors import UserError


class CheckpointError(UserError):
    """A checkpoint could not be written, is torn, or belongs to another model; the message says which and the mend."""


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


def disk_failure(error: BaseException) -> BaseException | None:
    """The error that says that the disk, not the program, is at fault; None where there is none."""
    links = list(_chain(error))
    for link in links:
        if isinstance(link, OSError) and link.errno in _DISK:
            return link
    spoken = [link for link in links if any(phrase in str(link).lower() for phrase in _PHRASES_DISK)]
    # A wrapper (Ray's) repeats the text of what it wraps among a traceback: the shortest is the original.
    return min(spoken, key=lambda link: len(str(link)), default=None)


def is_full(error: BaseException) -> bool:
    """Whether the failure is one of room: no space, quota, or size limit."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(phrase in str(error).lower() for phrase in _PHRASES_FULL)
