"""`hybridrl completion bash|zsh|fish`: a script that has the shell complete commands and settings."""

import argparse
import sys
from collections.abc import Sequence

from hybridrl.config.schema.node import declared
from hybridrl.config.schema.root import ROOTS
from hybridrl.config.short_names import TREES, rows
from hybridrl.config.verl.keys import key_book
from hybridrl.programs import COMMANDS, PROGRAMS

_OPTIONS = ("--help", "--cfg", "--resolve", "--package", "--config", "--config-path", "--config-name", "--info", "-m")
_BASH = """\
# hybridrl completion bash >> ~/.bash_completion
_hybridrl_of() {{
    case "$1" in
{cases}
    esac
}}
_hybridrl() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    COMPREPLY=($(compgen -W "$(_hybridrl_of "${{COMP_WORDS[1]}}")" -- "$word"))
    case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null;; esac
}}
complete -o default -F _hybridrl hybridrl
"""
_ZSH = """\
# hybridrl completion zsh >> ~/.zshrc
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


def words_of(program: str) -> list[str]:
    """Return what may follow a program's name: options, short names and keys."""
    tree = PROGRAMS[program].tree
    short = [name for row in dict.fromkeys(rows(tree).values()) if not (row.idle or row.refused) for name in row.names]
    keys = [name for name in declared(ROOTS[tree]) if name in key_book(tree).fields]
    return [*_OPTIONS, *(f"{name}=" for name in (*(short if tree in TREES else ()), *keys))]


def script(shell: str) -> str:
    """Return the script for a shell: `bash`, `zsh` or `fish`."""
    names = [name for name in PROGRAMS if " " not in name]  # the second word of others is not completed
    commands = [*names, *(name for name in COMMANDS if " " not in name)]
    by_words: dict[tuple[str, ...], list[str]] = {}  # programs of one tree share their words
    for program in names:
        by_words.setdefault(tuple(words_of(program)), []).append(program)
    if shell == "fish":
        lines = ["# hybridrl completion fish > ~/.config/fish/completions/hybridrl.fish"]
        lines.append(f"complete -c hybridrl -n __fish_use_subcommand -f -a '{' '.join(commands)}'")
        for words, programs in by_words.items():
            condition = f"'__fish_seen_subcommand_from {' '.join(programs)}'"
            lines.append(f"complete -c hybridrl -n {condition} -a '{' '.join(words)}'")
        return "\n".join(lines) + "\n"
    cases = "\n".join(
        f"        {'|'.join(programs)}) echo '{' '.join(words)}';;" for words, programs in by_words.items()
    )
    text = _BASH.format(cases=cases, commands=" ".join(commands))
    return text if shell == "bash" else _ZSH + text.partition("\n")[2]


def main(arguments: Sequence[str] | None = None, command: str = "hybridrl completion") -> int:
    """Print the script."""
    parser = argparse.ArgumentParser(
        prog=command,
        description="Print a script that has a shell complete commands and settings; its first line says what to do.",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    sys.stdout.write(script(parser.parse_args(arguments).shell))
    return 0
