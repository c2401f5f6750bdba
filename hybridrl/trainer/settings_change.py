"""Changes between the settings that a run began with and those it is resumed with.

`config.yaml` in the run's folder holds the settings of its first start. Each resume with other settings adds an entry
to `config_changes.yaml` next to it, so that the settings of every step are known afterwards.
"""

import datetime
import functools
import operator
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from hybridrl.config.convert import show
from hybridrl.config.differences import leaves
from hybridrl.config.entry_mappings import idle_settings, names_model, open_mappings
from hybridrl.config.places import absolute_value, same_place
from hybridrl.config.schema.node import ConfigNode, declared, default_tree
from hybridrl.errors import CheckpointError, UserError
from hybridrl.observe.run_folder import CHANGES, CONFIG, read_changes, settings_of
from hybridrl.trainer.experiment import (
    DATA,
    Definition,
    changed_keys,
    changed_parts,
    compared_keys,
    definition_of,
    shown_content,
)
from hybridrl.utils.files import write_text

_HOW_TO_RESUME = ("trainer.resume_mode", "trainer.resume_from_path")
_MODELS = (
    "actor_rollout_ref.model.path",
    "critic.model.path",
    "reward.reward_model.model.path",
    "model.path",
)
#: begins the name of a change of what a setting names
_CONTENT_OF = "content of "
_LOSSES = (
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "sft.loss_type",
    "dpo.loss_type",
    "kto.loss_type",
    "rm.loss_type",
)
_DISTILLATION = ("distillation.enabled", "distillation.distillation_loss.loss_mode")
_EXPERIMENT = ("algorithm.adv_estimator", *_LOSSES, *_DISTILLATION)
#: the program of a run, by a group of settings that only its tree has
_PROGRAMS = {"actor_rollout_ref": "main_ppo", "dpo": "main_dpo", "kto": "main_kto", "rm": "main_rm"}


class OtherExperimentError(CheckpointError):
    """A folder holds a run of another experiment.

    Args:
        reason: says so without the remedies.
        remedies: what to do.
        is_another_model: whether it is of another model.
    """

    def __init__(self, reason: str, remedies: str, is_another_model: bool = False) -> None:
        super().__init__(f"{reason}{remedies}")
        self.reason = reason
        self.is_another_model = is_another_model


@dataclass(frozen=True)
class SettingChange:
    """A setting with its value before and now.

    Attributes:
        redefines: whether what it names has another content; None: contents were not compared.
        parts: the names of the files that have another content.
    """

    key: str
    was: Any
    now: Any
    redefines: bool | None = None
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = f" (in {', '.join(self.parts[:5])}{', ...' * (len(self.parts) > 5)})" if self.parts else ""
        return f"{self.key} was {show(self.was)}, now {show(self.now)}{parts}"

    @property
    def is_another_experiment(self) -> bool:
        """Whether the run would go on with another model, other data, another algorithm, reward or environment."""
        if self.redefines is not None:
            return self.redefines
        if self.key == DATA or _is_model(self.key):
            return _absolute(self.was) != _absolute(self.now)
        return self.key in _EXPERIMENT


