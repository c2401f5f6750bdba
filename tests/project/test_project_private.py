"""Tests use what a class shows: the number of places that reach for a private name of the library may only fall."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "hybridrl"
#: names of other packages, and of verl's interface, that the library also sets or calls
FOREIGN = {
    *("_attn_implementation", "_gradient_checkpointing_func", "_timeout", "_stop", "_model"),
    *("_register_dispatch_collect_info", "_mutable_fields"),
}
#: how many places are left; a number that is too large is lowered
LEFT = 43


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module defines or assigns, those of attributes among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def private_uses(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Yield what a module takes of these names from objects and modules that are not its own."""
    own = {name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for name in private_names(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names - own:
            if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls", "os", "torch"):
                yield f"{node.lineno} {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hybridrl"):
            yield from (f"{node.lineno} {node.module}.{each.name}" for each in node.names if is_private(each.name))


def test_tests_use_the_public_face() -> None:
    modules = [ast.parse(path.read_bytes()) for path in PACKAGE.rglob("*.py")]
    names = {name for tree in modules for name in private_names(tree) if is_private(name)} - FOREIGN
    assert len(names) > 1000
    places = [
        f"{path.relative_to(TESTS)}:{use}"
        for path in sorted(TESTS.rglob("*.py"))
        for use in private_uses(ast.parse(path.read_bytes()), names)
    ]
    assert len(places) <= LEFT, "\n".join(places)


def test_a_private_use_is_seen() -> None:
    source = "from hybridrl.a import _b, c\nclass D:\n    def e(self): return self._f + c._f + c._g"
    assert sorted(private_uses(ast.parse(source), {"_f", "_g"})) == ["1 hybridrl.a._b", "3 c._f", "3 c._g"]
