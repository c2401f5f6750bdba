"""The checkpoints of a run: the one that it resumes from, and those that it writes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.checkpoint import RunStore, digest, load_json, save_json
from hybridrl.config import RunConfig
from hybridrl.notify import notify
from hybridrl.observe.run_folder import shown_settings
from hybridrl.trainer.background_save import BackgroundSave, Writers
from hybridrl.trainer.experiment import EXPERIMENT, STATE_FILE, Definition, complete_models, definition_of
from hybridrl.trainer.remote_checkpoints import RemoteCheckpoints
from hybridrl.trainer.settings_change import SettingChange, check_same_experiment, compare, record_changes


class Checkpoints:
    """Finds, loads and writes the checkpoints of a run.

    Args:
        config: the whole resolved configuration.
        trainer: its `trainer` part.
        identity: identifies the model; a checkpoint of another model is refused.
        writers: returns those that go on writing a checkpoint after `save` has returned (`checkpoint.async_save`).

    Attributes:
        store: the folders.
        remote: their copies behind `trainer.remote_dir`; None: there are none.
        source: the checkpoint to resume from; None: there is none.
        looked: whether `look` was called.
    """

    def __init__(
        self,
        config: Any,
        trainer: RunConfig,
        identity: Mapping[str, Any],
        writers: Callable[[], Sequence[Writers]] = tuple,
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.folder = Path(trainer.default_local_dir)
        self.store = RunStore(
            self.folder,
            keep=trainer.max_actor_ckpt_to_keep,
            identity=identity,
            world={"nnodes": trainer.nnodes, "n_gpus_per_node": trainer.n_gpus_per_node},
            config_digest=digest(shown_settings(config)),
        )
        self.remote = None if trainer.remote_dir is None else RemoteCheckpoints(trainer.remote_dir, self.store)
        self.source: Path | None = None
        self._writers = writers
        self.looked = False
        self._changes: list[SettingChange] = []
        self._definition: Definition = {}
        self._saving: BackgroundSave | None = None
        self._saved_step = -1

    def look(self, fetch: bool = True) -> None:
        """Find and verify the checkpoint that `restore` will resume from, so that a corrupt or foreign one is refused
        before a model is loaded, and so is another experiment. This is done only once.

        Args:
            fetch: whether a newer one behind `trainer.remote_dir` is copied to this machine.

        Raises:
            UserError: see `RemoteCheckpoints.look`.
            CheckpointError: see `RunStore.find`, or with `resume_mode=auto` the model, the data, the reward, the
                environment or the algorithm are not those that the run began with.
        """
        if self.looked:
            return
        self._definition = definition_of(self.config)
        if self.remote is not None:
            self.remote.look(self.trainer.resume_mode, self.config, self._definition, fetch)
        self.source = self.store.find(self.trainer.resume_mode, self.trainer.resume_from_path)
        self.looked = True
        if self.source is None:
            return
        saved = load_json(self.source / STATE_FILE).get(EXPERIMENT)
        if saved is None:
            notify(
                f"{self.source} was saved by an earlier version, which did not record what its data, reward, tools and "
                "code were: whether they are the same is not checked in this start"
            )
        self._changes = compare(self.source.parent, self.config, saved, self._definition)
        if self.trainer.resume_mode == "auto":
            check_same_experiment(self.folder, self._changes)
        if self._changes:
            notify(f"the run continues with other settings: {'; '.join(map(str, self._changes))}", "warning")

    @property
    def continues(self) -> bool:
        """Whether the checkpoint to resume from is of this run's folder."""
        return self.source is not None and self.source.resolve().parent == self.folder.resolve()

    @property
    def newest(self) -> Path | None:
        """The checkpoint of the last step that was saved or restored; None: there is none."""
        saved = self.store.folder(self._saved_step) if self._saved_step > 0 else None
        if saved is not None and not saved.is_dir():
            return self.source  # of another folder (resume_path), and no step was done since
        return saved

    def restore(self, load: Callable[[Path, dict[str, Any]], None]) -> int | None:
        """Call `load(folder, state)` with the checkpoint to resume from, and return its step; None: there is none."""
        self.look()
        if self.source is None:
            return None
        state = load_json(self.source / STATE_FILE)
        load(self.source, state["state"])
        step: int = state["step"]
        self._saved_step = step
        if self._changes and self.continues:
            record_changes(self.folder, step, self._changes)
        return step

    def go_back(self, folder: Path, load: Callable[[Path, dict[str, Any]], None]) -> None:
        """Verify an earlier checkpoint and call `load(folder, state)` with it. Steps and metrics continue.

        Raises:
            CheckpointError: the checkpoint is corrupt or incomplete.
        """
        self.complete()
        checkpoint = self.store.find("resume_path", folder)
        assert checkpoint is not None
        load(checkpoint, load_json(checkpoint / STATE_FILE)["state"])

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._saving is not None

    def has(self, step: int) -> bool:
        """Return whether the checkpoint of a step is written, or being written."""
        return step == self._saved_step or (self._saving is not None and self._saving.step == step)

    def save(self, step: int, write: Callable[[Path], dict[str, Any]]) -> None:
        """Write the checkpoint of a step. `write(folder)` returns the controller's state.

        With writers, it is complete after `complete`; the next save and the end of the run call that.
        """
        self.complete()
        unfinished = self.store.begin(step)
        try:
            self._definition = complete_models(self._definition, self.config)
            state = {"step": step, EXPERIMENT: self._definition, "state": write(unfinished.folder)}
            save_json(unfinished.folder / STATE_FILE, state)
        except BaseException as error:
            unfinished.abort(error)
            raise
        writers = self._writers()
        self._saving = BackgroundSave(unfinished, writers)
        self.advance(wait=not writers)

    def complete(self) -> None:
        """Wait for the checkpoint that is being written in the background.

        Raises:
            CheckpointError: the disk failed.
        """
        self.advance(wait=True)

    def advance(self, wait: bool = False) -> None:
        """Do what can be done by now for the checkpoint that is being written."""
        saving, self._saving = self._saving, None  # after an error there is nothing to wait for any more
        if saving is not None and saving.advance(wait):
            self._saved_step = saving.step
            if self.remote is not None:
                self.remote.add(saving.step)
        else:
            self._saving = saving
            if self.remote is not None:
                self.remote.advance()

    def has_copy(self, step: int) -> bool:
        """Return whether there is a checkpoint of a step, here or behind `trainer.remote_dir`."""
        return self.store.folder(step).is_dir() or (self.remote is not None and step in self.remote.steps)

    def close(self, error: BaseException | None, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Wait at the end of the run; after an error, which may be of the processes that write, as well as it goes.

        Args:
            gives_up: whether to wait no more for uploads; asked again and again.
        """
        try:
            self._close(error)
        finally:
            if self.remote is not None:
                self.remote.close(lambda: gives_up() or isinstance(error, KeyboardInterrupt))

    def _close(self, error: BaseException | None) -> None:
        if error is None:
            self.complete()
        elif self._saving is not None:
            step = self._saving.step
            try:
                self.complete()
            except Exception as failed:
                reason = (str(failed).splitlines() or [""])[0]
                notify(f"the checkpoint of step {step} could not be completed: {reason}", "warning")
