"""One run per folder: two runs that write into the same folder would destroy each other's checkpoints."""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from hybridrl.errors import CheckpointError

LOCK = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: dict[tuple[int, Path], IO[str]] = {}


def release(root: Path) -> None:
    """Unlock the folder, if this process holds its lock."""
    file = _held.pop((os.getpid(), Path(root).resolve()), None)
    if file is not None:
        file.close()


def hold(root: Path) -> None:
    """Lock the folder for this process until the process ends. Locking it again does nothing.

    The system frees the lock when the process dies, however it dies. File systems without locks are not protected.

    Raises:
        CheckpointError: another running process holds the lock.
    """
    key = (os.getpid(), Path(root).resolve())
    if key in _held:
        return
    file = open(key[1] / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (kept open: closing it releases the lock)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno in _UNSUPPORTED:
            file.close()
            return
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise CheckpointError(
            f"another run is writing into {root} (process {owner}): wait for it, stop it, or set "
            "trainer.default_local_dir or trainer.experiment_name to another folder"
        ) from exc
    file.truncate(0)
    file.write(f"{os.getpid()} on {os.uname().nodename}")
    file.flush()
    _held[key] = file
