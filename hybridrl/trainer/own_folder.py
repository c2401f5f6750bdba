"""The folder of a run, settled before anything starts: no run continues another experiment."""

import contextlib
import itertools
from dataclasses import fields
from pathlib import Path

from hybridrl.checkpoint import RunStore, load_json
from hybridrl.config import PPOTrainerConfig, RunConfig, SupervisedConfig
from hybridrl.errors import CheckpointError
from hybridrl.notify import notify
from hybridrl.observe.run_folder import CONFIG
from hybridrl.trainer.experiment import EXPERIMENT, STATE_FILE, Definition, definition_of
from hybridrl.trainer.settings_change import OtherExperimentError, check_same_experiment, compare


def settle_folder(config: PPOTrainerConfig | SupervisedConfig) -> None:
    """Refuse to resume from a run of another experiment, or give this one a new folder, if the user has named none.

    The folder is named by nobody if `trainer.experiment_name` and `trainer.default_local_dir` have their defaults. Both
    are set then: to the first of NAME-2, NAME-3, ... that is new, or that holds this experiment.

    Raises:
        OtherExperimentError: `trainer.resume_mode=auto` would continue another experiment in a folder that was named.
    """
    trainer = config.trainer
    folder = Path(trainer.default_local_dir)
    if trainer.resume_mode != "auto" or not _newest(folder):
        return
    definition = definition_of(config)
    try:
        _check(folder, config, definition)
        return
    except OtherExperimentError as error:
        if not _is_default(trainer):
            if error.is_another_model:  # the checkpoint itself says in which sizes (`RunStore.find`)
                return
            raise
        reason = error.reason
    for number in itertools.count(2):
        name = f"{trainer.experiment_name}-{number}"
        try:
            _check(folder.with_name(name), config, definition)
        except OtherExperimentError:
            continue
        break
    trainer.experiment_name, trainer.default_local_dir = name, str(folder.with_name(name))
    state = "continues in" if _newest(folder.with_name(name)) else "gets the new folder"
    notify(f"{reason}, so this one {state} {trainer.default_local_dir}")


def _check(folder: Path, config: PPOTrainerConfig | SupervisedConfig, definition: Definition) -> None:
    checkpoint = _newest(folder)
    if checkpoint is None and not (folder / CONFIG).is_file():
        return
    record = None
    with contextlib.suppress(CheckpointError, AttributeError):  # a corrupt one is skipped when it is verified
        record = None if checkpoint is None else load_json(checkpoint / STATE_FILE).get(EXPERIMENT)
    check_same_experiment(folder, compare(folder, config, record, definition))


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint, whose files are not verified yet."""
    if not folder.is_dir():
        return None
    store = RunStore(folder)
    step = store.newest()
    return None if step is None else store.folder(step)


def _is_default(trainer: RunConfig) -> bool:
    default = next(field.default for field in fields(RunConfig) if field.name == "experiment_name")
    folder = Path("checkpoints") / trainer.project_name / trainer.experiment_name
    return trainer.experiment_name == default and Path(trainer.default_local_dir) == folder
