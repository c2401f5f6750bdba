"""Scored batches of a run: written as training gets them, and read again in place of generation and scoring.

A run that reads the batches of another one learns from the same tokens, whatever engine generated them. With the same
settings, processes and first weights it ends with the same weights.
"""

import json
import os
from pathlib import Path
from typing import Any

from hybridrl.config import as_dict
from hybridrl.config.convert import show
from hybridrl.config.differences import leaves
from hybridrl.config.entry_mappings import idle_settings
from hybridrl.config.places import place_of
from hybridrl.config.schema.node import declared
from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.data.group_scores import GroupScore
from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.trainer.experiment import changed_keys, definition_of
from hybridrl.trainer.ppo.sampler import Sampler, ScoredBatch
from hybridrl.utils.files import write_text

RECORDING = "recording"
_DUMPS = "~/.hybridrl/rollout_dump"
_ORIGIN, _BATCHES = "origin.json", "step_*.safetensors"
_ROLLOUT = "actor_rollout_ref.rollout."
#: what makes batches: settings that take part by what they name (`hybridrl.trainer.experiment`)
_MAKING = ("data.", "reward.", "roles.", "actor_rollout_ref.model.", _ROLLOUT)
#: and those that take part by their values
_DECIDING = (
    "data.",
    *(f"{_ROLLOUT}{name}" for name in ("temperature", "top_k", "top_p", "do_sample", "ignore_eos", "stop", "seed")),
    "algorithm.filter_groups.",
)
#: but these, of validation, or of how data are read
_ELSEWHERE = (
    *(f"data.{name}" for name in ("val_", "validation_", "dataloader_num_workers", "filter_overlong_prompts_workers")),
)
_STEP_RESULTS = "recorded"  # in the meta_info of the file: metrics and names of columns


class Recorder:
    """Writes the scored batch of each step, and what made these batches.

    Args:
        folder: of the run.
        config: of the run.
    """

    def __init__(self, folder: Path, config: PPOTrainerConfig) -> None:
        self.folder = folder / RECORDING
        self._config = config
        self._has_begun = False

    def write(self, step: int, sampled: ScoredBatch) -> None:
        """Write the batch of a step, in place of an earlier one of this step. Errors are those of `write_batch`."""
        if not self._has_begun:
            write_origin(self.folder, self._config)
            self._has_begun = True
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
    """Check that stored batches were made as this run would make them. Note how, where nothing is stored yet.

    Raises:
        UserError: they were made from other data, with another model or sampling, or with another reward.
    """
    folder = stored_batches_of(config)
    dumps = f"skip.rollout.dump_dir={config.skip.rollout.dump_dir or _DUMPS}"
    if not (folder / _ORIGIN).exists():
        if any(folder.glob(_BATCHES)):
            raise UserError(f"{dumps}: {folder} has batches, and no {_ORIGIN} that says how they were made. Delete it")
        write_origin(folder, config)
        return
    if changes := _changes_since(folder, config):
        raise UserError(
            f"{dumps}: the batches in {folder} were stored with another {', another '.join(changes)}. Set another "
            "trainer.experiment_name or dump_dir, or delete that folder"
        )


def write_origin(folder: Path, config: PPOTrainerConfig) -> None:
    """Note what makes the batches of a run: data, model, sampling and reward, files by their contents."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / _ORIGIN, json.dumps(_origin_of(config), indent=1))


def _origin_of(config: PPOTrainerConfig) -> dict[str, Any]:
    without_effect = (*_ELSEWHERE, *idle_settings(config))
    settings = {
        key: value
        for key, value in leaves(as_dict(config), set(declared(type(config))))
        if key.startswith(_DECIDING) and not key.startswith(without_effect) and place_of(type(config), key) is None
    }
    return {"settings": settings, "definition": definition_of(config)}


def _changes_since(folder: Path, config: PPOTrainerConfig) -> list[str]:
    """Return the settings that made other batches of those in a folder; none if it does not say how they were made."""
    file = folder / _ORIGIN
    if not file.exists():
        return []
    origin, now = json.loads(file.read_text(encoding="utf-8")), json.loads(json.dumps(_origin_of(config)))
    keys = [key for key in changed_keys(origin["definition"], now["definition"]) if key.startswith(_MAKING)]
    before, after = origin["settings"], now["settings"]
    keys += [key for key in before if key in after and before[key] != after[key]]
    return [
        f"{key} ({show(before[key])}, now {show(after[key])})" if key in before and key in after else key
        for key in dict.fromkeys(keys)
    ]


def write_batch(folder: Path, step: int, sampled: ScoredBatch) -> None:
    """Write the scored batch of a step, in place of an earlier one.

    Raises:
        StorageError: a column holds objects that cannot be stored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = {
        "metrics": sampled.metrics,
        "reward_columns": list(sampled.reward_columns),
        "groups": [list(group) for group in sampled.groups],
    }
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
    groups = tuple(GroupScore(*group) for group in results.get("groups", []))  # earlier versions wrote none
    return ScoredBatch(batch, dict(results["metrics"]), {}, tuple(results["reward_columns"]), probe, groups)


def check_recording(config: PPOTrainerConfig, steps: int) -> None:
    """Check that the recording of `trainer.replay` has the batches of all steps.

    Settings that would make other batches have no effect. A notice names them.

    Args:
        config: of the run that reads them.
        steps: of that run.

    Raises:
        UserError: names the first step that is missing.
    """
    replay = str(config.trainer.replay)
    folder = recording_of(replay)
    missing = next((step for step in range(1, steps + 1) if not _batch_file(folder, step).exists()), None)
    if missing is not None:
        raise UserError(
            f"trainer.replay={replay}: {folder} has no batch of step {missing}, and this run has {steps} steps. Record "
            f"a run with trainer.record=True, or set trainer.total_training_steps={missing - 1 or 1}"
        )
    if changes := _changes_since(folder, config):
        notify(
            f"trainer.replay={replay}: tokens and scores are those of the recording, which was made with another "
            f"{', another '.join(changes)}",
            "warning",
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
