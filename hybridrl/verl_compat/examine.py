"""Whether verl's commands can run here, and what becomes of each of their settings; nothing is started."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybridrl.config.checks.check_run import check
from hybridrl.config.command import read_words, refuse_options, user_file
from hybridrl.config.compose import compose_config, configs_folder, parse_overrides
from hybridrl.config.verl.keys import key_book
from hybridrl.errors import ConfigError
from hybridrl.verl_compat.shell import ScriptCommand

State = Literal["mapped", "no effect here", "not supported"]


@dataclass(frozen=True)
class Setting:
    """The state of one word of a command, and the reason."""

    word: str
    state: State
    why: str = ""


@dataclass
class Examined:
    """Whether one command can run here.

    Attributes:
        command: the command.
        faults: every reason why it cannot; empty if it can.
        notices: what a run would tell the user before it starts.
    """

    command: ScriptCommand
    faults: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def examine(command: ScriptCommand, placeholders: "Placeholders | None" = None) -> Examined:
    """Compose and check a command without starting anything.

    Args:
        command: the command.
        placeholders: replace the files, models and devices that the command names; None: they must exist.
    """
    examined, program = Examined(command), command.program
    if program is None:
        examined.faults.append(f"{command.module}: not a program that this library knows")
        return examined
    if program.tree is None:
        examined.faults.append(f"{command.module}: {program.why}. {program.instead}")
        return examined
    with contextlib.chdir(command.folder if command.folder.is_dir() else Path.cwd()):
        try:
            words = read_words(program.tree, command.words)
            refuse_options(words)
            composed = compose_config(program.tree, words.overrides, *user_file(words), defaults=program.defaults)
            if placeholders is not None:
                placeholders.put(composed.config)
            examined.notices = [*composed.notices, *check(composed.config)]  # type: ignore[arg-type]
        except ConfigError as error:
            examined.faults.extend(error.faults)
    return examined


def settings_of(command: ScriptCommand, faults: Sequence[str] = ()) -> list[Setting]:
    """Return the state of each word of a command; none if the program does not exist here.

    Args:
        faults: the faults from `examine`, by which words are marked that are wrong only in combination.
    """
    if command.program is None or command.program.tree is None:
        return []
    tree = command.program.tree
    return [_setting(tree, word, faults) for word in read_words(tree, command.words).overrides]


def _setting(tree: str, word: str, of_command: Sequence[str]) -> Setting:
    book, faults = key_book(tree), list[str]()
    parsed = parse_overrides([word], book, [configs_folder()], faults)
    outcome = book.rewrite(parsed.assignments)
    faults += outcome.faults
    if not faults:
        keys = [item.key for item in outcome.assignments]
        faults += [fault for fault in of_command if any(re.match(rf"{re.escape(key)}(?![\w.])", fault) for key in keys)]
    notices = [*parsed.notices, *outcome.notices()]
    if faults:
        return Setting(word, "not supported", "; ".join(faults))
    acts = bool(outcome.assignments or parsed.choices or not notices)
    return Setting(word, "mapped" if acts else "no effect here", "; ".join(notices))


@dataclass(frozen=True)
class Placeholders:
    """Stand-ins for what a machine that only reads a script does not have: data, models, reward functions, GPUs.

    Args:
        folder: an existing folder, for the files.
    """

    folder: Path

    def put(self, config: Any) -> None:
        """Replace them in a typed configuration, wherever the command has set them."""
        file = self.folder / "data.parquet"
        function = self.folder / "functions.py"
        for path in (file, function):
            path.touch()
        data = config.data
        for name in ("train_files", "val_files", "path"):
            if getattr(data, name, None):
                setattr(data, name, [str(file)])
        self._put_models(config, function)
        reward = getattr(config, "reward", None)
        for owner, name in (
            (getattr(data, "custom_cls", None), "path"),
            (getattr(data, "sampler", None), "class_path"),
            (getattr(reward, "custom_reward_function", None), "path"),
            (getattr(getattr(reward, "reward_manager", None), "module", None), "path"),
        ):
            if owner is not None and getattr(owner, name) is not None:
                setattr(owner, name, str(function))
        if (ray := getattr(config, "ray_kwargs", None)) is not None:
            ray.ray_init["address"] = "auto"  # the devices of a cluster are counted when Ray runs
        trainer = getattr(config, "trainer", None)
        if trainer is not None and getattr(trainer, "resume_from_path", None) is not None:
            checkpoint = self.folder / "global_step_1"
            checkpoint.mkdir(exist_ok=True)
            trainer.resume_from_path = str(checkpoint)

    @staticmethod
    def _put_models(config: Any, function: Path) -> None:
        models = [getattr(config, "model", None)]
        scoring = getattr(getattr(config, "reward", None), "reward_model", None)
        for owner in (getattr(config, "actor_rollout_ref", None), getattr(config, "critic", None), scoring):
            models.append(getattr(owner, "model", None))
        for model in models:
            for name in ("path", "tokenizer_path", "hf_config_path"):
                if model is not None and getattr(model, name):
                    setattr(model, name, "organisation/model")
