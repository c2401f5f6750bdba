"""A checkpoint that is written while training goes on."""

from collections.abc import Sequence
from typing import Protocol

from hybridrl.checkpoint.store import Unfinished
from hybridrl.utils.background import BackgroundCall


class Writers(Protocol):
    """A worker group whose ranks write copies of their state in the background."""

    def is_saving(self, wait: bool = False) -> list[bool]:
        """Whether each rank is still writing; with `wait`, once it is written. Raises the error of a rank."""
        ...


class BackgroundSave:
    """Completes a checkpoint that workers are writing.

    The ranks are asked between steps, when they are idle, so no step waits for a disk. Once all have written their
    parts, a thread of the controller hashes the files and renames the folder.

    Args:
        unfinished: the checkpoint.
        writers: the groups that write into it.
    """

    def __init__(self, unfinished: Unfinished, writers: Sequence[Writers]) -> None:
        self._unfinished = unfinished
        self._writers = list(writers)
        self._commit: BackgroundCall | None = None

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._unfinished.step

    def advance(self, wait: bool = False) -> bool:
        """Do what can be done by now, and return whether the checkpoint is complete.

        Args:
            wait: return once it is.

        Raises:
            CheckpointError: the disk failed. Whatever the error is, nothing half-written is left.
        """
        try:
            self._writers = [group for group in self._writers if any(group.is_saving(wait))]
            if self._writers:
                return False
            if self._commit is None:
                self._commit = BackgroundCall(self._unfinished.commit)
            if not self._commit.done(wait):
                return False
            self._commit.result()
        except Exception as error:
            if self._commit is not None:
                self._commit.done(wait=True)
            self._unfinished.abort(error)
            raise
        return True
