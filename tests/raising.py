"""What tests compare of an error: its class, and that the message names the key and the value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises_with(error: type[BaseException] | tuple[type[BaseException], ...], *facts: object) -> Iterator[Any]:
    """Expect an error whose message has each of the facts as words of its own, in any order.

    Args:
        error: the class of the error, or several.
        facts: keys, values and names: `"rollout.n"`, `3`, `"'sum'"`.

    Yields:
        What `pytest.raises` yields.
    """
    with pytest.raises(error) as caught:
        yield caught
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    missing = [str(fact) for fact in facts if not stands_in(str(fact), message)]
    assert not missing, f"{type(caught.value).__name__} does not name {missing}: {message}"


def stands_in(fact: str, message: str) -> bool:
    """Return whether a text stands in a message and is no part of a longer word there."""
    before = r"(?<![^\W_])" if re.match(r"[^\W_]", fact) else ""
    after = r"(?![^\W_])" if re.search(r"[^\W_]$", fact) else ""
    return re.search(before + re.escape(fact) + after, message) is not None
