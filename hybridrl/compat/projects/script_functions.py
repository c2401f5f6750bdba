"""Functions in a user's file, which is read and not imported."""

from __future__ import annotations

import ast
from pathlib import Path


def parameters_of(path: Path, name: str) -> list[str] | None:
    """The parameters of a function in a file; None if there is no such file or function."""
    if not path.is_file():
        return None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return [argument.arg for argument in node.args.args]
    return None


def attributes_of(path: Path, name: str, parameter: str) -> set[str] | None:
    """The attributes of a parameter that a function in a file reads.

    Returns:
        None if the function also uses the parameter as a whole, or sets an attribute, so that they are not all.
    """
    attributes: set[str] = set()
    whole = 0
    for function in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.name != name:
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == parameter:
                if not isinstance(node.ctx, ast.Load):
                    return None
                attributes.add(node.attr)
                whole -= 1
            elif isinstance(node, ast.Name) and node.id == parameter:
                whole += 1
    return attributes if whole == 0 else None
