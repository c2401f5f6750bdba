"""No module imports, while it is imported itself, one that leads back to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from hybridrl.utils.python_source import parsed

PACKAGE = Path(__file__).parents[2] / "hybridrl"


def imported_at_once(node: ast.AST) -> Iterator[str]:
    """Yield the names that are imported with a module: not within functions, and not for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imported_at_once(other)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from imported_at_once(child)


def graph(package: Path) -> dict[str, set[str]]:
    """Return the modules of a package, each with those that are imported with it."""
    trees = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = parsed(path.read_bytes(), path)
    imports: dict[str, set[str]] = {}
    for module, tree in trees.items():
        names = set()
        for name in imported_at_once(tree):
            names.add(name if name in trees else name.rpartition(".")[0])
        imports[module] = names & trees.keys() - {module}
    return imports


def test_no_modules_import_each_other() -> None:
    assert list(TopologicalSorter(graph(PACKAGE)).static_order())


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "made"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("if True:\n    from made.two import x\n")
    (package / "two.py").write_text("def late():\n    import made.one\n")
    assert list(TopologicalSorter(graph(package)).static_order())
    (package / "two.py").write_text("from made import one\n")
    with pytest.raises(CycleError) as caught:
        list(TopologicalSorter(graph(package)).static_order())
    assert set(caught.value.args[1]) == {"made.one", "made.two"}
