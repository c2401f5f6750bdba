"""`hybridrl check PROGRAM key=value ...`: says whether a run would be refused, and what it would do.

It starts no Ray, loads no model and needs no GPU.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from hybridrl.check.findings import Findings
from hybridrl.check.set_keys import describe_settings
from hybridrl.config.command import read_words, refuse_options, user_file
from hybridrl.config.compose import Composed, compose_config
from hybridrl.errors import ConfigError
from hybridrl.plan.devices import DEVICES, Cluster, devices_here, read_devices
from hybridrl.programs import PROGRAMS, TRAINING

_OF_DEVICES = ("devices", "machine")
_ROWS = 64


def main(argv: Sequence[str] | None = None, command: str = "hybridrl check") -> int:
    """Run the command line.

    Returns:
        0; or 2 if the run would be refused, after all reasons.
    """
    args = _arguments(argv, command)
    findings = Findings()
    with contextlib.redirect_stdout(sys.stderr):  # what a dataset or reward function prints
        _check(args, findings, command)
    print(json.dumps(as_data(findings), indent=2, default=str) if args.json else "\n".join(as_lines(findings)))
    return findings.status


def _check(args: argparse.Namespace, findings: Findings, command: str) -> None:
    tree = PROGRAMS[args.program].tree
    named, words = _words_of_devices(tree, args.words)
    composed: Composed | None = findings.attempt(lambda: _composed(args.program, words, command))
    if composed is None:
        return
    for notice in composed.notices:
        findings.say("notices", notice)
    config: Any = composed.config
    if tree == "ppo_trainer":
        placement = config.placement
        named = {"devices": placement.devices, "machine": placement.machine}
    cluster = findings.attempt(lambda: _cluster(named))
    elsewhere = named.get("devices") is not None
    describe_settings(composed, findings)
    from hybridrl.check.run_checks import CheckOptions, check_run  # takes seconds (torch, transformers)

    check_run(findings, config, cluster, CheckOptions(args.rows, elsewhere, not args.no_weights))


def _composed(program: str, words: Sequence[str], command: str) -> Composed:
    tree, defaults = PROGRAMS[program].tree, PROGRAMS[program].defaults
    options = read_words(tree, words, command)
    refuse_options(options)
    return compose_config(tree, options.overrides, *user_file(options), defaults=defaults)


def _words_of_devices(tree: str, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Take `devices=` and `machine=` from the words for programs that have no such settings."""
    if tree == "ppo_trainer":
        return {}, list(words)
    own = {name: value for name, _, value in (word.partition("=") for word in words) if name in _OF_DEVICES}
    return own, [word for word in words if word.partition("=")[0] not in _OF_DEVICES]


def _cluster(named: dict[str, Any]) -> Cluster | None:
    text, machine = named.get("devices"), named.get("machine")
    if text is None:
        return devices_here()
    if machine is not None and not str(machine).isdigit():
        raise ConfigError(f"machine={machine}: must be a number of devices")
    return read_devices(text, None if machine is None else int(machine))


def as_lines(findings: Findings) -> Iterator[str]:
    """Yield the printed text."""
    for title, lines in findings.sections.items():
        yield f"{title}:"
        yield from (f"  {line}" for line in lines)
    for text in findings.warnings:
        yield f"warning: {text}"
    for text in findings.problems:
        yield f"problem: {text}"
    count = len(findings.problems)
    yield f"{count} {'problem' if count == 1 else 'problems'}" if count else "no problem"


def as_data(findings: Findings) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "problems": findings.problems,
        "warnings": findings.warnings,
        "notices": findings.sections.get("notices", []),
        **findings.facts,
    }


def _arguments(argv: Sequence[str] | None, command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command,
        usage=f"%(prog)s {{{','.join(TRAINING)}}} [options] key=value ...",
        description="Say whether a run with these settings would be refused, and why; what its settings are and where "
        "they were set; how its data look to the model; whether the reward function tells answers of the data from "
        "wrong ones; and, for devices=NxDEVICE, what memory and time it would take. Nothing is started.",
        epilog=f"devices: {', '.join(DEVICES)}. Exit status 2 if there is a problem. Other options are those of the "
        "program.",
        allow_abbrev=False,
    )
    parser.add_argument("program", choices=TRAINING, help="the program that the settings are for")
    parser.add_argument("--rows", type=int, default=_ROWS, help="rows of the data to render")
    parser.add_argument("--no-weights", action="store_true", help="the weights of models are on another machine")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args, words = parser.parse_known_args(argv)
    args.words = words
    return args
