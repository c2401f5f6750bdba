"""Parsing of Python source."""

from __future__ import annotations

import ast
import os

_ATTEMPTS = 20


def parsed(text: str | bytes, path: str | os.PathLike[str] = "<unknown>") -> ast.Module:
    """Return what `ast.parse` makes of a module's source, in any thread.

    CPython 3.11 counts the depth of recursion for all threads together (python/cpython#106905): if another thread
    parses while the garbage collector has released the interpreter lock, one of them fails, though nothing is wrong
    with its source.

    Args:
        text: the source.
        path: its file, for messages.

    Raises:
        SyntaxError: `text` is not Python.
        SystemError: it failed 20 times.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return ast.parse(text, path)
        except SystemError:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("not reached")
