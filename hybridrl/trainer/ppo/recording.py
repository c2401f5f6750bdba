"""Scored batches of a run: written as training gets them, and read again in place of generation and scoring.

A run that reads the batches of another one learns from the same tokens, whatever engine generated them. With the same
settings, processes and first weights it ends with the same weights.
"""

import json
import os
from pathlib import Path

from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.errors import UserError
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.sampler import Sampler, ScoredBatch

RECORDING = "recording"
_DUMPS = "~/.hybridrl/rollout_dump"
_OWNER = "settings.json"
_STEP_RESULTS = "recorded"  # in the meta_info of the file: metrics and names of columns


class Recorder:
    """Writes the scored batch of each step.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / RECORDING

    def write(self, step: int, sampled: ScoredBatch) -> None:
        """Write the batch of a step, in place of an earlier one of this step. Errors are those of `write_batch`."""
        write_batch(self.folder, step, sampled)


class ReplayedSampler(Sampler):
    """Returns the recorded batches of a run (`trainer.replay`). Nothing is generated or scored but for validation."""

    def next(self) -> ScoredBatch:
        """Return the recorded batch of the next step."""
        if self.is_out:
            self.release()
        sampled = read_batch(recording_of(str(self.config.trainer.replay)), self.step + 1)
        self.reward_columns, self.is_out = sampled.reward_columns, True
        return sampled

    def enough(self) -> bool:
        return True


class StoringSampler(Sampler):
    """Reads scored batches that an earlier run has stored (`skip.rollout`); the others it generates and stores."""

    def next(self) -> ScoredBatch:
        """Return the stored batch of the next step, or a new one."""
        if self.is_out:
            self.release()
        skip, folder, step = self.config.skip.rollout, stored_batches_of(self.config), self.step + 1
        listed = not skip.steps or step in skip.steps
        source = step if listed else sorted(skip.steps)[(step - 1) % len(skip.steps)]
        if (listed or skip.action == "repeat") and _batch_file(folder, source).exists():
            sampled = read_batch(folder, source)
            self.reward_columns, self.is_out = sampled.reward_columns, True
            return sampled
        sampled = super().next()
        if listed:
            write_batch(folder, step, sampled)
        return sampled


def sampler_class_of(config: PPOTrainerConfig, generating: type[Sampler]) -> type[Sampler]:
    """Return the class of the sampler that reads stored batches where the settings ask for it.

    Args:
        generating: the class that generates and scores.
    """
    if config.trainer.replay is not None:
        return ReplayedSampler
    if config.skip.rollout.enable:
        return type(f"Storing{generating.__name__}", (StoringSampler, generating), {})
    return generating


def stored_batches_of(config: PPOTrainerConfig) -> Path:
    """Return the folder of the batches of `skip.rollout`. Those of other sizes or another experiment have another."""
    data, rollout, trainer = config.data, config.actor_rollout_ref.rollout, config.trainer
    lengths = f"prompt{data.max_prompt_length}_response{data.max_response_length}"
    names = f"{trainer.project_name}_{trainer.experiment_name}".replace("/", "_")
    folder = Path(config.skip.rollout.dump_dir or _DUMPS).expanduser()
    return folder / names / f"batch{data.train_batch_size}_n{rollout.n}_{lengths}"


def check_stored_batches(config: PPOTrainerConfig) -> None:
    """Check that stored batches are those of this run's model and data, and note both where nothing is stored yet.

    Raises:
        UserError: they are another's.
    """
    folder = stored_batches_of(config)
    model = config.actor_rollout_ref.model
    owner = {
        "actor_rollout_ref.model.path": model.path,
        "actor_rollout_ref.model.tokenizer_path": model.tokenizer_path,
        "data.train_files": list(config.data.train_files),
    }
    file = folder / _OWNER
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(owner, indent=1), encoding="utf-8")
        return
    stored = json.loads(file.read_text(encoding="utf-8"))
    for key, value in owner.items():
        if stored.get(key) != value:
            dumps = config.skip.rollout.dump_dir or _DUMPS
            raise UserError(
                f"skip.rollout.dump_dir={dumps}: the batches in {folder} were stored with "
                f"{key}={stored.get(key)}, and this run has {key}={value}. Set another trainer.experiment_name or "
                "dump_dir, or delete that folder"
            )


def write_batch(folder: Path, step: int, sampled: ScoredBatch) -> None:
    """Write the scored batch of a step, in place of an earlier one.

    Raises:
        StorageError: a column holds objects that cannot be stored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = {"metrics": sampled.metrics, "reward_columns": list(sampled.reward_columns)}
    batch = sampled.batch.select()
    batch.meta_info = {**batch.meta_info, _STEP_RESULTS: results}
    if sampled.probe is not None:
        _store(sampled.probe, _probe_file(folder, step))
    _store(batch, _batch_file(folder, step))


def read_batch(folder: Path, step: int) -> ScoredBatch:
    """Return the scored batch of a step that `write_batch` has written."""
    batch = DataProto.load_from_disk(_batch_file(folder, step))
    results = batch.meta_info.pop(_STEP_RESULTS)
    file = _probe_file(folder, step)
    probe = DataProto.load_from_disk(file) if file.exists() else None
    return ScoredBatch(batch, dict(results["metrics"]), {}, tuple(results["reward_columns"]), probe)


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
