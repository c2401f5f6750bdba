"""The programs of hybridrl by name, and the command `hybridrl NAME ...` that runs them (also `python -m hybridrl`).

Only the standard library is imported here, so that a Python without the packages gets one line instead of a traceback.
"""

import difflib
import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

STOPPED = 75  # EX_TEMPFAIL: the run was asked to stop; the same command continues it


@dataclass(frozen=True)
class ProgramSpec:
    """One program.

    Attributes:
        summary: what it does, for `hybridrl --help`.
        tree: its configuration (`hybridrl.config.load_config`).
        function: `module:name` of the function that is called with the configuration.
        defaults: values by key that replace defaults of the tree; files and words replace them in turn.
        with_suites: the program that runs in its place where the option `--suite` names benchmark suites.
    """

    summary: str
    tree: str
    function: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    with_suites: str | None = None

    def load(self) -> Callable[..., Any]:
        """Import the function; with it come torch and Ray, which `--help` and `--cfg` do not need."""
        module, _, name = self.function.partition(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return loaded


@dataclass(frozen=True)
class ProgramResult:
    """Outcome of a training program.

    Attributes:
        folder: the run's folder.
        step: the last step that was completed.
        total_steps: the step after which the run is complete.
        checkpoint: the last checkpoint; None if there is none.
        stopped_by: the signal that asked the run to stop before that step; None if there was none.
        ended_early: it ended before that step because its validations did not improve any more.
        best_checkpoint: the best checkpoint by `trainer.best_metric`; None if there is none.
    """

    folder: Path
    step: int
    total_steps: int
    checkpoint: Path | None = None
    stopped_by: str | None = None
    ended_early: bool = False
    best_checkpoint: Path | None = None

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        return self.step >= self.total_steps or self.ended_early

    @property
    def exit_code(self) -> int:
        """The exit status of the program: 0, or 75 for a run that was asked to stop and can be resumed."""
        return 0 if self.stopped_by is None else STOPPED


_RUN_PPO = "hybridrl.trainer.ppo.run_ppo:run_ppo"
_RUN_SUPERVISED = "hybridrl.trainer.supervised.run_supervised:run_supervised"
_FORECAST_SUPERVISED = "hybridrl.forecast.supervised_run:print_forecast"
PROGRAMS = {
    "grpo": ProgramSpec(
        "GRPO and other methods without a critic; samples 8 responses per prompt unless rollout.n says otherwise",
        "ppo_trainer",
        _RUN_PPO,
        {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8},
    ),
    "ppo": ProgramSpec(
        "PPO with a critic, and every other estimator by algorithm.adv_estimator", "ppo_trainer", _RUN_PPO
    ),
    "sft": ProgramSpec("supervised fine-tuning", "sft_trainer", _RUN_SUPERVISED),
    "dpo": ProgramSpec("DPO and other preference optimisation on pairs of answers", "dpo_trainer", _RUN_SUPERVISED),
    "kto": ProgramSpec("KTO and other preference optimisation on answers with a label", "kto_trainer", _RUN_SUPERVISED),
    "rm": ProgramSpec("train a reward model on pairs of answers", "rm_trainer", _RUN_SUPERVISED),
    "forecast": ProgramSpec(
        "print the memory that grpo or ppo would take with the same settings, and start nothing",
        "ppo_trainer",
        "hybridrl.forecast.ppo_run:print_forecast",
    ),
    "forecast sft": ProgramSpec("the same for sft", "sft_trainer", _FORECAST_SUPERVISED),
    "forecast dpo": ProgramSpec("the same for dpo", "dpo_trainer", _FORECAST_SUPERVISED),
    "forecast kto": ProgramSpec("the same for kto", "kto_trainer", _FORECAST_SUPERVISED),
    "forecast rm": ProgramSpec("the same for rm", "rm_trainer", _FORECAST_SUPERVISED),
    "generate": ProgramSpec(
        "write responses to the prompts of a file",
        "generation",
        "hybridrl.trainer.generation.run_generation:run_generation",
    ),
    "eval": ProgramSpec(
        "score the responses in a file, by data source; with --suite NAME,NAME the same as eval suite",
        "evaluation",
        "hybridrl.trainer.evaluation:run_evaluation",
        with_suites="eval suite",
    ),
    "eval suite": ProgramSpec(
        "write responses to benchmark suites, and score them",
        "suite_evaluation",
        "hybridrl.trainer.suites.suite_evaluation:run_suites",
        {"data.output_path": "outputs/suites/responses.parquet"},
        with_suites="eval suite",
    ),
}


#: the programs that train
TRAINING = ("grpo", "ppo", "sft", "dpo", "kto", "rm")


@dataclass(frozen=True)
class SubCommand:
    """A command with options of its own in place of settings.

    Attributes:
        summary: what it does, for `hybridrl --help`.
        function: `module:name` of the function that is called with the words after the command and with the command; it
            returns the exit status.
    """

    summary: str
    function: str

    def run(self, words: Sequence[str], command: str) -> int:
        """Call the function."""
        module, _, name = self.function.partition(":")
        status: int = getattr(importlib.import_module(module), name)(words, command=command)
        return status


COMMANDS = {
    "report": SubCommand("write the report of a run's folder and print its summary", "hybridrl.observe.report:main"),
    "compare": SubCommand(
        "compare the validations of runs, prompt by prompt, with intervals", "hybridrl.observe.compare_command:main"
    ),
    "reward-bench": SubCommand(
        "measure reward functions on the responses in a file, and compare them", "hybridrl.reward.bench:main"
    ),
    "import": SubCommand(
        "tell what becomes of the settings of a script for TRL, OpenRLHF, slime or prime-rl, with the command to paste",
        "hybridrl.compat.import_command:main",
    ),
    "check": SubCommand(
        "say before a run whether its settings, data and reward function work, and start nothing",
        "hybridrl.check.check_command:main",
    ),
    "plan": SubCommand(
        "predict the fastest placement and layouts of grpo or ppo on devices that you name",
        "hybridrl.plan.plan_command:main",
    ),
    "certify": SubCommand(
        "train a small model in many arrangements, and tell which end with the same weights",
        "hybridrl.trainer.certify.certify_command:main",
    ),
    "simulate": SubCommand(
        "compare synchronous and asynchronous schedules, from latencies", "hybridrl.simulation.simulate_command:main"
    ),
    "check model": SubCommand(
        "try a model: files, template, training and generation against transformers",
        "hybridrl.model_check.check_model_command:main",
    ),
    "explain": SubCommand(
        "say what a setting means, what it is in a run, and whether it acts", "hybridrl.trainer.explain_command:main"
    ),
    "completion": SubCommand(
        "print a script that has bash, zsh or fish complete commands and settings", "hybridrl.trainer.completion:main"
    ),
    "serve": SubCommand(
        "serve a base model whose adapters clients of another API train (--tinker)",
        "hybridrl.tinker.serve_command:main",
    ),
    "sandbox-server": SubCommand("run programs in a sandbox, for others, over HTTP", "hybridrl.sandbox.server:main"),
}


def start(
    name: str, command: str, argv: Sequence[str] | None = None, defaults: Mapping[str, Any] | None = None
) -> None:
    """Run a program's command line (`hybridrl.config.cli`).

    Args:
        name: a name from `PROGRAMS`, which may have two words.
        command: how the user called it, for `--help`.
        argv: the words after the command; those of the process by default.
        defaults: values by key that replace the program's own.
    """
    program = PROGRAMS[name]
    words = list(sys.argv[1:] if argv is None else argv)
    if program.with_suites is not None and (suites := _suite_words(words, command)) is not None:
        program, words = PROGRAMS[program.with_suites], suites
    own_defaults = {**program.defaults, **(defaults or {})}

    def run(config: Any) -> int:
        return getattr(program.load()(config), "exit_code", 0)

    try:
        if not {"-m", "--multirun"}.isdisjoint(words):
            sweep = importlib.import_module("hybridrl.trainer.sweep").sweep
            if status := sweep(program.tree, run, words, command=command, defaults=own_defaults):
                raise SystemExit(status)
            return
        from hybridrl.config import cli

        cli(program.tree, run, words, command=command, defaults=own_defaults)
    except ModuleNotFoundError as error:
        _explain_missing(error)


def _suite_words(words: Sequence[str], command: str) -> list[str] | None:
    """Words in which `--suite NAME,NAME --suite-folder FOLDER` are settings; None: no suite is named.

    Raises:
        SystemExit: an option has no value, or a folder stands without a suite.
    """
    values: dict[str, list[str]] = {"--suite": [], "--suite-folder": []}
    rest: list[str] = []
    waiting = iter(words)
    for word in waiting:
        option, sign, value = word.partition("=")
        if option not in values:
            rest.append(word)
            continue
        value = value if sign else next(waiting, "")
        if not value or value.startswith("-"):
            _refuse(f"{command}: {option} needs a value, such as --suite gsm8k,aime24 --suite-folder copies")
        values[option].append(value)
    if len(values["--suite-folder"]) > 1 or (values["--suite-folder"] and not values["--suite"]):
        _refuse(f"{command}: --suite-folder is one folder with local copies of the suites that --suite names")
    names = [name for value in values["--suite"] for name in value.split(",") if name]
    if not names:
        return None
    folder = values["--suite-folder"][0] if values["--suite-folder"] else ""
    entries = [f"suite:{name}@{folder}" if folder and "@" not in name else f"suite:{name}" for name in names]
    quoted = ",".join("'" + entry.replace("\\", "\\\\").replace("'", "\\'") + "'" for entry in entries)
    return [*rest, f"data.path=[{quoted}]"]


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    """The command `hybridrl`."""
    words = list(sys.argv[1:] if argv is None else argv)
    parts = 2 if " ".join(words[:2]) in {*PROGRAMS, *COMMANDS} else 1  # of the command's name
    name, rest = " ".join(words[:parts]) or "--help", words[parts:]
    if name in PROGRAMS:
        start(name, f"hybridrl {name}", rest)
    elif name in COMMANDS:
        try:
            status = COMMANDS[name].run(rest, f"hybridrl {name}")
        except ModuleNotFoundError as error:
            _explain_missing(error)
        raise SystemExit(status)
    elif name in ("--help", "-h", "help"):
        print(_help())
    elif name == "--version":
        from hybridrl.version import __version__

        print(f"hybridrl {__version__}")
    else:
        names = [*PROGRAMS, *COMMANDS]
        close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
        hint = f"; nearest: {', '.join(close)}" if close else ""
        print(f"error: hybridrl {name}: unknown command{hint}; choose from {', '.join(names)}", file=sys.stderr)
        raise SystemExit(2)


def _help() -> str:
    summaries = {name: program.summary for name, program in PROGRAMS.items()}
    summaries |= {name: command.summary for name, command in COMMANDS.items()}
    commands = "\n".join(f"  {name:<14} {summary}" for name, summary in summaries.items())
    return (
        f"usage: hybridrl COMMAND [options] key=value ...\n\n{commands}\n\n"
        "hybridrl COMMAND --help shows the options of a command, --cfg job every setting with its value.\n"
        "The same from Python: hybridrl.grpo(model=..., reward=..., data=...), see docs/python.md."
    )


def _explain_missing(error: ModuleNotFoundError) -> None:
    """End with one line if this Python lacks a package that hybridrl requires; raise every other error again."""
    package = (error.name or "").split(".")[0]
    if package not in _required():
        raise error
    print(
        f"error: {sys.executable} has no package {package}, which hybridrl needs. Use the Python of the environment "
        "(source .venv/bin/activate), or create the environment: bash scripts/install.sh",
        file=sys.stderr,
    )
    raise SystemExit(2) from None


def _required() -> set[str]:
    """The modules of the packages that hybridrl cannot run without."""
    from importlib import metadata

    try:
        requirements = [word for word in metadata.requires("hybridrl") or [] if "extra ==" not in word]
    except metadata.PackageNotFoundError:  # a checkout, run with a Python that hybridrl is not installed in
        import tomllib

        project = Path(__file__).resolve().parents[1] / "pyproject.toml"
        if not project.is_file():
            return set()
        requirements = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    names = {re.split(r"[^\w.-]", word.strip())[0] for word in requirements}
    return {"hydra" if name == "hydra-core" else name.replace("-", "_") for name in names} | {"yaml", "tqdm"}
