"""Shared parts of all training programs around the loop: folder, metrics, timers, checkpoints and stop requests."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridrl.checkpoint import RunStore, digest, load_json, lock, save_json
from hybridrl.config import RunConfig, as_dict
from hybridrl.config.schema.rollout import TraceConfig
from hybridrl.data import StatefulLoader
from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.observe.events import END, RESUME, EventLog
from hybridrl.observe.report import print_summary, write_report
from hybridrl.observe.run_folder import write_run_info
from hybridrl.observe.timeline import Timed, Timeline
from hybridrl.observe.traces import Traces
from hybridrl.observe.tracking import Tracking
from hybridrl.programs import STOPPED, ProgramResult
from hybridrl.protocol import DataProto
from hybridrl.trainer.background_save import BackgroundSave, Writers
from hybridrl.trainer.experiment import EXPERIMENT, STATE_FILE, Definition, complete_models, definition_of
from hybridrl.trainer.failed_batches import FailedBatches
from hybridrl.trainer.interrupt import StopRequest
from hybridrl.trainer.phases import PhaseTimer, take_spans
from hybridrl.trainer.settings_change import SettingChange, check_same_experiment, compare, record_changes
from hybridrl.utils.files import check_writable

_BETWEEN_STEPS = ("save_checkpoint", "data")


class TrainingRun:
    """One run, entered around the training loop.

    Args:
        config: the whole resolved configuration, written into the run's folder.
        trainer: its `trainer` part.
        total_steps: the step after which the run is complete.
        identity: identifies the model; a checkpoint of another model is refused.
        short_of_memory: what to change if a phase runs out of memory, by phase.

    Attributes:
        step: steps completed, or inside `measured_step` the one in progress (from 1).
        rollout_folder, validation_folder: where samples are dumped, one file per step.
        timing: seconds of each phase of the step in progress, by name.
        events: what is recorded in addition to metrics; open while the run is entered.
        groups: all worker groups, whose calls the timeline shows.
        writers: those that go on writing a checkpoint after `save` has returned (`checkpoint.async_save`).
    """

    def __init__(
        self,
        config: Any,
        trainer: RunConfig,
        total_steps: int,
        identity: Mapping[str, Any],
        short_of_memory: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.total_steps = total_steps
        self.folder = Path(trainer.default_local_dir)
        self.rollout_folder = Path(getattr(trainer, "rollout_data_dir", None) or self.folder / "rollouts")
        self.validation_folder = Path(getattr(trainer, "validation_data_dir", None) or self.folder / "validation")
        #: `rollout.trace` of a run that generates, and what sends the traces while the run goes on
        self.trace: TraceConfig | None = None
        self.traces: Traces | None = None
        self.store = RunStore(
            self.folder,
            keep=trainer.max_actor_ckpt_to_keep,
            identity=identity,
            world={"nnodes": trainer.nnodes, "n_gpus_per_node": trainer.n_gpus_per_node},
            config_digest=digest(as_dict(config)),
        )
        self.failed_batches = FailedBatches(self.folder)
        self._timer = PhaseTimer(short_of_memory)
        self.timing = self._timer.seconds
        self.step = 0
        self.groups: list[Timed] = []
        self.writers: list[Writers] = []
        self._saving: BackgroundSave | None = None
        self._saved_step = -1
        self._was_finished = False
        self._looked = False
        self._resumed_from: Path | None = None
        self._changes: list[SettingChange] = []
        self._definition: Definition = {}
        self._stop = StopRequest(self.folder)
        self._cleanup = ExitStack()

    def __enter__(self) -> "TrainingRun":
        with ExitStack() as stack:  # undone if a tracker cannot be started
            self.look_for_checkpoint()
            self.store.claim()
            stack.callback(lock.release, self.folder)
            write_run_info(self.folder, self.config, resumed=self._continues)
            start_over = self.trainer.resume_mode != "auto" and not self._continues
            self.events = stack.enter_context(EventLog(self.folder, lambda: self.step, start_over))
            stack.enter_context(self._stop)
            self.tracking = Tracking(
                loggers=self.trainer.logger,
                project=self.trainer.project_name,
                experiment=self.trainer.experiment_name,
                folder=self.folder,
                config=as_dict(self.config),
                total_steps=self.total_steps,
                progress_bar=self.trainer.progress_bar,
                dump_folders=[self.rollout_folder, self.validation_folder],
            )
            if self.trace is not None and self.trace.backend is not None:
                self.traces = stack.enter_context(closing(Traces(self.trace, self.folder)))
            self.timeline = stack.enter_context(Timeline(self.folder))
            take_spans()  # of an earlier run of this process
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._cleanup:
            self._complete_last_save(error)
            self.tracking.finish(failed=kind is not None)
            self.events.write(END, self._ending(error))
            if kind is None and self.trainer.report:
                write_report(self.folder)
                print_summary(self.folder)
            if kind is None:
                self._report_end()

    def _report_end(self) -> None:
        outcome = self.outcome
        if outcome.stopped_by is not None:
            where = f"its state is in {outcome.checkpoint}" if outcome.checkpoint else "nothing is saved before step 1"
            remedy = "" if self.trainer.resume_mode == "auto" else " with trainer.resume_mode=auto"
            notify(
                f"stopped by {outcome.stopped_by} after step {self.step} of {self.total_steps}; {where}. To resume, "
                f"run the same command again{remedy}. Exit status {STOPPED}"
            )
        elif self.step >= self.total_steps:
            saved = f"; the last checkpoint is {outcome.checkpoint}" if outcome.checkpoint else ""
            nothing = "it was finished before, so nothing was trained; " if self._was_finished else ""
            notify(
                f"the run in {self.folder} is finished (step {self.step} of {self.total_steps}){saved}; {nothing}"
                "to train further, raise trainer.total_training_steps or trainer.total_epochs; to start over, set "
                "trainer.resume_mode=disable or another trainer.default_local_dir"
            )

    @property
    def outcome(self) -> ProgramResult:
        """The run's outcome, after the loop."""
        saved = self.store.folder(self._saved_step) if self._saved_step > 0 else None
        if saved is not None and not saved.is_dir():
            saved = self._resumed_from  # of another folder (resume_path), and no step was done since
        stopped_by = self._stop.requested if self.step < self.total_steps else None
        return ProgramResult(self.folder, self.step, self.total_steps, saved, stopped_by)

    @property
    def _continues(self) -> bool:
        """Whether the checkpoint to resume from is of this run's folder."""
        return self._resumed_from is not None and self._resumed_from.resolve().parent == self.folder.resolve()

    def _ending(self, error: BaseException | None) -> str:
        """Describe the run's end, for its report."""
        if error is not None:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if self.step >= self.total_steps:
            return "finished"
        return f"stopped by {self.outcome.stopped_by}" if self.stop_requested else f"ended after step {self.step}"

    @property
    def is_last(self) -> bool:
        """Whether the loop ends after this step: all steps are done, or the user asked to stop."""
        return self.step >= self.total_steps or self.stop_requested

    @property
    def stop_requested(self) -> bool:
        return self._stop.requested is not None

    def abandonable(self) -> AbstractContextManager[None]:
        """Let a second stop request leave the block by `StepAbandoned`; see `StopRequest.abandonable`."""
        return self._stop.abandonable()

    def due(self, frequency: int) -> bool:
        """Return whether an action is due that runs every `frequency` steps (never if not positive) and at the end."""
        return frequency > 0 and (self.step % frequency == 0 or self.step >= self.total_steps)

    def batches(self, loader: StatefulLoader) -> Iterator[DataProto]:
        """Yield the loader's batches, epoch after epoch, from the current step to the end of the run."""
        while not self.is_last:
            batches = iter(loader)
            while True:
                with self.phase("data"):
                    batch = next(batches, None)
                if batch is None:
                    break
                yield batch
                if self.is_last:
                    return

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the block's wall time to `timing[name]`; see `PhaseTimer.phase`."""
        return self._timer.phase(name)

    @contextmanager
    def measured_step(self) -> Iterator[None]:
        """Count a step, and measure the block's wall time as `timing_s/step`."""
        self.step += 1
        # What belongs to no step: the save of the previous one, which was reported before, and reading the batch.
        between = {name: seconds for name, seconds in self.timing.items() if name in _BETWEEN_STEPS}
        self.timing.clear()
        self.timing.update(between)
        with self.phase("step"):
            yield

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of the current step to every tracking back end."""
        self.tracking.log(dict(metrics), step=self.step)
        spans = [span for group in self.groups for span in group.take_spans()]
        self.timeline.write(self.step, [*take_spans(), *spans])

    def look_for_checkpoint(self) -> None:
        """Find and verify the checkpoint that `restore` will resume from, so that a corrupt or foreign one is refused
        before a model is loaded, and so is another experiment, or a folder that cannot be written. This is done only
        once.

        Raises:
            CheckpointError: see `RunStore.find`, or with `resume_mode=auto` the model, the data, the reward, the
                environment or the algorithm are not those that the run began with.
            UserError: a folder for samples cannot be written.
        """
        if self._looked:
            return
        self._check_dump_folders()
        self._definition = definition_of(self.config)
        self._resumed_from = self.store.find(self.trainer.resume_mode, self.trainer.resume_from_path)
        self._looked = True
        if self._resumed_from is None:
            return
        saved = load_json(self._resumed_from / STATE_FILE).get(EXPERIMENT)
        if saved is None:
            notify(
                f"{self._resumed_from} was saved by an earlier version, which did not record its data, reward, tools "
                "and code: whether they are the same is not checked in this start"
            )
        self._changes = compare(self._resumed_from.parent, self.config, saved, self._definition)
        if self.trainer.resume_mode == "auto":
            check_same_experiment(self.folder, self._changes)
        if self._changes:
            notify(f"the run continues with other settings: {'; '.join(map(str, self._changes))}", "warning")

    def _check_dump_folders(self) -> None:
        for name in ("rollout_data_dir", "validation_data_dir"):
            folder = getattr(self.trainer, name, None)
            try:
                if folder:
                    check_writable(Path(folder))
            except OSError as error:
                raise UserError(
                    f"trainer.{name}={folder}: the folder cannot be written ({error.strerror or error}): let this user "
                    "write there, or name another folder"
                ) from error

    def restore(self, load: Callable[[Path, dict[str, Any]], None]) -> bool:
        """Resume as `trainer.resume_mode` says. `load(folder, state)` gets the verified checkpoint and the state that
        was saved with it.

        Metrics and dumps of later steps, written by a run that died after its checkpoint, are removed.

        Returns:
            Whether there was a checkpoint to resume from.
        """
        self.look_for_checkpoint()
        folder = self._resumed_from
        if folder is None:
            self.tracking.cut_after(-1)
            self.timeline.cut_after(-1)
            return False
        state = load_json(folder / STATE_FILE)
        load(folder, state["state"])
        self.step = self._saved_step = state["step"]
        self._was_finished = self.step >= self.total_steps
        if self._changes and self._continues:
            record_changes(self.folder, self.step, self._changes)
        self.tracking.cut_after(self.step)
        self.timeline.cut_after(self.step)
        self.events.write(RESUME, str(folder))
        notify(f"resumed from {folder} (step {self.step} of {self.total_steps})")
        return True

    def go_back(self, folder: Path, load: Callable[[Path, dict[str, Any]], None]) -> None:
        """Verify an earlier checkpoint and call `load(folder, state)` with it. Steps and metrics continue.

        Raises:
            CheckpointError: the checkpoint is corrupt or incomplete.
        """
        self.complete_save()
        checkpoint = self.store.find("resume_path", folder)
        assert checkpoint is not None
        load(checkpoint, load_json(checkpoint / STATE_FILE)["state"])

    def save_if_due(self, write: Callable[[Path], dict[str, Any]]) -> None:
        """Save if `trainer.save_freq`, `trainer.save_last` or a stop request asks for it.

        `write(folder)` returns the controller's state.
        """
        self._advance_save()
        last = self.trainer.save_last and self.step >= self.total_steps
        if self.due(self.trainer.save_freq) or last or self.stop_requested:
            self.save(write)

    def save(self, write: Callable[[Path], dict[str, Any]]) -> None:
        """Write a checkpoint of the current step, unless it already exists.

        With `writers`, it is complete after `complete_save`; the next save and the end of the run call that.
        """
        if self.step in (0, self._saved_step) or (self._saving is not None and self._saving.step == self.step):
            return
        with self.phase("save_checkpoint"):
            self.complete_save()
            unfinished = self.store.begin(self.step)
            try:
                self._definition = complete_models(self._definition, self.config)
                state = {"step": self.step, EXPERIMENT: self._definition, "state": write(unfinished.folder)}
                save_json(unfinished.folder / STATE_FILE, state)
            except BaseException as error:
                unfinished.abort(error)
                raise
            self._saving = BackgroundSave(unfinished, self.writers)
            self._advance_save(wait=not self.writers)

    def complete_save(self) -> None:
        """Wait for the checkpoint that is being written in the background.

        Raises:
            CheckpointError: the disk failed.
        """
        self._advance_save(wait=True)

    def _advance_save(self, wait: bool = False) -> None:
        saving, self._saving = self._saving, None  # after an error there is nothing to wait for any more
        if saving is not None and saving.advance(wait):
            self._saved_step = saving.step
        else:
            self._saving = saving

    def _complete_last_save(self, error: BaseException | None) -> None:
        """Wait at the end of the run; after an error, which may be of the processes that write, as well as it goes."""
        if error is None:
            self.complete_save()
        elif self._saving is not None:
            step = self._saving.step
            try:
                self.complete_save()
            except Exception as failed:
                reason = (str(failed).splitlines() or [""])[0]
                notify(f"the checkpoint of step {step} could not be completed: {reason}", "warning")
