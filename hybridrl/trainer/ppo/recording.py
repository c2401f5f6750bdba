"""Scored batches of a run: written as training gets them, and read again in place of generation and scoring.

A run that reads the batches of another one learns from the same tokens, whatever engine generated them. With the same
settings, processes and first weights it ends with the same weights.
"""

import os
from pathlib import Path

from hybridrl.errors import UserError
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.sampler import Sampler, ScoredBatch

RECORDING = "recording"
_STEP_RESULTS = "recorded"  # in the meta_info of the file: metrics and names of columns


class Recorder:
    """Writes the scored batch of each step.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / RECORDING

    def write(self, step: int, sampled: ScoredBatch) -> None:
        """Write the batch of a step, in place of an earlier one of this step.

        Raises:
            StorageError: a column holds objects that cannot be stored.
        """
        self.folder.mkdir(exist_ok=True)
        results = {"metrics": sampled.metrics, "reward_columns": list(sampled.reward_columns)}
        batch = sampled.batch.select()
        batch.meta_info = {**batch.meta_info, _STEP_RESULTS: results}
        if sampled.probe is not None:
            _store(sampled.probe, _probe_file(self.folder, step))
        _store(batch, _batch_file(self.folder, step))


class ReplayedSampler(Sampler):
    """Returns the recorded batches of a run (`trainer.replay`). Nothing is generated or scored but for validation."""

    def next(self) -> ScoredBatch:
        """Return the recorded batch of the next step."""
        if self.is_out:
            self.release()
        folder, step = recording_of(str(self.config.trainer.replay)), self.step + 1
        batch = DataProto.load_from_disk(_batch_file(folder, step))
        results = batch.meta_info.pop(_STEP_RESULTS)
        self.reward_columns = tuple(results["reward_columns"])
        file = _probe_file(folder, step)
        probe = DataProto.load_from_disk(file) if file.exists() else None
        self.is_out = True
        return ScoredBatch(batch, dict(results["metrics"]), {}, self.reward_columns, probe)

    def enough(self) -> bool:
        return True


def check_recording(replay: str, steps: int) -> None:
    """Check that a recording has the batches of all steps.

    Args:
        replay: `trainer.replay`.
        steps: of the run that reads them.

    Raises:
        UserError: names the first step that is missing.
    """
    folder = recording_of(replay)
    missing = next((step for step in range(1, steps + 1) if not _batch_file(folder, step).exists()), None)
    if missing is not None:
        raise UserError(
            f"trainer.replay={replay}: {folder} has no batch of step {missing}, and this run has {steps} steps. Record "
            f"a run with trainer.record=True, or set trainer.total_training_steps={missing - 1 or 1}"
        )


def recording_of(replay: str) -> Path:
    """Return the folder of the batches of `trainer.replay`, which is that of a run or of its recording."""
    folder = Path(replay).expanduser()
    return folder if folder.name == RECORDING else folder / RECORDING


def _batch_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:05d}.safetensors"


def _probe_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:05d}_probe.safetensors"


def _store(batch: DataProto, path: Path) -> None:
    """Write a batch such that the file is there as a whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    batch.save_to_disk(unfinished)
    os.replace(unfinished, path)
