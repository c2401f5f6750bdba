"""Digests of a user's code that do not change with its place, and, if asked for, not with comments and layout."""

import ast
import dis
import functools
import hashlib
import pickle
import re
import site
import sys
import sysconfig
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from hybridrl.utils.content_digest import digest_of_content, digest_of_files
from hybridrl.utils.named_files import (
    LISTERS,
    LISTERS_BELOW,
    OF_PROGRAMS,
    WRITERS,
    WRITING_CLASSES,
    files_in,
    named_files,
    places,
)
from hybridrl.utils.python_source import parsed

#: names of folders that packages are installed in
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
#: files of code that are read in full; of further ones only the imports are
_ANALYSED = 200
_IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+(?P<names>[\w., \t]+)"
    r"|from[ \t]+(?P<of>\.*[\w.]*)[ \t]+import[ \t]*(?:\((?P<inner>[^)]*)\)|(?P<outer>(?:[^\n\\]|\\\n)*)))",
    re.MULTILINE,
)
#: packages that belong to the library, or that stand in for it
_LIBRARY = ("hybridrl", "verl")
#: words in a source whose code may read docstrings
_READ_DOCSTRINGS = (b"__doc__", b"getdoc", b"get_json_schema", b"docstring", b"verifiers")
#: decorators that do not
_PLAIN_DECORATORS: tuple[str, ...] = (
    "property",
    "cached_property",
    "setter",
    "staticmethod",
    "classmethod",
    "abstractmethod",
)
_PLAIN_DECORATORS += ("cache", "lru_cache", "wraps", "overload", "override", "contextmanager", "dataclass")
#: of `open`
_WRITING_MODES = ("w", "a", "x", "wb", "ab", "xb", "wt", "at", "w+", "a+", "r+", "w+b", "r+b")


def digest_of_file(file: Path, exact: bool) -> str:
    """Return a digest of a Python file, of the local modules that it imports, and of the files that it names.

    Neither counts where the files lie; see `parts_of_file`.
    """
    return _digest(repr(sorted(parts_of_file(file, exact))).encode())


def parts_of_file(file: Path, exact: bool) -> list[tuple[str, str]]:
    """Return a name and a digest for a Python file and for everything that it reads (`named_files`).

    Args:
        file: need not be valid Python.
        exact: of the bytes; False: of the syntax tree, which comments, docstrings and layout are not part of.
            Docstrings count where something may read them: of functions with a decorator, such as tools, and in files
            that mention `__doc__` or the like.
    """
    read = _Collection(file.resolve())
    parts = [
        (
            name,
            _digest_of_source(path, exact or path in read.light) if path.suffix == ".py" else digest_of_content(path),
        )
        for path, name in read.names.items()
    ]
    for (folder, pattern), files in read.listings.items():
        label = "." if folder in file.resolve().parents else folder.name  # the experiment may move
        parts.append((f"folder {label}/{pattern}", digest_of_files(folder, files)))
    return parts


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


def local_file(name: str, folders: Sequence[Path] = ()) -> Path | None:
    """Return the file of a module that lies in `folders` or elsewhere on the path, but is not installed; else None."""
    if not _MODULE.fullmatch(name) or name.partition(".")[0] in _LIBRARY:
        return None
    for root in [*folders, *_local_folders()]:
        base = root.joinpath(*name.split("."))
        compiled = (base.with_name(f"{base.name}{suffix}") for suffix in EXTENSION_SUFFIXES)
        for path in (base / "__init__.py", base.with_name(f"{base.name}.py"), *compiled):
            if path.is_file():
                return path.resolve()
    return None


def _local_folders() -> list[Path]:
    """The folders of `sys.path` that hold neither the standard library nor installed packages."""
    return _local_among(tuple(sys.path), Path.cwd())


