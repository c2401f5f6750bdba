"""Makes the virtual environments in which servers of environments run, from files of exact versions.

    python -m hybridrl.agents.environments.install openenv [PACKAGE ...]

A server has its own environment so that its packages never meet those of the trainer. `HYBRIDRL_ENVIRONMENTS` names the
folder of these environments; it is `~/.cache/hybridrl/environments` otherwise.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridrl.errors import RolloutError
from hybridrl.notify import notify

_HERE = Path(__file__).parent
_COMPLETE = "complete"  # this file is in an environment whose installation has ended


def pinned_file(name: str) -> Path:
    """The file of exact versions for servers of this kind.

    Raises:
        RolloutError: there is none.
    """
    file = _HERE / f"{name}.txt"
    if not file.is_file():
        kinds = ", ".join(sorted(path.stem for path in _HERE.glob("*.txt")))
        raise RolloutError(f"unknown kind of server {name!r}; choose from {kinds}")
    return file


def python_of(name: str, packages: Sequence[str] = (), pinned: Path | None = None) -> Path:
    """The Python of the environment of a server, which is made if there is none.

    Args:
        name: of the kind of server, `openenv`.
        packages: further ones, as pip takes them, installed with the versions of the file as constraints.
        pinned: the file of exact versions; None: the one that comes with the library.

    Raises:
        RolloutError: pip failed; its output says why.
    """
    pinned = pinned or pinned_file(name)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    inputs = "\n".join([version, pinned.read_text(encoding="utf-8"), *sorted(packages)])
    root = Path(os.environ.get("HYBRIDRL_ENVIRONMENTS") or Path.home() / ".cache/hybridrl/environments").expanduser()
    folder = root / f"{name}-{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may make it now
        if not (folder / _COMPLETE).exists():
            notify(f"making the environment of {name} in {folder}, which takes some minutes")
            _make(folder, python, pinned, packages)
    return python


def _make(folder: Path, python: Path, pinned: Path, packages: Sequence[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # an installation that did not end
    own = importlib.util.find_spec("pip") is not None  # then the environment needs none, which takes most of the time
    make = [sys.executable, "-m", "venv", *(["--without-pip"] if own else []), str(folder)]
    run = [sys.executable, "-m", "pip", "--python", str(python)] if own else [str(python), "-m", "pip"]
    pip = [*run, "install", "--quiet", "--disable-pip-version-check"]
    commands = [make, [*pip, "-r", str(pinned)]]
    if packages:
        commands.append([*pip, "-c", str(pinned), *packages])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, env=own_variables(), check=False)
        if done.returncode:
            raise RolloutError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    (folder / _COMPLETE).touch()


def own_variables() -> dict[str, str]:
    """The environment variables of a server: without those that lead Python to the trainer's packages."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the kind of server: openenv, verifiers")
    parser.add_argument("packages", nargs="*", help="further packages, as pip takes them")
    arguments = parser.parse_args()
    try:
        print(python_of(arguments.name, arguments.packages))
    except RolloutError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
