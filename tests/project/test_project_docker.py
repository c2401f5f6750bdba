"""The container's file, replayed without a container: its COPY lines, and what its RUN lines do to the package."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    """(instruction, its words) in their order, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip():
            name, _, words = line.strip().partition(" ")
            yield name.upper(), words.strip()


def matcher(dockerignore: str) -> re.Pattern[str]:
    """What .dockerignore keeps out of the build's context, by path from its root; without `!` lines."""
    patterns = []
    for line in filter(None, map(str.strip, dockerignore.splitlines())):
        assert not line.startswith(("!", "#")), f"not understood here: {line}"
        parts = [".*" if part == "**" else re.escape(part).replace(r"\*", "[^/]*") for part in line.split("/")]
        patterns.append("/".join(parts).replace(".*/", "(?:.*/)?"))
    return re.compile(f"(?:{'|'.join(patterns)})")


def copy(repository: Path, words: str, folder: Path) -> None:
    """A COPY line: a folder's content, or files into a folder."""
    ignored = matcher((repository / ".dockerignore").read_text())

    def left_out(parent: str, names: list[str]) -> set[str]:
        return {name for name in names if ignored.fullmatch((Path(parent) / name).relative_to(repository).as_posix())}

    *sources, target = shlex.split(words)
    for source in sources:
        path, place = repository / source, folder / target
        assert path.exists(), f"COPY {words}: there is no {source}"
        if path.is_dir():
            shutil.copytree(path, place, dirs_exist_ok=True, ignore=left_out)
        else:
            place = place / path.name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Of an environment that has what the tests' one has, without hybridrl."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "python"


def test_every_step_of_the_container_finds_the_files_that_it_needs(
    repository: Path, tmp_path: Path, python: Path
) -> None:
    folder = tmp_path / "image"
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> None:
        words = list(map(str, command))
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr

    steps, installed = [], 0
    for name, words in instructions((repository / "docker" / "Dockerfile").read_text()):
        if name == "COPY":
            copy(repository, words, folder)
        elif name == "RUN" and "scripts/install.sh" in words:
            assert (folder / "scripts" / "install.sh").is_file() and list((folder / "constraints").glob("*.txt"))
            # what install.sh does to the package itself; the dependencies are there
            pip = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet"]
            run(*pip, "--no-deps", "--no-build-isolation", "-e", ".")
            run(python, "-P", "-c", "import hybridrl")  # -P: not from the working directory
            installed += 1
            steps += [step.strip() for step in words.split("&&") if "python -m" in step]
    assert installed == 2 and len(steps) == 1
    run(python, *shlex.split(steps[0].split(">")[0])[1:])
    assert not (folder / ".git").exists()
