"""Statements such as `assert f(1) == 2` as test cases: what is expected stays outside of the program's process.

Where both sides are compared in the program's process, an object that equals everything passes, and so does a program
that replaces `abs`. So only the parts that call the program are evaluated there, and their values are sent. All around
them is evaluated here: comparisons, `and`, `not`, and functions such as `abs`, `sorted` and `math.isclose`.
"""

import ast
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

#: functions that a statement may call here, on values of the program
_FUNCTIONS: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        *(abs, all, any, bool, bytes, complex, dict, divmod, enumerate, filter, float, frozenset, int, isinstance, len),
        *(list, map, max, min, reversed, round, set, sorted, str, sum, tuple, type, zip),
    )
}
_MATHEMATICS = ("isclose", "fabs", "floor", "ceil", "sqrt", "isnan", "isinf", "isfinite", "pi", "e", "inf", "nan")
_NAMES: Mapping[str, Any] = {
    **_FUNCTIONS,
    "math": SimpleNamespace(**{name: getattr(math, name) for name in _MATHEMATICS}),
}
#: what a value of the program is called in what is evaluated here
_VALUE = "value_{}"
_LARGEST_POWER = 1000
#: with values of the program, these may take any time and memory
_UNBOUNDED = (ast.Mult, ast.Pow, ast.LShift, ast.Mod)
#: kinds of expressions that are evaluated here
_KINDS_HERE = (
    *(ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Call),
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.IfExp),
)
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
_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "bytes": bytes.fromhex,
    "tuple": lambda items: tuple(map(decoded, items)),
    "set": lambda items: frozenset(map(decoded, items)),
    "dict": lambda items: {decoded(name): decoded(item) for name, item in items},
    "complex": lambda parts: complex(*parts),
    "other": lambda name: object(),  # equal to nothing
}


@dataclass(frozen=True)
class AssertCase:
    """A statement as a test case.

    Attributes:
        expression: is evaluated in the program's process: a tuple of the parts that call the program.
        condition: is evaluated here, with `value_N` for the value of part N.
    """

    expression: str
    condition: str

    def holds(self, values: Any) -> bool:
        """Whether the statement holds for the values of its parts."""
        if not isinstance(values, tuple):
            return False
        names = {**_NAMES, **{_VALUE.format(number): value for number, value in enumerate(values)}}
        try:
            return bool(eval(self.condition, {"__builtins__": {}}, names))  # `split_assert` has checked each name in it
        except Exception:  # the values do not fit
            return False


def split_assert(text: str) -> AssertCase | None:
    """The parts of an assert, or None where its whole has to be evaluated in the program's process.

    That is so for several statements, where both sides of a comparison call the program, and for parts that use a
    variable of the statement itself.
    """
    with contextlib.suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        body = ast.parse(text.strip()).body
        if len(body) == 1 and isinstance(body[0], ast.Assert):
            parts: list[ast.expr] = []
            condition = _condition(body[0].test, parts)
            expression = f"({''.join(f'{ast.unparse(part)}, ' for part in parts)})"
            return AssertCase(expression, ast.unparse(condition))
    return None


def _condition(node: ast.expr, parts: list[ast.expr]) -> ast.expr:
    """An expression with names of values in place of the parts that call the program, which are added to `parts`.

    Raises:
        ValueError: it cannot be evaluated here.
    """
    if not _calls_program(node):
        if not all(isinstance(inner, _KINDS_HERE) and _is_bounded(inner) for inner in _expressions(node)):
            raise ValueError(ast.unparse(node))
        return node
    if _is_part(node):
        parts.append(node)
        return ast.Name(_VALUE.format(len(parts) - 1))
    if not isinstance(node, _KINDS_HERE):
        raise ValueError(ast.unparse(node))
    if isinstance(node, ast.BinOp) and isinstance(node.op, _UNBOUNDED):
        raise ValueError(ast.unparse(node))
    if isinstance(node, ast.IfExp) or (isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)):
        raise ValueError(ast.unparse(node))  # not all of it may be evaluated
    if isinstance(node, ast.Compare) and sum(map(_calls_program, (node.left, *node.comparators))) > 1:
        raise ValueError(ast.unparse(node))  # such as two objects of a class of the program
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            setattr(node, name, _condition(value, parts))
        elif isinstance(value, list):
            setattr(node, name, [_condition(item, parts) if isinstance(item, ast.expr) else item for item in value])
        elif isinstance(value, ast.keyword):
            value.value = _condition(value.value, parts)
    for keyword in getattr(node, "keywords", ()):
        keyword.value = _condition(keyword.value, parts)
    return node


def _is_bounded(node: ast.expr) -> bool:
    """Whether a part of an expression without the program takes little time and memory."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, _UNBOUNDED):
        return True
    right = node.right.value if isinstance(node.right, ast.Constant) else None
    if isinstance(node.op, ast.Mult):
        return not any(
            isinstance(inner, ast.List | ast.Tuple | ast.Dict | ast.Set) for inner in _expressions(node)
        ) and (
            all(isinstance(inner.value, int | float) for inner in _expressions(node) if isinstance(inner, ast.Constant))
        )
    return isinstance(node.op, ast.Mod) or (isinstance(right, int | float) and abs(right) <= _LARGEST_POWER)


def _is_part(node: ast.expr) -> bool:
    """Whether an expression is a value of the program: a name of its own, or what is called or read of one."""
    if isinstance(node, ast.Name):
        return node.id not in _NAMES
    if isinstance(node, ast.Call):
        return _is_part(node.func)
    if isinstance(node, ast.Attribute):
        is_known = isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in _MATHEMATICS
        return not is_known
    return isinstance(node, ast.Subscript) and _is_part(node.value)


def _calls_program(node: ast.expr) -> bool:
    return any(_is_part(inner) for inner in _expressions(node))


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.expr))


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
