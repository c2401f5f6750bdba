"""The checkpoints of one run: `global_step_N` folders that are complete or do not exist.

A save fills `global_step_N.tmp`, hashes it, makes it durable and then renames it. A kill at any moment leaves either
the `.tmp` folder (removed at the next start) or the finished folder. Saving a step again renames the earlier folder to
`global_step_N.old` between two renames; if the run is killed there, the next start renames it back. Pruned folders are
renamed to `global_step_N.del` before their files are removed, so an incomplete checkpoint never has a valid name.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.checkpoint import lock
from hybridrl.checkpoint.disk_failure import disk_failure
from hybridrl.checkpoint.manifest import (
    Manifest,
    check_identity,
    ranked,
    read_manifest,
    verify,
    write_manifest,
)
from hybridrl.config.schema.choices import RESUME_MODES
from hybridrl.errors import CheckpointError
from hybridrl.notify import notify
from hybridrl.utils.files import check_writable, remedy_for_full_disk, sync_folder, write_text

LATEST = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"global_step_(\d+)")
_UNFINISHED_LATEST = re.compile(re.escape(f".{LATEST}.") + r".*\.tmp")
_LEFTOVER = re.compile(r"global_step_(\d+)\.(tmp|old|del)")


class RunStore:
    """The checkpoints under `root`.

    Args:
        root: the run's folder (`trainer.default_local_dir`); created at the first write.
        keep: number of newest checkpoints to keep; None keeps all.
        identity: identifies the model (plain data: architecture, sizes, vocabulary hash). It is recorded in each
            checkpoint and compared when a checkpoint is found.
        world: number of ranks, nodes and such, recorded in each checkpoint.
        config_digest: hash of the resolved configuration, recorded in each checkpoint.
        notice: called with each message for the user; by default, messages are printed to stderr.

    Attributes:
        earlier: number of saves of this run that are elsewhere, after which those of a new folder are numbered.

    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        keep: int | None = None,
        *,
        identity: Mapping[str, Any] | None = None,
        world: Mapping[str, Any] | None = None,
        config_digest: str | None = None,
        notice: Callable[[str], None] = notify,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"number of checkpoints to keep is {keep}; set it to at least 1, or to null for all")
        self.root = Path(root)
        self.keep = keep
        # After a JSON round trip (a tuple becomes a list), so that the comparison uses the saved form.
        self.identity: dict[str, Any] = json.loads(json.dumps(dict(identity or {})))
        self.world: dict[str, Any] = json.loads(json.dumps(dict(world or {})))
        self.config_digest = config_digest
        self.earlier = 0
        self._notice = notice
        self._protected: dict[str, Path] = {}
        self._in_use: Path | None = None
        self._unfinished: Unfinished | None = None

    def folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether or not it exists."""
        return self.root / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint folder, ascending. Completeness is not checked."""
        if not self.root.is_dir():
            return []
        matches = (_FOLDER.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def protect(self, reason: str, folder: Path | None) -> None:
        """Keep a checkpoint besides the newest `keep`, in place of the earlier one of this reason; None: none.

        The earlier one is removed by the next save, or at once by `prune`.
        """
        if folder is None:
            self._protected.pop(reason, None)
        else:
            self._protected[reason] = folder

    def prune(self, *others: Path) -> None:
        """Remove what is neither among the newest `keep`, nor protected, nor resumed from, nor among others."""
        if self.keep is None:
            return
        for step in self._ranked()[self.keep :]:
            folder = self.folder(step)
            if folder not in (*others, self._in_use, *self._protected.values()):
                self._remove(folder)

    # ------------------------------------------------------------------ writing

    @contextlib.contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield a folder to write the state of `step` into. It becomes a valid checkpoint when the block succeeds.

        Other processes may write into the folder as long as they are done when the block ends. A second save of the
        same step replaces the first atomically.

        Raises:
            CheckpointError: the disk failed or is full. Any other exception of the block passes through, with a note.
                In every case the unfinished folder is removed and existing checkpoints are untouched.
        """
        unfinished = self.begin(step)
        try:
            yield unfinished.folder
            unfinished.commit()
        except BaseException as exc:
            unfinished.abort(exc)
            raise

    def begin(self, step: int) -> "Unfinished":
        """Make the folder that the state of `step` is written into. The caller commits or aborts what it gets.

        Raises:
            CheckpointError: the disk failed or is full.
        """
        if self._unfinished is not None:
            raise RuntimeError("a checkpoint is being written already; saving does not nest: commit or abort it first")
        try:
            self.claim()
            self._make_room()
            self._unfinished = Unfinished(self, step)
            self._unfinished.folder.mkdir()
        except BaseException as exc:
            self._unfinished = None
            self._explain(exc, step)
            raise
        return self._unfinished

    @contextlib.contextmanager
    def receiving(self, step: int) -> Iterator[Path]:
        """Yield a folder to copy a finished checkpoint of `step` into, with its manifest. It is verified at the end.

        Raises:
            CheckpointError: the copy is incomplete or corrupt. The folder is removed then, as after any other error.
        """
        self.claim()
        final = self.folder(step)
        temporary = final.with_name(final.name + ".tmp")
        temporary.mkdir()
        try:
            yield temporary
            verify(temporary)
            self._publish(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        write_text(self.root / LATEST, str(step))

    def claim(self) -> None:
        """Create the folder, lock it for this process, and clean up after a killed run. `find` and `writing` do so too.

        Call it before anything else is written into the run's folder.

        Raises:
            CheckpointError: another running process writes there, or a file has the folder's name.
        """
        if self.root.exists() and not self.root.is_dir():
            raise CheckpointError(f"{self.root} is a file; trainer.default_local_dir has to be a folder")
        try:
            check_writable(self.root)
            lock.hold(self.root)
        except OSError as exc:
            culprit = disk_failure(exc)
            remedy = (
                remedy_for_full_disk(self.root)
                if culprit is not None and culprit.full
                else "let this user write there, or set trainer.default_local_dir to another folder"
            )
            raise CheckpointError(
                f"trainer.default_local_dir={self.root}: the folder cannot be written ({exc.strerror or exc}): {remedy}"
            ) from exc
        self.clean()

    def clean(self) -> None:
        """Clean up after a killed run: remove `.tmp` and `.del`, and restore `.old` if nothing replaced it."""
        if not self.root.is_dir():
            return
        for path in sorted(self.root.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            if self._unfinished is not None and path == self._unfinished.folder:
                continue
            if not match:
                if _UNFINISHED_LATEST.fullmatch(path.name):
                    path.unlink()
                continue
            final = self.folder(int(match[1]))
            if match[2] == "old" and not final.exists():
                path.rename(final)
                sync_folder(self.root)
                self._notice(f"{final}: put back after a save that was interrupted")
            else:
                shutil.rmtree(path)

    def _publish(self, temporary: Path, final: Path) -> None:
        if final.exists():
            parked = final.with_name(final.name + ".old")
            final.rename(parked)
            try:
                temporary.rename(final)
            except BaseException:
                parked.rename(final)
                raise
            sync_folder(self.root)
            shutil.rmtree(parked)
        else:
            temporary.rename(final)
            sync_folder(self.root)

    def _explain(self, exc: BaseException, step: int) -> None:
        """Raise a CheckpointError if the disk is at fault. Otherwise add a note about the save to the exception."""
        newest = self.newest()
        before = f"{self.folder(newest)} is untouched" if newest is not None else "there is no earlier checkpoint"
        culprit = disk_failure(exc)
        if culprit is None or isinstance(exc, CheckpointError) or not isinstance(exc, Exception):
            exc.add_note(f"while saving the checkpoint of step {step} into {self.root}; {before}")
            return
        remedy = f" {remedy_for_full_disk(self.root)}." if culprit.full else ""
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written into {self.root}: "
            f"{culprit.text}. Nothing half-written is left; {before}.{remedy}"
        ) from exc

    def _next_sequence(self) -> int:
        return max([self.earlier, *(manifest.sequence for manifest in self.manifests().values())]) + 1

    def manifests(self) -> dict[int, Manifest]:
        """Return the manifests that can be read, by step."""
        return self._manifests()[0]

    def _manifests(self) -> tuple[dict[int, Manifest], list[str]]:
        """Return the manifests that can be read, by step, and why the others cannot."""
        manifests, faults = {}, []
        for step in self.steps():
            try:
                manifests[step] = read_manifest(self.folder(step))
            except CheckpointError as exc:
                faults.append(str(exc))
        return manifests, faults

    def _ranked(self) -> list[int]:
        """Return the steps with a readable manifest, starting with the one to resume from."""
        return ranked(self.manifests())

    def newest(self) -> int | None:
        """Return the step of the checkpoint saved last, or None. Its hashes are not checked."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def _make_room(self) -> None:
        """Remove what the next save would prune anyway, if the disk has no space for one more checkpoint.

        The checkpoint saved last always stays, because the new one does not exist yet.
        """
        manifests, steps = self.manifests(), self._ranked()
        if self.keep is None or len(steps) < max(2, self.keep):
            return
        needed = manifests[steps[0]].size
        for step in reversed(steps[max(1, self.keep - 1) :]):
            free = shutil.disk_usage(self.root).free
            folder = self.folder(step)
            if free > needed:
                return
            if folder not in (self._in_use, *self._protected.values()):
                self._notice(
                    f"{self.root}: {free / 2**20:.0f} MiB are free and a checkpoint takes {needed / 2**20:.0f}, so "
                    f"{folder.name} is removed before the next one is saved, not after it"
                )
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        doomed = folder.with_name(folder.name + ".del")
        folder.rename(doomed)
        sync_folder(self.root)
        shutil.rmtree(doomed)

    def _prune(self, written: Path) -> None:
        self.prune(written)
        if self.keep is not None:  # the checkpoint that the run resumed from need not stay: the run now has its own
            self._in_use = None

    # ------------------------------------------------------------------ finding

    def find(self, resume_mode: str = "auto", resume_from_path: str | os.PathLike[str] | None = None) -> Path | None:
        """Return the checkpoint to resume from, verified byte by byte, or None to start over.

        Also cleans up after a killed run.

        Args:
            resume_mode: `auto` takes the newest complete checkpoint; a corrupt one is named in a notice and skipped.
                `resume_path` takes exactly `resume_from_path`. `disable` takes none.
            resume_from_path: a `global_step_N` folder of this run or another one.

        Raises:
            CheckpointError: the mode is unknown, the path is not a checkpoint, the requested checkpoint or every
                checkpoint is corrupt or incomplete, or a checkpoint belongs to another model.
        """
        if resume_mode not in RESUME_MODES:
            raise CheckpointError(f"trainer.resume_mode is {resume_mode!r}; it is one of {', '.join(RESUME_MODES)}")
        self.claim()
        if resume_mode == "disable":
            return None
        checkpoint = self._find_path(resume_from_path) if resume_mode == "resume_path" else self._find_newest()
        self._in_use = checkpoint
        return checkpoint

    def _find_path(self, path: str | os.PathLike[str] | None) -> Path:
        if path is None or not str(path):
            raise CheckpointError("trainer.resume_mode=resume_path needs trainer.resume_from_path")
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"trainer.resume_from_path={folder}: there is no such folder")
        if not _FOLDER.fullmatch(folder.resolve().name):
            inside = sorted(child.name for child in folder.iterdir() if _FOLDER.fullmatch(child.name))
            hint = f"; it holds {', '.join(inside)}: name one of these" if inside else ""
            raise CheckpointError(f"trainer.resume_from_path={folder} is no global_step_N folder{hint}")
        folder = folder.resolve()
        verify(folder, self.identity)
        return self.root / folder.name if folder.parent == self.root.resolve() else folder

    def _find_newest(self) -> Path | None:
        steps, ranked = self.steps(), self._ranked()
        faults = self._manifests()[1]
        for step in ranked:
            if self.identity:
                check_identity(self.folder(step), read_manifest(self.folder(step)), self.identity)
            try:
                verify(self.folder(step))
            except CheckpointError as exc:
                faults.append(str(exc))
                continue
            if faults:
                self._notice("\n".join([*faults, f"RESUMING FROM THE OLDER {self.folder(step)} INSTEAD"]))
            later = [other for other in steps if other > step and not faults]
            if later:
                self._notice(f"resuming from {self.folder(step)}, saved last; steps {later} are of an earlier attempt")
            return self.folder(step)
        if steps:
            raise CheckpointError(
                "no checkpoint can be resumed from:\n" + "\n".join(faults) + f"\nRestore one, or remove them from "
                f"{self.root} (or set trainer.resume_mode=disable) to start over."
            )
        return None


