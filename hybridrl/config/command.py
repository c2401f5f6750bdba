"""The command line of a program: overrides, `--cfg`, `--config-path`, `--config-name`, `--help`, `--info`.

It writes no `outputs/` folder and does not change the working directory, as `@hydra.main` would: the run's folder is
`trainer.default_local_dir`.
"""

import argparse
import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybridrl.config.checks.check_run import validate
from hybridrl.config.compose import Composed, compose_config, configs_folder, print_notices
from hybridrl.config.convert import nearest
from hybridrl.config.output import to_yaml
from hybridrl.config.places import with_masked_addresses
from hybridrl.config.repeat import search_modules_of
from hybridrl.config.short_names import explain, nearest_names, table_text
from hybridrl.config.torchrun import leave_torchrun
from hybridrl.config.verl.keys import key_book
from hybridrl.errors import ConfigError, UserError, WorkerError
from hybridrl.utils.files import NO_SPACE
from hybridrl.utils.termination import Terminated, ending_in_order
from hybridrl.utils.urls import masked_text

_EXAMPLES = {
    "ppo_trainer": (
        "main_ppo",
        "data.train_files=train.parquet data.val_files=test.parquet \\\n"
        "      actor_rollout_ref.model.path=MODEL algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8",
    ),
    "sft_trainer": ("main_sft", "data.train_files=train.parquet model.path=MODEL optim.lr=1e-5"),
    "dpo_trainer": ("main_dpo", "data.train_files=pairs.parquet model.path=MODEL optim.lr=1e-6 dpo.beta=0.1"),
    "kto_trainer": ("main_kto", "data.train_files=answers.parquet model.path=MODEL optim.lr=1e-6 kto.beta=0.1"),
    "rm_trainer": ("main_rm", "data.train_files=pairs.parquet model.path=MODEL optim.lr=1e-5"),
    "generation": (
        "main_generation",
        "data.path=test.parquet data.output_path=answers.parquet data.n_samples=8 \\\n"
        "      actor_rollout_ref.model.path=MODEL",
    ),
    "evaluation": ("main_eval", "data.path=answers.parquet"),
    "suite_evaluation": (
        "main_eval",
        "--suite gsm8k,aime24 --suite-folder copies \\\n      actor_rollout_ref.model.path=MODEL data.n_samples=4",
    ),
}
_REFUSED = {
    "multirun": "sweeps are run by the command hybridrl, for programs that train",
    "experimental_rerun": "start again with the same words; trainer.resume_mode=auto continues from the checkpoint",
    "shell_completion": "not supported; --cfg job prints every key",
}


def cli(
    name: str,
    run: Callable[[Any], object],
    argv: Sequence[str] | None = None,
    *,
    command: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Run the command line of a program: compose, check, print notices, call `run(config)`.

    Args:
        name: a name from `ROOTS`, such as `ppo_trainer` or `sft_trainer`.
        run: the program; called with the typed configuration. A number other than 0 that it returns is the exit status.
        argv: words after the program's name; those of the process by default.
        command: how the user called the program, for `--help`.
        defaults: values by key that replace defaults of the tree, as `compose_config` takes them.

    An error that ends the run is printed as one message on standard error, and the process exits with status

    - 2 for an error that the user can fix: any `UserError`, including a faulty configuration, or a full disk;
    - 1 for a worker that failed or died: the message holds the worker's own traceback, if there is one;
    - 130 for Ctrl-C.

    A training run that was asked to stop, and saved its state, ends with 75 (`hybridrl.programs.STOPPED`).

    Any other exception is raised unchanged. Under torchrun, rank 0 runs the program and every other rank returns at
    once.
    """
    launch = leave_torchrun(os.environ)
    if launch is not None and launch.rank > 0:
        print_notices([farewell] if (farewell := launch.farewell()) else [])
        return
    words = read_words(name, sys.argv[1:] if argv is None else argv, command)
    if words.help is not None:
        print(_help(name, words.help, command, defaults or {}))
        return
    try:
        refuse_options(words)
        folder, file = user_file(words)
        launched = launch.settings() if launch is not None else {}
        composed = compose_config(name, words.overrides, folder, file, launched, defaults=defaults)
        if launch is not None:
            composed.notices.append(launch.notice(_EXAMPLES[name][0], "trainer" in composed.tree))
        print_notices(composed.notices)
        if words.cfg is not None:
            print(_config_text(composed, words.package, words.resolve), end="")
            return
        if words.info is not None:
            print(_info(name, folder, file))
            return
        with ending_in_order():
            validate(composed.config)  # type: ignore[arg-type]
            status = run(composed.config)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Terminated as terminated:
        with contextlib.suppress(OSError):  # the terminal may have closed
            print(f"ended by {terminated.signal.name}", file=sys.stderr)
        terminated.end()
    except Exception as error:
        status = _exit_status(error)
        if status is None:
            raise
        print(masked_text("\n".join([f"error: {error}", *getattr(error, "__notes__", ())])), file=sys.stderr)
        raise SystemExit(status) from None
    if isinstance(status, int) and status:
        raise SystemExit(status)


def user_file(words: argparse.Namespace) -> tuple[str | None, str | None]:
    """The folder and the name of the user's YAML file, from whichever options name it."""
    for option in ("config", "config_path", "config_name"):
        setattr(words, option, _only(f"--{option.replace('_', '-')}", getattr(words, option)))
    if words.config is None:
        return words.config_path, words.config_name
    if words.config_path is not None or words.config_name is not None:
        raise ConfigError("--config names the file that --config-path and --config-name name; give one of both forms")
    path = Path(words.config).expanduser()
    if not path.is_file():
        raise ConfigError(f"--config {words.config}: no such file (from {Path.cwd()})")
    if path.suffix != ".yaml":
        raise ConfigError(f"--config {words.config}: the name of a YAML file has to end in .yaml")
    search_modules_of(path.absolute())
    return str(path.parent), path.stem


def _only(option: str, values: list[str] | str | None) -> str | None:
    """The value of an option that may be written once, or several times with the same value."""
    if values is None or isinstance(values, str):
        return values
    if len(different := list(dict.fromkeys(values))) > 1:
        written = " and ".join(f"{option} {value}" for value in different)
        raise ConfigError(
            f"{written}: one file is read; give one of them, and name the others in its defaults list (docs/config.md)"
        )
    return different[0]


def read_words(name: str, argv: Sequence[str], command: str | None = None) -> argparse.Namespace:
    """Sort the words of a command line into options and overrides. `name` and `command` are those of `cli`."""
    return _parser(name, command).parse_intermixed_args(list(argv))


def refuse_options(words: argparse.Namespace) -> None:
    """Raise a `ConfigError` for an option of Hydra that has no counterpart here."""
    for option, reason in _REFUSED.items():
        if getattr(words, option):
            raise ConfigError(f"--{option.replace('_', '-')}: {reason}")


def _exit_status(error: Exception) -> int | None:
    """The exit status for an error whose message is sufficient; None if the traceback is needed as well."""
    if isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in NO_SPACE):
        return 2
    return 1 if isinstance(error, WorkerError) else None


