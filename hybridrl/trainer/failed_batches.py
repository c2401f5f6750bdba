"""Keeps the batches whose update or scoring failed in the run's folder, so that they can be examined and replayed."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.protocol.storage import StorageError
from hybridrl.single_controller import WorkerError
from hybridrl.utils.metrics import Metric

KEPT_BATCHES = 8  # a run that skips many updates must not fill the disk


class FailedBatches:
    """Keeps the batches whose update or scoring failed.

    Args:
        folder: the run's folder. A batch is written to `failed_batch_step_N` in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def keeping(self, batch: DataProto, step: int, kind: type[Exception] = WorkerError) -> Iterator[None]:
        """Keep `batch` if a worker fails inside the block. The error says where the batch was written.

        Args:
            kind: the class of the errors for which it is kept.
        """
        try:
            yield
        except kind as error:
            error.add_note(self.keep(batch, step))
            raise

    def keep_if_skipped(self, batch: DataProto, step: int, metrics: Mapping[str, Iterable[Metric]]) -> None:
        """Keep the batch of an update in which a step was skipped (`trainer.on_nonfinite=skip`), and report it.

        Args:
            metrics: the metrics that the workers' update returned.
        """
        if any(
            float(metric.value) > 0 for name in metrics if name.endswith("/skipped_steps") for metric in metrics[name]
        ):
            message = f"step {step}: loss or gradient is not finite; the update was skipped (trainer.on_nonfinite=skip)"
            notify(f"{message}; {self.keep(batch, step)}", "warning")

    def keep(self, batch: DataProto, step: int) -> str:
        """Write the batch and return a sentence for a message that says where it is, or why it was not written."""
        path = self.folder / f"failed_batch_step_{step}"
        if len(list(self.folder.glob("failed_batch_step_*"))) >= KEPT_BATCHES and not path.exists():
            return f"the batch of this update is not kept: {KEPT_BATCHES} are in {self.folder} already"
        present = [name for name in ("temperature",) if name in batch.meta_info]
        try:
            batch.select(meta_info_keys=present).save_to_disk(path)
        except (OSError, StorageError) as error:  # must not hide the failure
            return f"the batch of this update could not be kept in {path}: {error}"
        return f"the batch of this update is kept in {path} (DataProto.load_from_disk)"
