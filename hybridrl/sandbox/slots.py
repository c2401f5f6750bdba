"""A limit on programs that run at once, over all processes of a user on a machine."""

import contextlib
import fcntl
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hybridrl.sandbox.program import SandboxError

_POLL_S = 0.02
#: what threads of a process wait for before they look for a free place, by process, name and count. A process that is
#: forked begins with its own.
_own: dict[tuple[int, str, int], threading.Semaphore] = {}


class Slots:
    """A number of places. Whoever holds one has a lock on its file, which the kernel releases when a process ends.

    Args:
        count: places.
        name: what they are for. Processes that use the same name share the places.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self.name = name

    @contextlib.contextmanager
    def acquired(self) -> Iterator[None]:
        """Hold a place; waits until one is free.

        Raises:
            SandboxError: the folder of the locks belongs to another user, or cannot be used.
        """
        folder = _folder(self.name)
        with _own.setdefault((os.getpid(), self.name, self.count), threading.Semaphore(self.count)):
            while (descriptor := self.free_place(folder)) is None:
                time.sleep(_POLL_S * (0.5 + random.random()))
            try:
                yield
            finally:
                os.close(descriptor)

    def free_place(self, folder: Path) -> int | None:
        """The descriptor of a place that was free."""
        first = random.randrange(self.count)
        for number in range(self.count):
            path = folder / str((first + number) % self.count)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise SandboxError(f"no place for a program: {error}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            else:
                return descriptor
        return None


def _folder(name: str) -> Path:
    """The folder of the locks, which this user owns."""
    try:
        folder = Path(tempfile.gettempdir()) / f"hybridrl-slots-{os.getuid()}"
    except OSError as error:
        raise SandboxError(f"no place for a program: {error}") from error
    for path in (folder, folder / name):
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            status = path.lstat()
        except OSError as error:
            raise SandboxError(f"no place for a program: {error}") from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise SandboxError(f"{path} is not a folder of this user; remove it, or set TMPDIR to another folder")
    return folder / name
