"""The languages of programs: the file that holds the source, and the commands that compile and run it."""

import contextlib
import shutil
import sys
from dataclasses import dataclass

from hybridrl.sandbox.program import SandboxError

PYTHON = "{python}"  # stands for this Python in a command


@dataclass(frozen=True)
class Language:
    """Commands that compile and run a program of one language.

    Attributes:
        source: name of the file with its code.
        run: the command, in the folder of that file. `{python}` is the Python of this process.
        build: the command that compiles it; () where nothing is compiled.
        product: the file that `build` writes and `run` needs.
    """

    source: str
    run: tuple[str, ...]
    build: tuple[str, ...] = ()
    product: str = ""


LANGUAGES: dict[str, Language] = {
    "python": Language("main.py", (PYTHON, "-I", "-u", "main.py")),
    "bash": Language("main.sh", ("/bin/bash", "main.sh")),
    "cpp": Language("main.cpp", ("./main",), ("g++", "-O2", "-std=c++17", "-o", "main", "main.cpp"), "main"),
}


def register_language(name: str, language: Language) -> None:
    """Make a language known to the local sandbox and to the server that this process runs."""
    LANGUAGES[name] = language


def language_of(name: str) -> Language:
    """A language by name.

    Raises:
        SandboxError: it is not known.
    """
    if name not in LANGUAGES:
        raise SandboxError(f"language {name!r}: this sandbox runs {', '.join(LANGUAGES)}")
    return LANGUAGES[name]


def command(words: tuple[str, ...]) -> list[str]:
    """A command with the path of its program.

    Raises:
        SandboxError: this machine does not have the program.
    """
    first = sys.executable if words[0] == PYTHON else words[0]
    path = first if "/" in first else shutil.which(first, path="/usr/local/bin:/usr/bin:/bin")
    if path is None:
        raise SandboxError(f"this machine has no {first}, which runs the program; install it in /usr/bin")
    return [path, *words[1:]]


def runnable() -> list[str]:
    """The languages whose programs this machine has."""
    names = []
    for name, language in LANGUAGES.items():
        with contextlib.suppress(SandboxError):
            command(language.build or language.run)
            names.append(name)
    return names