def find_changes(folder: Path, config: ConfigNode) -> list[SettingChange]:
    """Compare `config` with the settings that the run in `folder` had last. Empty if they are not recorded there.

    Settings that only follow another one are left out, and so are settings that the earlier version did not have.
    Those of roles and teachers are compared one by one.

    Raises:
        OtherExperimentError: the folder holds a run of another program.
        CheckpointError: its settings cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        return []
    try:
        first = yaml.safe_load(path.read_text(encoding="utf-8"))
        groups = set(first)
        earlier = dict(leaves(first, set(declared(type(config)))))
        for entry in read_changes(folder):
            earlier |= {key: change["now"] for key, change in entry["changes"].items()}
        # earlier versions wrote paths as they were given
        earlier = {key: absolute_value(type(config), key, value) for key, value in earlier.items()}
    except (OSError, UserError, yaml.YAMLError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} or {CHANGES} next to it cannot be read ({type(error).__name__}: {error}), so it is unknown "
            "whether this run continues that one; remove both to continue with the present settings"
        ) from error
    tree = yaml.safe_load(yaml.safe_dump(settings_of(config)))
    earlier_program, program = _program_of(groups), _program_of(tree)
    if earlier_program != program:
        raise OtherExperimentError(
            f"{folder} holds a run of {earlier_program}, and this is {program}",
            ": set trainer.default_local_dir to another folder",
        )
    now = dict(leaves(tree, set(declared(type(config)))))
    open_mappings(earlier, now)
    idle = tuple(idle_settings(config))
    changes = [
        SettingChange(key, earlier[key], value)
        for key, value in now.items()
        if key in earlier and earlier[key] != value and key not in _HOW_TO_RESUME
        if not key.startswith(idle) or key == "reward.reward_model.enable"
    ]
    return [change for change in changes if not _only_follows(change, earlier, now, type(config))]


def _program_of(groups: Collection[str]) -> str:
    """The program whose configuration has these groups; those of the first versions had no group `sft`."""
    return next((program for group, program in _PROGRAMS.items() if group in groups), "main_sft")


def compare(
    folder: Path, config: ConfigNode, before: Definition | None, now: Definition | None = None
) -> list[SettingChange]:
    """Compare the settings of `config`, and the contents of files that they name, with those of the run in `folder`.

    Args:
        before: what its checkpoint has recorded (see `hybridrl.trainer.experiment`); None: an earlier version saved it.
        now: the same of `config`; None: it is computed.

    Raises:
        CheckpointError: see `find_changes`.
    """
    changes = find_changes(folder, config)
    if before is None:
        return changes
    now = definition_of(config) if now is None else now
    redefined = changed_keys(before, now)
    compared = set(redefined) | compared_keys(before, now)
    changes = [
        replace(change, redefines=change.key in redefined) if change.key in compared else change for change in changes
    ]
    by_value = {change.key for change in changes}
    contents: dict[
        tuple[str | None, str | None], SettingChange
    ] = {}  # settings that follow another one have its content
    for key in redefined:
        pair = (shown_content(key, before), shown_content(key, now))
        if pair == (None, None) and key not in by_value:
            pair = (before["values"].get(key), now["values"].get(key))
        if pair != (None, None):
            parts = tuple(changed_parts(key, before, now))
            contents.setdefault(pair, SettingChange(f"{_CONTENT_OF}{key}", *pair, redefines=True, parts=parts))
    return [*changes, *contents.values()]


def check_same_experiment(folder: Path | str, changes: list[SettingChange]) -> None:
    """Refuse to continue a run as another experiment.

    Args:
        folder: of the run, or the address of its copies.
        changes: what is different.

    Raises:
        OtherExperimentError: the model, the data, the reward, the environment or the algorithm are others; names the
            settings and the remedies.
    """
    setting = (
        "trainer.remote_dir" if isinstance(folder, str) else "trainer.default_local_dir (or trainer.experiment_name)"
    )
    others = [str(change) for change in changes if change.is_another_experiment]
    if others:
        raise OtherExperimentError(
            f"trainer.resume_mode=auto would continue the run in {folder} as another experiment: {'; '.join(others)}",
            f". Set {setting} to another folder, or "
            "trainer.resume_mode=disable to start over in this one. To continue that run with the new values on "
            "purpose: trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N",
            any(change.is_another_experiment and _is_model(change.key.removeprefix(_CONTENT_OF)) for change in changes),
        )


def record_changes(folder: Path, step: int, changes: list[SettingChange]) -> None:
    """Add the changes of this start to `config_changes.yaml`."""
    entry = {
        "after_step": step,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "changes": {change.key: {"was": change.was, "now": change.now} for change in changes},
    }
    text = yaml.safe_dump([*read_changes(folder), entry], sort_keys=False, allow_unicode=True, width=120)
    write_text(folder / CHANGES, text)


def _only_follows(change: SettingChange, earlier: Mapping[str, Any], now: Mapping[str, Any], root: type) -> bool:
    """Whether the setting has its default both times, and that default is the value of another setting."""
    default = default_tree(root)
    try:
        raw = functools.reduce(operator.getitem, change.key.split("."), default)
    except (KeyError, TypeError):
        return False
    if "${" not in str(raw):
        return False
    return all(
        same_place(_resolved(change.key, raw, values), value)
        for values, value in ((earlier, change.was), (now, change.now))
    )


def _resolved(key: str, raw: Any, values: Mapping[str, Any]) -> Any:
    """The value that an interpolation at `key` has among other values."""
    config = OmegaConf.create({})
    for name, value in {**values, key: raw}.items():
        OmegaConf.update(config, name, value, force_add=True)
    selected = OmegaConf.select(config, key)
    return OmegaConf.to_container(selected, resolve=True) if OmegaConf.is_config(selected) else selected


def _is_model(key: str) -> bool:
    return key in _MODELS or names_model(key)


def _absolute(value: Any) -> list[str]:
    paths = value if isinstance(value, list) else [value]
    return [path if "://" in str(path) else os.path.abspath(os.path.expanduser(str(path))) for path in paths]