@functools.lru_cache(8)
def _local_among(names: tuple[str, ...], cwd: Path) -> list[Path]:
    """`_local_folders` of a path, and for a working directory."""
    roots = _installed_folders()
    folders = dict.fromkeys((cwd / name).resolve() for name in names)
    return [
        folder
        for folder in folders
        if folder.is_dir()
        and not _INSTALLED.intersection(folder.parts)  # also those of an environment below this one
        and not any(folder.is_relative_to(root) for root in roots)
    ]


@functools.cache
def _installed_folders() -> list[Path]:
    """The folders of the standard library and of installed packages."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages()}
    return [Path(folder).resolve() for folder in installed if folder]


class _Collection:
    """The files that a Python file reads: itself, the modules that it imports, the files that it names.

    Of the first `_ANALYSED` files everything is found. Of further ones, which belong to large packages, only the
    imports are, and they are compared by their bytes: that takes a tenth of the time.

    Attributes:
        names: what each file is imported as, or called.
        light: files that were only searched for imports.
        listings: by folder and pattern, the files of folders that the code lists, without those in Python, which are
            collected like modules.
    """

    def __init__(self, file: Path) -> None:
        self.names: dict[Path, str] = {}
        self.light: set[Path] = set()
        self.listings: dict[tuple[Path, str], list[Path]] = {}
        self._roots = [file.parent]  # that the names of modules start from, with those that code adds to `sys.path`
        self._places: dict[tuple[str, tuple[Path, ...]], Path | None] = {}
        self._pending: list[tuple[Path, str] | tuple[Path, int, str]] = [(file, "")]
        while self._pending:  # no recursion: chains of imports may be longer than Python's stack
            part = self._pending.pop()
            self._add(*part) if len(part) == 2 else self._import(*part)

    def _add(self, file: Path, name: str) -> None:
        """Add a file, and put off what it reads, the first before the others."""
        if file in self.names:
            return
        self.names[file] = name
        if file.suffix != ".py":
            return
        content = file.read_bytes()
        if len(self.names) > _ANALYSED:
            self.light.add(file)
            self._pending += [(file, level, module) for level, module in reversed(_imports_in(content))]
            return
        try:
            read = named_files(parsed(content, file), file)
        except (SyntaxError, ValueError):
            return
        self._roots += [folder for folder in read.folders if folder not in self._roots and not _is_installed(folder)]
        parts_read: list[tuple[Path, str] | tuple[Path, int, str]] = [(file, *module) for module in read.modules]
        parts_read += [(path, f"file {path.name}") for path in read.files if not _is_installed(path)]
        for folder, pattern, files in read.listings:
            if not _is_installed(folder) and (folder, pattern) not in self.listings:
                self.listings[folder, pattern] = [path for path in files if path.suffix != ".py"]
                python = [path for path in files if path.suffix == ".py"]
                parts_read += [(path, f"file {path.relative_to(folder).as_posix()}") for path in python]
        self._pending += reversed(parts_read)

    def _import(self, file: Path, level: int, module: str) -> None:
        """Add the module that a file imports, and the packages around it, which are imported, too."""
        folders = self._roots if level == 0 else [file.parents[min(level, len(file.parents)) - 1]]
        parts_read: list[tuple[Path, str]] = []
        if level and (package := folders[0] / "__init__.py").is_file():
            parts_read.append((package, "." * level))
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            key = (name, tuple(folders))
            if key not in self._places:
                self._places[key] = local_file(name, folders)
            if (path := self._places[key]) is not None:
                parts_read.append((path, name))
        self._pending += reversed(parts_read)


def _is_installed(path: Path) -> bool:
    return any(map(path.is_relative_to, _installed_folders()))


def _imports_in(source: bytes) -> list[tuple[int, str]]:
    """The level and the name of each module that the import statements of a source may import, found by their words."""
    modules = []
    for match in _IMPORT.finditer(source.decode(errors="replace")):
        if match["names"] is not None:
            modules += [(0, part.split()[0]) for part in match["names"].split(",") if part.strip()]
            continue
        of = match["of"].lstrip(".")
        level = len(match["of"]) - len(of)
        parts = re.findall(r"[A-Za-z_]\w*", re.sub(r"#.*|\bas\s+\w+", "", match["inner"] or match["outer"] or ""))
        modules += [(level, ".".join(filter(None, (of, part)))) for part in parts or [""]]
    return list(dict.fromkeys(modules))


def _digest_of_source(file: Path, exact: bool) -> str:
    content = file.read_bytes()
    try:
        return _digest(content if exact else ast.dump(_without_docstrings(parsed(content, file), content)).encode())
    except (SyntaxError, ValueError):
        return _digest(content)


def _without_docstrings(tree: ast.Module, source: bytes) -> ast.Module:
    """Remove texts that stand alone, unless something may read them."""
    if any(word in source for word in _READ_DOCSTRINGS):
        return tree
    for node in ast.walk(tree):
        is_read = any(_last(decorator) not in _PLAIN_DECORATORS for decorator in getattr(node, "decorator_list", ()))
        body = getattr(node, "body", None)
        if isinstance(body, list) and not (is_read and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            node.body = [entry for entry in body if not _is_text(entry)]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _last(decorator: ast.expr) -> str:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Shape:
    """Describes functions and what they refer to as plain data, without places in files.

    Args:
        exact: how local modules are compared; see `digest_of_file`.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no two objects have one id

    def of(self, value: Any) -> Any:
        """Describe a value."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | type(...)):
            return repr(value)
        if id(value) in self._numbers:
            return ("again", self._numbers[id(value)])
        self._numbers[id(value)] = len(self._numbers)
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
            return self._of_code(value)
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

    def _of_code(self, code: types.CodeType) -> Any:
        """Describe the bytecode, without constants that it does not load, such as docstrings."""
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_HAS_DOCSTRING)
        loaded = {step.arg for step in dis.get_instructions(code) if step.opcode in dis.hasconst}
        constants = [self.of(value) if number in loaded else None for number, value in enumerate(code.co_consts)]
        return ("code", code.co_code, names, counts, constants)

    def _files(self, code: types.CodeType, used: Sequence[Any]) -> list[str]:
        """Digests of the files that a function and the values it uses name, if it does not write any."""
        texts = [value for value in (*code.co_consts, *used) if isinstance(value, str | Path)]
        writes = any(text in _WRITING_MODES for text in code.co_consts if isinstance(text, str))
        if writes or any(name.startswith(WRITERS) or name.endswith(WRITING_CLASSES) for name in code.co_names):
            return []
        named = dict.fromkeys(path for text in texts for path in places(text, Path.cwd()))
        digests = [digest_of_content(path) for path in named if path.is_file() and path.suffix not in OF_PROGRAMS]
        if set(LISTERS + LISTERS_BELOW) & set(code.co_names):
            digests += [digest_of_files(path, files_in(path, "**/*")) for path in named if path.is_dir()]
        return digests

    def _of_function(self, function: types.FunctionType) -> Any:
        used = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
        cells = [_content_of(cell) for cell in function.__closure__ or ()]
        parts = (function.__code__, function.__defaults__, function.__kwdefaults__, cells, dict(sorted(used.items())))
        return ("function", [self.of(part) for part in parts], self._files(function.__code__, [*used.values(), *cells]))

    def _of_module(self, name: str) -> tuple[str, str]:
        file = local_file(name)
        return name, "" if file is None else digest_of_file(file, self._exact)


_OF_CLASSES: tuple[str, ...] = ("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__")
_OF_CLASSES += ("__slotnames__", "__static_attributes__")
_HAS_DOCSTRING = 0x4000000  # of `co_flags`, since Python 3.13


def _is_importable(value: Any) -> bool:
    resolved: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        resolved = getattr(resolved, name, None)
    return resolved is value and value.__module__ != "__main__"


def _names(code: types.CodeType) -> set[str]:
    """The global names that a function and those within it may use."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
