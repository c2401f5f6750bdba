"""Shared parts of all training programs around the loop: folder, metrics, timers, checkpoints and stop requests."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridrl.checkpoint import lock
from hybridrl.config import RunConfig
from hybridrl.config.schema.rollout import TraceConfig
from hybridrl.data import StatefulLoader
from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.observe.events import END, RESUME, EventLog
from hybridrl.observe.jsonl import read
from hybridrl.observe.report import print_summary, write_report
from hybridrl.observe.run_folder import shown_settings, write_run_info
from hybridrl.observe.timeline import Timed, Timeline
from hybridrl.observe.traces import Traces
from hybridrl.observe.tracking import METRICS, Tracking
from hybridrl.programs import STOPPED, ProgramResult
from hybridrl.protocol import DataProto
from hybridrl.trainer.background_save import Writers
from hybridrl.trainer.best_checkpoint import BestCheckpoint
from hybridrl.trainer.callbacks import EventKind, RunEvent, emit
from hybridrl.trainer.checkpoints import Checkpoints
from hybridrl.trainer.failed_batches import FailedBatches
from hybridrl.trainer.interrupt import StopRequest
from hybridrl.trainer.phases import PhaseTimer, take_spans
from hybridrl.utils.files import check_writable

#: metric by which a report of a validation is known
VALIDATION_SECONDS = "timing_s/testing"
_BETWEEN_STEPS = ("save_checkpoint", "data")


class TrainingRun:
    """One run, entered around the training loop.

    Args:
        config: the whole resolved configuration, written into the run's folder.
        trainer: its `trainer` part.
        total_steps: the step after which the run is complete.
        identity: identifies the model; a checkpoint of another model is refused.
        short_of_memory: what to change if a phase runs out of memory, by phase.
        trace: `rollout.trace` of a run that generates.
        groups: returns the worker groups, whose calls the timeline shows, once they are there.
        writers: see `Checkpoints`.

    Attributes:
        step: steps completed, or inside `measured_step` the one in progress (from 1).
        rollout_folder, validation_folder: where samples are dumped, one file per step.
        checkpoints: of the run.
        best: the best of them, by `trainer.best_metric`.
        timing: seconds of each phase of the step in progress, by name.
        events: what is recorded in addition to metrics; open while the run is entered.
        traces: sends samples to the service of `trace`, while the run is entered; None without one.
    """

    def __init__(
        self,
        config: Any,
        trainer: RunConfig,
        total_steps: int,
        identity: Mapping[str, Any],
        short_of_memory: Mapping[str, str] | None = None,
        trace: TraceConfig | None = None,
        groups: Callable[[], Iterable[Timed]] = tuple,
        writers: Callable[[], Sequence[Writers]] = tuple,
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.total_steps = total_steps
        self.folder = Path(trainer.default_local_dir)
        self.rollout_folder = Path(getattr(trainer, "rollout_data_dir", None) or self.folder / "rollouts")
        self.validation_folder = Path(getattr(trainer, "validation_data_dir", None) or self.folder / "validation")
        self.checkpoints = Checkpoints(config, trainer, identity, writers)
        self.best = BestCheckpoint(trainer)
        self._best_folder: Path | None = None  # the one that is protected
        self.traces: Traces | None = None
        self._trace = trace
        self._groups = groups
        self.failed_batches = FailedBatches(self.folder)
        self._timer = PhaseTimer(short_of_memory)
        self.timing = self._timer.seconds
        self.step = 0
        self._was_finished = False
        self._stop = StopRequest(self.folder)
        self._cleanup = ExitStack()

    def __enter__(self) -> "TrainingRun":
        with ExitStack() as stack:  # undone if a tracker cannot be started
            self.look_for_checkpoint()
            self.checkpoints.store.claim()
            stack.callback(lock.release, self.folder)
            write_run_info(self.folder, self.config, resumed=self.checkpoints.continues)
            start_over = self.trainer.resume_mode != "auto" and not self.checkpoints.continues
            self.events = stack.enter_context(EventLog(self.folder, lambda: self.step, start_over))
            stack.enter_context(self._stop)
            self.tracking = Tracking(
                loggers=self.trainer.logger,
                project=self.trainer.project_name,
                experiment=self.trainer.experiment_name,
                folder=self.folder,
                config=shown_settings(self.config),
                total_steps=self.total_steps,
                progress_bar=self.trainer.progress_bar,
                dump_folders=[self.rollout_folder, self.validation_folder],
            )
            if self._trace is not None and self._trace.backend is not None:
                self.traces = stack.enter_context(closing(Traces(self._trace, self.folder)))
            self.timeline = stack.enter_context(Timeline(self.folder))
            take_spans()  # of an earlier run of this process
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._cleanup:
            self.checkpoints.close(error, lambda: self.abandons)
            self._keep_best()
            self.tracking.finish(failed=kind is not None)
            self.events.write(END, self._ending(error))
            if kind is None and self.trainer.report:
                write_report(self.folder)
                print_summary(self.folder)
            if self.checkpoints.remote is not None:
                self.checkpoints.remote.upload_run_files()
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
        elif outcome.finished:
            saved = f"; the last checkpoint is {outcome.checkpoint}" if outcome.checkpoint else ""
            best = f"; {self.best}, in {outcome.best_checkpoint}" if outcome.best_checkpoint else ""
            nothing = "it was finished before, so nothing was trained; " if self._was_finished else ""
            early, longer = "", "trainer.total_training_steps or trainer.total_epochs"
            if self.step < self.total_steps:
                early = f" early, after {self.best.waiting} validations without a better {self.best.metric}"
                longer = "trainer.early_stopping_patience"
            notify(
                f"the run in {self.folder} is finished{early} (step {self.step} of {self.total_steps}){saved}{best}; "
                f"{nothing}to train further, raise {longer}; to start over, set trainer.resume_mode=disable or another "
                "trainer.default_local_dir"
            )

    @property
    def outcome(self) -> ProgramResult:
        """The run's outcome, after the loop."""
        best = None if self.best.best is None else self.checkpoints.store.folder(self.best.best.step)
        return ProgramResult(
            self.folder,
            self.step,
            self.total_steps,
            self.checkpoints.newest,
            stopped_by=None if self._is_finished else self._stop.requested,
            ended_early=self.step < self.total_steps and self.best.ends_run,
            best_checkpoint=best if best is not None and best.is_dir() else None,
        )

    def _ending(self, error: BaseException | None) -> str:
        """Describe the run's end, for its report."""
        if error is not None:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if self._is_finished:
            return (
                "finished" if self.step >= self.total_steps else f"finished early, after step {self.step}: {self.best}"
            )
        return f"stopped by {self.outcome.stopped_by}" if self.stop_requested else f"ended after step {self.step}"

    @property
    def is_last(self) -> bool:
        """Whether the loop ends after this step: the run is finished, or the user asked to stop."""
        return self._is_finished or self.stop_requested

    @property
    def _is_finished(self) -> bool:
        """Whether all steps are done, or validations have not improved for long enough (`early_stopping_patience`)."""
        return self.step >= self.total_steps or self.best.ends_run

    @property
    def stop_requested(self) -> bool:
        return self._stop.requested is not None

    @property
    def abandons(self) -> bool:
        """Whether a second stop request came, so that nothing is waited for that a resumed run can do again."""
        return self._stop.abandons

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

    def report(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send metrics to every tracking back end.

        Args:
            step: which they belong to; None: the current one. What was timed since belongs to the current one.
        """
        of_step = self.step if step is None else step
        self.tracking.log(dict(metrics), step=of_step)
        kind: EventKind = "validation" if VALIDATION_SECONDS in metrics or not of_step else "step"
        if kind == "validation":
            self.best.observe(of_step, metrics)
        self._emit(kind, self.folder, metrics, of_step)
        if of_step == self.step:
            spans = [span for group in self._groups() for span in group.take_spans()]
            self.timeline.write(self.step, [*take_spans(), *spans])

    def has_validated(self) -> bool:
        """Return whether the run's file has a validation of the current step."""
        records = read(self.folder / METRICS)
        return any(int(record["step"]) == self.step and VALIDATION_SECONDS in record for record in records)

    def _emit(self, kind: EventKind, folder: Path, metrics: Mapping[str, Any], step: int) -> None:
        emit(RunEvent(kind, step, self.total_steps, folder, dict(metrics)))

    def look_for_checkpoint(self, fetch: bool = True) -> None:
        """Find and verify the checkpoint to resume from, and refuse folders that cannot be written.

        Args:
            fetch: see `Checkpoints.look`.

        Raises:
            CheckpointError: see `Checkpoints.look`.
            UserError: a folder for samples cannot be written.
        """
        if not self.checkpoints.looked:
            self._check_dump_folders()
        self.checkpoints.look(fetch)

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
        step = self.checkpoints.restore(load)
        if step is None:
            self.tracking.cut_after(-1)
            self.timeline.cut_after(-1)
            return False
        self.step = step
        self.tracking.cut_after(self.step)
        records = read(self.folder / METRICS) if (self.folder / METRICS).exists() else []
        self.best.replay(records, self.checkpoints.has_copy)
        self._was_finished = self._is_finished
        self.timeline.cut_after(self.step)
        self.events.write(RESUME, str(self.checkpoints.source))
        notify(f"resumed from {self.checkpoints.source} (step {self.step} of {self.total_steps})")
        return True

    def abandon_step(self, step: int) -> None:
        """Count only the steps up to `step`, the last complete one: the step in progress is abandoned."""
        self.step = step

    def save_if_due(self, write: Callable[[Path], dict[str, Any]]) -> None:
        """Save if `trainer.save_freq`, `trainer.save_last`, a stop request or a new best validation asks for it.

        `write(folder)` returns the controller's state.

        Raises:
            UserError: the validation of the step has no `trainer.best_metric`. The step is saved.
        """
        self.checkpoints.advance()
        last = self.trainer.save_last and self._is_finished
        is_best = self.best.best is not None and self.best.best.step == self.step
        if self.due(self.trainer.save_freq) or last or is_best or self.stop_requested or self.best.fault is not None:
            self.save(write)
        if self.best.fault is not None:
            raise UserError(f"{self.best.fault}. Step {self.step} is kept in {self.checkpoints.newest}")

    def save(self, write: Callable[[Path], dict[str, Any]]) -> None:
        """Write a checkpoint of the current step, unless it already exists; see `Checkpoints.save`."""
        self._keep_best()
        if self.step and not self.checkpoints.has(self.step):
            with self.phase("save_checkpoint"):
                self.checkpoints.save(self.step, write)
            self._emit("checkpoint", self.checkpoints.newest or self.folder, {}, self.step)
        self._keep_best()

    def _keep_best(self) -> None:
        """Keep the best checkpoint, once it is written, besides the newest ones, and name it in the run's folder."""
        if self.best.best is None:
            return
        if self.checkpoints.remote is not None:
            self.checkpoints.remote.best = self.best.best.step
        folder = self.checkpoints.store.folder(self.best.best.step)
        if folder.is_dir() and folder != self._best_folder:
            self._best_folder = folder
            self.checkpoints.store.protect("best", folder)
            self.best.write(self.folder, folder)
            if not self.checkpoints.is_saving:  # which prunes, too, in a thread of its own
                self.checkpoints.store.prune()
