"""`python -m hybridrl.verl_compat run`: runs a program that imports verl, unchanged."""

from __future__ import annotations

import json
import runpy
import sys
import tokenize
from pathlib import Path
from types import ModuleType

from hybridrl.verl_compat.alias import activate

USAGE = """usage: python -m hybridrl.verl_compat run PROGRAM.py [ARGUMENT ...]
       python -m hybridrl.verl_compat run NOTEBOOK.ipynb
       python -m hybridrl.verl_compat run -m MODULE [ARGUMENT ...]

Runs a program in which `import verl` finds hybridrl's modules, here and in all processes that the program starts.
A module may be one of verl's, such as verl.trainer.main_ppo. Of a notebook, the code cells run in order."""


def main(arguments: list[str]) -> int:
    """Run the program; its exit code is this process's unless it ends normally."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "-m" and len(arguments) == 1:
        print(f"-m needs the name of a module\n{USAGE}", file=sys.stderr)
        return 2
    is_module = arguments[0] == "-m"
    program, *rest = arguments[1:] if is_module else arguments
    if not is_module and not Path(program).is_file():
        print(f"{program}: no such file. To run a module, use -m.", file=sys.stderr)
        return 2
    if not is_module and not sys.flags.safe_path:
        sys.path[0] = str(Path(program).resolve().parent)  # in place of the current folder, which `python -m` put there
    activate()
    sys.argv = [program, *rest]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif program.endswith(".ipynb"):
        _run_notebook(Path(program))
    else:
        runpy.run_path(program, run_name="__main__")
    return 0


def _run_notebook(path: Path) -> None:
    """Run the code cells in one module. What is meant for IPython (`!command`, `%magic`) is left out, and named."""
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    for number, source in enumerate(cells, start=1):
        lines = source.splitlines()
        left_out = range(len(lines)) if source.startswith("%%") else _for_ipython(lines)
        for index in left_out:
            print(f"{path}, cell {number}: left out {lines[index].strip()}", file=sys.stderr)
            # `pass`, because the line may be all that a block holds
            indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
            lines[index] = "" if source.startswith("%%") else f"{indent}pass"
        code = compile("\n".join(lines), f"{path}[cell {number}]", "exec", dont_inherit=True)
        exec(code, module.__dict__)


def _for_ipython(lines: list[str]) -> list[int]:
    """The indices of the lines that begin with `!` or `%` and begin a statement.

    In a string, or within brackets, such a line is Python. To tell, the lines before it are read as Python.
    """
    indices: list[int] = []
    python: list[str] = []
    for index, line in enumerate(lines):
        if line.lstrip().startswith(("!", "%")) and not _goes_on(python):
            indices.append(index)
            line = ""
        python.append(line)
    return indices


def _goes_on(lines: list[str]) -> bool:
    """Whether a string, a bracket or a line with a backslash is open after the lines."""
    try:
        for _ in tokenize.generate_tokens(iter([f"{line}\n" for line in lines]).__next__):
            pass
    except tokenize.TokenError:
        return True
    except (IndentationError, SyntaxError):
        return False
    return False