def _parser(name: str, command: str | None = None) -> argparse.ArgumentParser:
    program, example = _EXAMPLES[name]
    command = command or f"python -m hybridrl.trainer.{program}"
    parser = argparse.ArgumentParser(
        prog=command,
        usage="%(prog)s [options] key=value ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
        description=f"Example:\n  {command} {example}",
        epilog="Every key with its default: --cfg job. Meanings: docs/config.md.\n"
        "key=value sets a key (+key=value and ++key=value do the same), ~key takes it back to its default.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as in Hydra")
    parser.add_argument(
        "--help", "-h", nargs="?", const="", metavar="KEY", help="show this text, or explain a key or a short name"
    )
    parser.add_argument("--cfg", "-c", choices=("job",), help="print the configuration as YAML and end")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: interpolations replaced by their values")
    parser.add_argument("--package", "-p", help="with --cfg: this part only, e.g. actor_rollout_ref.actor")
    parser.add_argument(
        "--config-path", "-cp", action="append", metavar="DIR", help="folder of your YAML, from the working directory"
    )
    parser.add_argument(
        "--config-name", "-cn", action="append", metavar="NAME", help="your YAML without .yaml; it may be partial"
    )
    parser.add_argument(
        "--config", action="append", metavar="FILE", help="your YAML; the same as --config-path and --config-name"
    )
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=("all",), help="print where settings come from")
    parser.add_argument("--run", "-r", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--multirun", "-m", action="store_true", help="run all combinations of key=value,value,... one after another"
    )
    parser.add_argument("--experimental-rerun", help=argparse.SUPPRESS)
    parser.add_argument("--shell-completion", "-sc", action="store_true", help=argparse.SUPPRESS)
    return parser


def _help(name: str, key: str, command: str | None, defaults: Mapping[str, Any]) -> str:
    """Return the text of `--help`, or of `--help KEY`.

    Raises:
        SystemExit: there is no such key.
    """
    if not key or "=" in key:
        table = table_text(name, defaults)
        if not table:
            return _parser(name, command).format_help()
        lines = [textwrap.dedent("""
            Short names, with their defaults. TRL's mean what they mean in TRL; the last part of a key that no other key
            has is a name, too. --help NAME explains one.
            """).strip()]  # fmt: skip
        for names, default, meaning in table:
            text = f"{meaning}{f' [{default}]' if default else ''}"
            lines += textwrap.wrap(text, 118, initial_indent=f"  {names}: ", subsequent_indent="      ")
        return "\n".join([_parser(name, command).format_help(), *lines])
    explained = explain(name, key, defaults)
    if explained is not None:
        return explained
    hint = key_book(name).suggest(key) if "." in key else nearest_names(name, key)
    print(f"error: --help {key}: unknown key{hint}", file=sys.stderr)
    raise SystemExit(2)


def _config_text(composed: Composed, package: str | None, resolve: bool) -> str:
    """Return the text that `--cfg job` prints: the tree with interpolations, or resolved."""
    plain: Any = OmegaConf.to_container(OmegaConf.create(to_yaml(composed.config) if resolve else composed.tree))
    tree = OmegaConf.create(with_masked_addresses(plain, type(composed.config)))
    if package is None:
        return OmegaConf.to_yaml(tree)
    part: Any = OmegaConf.to_container(tree, resolve=False)
    for name in package.split("."):
        if not isinstance(part, dict) or name not in part:
            names = list(part) if isinstance(part, dict) else []
            raise ConfigError(f"--package {package}: unknown group {name}{nearest(name, names)}")
        part = part[name]
    return OmegaConf.to_yaml(OmegaConf.create(part)) if isinstance(part, dict | list) else f"{part}\n"


def _info(name: str, folder: str | None, file: str | None) -> str:
    """Return the text that `--info` prints."""
    shipped = configs_folder()
    groups = sorted({path.parent.relative_to(shipped).as_posix() for path in shipped.glob("*/**/*.yaml")})
    lines = [f"base: {shipped / name}.yaml"]
    if folder is not None or file is not None:
        lines.append(f"over it: {folder or shipped}/{file or name}")
    lines.append("config groups (group=choice selects):")
    for group in groups:
        lines.append(f"  {group}: {', '.join(sorted(path.stem for path in (shipped / group).glob('*.yaml')))}")
    return "\n".join(lines)
