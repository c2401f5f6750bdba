"""Digests of a user's code that do not change with its place, and, if asked for, not with comments and layout."""

import ast
import hashlib
import pickle
import re
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.utils.source import parsed

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
#: packages that belong to the library, or that stand in for it
_LIBRARY = ("hybridrl", "verl")


def digest_of_file(file: Path, exact: bool) -> str:
    """Return a digest of a Python file and of the local modules that it imports, wherever they lie.

    Args:
        file: need not be valid Python.
        exact: of the bytes; False: of the syntax tree, which comments and layout are not part of.
    """
    found: dict[Path, str] = {}
    _collect(file.resolve(), "", file.resolve().parent, found)
    parts = sorted((name, _digest_of_source(path, exact)) for path, name in found.items())
    return _digest(repr(parts).encode())


def digest_of_pickle(file: Path, exact: bool) -> str:
    """Return a digest of a pickled function: of its code, of what it refers to, and of its local modules.

    The function is loaded for it. One that cannot be loaded is compared by the bytes of the file.
    """
    content = file.read_bytes()
    try:
        shape = _Shape(exact).of(pickle.loads(content))
    except Exception:  # its modules may raise anything while they are imported
        return _digest(content)
    return _digest(repr((shape, content if exact else b"")).encode())


def local_file(name: str, folder: Path | None = None) -> Path | None:
    """Return the file of a module that lies in `folder` or elsewhere on the path, but is not installed; else None."""
    if not _MODULE.fullmatch(name) or name.partition(".")[0] in _LIBRARY:
        return None
    for root in ([] if folder is None else [folder]) + _local_folders():
        base = root.joinpath(*name.split("."))
        for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if path.is_file():
                return path.resolve()
    return None


def _local_folders() -> list[Path]:
    """The folders of `sys.path` that hold neither the standard library nor installed packages."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages()}
    roots = [Path(folder).resolve() for folder in installed if folder]
    folders = dict.fromkeys(Path(folder or ".").resolve() for folder in sys.path)
    return [folder for folder in folders if folder.is_dir() and not any(folder.is_relative_to(root) for root in roots)]


def _collect(file: Path, name: str, root: Path, found: dict[Path, str]) -> None:
    """Add a file, and the local ones that it imports, with the names that they are imported by."""
    if file in found:
        return
    found[file] = name
    try:
        tree = parsed(file.read_bytes(), file)
    except (SyntaxError, ValueError):
        return
    for module, folder in _imports(tree, file, root):
        parts = module.split(".")
        for count in range(1, len(parts) + 1):  # packages are imported, too
            path = local_file(".".join(parts[:count]), folder)
            if path is not None:
                _collect(path, ".".join(parts[:count]), folder, found)


def _imports(tree: ast.Module, file: Path, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield each module that a file may import, with the folder that its name starts from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, root) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = root if node.level == 0 else file.parents[node.level - 1]
            prefix = f"{node.module}." if node.module else ""
            yield from ((f"{prefix}{alias.name}".removesuffix(".*"), folder) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield from ((arg.value, root) for arg in node.args[:1] if isinstance(getattr(arg, "value", None), str))  # type: ignore[attr-defined]


def _digest_of_source(file: Path, exact: bool) -> str:
    content = file.read_bytes()
    try:
        return _digest(content if exact else ast.dump(parsed(content, file)).encode())
    except (SyntaxError, ValueError):
        return _digest(content)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Shape:
    """Describes functions and what they refer to as plain data, without places in files.

    Args:
        exact: how local modules are compared; see `digest_of_file`.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no two objects have one id

    def of(self, value: Any) -> Any:
        """Describe a value."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | type(...)):
            return repr(value)
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        if isinstance(value, Mapping):
            return ("mapping", [(self.of(key), self.of(item)) for key, item in value.items()])
        if isinstance(value, set | frozenset):
            return ("set", sorted(repr(self.of(item)) for item in value))
        if isinstance(value, list | tuple):
            return (type(value).__name__, [self.of(item) for item in value])
        return self._of_object(value)

    def _of_object(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
            counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
            return ("code", value.co_code, names, counts, [self.of(constant) for constant in value.co_consts])
        if isinstance(value, types.ModuleType):
            return ("module", *self._of_module(value.__name__))
        if isinstance(value, type | types.FunctionType) and _is_importable(value):
            return ("imported", value.__qualname__, *self._of_module(value.__module__))
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, type):
            own = {key: item for key, item in vars(value).items() if key not in _OF_CLASSES}
            return ("class", value.__qualname__, [self.of(base) for base in value.__bases__], self.of(own))
        if isinstance(value, staticmethod | classmethod | types.MethodType):
            return (type(value).__name__, self.of(value.__func__), self.of(getattr(value, "__self__", None)))
        if isinstance(value, types.BuiltinFunctionType):
            return ("builtin", value.__module__, value.__qualname__)
        try:
            parts = value.__reduce_ex__(4)
        except Exception:  # objects may refuse to be copied in any way
            return ("object", self.of(type(value)))
        return ("object", self.of(type(value)), self.of(parts[1:3]) if isinstance(parts, tuple) else parts)

    def _of_function(self, function: types.FunctionType) -> Any:
        used = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
        cells = [_content_of(cell) for cell in function.__closure__ or ()]
        parts = (function.__code__, function.__defaults__, function.__kwdefaults__, cells, dict(sorted(used.items())))
        return ("function", [self.of(part) for part in parts])

    def _of_module(self, name: str) -> tuple[str, str]:
        file = local_file(name)
        return name, "" if file is None else digest_of_file(file, self._exact)


_OF_CLASSES = ("__dict__", "__weakref__", "__module__", "__firstlineno__", "__slotnames__", "__static_attributes__")


def _is_importable(value: Any) -> bool:
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value and value.__module__ != "__main__"


def _names(code: types.CodeType) -> set[str]:
    """The global names that a function and those within it may use."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
