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
from hybridrl.checkpoint.manifest import Manifest, check_identity, read_manifest, verify, write_manifest
from hybridrl.errors import CheckpointError
from hybridrl.notify import notify
from hybridrl.utils.files import sync_folder, write_text

LATEST = "latest_checkpointed_iteration.txt"
RESUME_MODES = ("auto", "disable", "resume_path")
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
        protected: a checkpoint that is kept besides the newest `keep`, or None.
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
        self._notice = notice
        self.protected: Path | None = None
        self._in_use: Path | None = None
        self._is_writing = False

    def folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether or not it exists."""
        return self.root / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint folder, ascending. Completeness is not checked."""
        if not self.root.is_dir():
            return []
        matches = (_FOLDER.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

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
        if self._is_writing:
            raise RuntimeError("a checkpoint is being written already; writing() does not nest")
        final = self.folder(step)
        temporary = final.with_name(final.name + ".tmp")
        self._is_writing = True
        try:
            self.claim()
            temporary.mkdir()
            yield temporary
            write_manifest(
                temporary,
                step,
                self._next_sequence(),
                identity=self.identity,
                world=self.world,
                config_digest=self.config_digest,
            )
            self._publish(temporary, final)
            write_text(self.root / LATEST, str(step))
        except BaseException as exc:
            shutil.rmtree(temporary, ignore_errors=True)
            self._explain(exc, step)
            raise
        finally:
            self._is_writing = False
        try:
            self._prune(final)
        except OSError as exc:
            raise CheckpointError(f"{final} is saved, but an older checkpoint could not be removed: {exc}") from exc

    def claim(self) -> None:
        """Create the folder, lock it for this process, and clean up after a killed run. `find` and `writing` do so too.

        Call it before anything else is written into the run's folder.

        Raises:
            CheckpointError: another running process writes there, or a file has the folder's name.
        """
        if self.root.exists() and not self.root.is_dir():
            raise CheckpointError(f"{self.root} is a file; trainer.default_local_dir has to be a folder")
        self.root.mkdir(parents=True, exist_ok=True)
        lock.hold(self.root)
        self.clean()

    def clean(self) -> None:
        """Clean up after a killed run: remove `.tmp` and `.del`, and restore `.old` if nothing replaced it."""
        if not self.root.is_dir():
            return
        for path in sorted(self.root.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
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
        kept = self.newest()
        before = f"{self.folder(kept)} is untouched" if kept is not None else "there is no earlier checkpoint"
        culprit = disk_failure(exc)
        if culprit is None or isinstance(exc, CheckpointError) or not isinstance(exc, Exception):
            exc.add_note(f"while saving the checkpoint of step {step} into {self.root}; {before}")
            return
        remedy = ""
        if culprit.full:
            free = shutil.disk_usage(self.root).free / 2**20 if self.root.is_dir() else 0.0
            remedy = (
                f" {free:.0f} MiB are free there (a quota or file size limit may be lower): make room, keep fewer "
                "checkpoints (trainer.max_actor_ckpt_to_keep), or move trainer.default_local_dir."
            )
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written into {self.root}: "
            f"{culprit.text}. Nothing half-written is left; {before}.{remedy}"
        ) from exc

    def _next_sequence(self) -> int:
        return max((manifest.sequence for manifest in self._readable().values()), default=0) + 1

    def _readable(self) -> dict[int, Manifest]:
        """Return the manifests that can be read, by step."""
        found = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                found[step] = read_manifest(self.folder(step))
        return found

    def _ranked(self) -> list[int]:
        """Return the steps with a readable manifest, starting with the one to resume from.

        The newest checkpoint is the one saved last, which need not have the highest step: a run that went back to an
        earlier step leaves checkpoints of later steps that it abandoned. Those come last.
        """
        manifests = self._readable()
        if not manifests:
            return []
        newest = max(manifests, key=lambda step: manifests[step].sequence)
        return sorted(manifests, key=lambda step: (step <= newest, manifests[step].sequence), reverse=True)

    def newest(self) -> int | None:
        """Return the step of the checkpoint saved last, or None. Its hashes are not checked."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def _prune(self, written: Path) -> None:
        if self.keep is None:
            return
        for step in self._ranked()[self.keep :]:
            folder = self.folder(step)
            if folder not in (written, self._in_use, self.protected):
                doomed = folder.with_name(folder.name + ".del")
                folder.rename(doomed)
                sync_folder(self.root)
                shutil.rmtree(doomed)
        # The checkpoint that the run resumed from needs no protection any more: the run now has its own.
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
        if self.root.is_dir():
            self.claim()
        if resume_mode == "disable":
            return None
        found = self._find_path(resume_from_path) if resume_mode == "resume_path" else self._find_newest()
        self._in_use = found
        return found

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
        faults = [f"{self.folder(step)} has no readable manifest.json" for step in steps if step not in ranked]
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
