"""Reads the TOML files, command lines and shell scripts of prime-rl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridrl.compat.prime_rl.prime_rl_policy import POLICY, preparation
from hybridrl.compat.prime_rl.prime_rl_tuning import TUNING
from hybridrl.compat.prime_rl.toml_files import settings_of_words
from hybridrl.compat.projects.imported_projects import imported_project
from hybridrl.compat.projects.option_words import commands_of
from hybridrl.compat.projects.project_settings import ProjectValues, WrittenSetting, translate_run
from hybridrl.compat.projects.run_report import RunReport
from hybridrl.errors import ConfigError

_PROGRAMS = ("rl", "sft")
_PARTS = ("trainer", "orchestrator", "inference", "evals", "env-server")


@imported_project("prime-rl", reads="TOML files, command lines and shell scripts of rl and sft")
def prime_rl(words: Sequence[str]) -> list[RunReport]:
    """Report on the runs of a TOML file with options, of a command line or of a script.

    Args:
        words: `FILE.toml [OPTIONS]`, `@ FILE.toml [OPTIONS]`, `-- uv run rl @ FILE.toml [OPTIONS]`, or a shell script
            with its arguments.

    Raises:
        ConfigError: a file cannot be read, or no program of prime-rl is started in the script.
    """
    if words[0].endswith(".toml"):
        return [_report("", ["@", *words], Path.cwd())]
    if words[0] == "@":
        return [_report("", words, Path.cwd())]
    reports = []
    started = commands_of(words)
    for command in started.commands:
        line = command.words
        places = [at for at, word in enumerate(line) if word in _PROGRAMS and any(each == "@" or each.startswith("--")
                  for each in line[at + 1 :])]  # fmt: skip
        if places:
            reports.append(_report(line[places[0]], line[places[0] + 1 :], command.folder))
        elif line[:2] == ["uv", "run"] and len(line) > 2 and line[2] in _PARTS:
            reports.append(
                RunReport(f"uv run {line[2]}: one part of a run; give the command of rl, which has them all")
            )
    if not reports:
        raise ConfigError(
            f"{words[0]}: neither rl nor sft of prime-rl is started in it{started.ending}, and it is no TOML file"
        )
    return reports


def _report(program: str, words: Sequence[str], folder: Path) -> RunReport:
    settings = settings_of_words(words, folder)
    program = program or _program_of(settings)
    if program not in _PROGRAMS:
        return RunReport(f"settings of {program}: one part of a run; give the file of rl, which has them all")
    table = POLICY if program == "rl" else TUNING
    report = translate_run(table, settings, f"prime-rl's {program}")
    if program == "rl":
        report.preparation = preparation(ProjectValues(table, settings))
    return report


def _program_of(settings: Sequence[WrittenSetting]) -> str:
    """The program that a file is for: that of reinforcement learning has an orchestrator."""
    groups = {item.name.split(".")[0] for item in settings}
    if not groups & {"orchestrator", "trainer", "data", "optim", "val"}:
        if groups & {"vllm", "server", "router"}:
            return "inference"
        if "eval" in groups:
            return "evals"
    return "sft" if groups & {"data", "optim", "val"} and not groups & {"orchestrator", "trainer"} else "rl"
