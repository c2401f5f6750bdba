"""Source is parsed in several threads at once."""

from __future__ import annotations

import ast
import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridrl import registry
from hybridrl.utils.python_source import parsed


def test_threads_that_parse_at_once_do_not_disturb_each_other() -> None:
    """Each at its own depth of the stack, and garbage collection lets others run: CPython 3.11 fails some of 240."""
    text = Path(registry.__file__).read_text()
    expected = ast.dump(ast.parse(text))

    def at_depth(depth: int) -> int:
        if depth:
            return at_depth(depth - 1)
        return sum(ast.dump(parsed(text)) != expected for _ in range(60))

    def let_others_run(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(let_others_run)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(at_depth, (0, 7, 14, 21))) == [0] * 4
    finally:
        gc.callbacks.remove(let_others_run)
        sys.setswitchinterval(interval)


def test_what_is_not_python_is_an_error_with_its_file() -> None:
    with pytest.raises(SyntaxError) as caught:
        parsed("def :", "own.py")
    assert caught.value.filename == "own.py"
