"""Reader of the further arguments of a reward function."""

import ast
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.mappings import Entries, reads_mapping
from hybridrl.reward.function import CHECK
from hybridrl.utils.python_source import parsed


@reads_mapping("function-arguments")
def check_arguments(entries: Entries) -> Iterator[str]:
    """Check `reward_kwargs` against the parameters of the function, as its file declares them.

    The file is read and not run: the processes that score run it, and check what only they can tell.
    """
    path, name = entries.near(".path"), entries.near(".name")
    file = Path(str(path)).expanduser()
    if file.suffix != ".py" or not file.is_file():
        return
    try:
        body = parsed(file.read_bytes(), file).body
    except (SyntaxError, OSError, ValueError):
        return  # another check reports it
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    usual_names = [usual_name for usual_name in ("compute_score", "compute_reward") if usual_name in functions]
    function = functions.get(str(name)) if name is not None else functions.get(usual_names[0]) if usual_names else None
    if function is None or function.decorator_list or CHECK in functions:
        return
    takes = function.args
    if takes.kwarg is None:
        yield from entries.unknown(
            [parameter.arg for parameter in (*takes.args, *takes.kwonlyargs)], f"the function {function.name} of {path}"
        )
