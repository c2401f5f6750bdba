"""Parsing of Python source."""

from __future__ import annotations

import ast
import os
import threading
import time

_ATTEMPTS = 20
_one_at_a_time = threading.Lock()


def _new_lock() -> None:
    """A process that is forked while another thread parses must not wait for that thread, which it does not have."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def parsed(text: str | bytes, path: str | os.PathLike[str] = "<unknown>") -> ast.Module:
    """Return what `ast.parse` makes of a module's source, in any thread.

    CPython 3.11 counts the depth of recursion for all threads together (python/cpython#106905): if another thread
    parses while the garbage collector has released the interpreter lock, one of them fails, though nothing is wrong
    with its source. So one thread parses at a time here, and where code from elsewhere parses too, this tries again.

    Args:
        text: the source.
        path: its file, for messages.

    Raises:
        SyntaxError: `text` is not Python.
        SystemError: it failed 20 times.
    """
    for attempt in range(_ATTEMPTS):
        try:
            with _one_at_a_time:
                return ast.parse(text, path)
        except SystemError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(0.001 * attempt)
    raise AssertionError("not reached")
