"""What all training programs share around the loop: folder, metrics, timers, checkpoints and stop requests."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridrl.checkpoint import RunStore, digest, load_json, save_json
from hybridrl.config import RunConfig, as_dict
from hybridrl.data import StatefulLoader
from hybridrl.notify import notify
from hybridrl.observe.report import print_summary, write_report
from hybridrl.observe.run_folder import write_run_info
from hybridrl.observe.tracking import Tracking
from hybridrl.protocol import DataProto
from hybridrl.trainer.failed_batches import FailedBatches
from hybridrl.trainer.interrupt import StopRequest
from hybridrl.trainer.phases import PhaseTimer

STATE_FILE = "trainer.json"


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
        self._saved_step = -1
        self._looked = False
        self._found: Path | None = None
        self._stop = StopRequest()
        self._cleanup = ExitStack()

    def __enter__(self) -> "TrainingRun":
        self.store.claim()
        write_run_info(self.folder, self.config)
        self._cleanup.enter_context(self._stop)
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._cleanup:
            self.tracking.finish(failed=kind is not None)
            if kind is None and self.trainer.report:
                write_report(self.folder)
                print_summary(self.folder)

    @property
    def is_last(self) -> bool:
        """Whether the loop ends after this step: all steps are done, or the user asked to stop."""
        return self.step >= self.total_steps or self.stop_requested

    @property
    def stop_requested(self) -> bool:
        return self._stop.requested is not None

    def due(self, frequency: int) -> bool:
        """Return whether an action is due that runs every `frequency` steps (never if not positive) and at the end."""
        return frequency > 0 and (self.step % frequency == 0 or self.step >= self.total_steps)

    def batches(self, loader: StatefulLoader) -> Iterator[DataProto]:
        """Yield the loader's batches, epoch after epoch, from the current step to the end of the run."""
        while not self.is_last:
            for batch in loader:
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
        saving = self.timing.get("save_checkpoint")  # of the previous step, which was reported before it was saved
        self.timing.clear()
        if saving is not None:
            self.timing["save_checkpoint"] = saving
        with self.phase("step"):
            yield

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of the current step to every tracking back end."""
        self.tracking.log(dict(metrics), step=self.step)

    def look_for_checkpoint(self) -> None:
        """Find and verify the checkpoint that `restore` will resume from, so that a corrupt or foreign one is refused
        before a model is loaded. This is done only once; `restore` does it if it was not done before.

        Raises:
            CheckpointError: see `RunStore.find`.
        """
        if not self._looked:
            self._found = self.store.find(self.trainer.resume_mode, self.trainer.resume_from_path)
            self._looked = True

    def restore(self, load: Callable[[Path, dict[str, Any]], None]) -> bool:
        """Resume as `trainer.resume_mode` says. `load(folder, state)` gets the verified checkpoint and the state that
        was saved with it.

        Metrics and dumps of later steps, written by a run that died after its checkpoint, are removed.

        Returns:
            Whether there was a checkpoint to resume from.
        """
        self.look_for_checkpoint()
        folder = self._found
        if folder is None:
            self.tracking.cut_after(-1)
            return False
        state = load_json(folder / STATE_FILE)
        load(folder, state["state"])
        self.step = self._saved_step = state["step"]
        self.tracking.cut_after(self.step)
        notify(f"resumed from {folder} (step {self.step} of {self.total_steps})")
        return True

    def go_back(self, folder: Path, load: Callable[[Path, dict[str, Any]], None]) -> None:
        """Verify an earlier checkpoint and call `load(folder, state)` with it. Steps and metrics continue.

        Raises:
            CheckpointError: the checkpoint is corrupt or incomplete.
        """
        found = self.store.find("resume_path", folder)
        assert found is not None
        load(found, load_json(found / STATE_FILE)["state"])

    def save_if_due(self, write: Callable[[Path], dict[str, Any]]) -> None:
        """Save if `trainer.save_freq` or a stop request asks for it. `write(folder)` returns the controller's state."""
        if self.due(self.trainer.save_freq) or self.stop_requested:
            self.save(write)

    def save(self, write: Callable[[Path], dict[str, Any]]) -> None:
        """Write a checkpoint of the current step, unless it already exists."""
        if self.step in (0, self._saved_step):
            return
        with self.phase("save_checkpoint"), self.store.writing(self.step) as folder:
            save_json(folder / STATE_FILE, {"step": self.step, "state": write(folder)})
        self._saved_step = self.step
