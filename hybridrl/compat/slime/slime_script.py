"""Reads the shell scripts and command lines of slime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from hybridrl.compat.projects.imported_projects import imported_project
from hybridrl.compat.projects.option_words import commands_of, option_settings
from hybridrl.compat.projects.project_settings import WrittenSetting, translate_run
from hybridrl.compat.projects.run_report import RunReport
from hybridrl.compat.slime.slime_policy import POLICY
from hybridrl.compat.slime.slime_tuning import TUNING
from hybridrl.errors import ConfigError

_PROGRAMS = ("train.py", "train_async.py")


@imported_project("slime", reads="shell scripts and command lines of train.py and train_async.py")
def slime(words: Sequence[str]) -> list[RunReport]:
    """Report on the runs of a script.

    Args:
        words: the script and its arguments, or `--` and a command line.

    Raises:
        ConfigError: no program of slime is started in it.
    """
    reports = []
    started = commands_of(words)
    for command in started.commands:
        places = [at for at, word in enumerate(command.words) if PurePath(word).name in _PROGRAMS]
        if not places:
            continue
        program = PurePath(command.words[places[0]]).name
        options = command.words[places[0] + 1 :]
        settings = option_settings(options, POLICY)
        tunes = any(item.name == "loss-type" and item.value == "sft_loss" for item in settings)
        table = TUNING if tunes else POLICY
        if program == "train_async.py" and not tunes:
            settings.insert(0, WrittenSetting(program, True, program))
        reports.append(translate_run(table, settings, f"slime's {program}"))
    if not reports:
        raise ConfigError(f"{words[0]}: neither train.py nor train_async.py of slime is started in it{started.ending}")
    return reports