class Unfinished:
    """A checkpoint that is being written. Until `commit` renames it, it is no checkpoint.

    Attributes:
        step: the training step after which the state was taken.
        folder: where to write the state.
    """

    def __init__(self, store: RunStore, step: int) -> None:
        self._store = store
        self.step = step
        self._final = store.folder(step)
        self.folder = self._final.with_name(self._final.name + ".tmp")

    def commit(self) -> None:
        """Hash everything, make it durable, rename the folder, and prune. Any thread may call it.

        Raises:
            CheckpointError: an older checkpoint could not be removed. Any other error is for `abort`.
        """
        store = self._store
        write_manifest(
            self.folder,
            self.step,
            store._next_sequence(),
            identity=store.identity,
            world=store.world,
            config_digest=store.config_digest,
        )
        store._publish(self.folder, self._final)
        write_text(store.root / LATEST, str(self.step))
        store._unfinished = None
        try:
            store._prune(self._final)
        except OSError as exc:
            raise CheckpointError(
                f"{self._final} is saved, but an older checkpoint could not be removed: {exc}"
            ) from exc

    def abort(self, error: BaseException) -> None:
        """Remove what was written, unless it was committed.

        Raises:
            CheckpointError: `error` is a failure of the disk. Any other error gets a note.
        """
        if self._store._unfinished is not self:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self._store._unfinished = None
        self._store._explain(error, self.step)
