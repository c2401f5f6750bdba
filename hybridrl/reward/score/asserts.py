"""Statements such as `assert f(1) == 2` as test cases: what is expected stays outside of the program's process.

Where both sides are compared in the program's process, an object that equals everything passes. So the side that calls
the program is evaluated there, and its value is sent; the other side is a literal, with which it is compared here.
"""

import ast
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

#: what a literal may stand in, as in `assert set(f(x)) == set([1, 2])`
_BUILT_IN: Mapping[str, Callable[[Any], Any]] = {
    kind.__name__: kind for kind in (set, frozenset, tuple, list, dict, sorted)
}
#: Python of the program's process: `encoded` makes JSON of a value that `decoded` reads
ENCODER = """
def encoded(value):
    import collections.abc, numbers
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (str, int, float)):
        return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
    if hasattr(value, "tolist") and getattr(value, "ndim", None) == 0:
        return encoded(value.tolist())
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, list):
        return [encoded(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encoded(item) for item in value]}
    if isinstance(value, collections.abc.Set):
        return {"set": [encoded(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encoded(name), encoded(item)] for name, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, numbers.Number):
        return int(value) if value == int(value) else float(value)
    return {"other": type(value).__name__}
"""
_OTHER = object()
_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "bytes": bytes.fromhex,
    "tuple": lambda items: tuple(map(decoded, items)),
    "set": lambda items: frozenset(map(decoded, items)),
    "dict": lambda items: {decoded(name): decoded(item) for name, item in items},
    "complex": lambda parts: complex(*parts),
    "other": lambda name: _OTHER,
}


def split_assert(text: str) -> tuple[str, Any] | None:
    """The expression of an assert that its program has to evaluate, and the value that it is compared with.

    None where the text is something else than one comparison `==` of an expression with a literal.
    """
    with contextlib.suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        body = ast.parse(text.strip()).body
        if len(body) != 1 or not isinstance(body[0], ast.Assert) or not isinstance(body[0].test, ast.Compare):
            return None
        compared = body[0].test
        if len(compared.ops) != 1 or not isinstance(compared.ops[0], ast.Eq):
            return None
        for side, other in ((compared.left, compared.comparators[0]), (compared.comparators[0], compared.left)):
            with contextlib.suppress(ValueError, TypeError):
                return ast.unparse(side), _literal(other)
    return None


def _literal(node: ast.expr) -> Any:
    """The value of a literal, also within a built-in function of `_BUILT_IN`.

    Raises:
        ValueError, TypeError: it is none.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BUILT_IN:
        if node.keywords or len(node.args) > 1:
            raise ValueError(ast.unparse(node))
        return _BUILT_IN[node.func.id](*map(_literal, node.args))
    return ast.literal_eval(node)


def decoded(value: Any) -> Any:
    """The value that `encoded` made JSON of.

    Raises:
        ValueError, TypeError, RecursionError: it is none of that.
    """
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind not in _KINDS:
        raise ValueError(f"a value of kind {kind!r}")
    return _KINDS[kind](content)
