"""The command `python -m hybridrl.verl_compat`."""

import importlib
import sys

#: command -> the module whose `main(arguments)` runs it and returns the exit code, and what it does
COMMANDS = {
    "run": ("hybridrl.verl_compat.program", "run a program, module or notebook that imports verl"),
    "script": ("hybridrl.verl_compat.script", "tell what becomes of each setting of a shell script, and run it"),
    "table": ("hybridrl.verl_compat.table", "count the commands in the scripts of a checkout of verl, by reason"),
}


def main(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        return int(importlib.import_module(COMMANDS[name][0]).main(arguments[1:]))
    usage = "usage: python -m hybridrl.verl_compat COMMAND ..."
    table = "\n".join(f"  {command:8}{meaning}" for command, (_, meaning) in COMMANDS.items())
    help_requested = name in ("-h", "--help")
    problem = "" if help_requested or not name else f"unknown command {name!r}\n"
    print(f"{problem}{usage}\n\n{table}", file=sys.stdout if help_requested else sys.stderr)
    return 0 if help_requested else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
