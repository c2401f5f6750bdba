"""Checkpoints of the training server on disk: `FOLDER/RUN/KIND/NAME`, which clients call `tinker://RUN/KIND/NAME`."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.tinker.wire import RequestError
from hybridrl.utils.files import sync_folder, write_text

WEIGHTS, SAMPLER = "weights", "sampler_weights"
_SCHEME = "tinker://"
_STATE_FILE = "checkpoint.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}")


@dataclass(frozen=True)
class SavedState:
    """Facts of a checkpoint besides its tensors.

    Attributes:
        base: digest of the base's weights.
        base_model: the name of the base.
        rank, attention, mlp, head: see `AdapterShape`.
        saved_at: seconds since 1970.
        expires_at: likewise, when it is removed; None: never.
        user_metadata: the client's own.
    """

    base: str
    base_model: str
    rank: int
    attention: bool
    mlp: bool
    head: bool
    saved_at: float
    expires_at: float | None = None
    user_metadata: dict[str, Any] | None = field(default=None)


class SavedAdapters:
    """The checkpoints below a folder.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, run: str, kind: str, name: str) -> str:
        """Return how clients call a checkpoint."""
        return f"{_SCHEME}{run}/{kind}/{name}"

    def write(
        self, run: str, kind: str, name: str, state: SavedState, save: Callable[[Path], None], overwrite: bool
    ) -> Path:
        """Write a checkpoint: complete, or not at all.

        Args:
            save: writes the adapter's files into a folder that does not exist.

        Raises:
            RequestError: the name is none, or there is a checkpoint of this name and `overwrite` is False.
        """
        target = self._folder(run, kind, name)
        self.remove_expired()
        if target.exists() and not overwrite:
            raise RequestError(f"{self.path(run, kind, name)} exists; give another name, or overwrite=True")
        target.parent.mkdir(parents=True, exist_ok=True)
        with_temporary = target.with_name(f".{name}.{time.time_ns():x}.tmp")
        try:
            save(with_temporary)
            write_text(with_temporary / _STATE_FILE, json.dumps(asdict(state), indent=2) + "\n")
            if target.exists():
                shutil.rmtree(target)
            with_temporary.rename(target)
            sync_folder(target.parent)
        except BaseException:
            shutil.rmtree(with_temporary, ignore_errors=True)
            raise
        return target

    def find(self, path: str) -> tuple[Path, SavedState]:
        """Return the folder of a checkpoint, and its state.

        Args:
            path: as clients call it.

        Raises:
            RequestError: there is none.
        """
        parts = path.removeprefix(_SCHEME).split("/")
        if not path.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in (WEIGHTS, SAMPLER):
            raise RequestError(
                f"{path!r} is no path of a checkpoint: {_SCHEME}RUN/{WEIGHTS}/NAME, or .../{SAMPLER}/NAME"
            )
        folder = self._folder(*parts)
        state = _state_of(folder)
        if state is None or (state.expires_at is not None and state.expires_at < time.time()):
            raise RequestError(f"there is no checkpoint {path}; it was never saved here, or it has expired")
        return folder, state

    def remove(self, folder: Path) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(folder, ignore_errors=True)

    def remove_expired(self) -> None:
        """Remove the checkpoints whose time is over."""
        for file in self.root.glob(f"*/*/*/{_STATE_FILE}"):
            state = _state_of(file.parent)
            if state is not None and state.expires_at is not None and state.expires_at < time.time():
                self.remove(file.parent)

    def _folder(self, run: str, kind: str, name: str) -> Path:
        for part in (run, name):
            if not _NAME.fullmatch(part):
                raise RequestError(
                    f"{part!r} is no name of a checkpoint: up to 200 letters, digits, and . _ - : after the first"
                )
        return self.root / run / kind / name


def _state_of(folder: Path) -> SavedState | None:
    try:
        return SavedState(**json.loads((folder / _STATE_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
