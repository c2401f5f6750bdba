"""Reads the shell scripts and command lines of OpenRLHF."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hybridrl.compat.openrlhf.openrlhf_policy import POLICY
from hybridrl.compat.openrlhf.openrlhf_supervised import PAIRS, REWARD_MODEL, SUPERVISED
from hybridrl.compat.projects.imported_projects import imported_project
from hybridrl.compat.projects.option_words import commands_of, option_settings
from hybridrl.compat.projects.project_settings import SettingTable, translate_run
from hybridrl.compat.projects.run_report import RunReport
from hybridrl.errors import ConfigError

#: programs of OpenRLHF by the last part of their module
PROGRAM_TABLES: dict[str, SettingTable] = {
    "train_ppo_ray": POLICY,
    "train_sft": SUPERVISED,
    "train_dpo": PAIRS,
    "train_rm": REWARD_MODEL,
}
_MODULE = re.compile(r"openrlhf[./]cli[./](\w+?)(?:\.py)?$")
_NONE_HERE = {
    "train_kto": "its settings are not read; hybridrl kto trains so (docs/kto.md)",
    "train_kd": "distillation is a part of hybridrl grpo (docs/distillation.md)",
    "train_prm": "a step model is read, not trained (docs/reward_models.md)",
    "train_ppo": "an older version of train_ppo_ray: give its settings to that one",
    "serve_rm": "a reward model runs inside a run: reward.reward_model.enable=True (docs/reward_models.md)",
    "batch_inference": "responses are written by hybridrl generate",
    "lora_combiner": "checkpoints hold the merged model (docs/lora.md)",
}


@imported_project("openrlhf", reads="shell scripts and command lines of openrlhf.cli.train_*")
def openrlhf(words: Sequence[str]) -> list[RunReport]:
    """Report on the runs of a script.

    Args:
        words: the script and its arguments, or `--` and a command line.

    Raises:
        ConfigError: no program of OpenRLHF is started in it.
    """
    reports = []
    started = commands_of(words)
    for command in started.commands:
        places = [(at, match[1]) for at, word in enumerate(command.words) if (match := _MODULE.search(word))]
        if not places:
            continue
        at, name = places[0]
        heading = f"openrlhf.cli.{name}"
        if name not in PROGRAM_TABLES:
            reports.append(RunReport(f"{heading}: {_NONE_HERE.get(name, 'there is no such program here')}"))
            continue
        table = PROGRAM_TABLES[name]
        reports.append(translate_run(table, option_settings(command.words[at + 1 :], table), heading))
    if not reports:
        raise ConfigError(
            f"{words[0]}: it starts no openrlhf.cli.train_ppo_ray, train_sft, train_dpo or train_rm{started.ending}"
        )
    return reports
