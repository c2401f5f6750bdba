"""The checkpoints of one run: `global_step_N` folders that are whole or not there.

Life of a save: `global_step_N.tmp` is filled, hashed and made durable, then renamed. A kill at any moment leaves the
`.tmp` (removed at the next start) or the finished folder. Saving a step again parks the former folder as
`global_step_N.old` for the moment between two renames; if a kill falls in there, the next start renames it back.
Pruned folders become `global_step_N.del` before their files go, so that half a checkpoint never bears a valid name.
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
        root: the run's folder (`trainer.default_local_dir`); made when first written to.
        keep: how many checkpoints to keep, the newest; None keeps all.
        identity: what the model is (plain data: architecture, sizes, vocabulary hash). Recorded in each checkpoint and
            compared when one is found.
        world: number of ranks, nodes and such, recorded in each checkpoint.
        config_digest: hash of the resolved configuration, recorded in each checkpoint.
        notice: called with each message for the user; by default it is printed to stderr.

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
        # As JSON brings it back (a tuple as a list), so that what is compared is what was saved.
        self.identity: dict[str, Any] = json.loads(json.dumps(dict(identity or {})))
        self.world: dict[str, Any] = json.loads(json.dumps(dict(world or {})))
        self.config_digest = config_digest
        self._notice = notice
        self.protected: Path | None = None
        self._in_use: Path | None = None
        self._is_writing = False

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step stands or would stand."""
        return self.root / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, ascending; whether they are whole is not looked at."""
        if not self.root.is_dir():
            return []
        matches = (_FOLDER.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    # ------------------------------------------------------------------ writing

    @contextlib.contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to write the state of `step` into; a valid checkpoint when the block is left, else nothing.

        Processes other than this one may write into the folder as long as they are done when the block is left. A
        second save of the same step replaces the first at once.

        Raises:
            CheckpointError: the disk failed or is full. Whatever else the block raises passes through, with a note. In
                every case the unfinished folder is removed and the checkpoints that were there are untouched.
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
        """Make the folder, take it for this process, and clean up after a killed run; `find` and `writing` do it too.

        To be called before anything else is written into the run's folder.

        Raises:
            CheckpointError: another living process writes there, or a file has the folder's name.
        """
        if self.root.exists() and not self.root.is_dir():
            raise CheckpointError(f"{self.root} is a file; trainer.default_local_dir has to be a folder")
        self.root.mkdir(parents=True, exist_ok=True)
        lock.hold(self.root)
        self.clean()

    def clean(self) -> None:
        """Undo what a killed run left: `.tmp` and `.del` go, `.old` comes back if nothing replaced it."""
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
        """Raise a CheckpointError if the disk is at fault; else note on the exception what became of the save."""
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
        """Manifests that can be read, by step."""
        found = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                found[step] = read_manifest(self.folder(step))
        return found

    def _ranked(self) -> list[int]:
        """Steps with a readable manifest, the one to resume from first.

        The newest is the one saved last, which need not be that of the highest step: a run that went back to an
        earlier step leaves later ones of a future that was given up. Those come last.
        """
        manifests = self._readable()
        if not manifests:
            return []
        newest = max(manifests, key=lambda step: manifests[step].sequence)
        return sorted(manifests, key=lambda step: (step <= newest, manifests[step].sequence), reverse=True)

    def newest(self) -> int | None:
        """Step of the checkpoint saved last, or None; its hashes are not checked."""
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
        # The state that the run came from is protected once: from here on the run stands on its own checkpoint.
        self._in_use = None

    # ------------------------------------------------------------------ finding

    def find(self, resume_mode: str = "auto", resume_from_path: str | os.PathLike[str] | None = None) -> Path | None:
        """The checkpoint to resume from, verified byte by byte; None to start over.

        Also cleans up after a killed run.

        Args:
            resume_mode: `auto`: the newest that is whole; a torn one is named in a notice and the one before it taken.
                `resume_path`: exactly `resume_from_path`. `disable`: none.
            resume_from_path: a `global_step_N` folder, of this run or another.

        Raises:
            CheckpointError: an unknown mode; a path that is no checkpoint; a torn one where it was asked for, or no
                whole one among those there; a checkpoint of another model.
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
