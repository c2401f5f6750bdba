"""Copies of a run's checkpoints behind `trainer.remote_dir`: uploaded next to training, taken by a fresh machine."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.checkpoint import CheckpointError, RunStore, load_json
from hybridrl.checkpoint.manifest import Manifest, check_identity, ranked
from hybridrl.checkpoint.remote_store import RemoteStore
from hybridrl.errors import RemoteFileError
from hybridrl.notify import notify
from hybridrl.observe.run_folder import BEST, CHANGES, CONFIG, VERSIONS
from hybridrl.observe.tracking import MEMORY, METRICS
from hybridrl.trainer.experiment import EXPERIMENT, STATE_FILE, Definition
from hybridrl.trainer.settings_change import check_same_experiment, compare
from hybridrl.utils.background import BackgroundCall

#: what a run that continues elsewhere reads, and what is of use without the run's folder
_CONTINUED = (CONFIG, CHANGES, METRICS, MEMORY, BEST)
_RUN_FILES = (*_CONTINUED, VERSIONS, "report.html")
_POLL_S = 0.05


class RemoteCheckpoints:
    """Uploads finished checkpoints one after the other in a thread, and finds the one to continue from.

    A checkpoint stays on this machine until it is uploaded. One that would be removed before its turn comes, because
    newer ones are waiting too, is left out.

    Args:
        url: `trainer.remote_dir`.
        store: the run's checkpoints on this machine.

    Attributes:
        best: step of the best checkpoint, which is kept; None: there is none.
    """

    def __init__(self, url: str, store: RunStore) -> None:
        self._ends = threading.Event()
        with _naming_the_setting():
            self._remote = RemoteStore(url, wait=self._wait)
        self._store = store
        self._waiting: list[int] = []
        self._failed: dict[int, str] = {}
        self._uploading: int | None = None
        self._call: BackgroundCall | None = None
        self.best: int | None = None
        self._steps: set[int] = set()

    @property
    def steps(self) -> set[int]:
        """Steps whose checkpoints were complete there when the run began."""
        return self._steps

    @property
    def is_uploading(self) -> bool:
        """Whether an upload has not ended, or its end was not noted yet by `advance`."""
        return self._uploading is not None

    # ------------------------------------------------------------------ finding

    def look(self, resume_mode: str, config: Any, definition: Definition, fetch: bool = True) -> None:
        """Check the address, and with `resume_mode=auto` copy the newest checkpoint there to this machine, if it was
        saved after those here.

        Args:
            config: the whole configuration.
            definition: of the experiment, see `hybridrl.trainer.experiment`.
            fetch: whether the checkpoint is copied, or only named.

        Raises:
            UserError: the address cannot be read or written, every checkpoint there is corrupt, or it is of another
                model or experiment.
        """
        with _naming_the_setting():
            self._remote.check_writable()
            manifests, unfinished = self._remote.manifests()
        if unfinished:
            then = "" if manifests else ", and there is no complete one"
            notify(f"{self._remote.url}: the checkpoints of steps {unfinished} were not uploaded completely{then}")
        self._steps = set(manifests)
        self._store.earlier = max((manifest.sequence for manifest in manifests.values()), default=0)
        if resume_mode != "auto":
            return
        local = self._store.manifests()
        newest = max((manifest.sequence for manifest in local.values()), default=0)
        self._waiting = sorted(step for step, manifest in local.items() if manifest.sequence > self._store.earlier)
        for step in self._waiting:
            self._protect(step, True)
        newer = [step for step in ranked(manifests) if manifests[step].sequence > newest]
        if newer and not fetch:
            notify(f"the run would continue from {self._remote.address(newer[0])}")
        elif newer:
            with _naming_the_setting():
                self._take_newest(newer, manifests, config, definition, is_only=not local)

    def _take_newest(
        self, steps: list[int], manifests: dict[int, Manifest], config: Any, definition: Definition, is_only: bool
    ) -> None:
        faults = []
        for step in steps:
            address = self._remote.address(step)
            check_identity(address, manifests[step], self._store.identity)
            self._check_experiment(step, config, definition)
            notify(f"fetching {address} ({manifests[step].size / 2**20:.0f} MiB)")
            try:
                self._remote.download(step, self._store)
            except CheckpointError as error:
                faults.append(f"{address}: {error}")
                continue
            for name in _CONTINUED:
                self._remote.get(name, self._store.root / name)
            if faults:
                notify("\n".join([*faults, f"CONTINUING FROM THE OLDER {address} INSTEAD"]), "warning")
            return
        text = "\n".join(faults)
        if is_only:
            raise CheckpointError(
                f"no checkpoint in {self._remote.url} can be resumed from:\n{text}\nRemove them, or set "
                "trainer.resume_mode=disable to start over."
            )
        notify(f"{text}\nCONTINUING FROM THE OLDER CHECKPOINT IN {self._store.root} INSTEAD", "warning")

    def _check_experiment(self, step: int, config: Any, definition: Definition) -> None:
        """Refuse a checkpoint of another experiment before it is in the run's folder."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            for name in (CONFIG, CHANGES):
                self._remote.get(name, place / name)
            if self._remote.get(f"global_step_{step}/{STATE_FILE}", place / STATE_FILE):
                saved = load_json(place / STATE_FILE).get(EXPERIMENT)
                check_same_experiment(self._remote.url, compare(place, config, saved, definition))

    # ------------------------------------------------------------------ uploading

    def add(self, step: int) -> None:
        """Upload the finished checkpoint of a step, and those that failed before, when their turn comes."""
        self._protect(step, True)
        self._waiting = [*sorted({*self._waiting, *self._failed} - {step}), step]
        self._failed.clear()
        self.advance()

    def advance(self) -> None:
        """Begin the next upload if the last one has ended."""
        if self._call is not None and not self._call.done():
            return
        self._finish()
        while self._waiting and self._uploading is None and not self._ends.is_set():
            step = self._waiting.pop(0)
            keep = self._store.keep
            if keep is not None and len(self._waiting) >= keep and step != self.best:
                notify(f"the checkpoint of step {step} is not uploaded: {len(self._waiting)} newer ones are waiting")
                self._protect(step, False)
            elif self._store.folder(step).is_dir():
                self._uploading = step
                protected = {step, *(() if self.best is None else (self.best,))}
                self._call = BackgroundCall(partial(self._upload, self._store.folder(step), protected))

    def _upload(self, folder: Path, protected: set[int]) -> None:
        """Copy a checkpoint and the files of the run, and remove what is not kept there any more."""
        self._remote.upload(folder, self._check)
        try:
            self._copy_run_files()
            if self._store.keep is not None:
                manifests, unfinished = self._remote.manifests()
                outdated = ranked(manifests)[self._store.keep :]
                self._remote.remove(step for step in [*outdated, *unfinished] if step not in protected)
        except RemoteFileError as error:
            notify(f"trainer.remote_dir: {folder.name} is uploaded, but not all after it is done: {error}", "warning")

    def upload_run_files(self) -> None:
        """Copy metrics, settings and the report. A failure is told."""
        if self._ends.is_set():
            return
        try:
            self._copy_run_files()
        except RemoteFileError as error:
            notify(f"trainer.remote_dir: the run's metrics and report are not uploaded: {error}", "error")

    def _copy_run_files(self) -> None:
        for name in _RUN_FILES:
            if (self._store.root / name).is_file():
                with tempfile.TemporaryDirectory() as copies:  # a file that grows while it is sent has no size
                    copy = Path(copies) / name
                    copy.write_bytes((self._store.root / name).read_bytes())
                    self._remote.put(copy, name)

    def _finish(self) -> None:
        """Take note of the end of an upload."""
        if self._call is None or self._uploading is None:
            return
        step, self._uploading = self._uploading, None
        call, self._call = self._call, None
        try:
            call.result()
        except Exception as error:  # the checkpoint is on this machine, and training goes on
            self._failed[step] = str(error)
            notify(
                f"trainer.remote_dir: the checkpoint of step {step} is not uploaded: {error}. It stays in "
                f"{self._store.folder(step)} and is tried again after the next one",
                "warning",
            )
        else:
            self._protect(step, False)

    def _protect(self, step: int, protect: bool) -> None:
        self._store.protect(f"upload of step {step}", self._store.folder(step) if protect else None)

    def close(self, gives_up: Callable[[], bool]) -> None:
        """Upload what is waiting, and failed uploads once more. What then is not uploaded is told by name.

        Args:
            gives_up: whether to wait no more; asked again and again.
        """
        self._waiting = sorted({*self._waiting, *self._failed})
        self._failed.clear()
        try:
            self.advance()
            if self.is_uploading:
                notify(f"uploading checkpoints to {self._remote.url}; a signal more ends the run without them")
            while self.is_uploading:
                if gives_up():
                    self._ends.set()
                time.sleep(_POLL_S)
                self.advance()
        except BaseException:
            self._ends.set()
            raise
        finally:
            self._tell_missing()
        self._store.prune()  # what stayed until it was uploaded

    def _tell_missing(self) -> None:
        uploading = [] if self._uploading is None else [self._uploading]
        missing = sorted({*self._failed, *self._waiting, *uploading})
        if missing:
            reasons = "; ".join(dict.fromkeys(self._failed.values())) or "the run was ended"
            folders = ", ".join(str(self._store.folder(step)) for step in missing)
            notify(
                f"trainer.remote_dir={self._remote.url}: the checkpoints of steps {missing} are not uploaded "
                f"({reasons}). They are in {folders}; the same command with trainer.resume_mode=auto uploads them",
                "error",
            )

    def _wait(self, seconds: float) -> None:
        if self._ends.wait(seconds):
            self._check()

    def _check(self) -> None:
        if self._ends.is_set():
            raise RemoteFileError(f"{self._remote.url}: the run ended before everything was uploaded")


@contextlib.contextmanager
def _naming_the_setting() -> Iterator[None]:
    """Put the name of the setting before errors of the address."""
    try:
        yield
    except RemoteFileError as error:
        raise RemoteFileError(f"trainer.remote_dir={error}") from None
