"""Finds what a Python file reads besides itself: modules that it imports, and files that it names in its source.

Those are also the files of folders that it lists, such as `Path(__file__).parent.glob("*.txt")`. Nothing is run.
Expressions of literals, `__file__`, `os.path` and `pathlib` are computed, so that
`open(os.path.join(os.path.dirname(__file__), "rubric.txt"))` names a file. Names that are made while the code runs are
not known.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: functions that import what their first argument names
_IMPORTERS = ("import_module", "__import__")
#: what leaves a path as it is, as far as its content is concerned
_SAME = ("abspath", "realpath", "expanduser", "normpath", "fspath", "str", "resolve", "absolute", "as_posix", "strip")
_PATH_CLASSES = ("Path", "PurePath", "PosixPath", "PurePosixPath")
#: functions and methods that write what their arguments name, by their names or by what these begin with
WRITERS = ("to_", "save", "dump", "write", "touch", "unlink", "remove", "connect", "basicConfig")
WRITING_CLASSES = ("FileHandler", "FileLock", "SummaryWriter", "Memory", "Cache", "Lock", "Shelf")
#: functions and methods that ask about a file, and read nothing of it
PROBES = ("exists", "lexists", "is_file", "is_dir", "isfile", "isdir", "is_symlink", "islink", "stat", "access")
#: files that programs keep for themselves
OF_PROGRAMS = (".log", ".lock", ".pid", ".tmp", ".out", ".err", ".db", ".sqlite", ".sqlite3", ".pyc")
_MAX_NAME = 1024
#: functions and methods that list a folder: its files, and those below it
LISTERS = ("listdir", "scandir", "iterdir")
LISTERS_BELOW = ("walk", "rglob", "glob", "iglob")
#: a folder with more files is none of the code's own
_MAX_LISTED = 20_000


@dataclass
class NamedFiles:
    """Modules and files that one Python file reads.

    Attributes:
        modules: modules that it may import: how many packages up a name begins (0: it is absolute), and the name.
        folders: folders that it may put on `sys.path`.
        files: files that exist and that it names, next to it or from the working directory, without those it writes.
        listings: what it lists: a folder, the pattern and the files, without those that it writes. Not all files of
            the working directory, or of a folder around it.
    """

    modules: list[tuple[int, str]] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    listings: list[tuple[Path, str, list[Path]]] = field(default_factory=list)


def named_files(tree: ast.Module, file: Path) -> NamedFiles:
    """Find what a Python file reads.

    Args:
        tree: its syntax tree.
        file: its place.
    """
    reader = _Reader(tree, file)
    names = NamedFiles(modules=list(dict.fromkeys(reader.modules())))
    written = {path for value in reader.written() for path in places(value, file.parent)}
    changes_path = reader.mentions("path", "addsitedir")
    for value in reader.values():
        for path in places(value, file.parent):
            if path.is_file() and path != file and path not in written and path.suffix not in OF_PROGRAMS:
                names.files.append(path)
            elif changes_path and path.is_dir():
                names.folders.append(path)
    changed = {path for value in reader.changed_folders() for path in places(value, file.parent)}
    for folder, pattern in dict.fromkeys(reader.listed()):
        if pattern in ("*", "**/*") and Path.cwd().is_relative_to(folder):
            continue  # where runs leave files of any kind
        listed = [path for path in files_in(folder, pattern) if path.parent not in changed and path not in written]
        names.listings.append((folder, pattern, [path for path in listed if path != file]))
    names.files, names.folders = list(dict.fromkeys(names.files)), list(dict.fromkeys(names.folders))
    return names


def places(value: str | Path, folder: Path) -> list[Path]:
    """Return what a name names that exists: from the working directory, and in `folder`."""
    text = str(value)
    if not 0 < len(text) <= _MAX_NAME or "\n" in text or "\0" in text:
        return []
    path = Path(os.path.expanduser(text))
    try:
        candidates = [Path.cwd() / path, folder / path]
        return list(dict.fromkeys(place.resolve() for place in candidates if place.exists()))
    except (OSError, ValueError, RuntimeError):  # no name of a file, or a loop of links
        return []


def files_in(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that a pattern names, without those that programs keep for themselves.

    None where there are so many that the folder is none of the code's own.
    """
    paths = list(itertools.islice(folder.glob(pattern), _MAX_LISTED + 1))
    if len(paths) > _MAX_LISTED:
        return []
    hidden = [any(part[0] == "." or part == "__pycache__" for part in path.relative_to(folder).parts) for path in paths]
    pairs = zip(paths, hidden, strict=True)
    return sorted(path for path, skip in pairs if not skip and path.suffix not in OF_PROGRAMS and path.is_file())


class _Reader:
    """Computes the expressions of a file that may be paths.

    Args:
        tree: its syntax tree.
        file: its place, which is `__file__`.
    """

    def __init__(self, tree: ast.Module, file: Path) -> None:
        self._file = file
        nodes = list(ast.walk(tree))
        self._expressions = [node for node in nodes if isinstance(node, ast.expr)]
        self._calls = [node for node in nodes if isinstance(node, ast.Call)]
        self._imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        self._cache: dict[int, str | Path | None] = {}
        self._assigned: dict[str, ast.expr] = {}
        self._texts_alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self._assigned.setdefault(target.id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self._assigned.setdefault(node.target.id, node.value)

    def mentions(self, *names: str) -> bool:
        """Whether the last part of a dotted name is one of these."""
        return any(_last(node) in names for node in self._expressions)

    def values(self) -> Iterator[str | Path]:
        """Yield every text and path of the file, without docstrings and paths that are only probed for a file."""
        probed = self._probed()
        for node in self._expressions:
            if isinstance(node, ast.Constant) and id(node) in self._texts_alone:
                continue
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                continue
            if id(node) not in probed:
                value = self.value(node)
                if value is not None:
                    yield value

    def _probed(self) -> set[int]:
        """Return the nodes of expressions, also of assigned ones, that nothing uses but `PROBES`."""
        probed: set[int] = set()
        for node in self._calls:
            if _last(node.func) in PROBES:
                of = [node.func.value] if isinstance(node.func, ast.Attribute) else []
                probed.update(id(part) for root in (*of, *node.args) for part in ast.walk(root))
        loads: dict[str, list[int]] = {}
        for expression in self._expressions:
            if isinstance(expression, ast.Name) and isinstance(expression.ctx, ast.Load):
                loads.setdefault(expression.id, []).append(id(expression))
        for name, value in self._assigned.items():
            if name in loads and probed.issuperset(loads[name]):
                probed.update(id(part) for part in ast.walk(value))
        return probed

    def modules(self) -> Iterator[tuple[int, str]]:
        """Yield the level and the name of each module that the file may import."""
        for node in self._imports:
            if isinstance(node, ast.Import):
                yield from ((0, alias.name) for alias in node.names)
            else:
                names = [alias.name for alias in node.names if alias.name != "*"] or [""]
                yield from ((node.level, ".".join(filter(None, (node.module, name)))) for name in names)
        for call in self._calls:
            if _last(call.func) in _IMPORTERS:
                yield from self._imported(call)

    def _imported(self, node: ast.Call) -> Iterator[tuple[int, str]]:
        """Yield the module that `import_module(name, package)` or `__import__(name)` imports."""
        words = {word.arg: word.value for word in node.keywords}
        names = [self.value(value) for value in (*node.args[:1], *filter(None, [words.get("name")]))]
        package = [self.value(value) for value in (*node.args[1:2], *filter(None, [words.get("package")]))]
        if not names or not isinstance(names[0], str):
            return
        name = names[0].lstrip(".")
        level = len(names[0]) - len(name)
        if level and package and isinstance(package[0], str):  # by name, and not `__package__`
            parts = package[0].split(".")
            level, name = 0, ".".join([*parts[: len(parts) - level + 1], name])
        yield level, name

    def written(self) -> Iterator[str | Path]:
        """Yield the names of files that the code writes."""
        for node in self._calls:
            name = _last(node.func)
            of = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            if name == "open":
                is_method = bool(of) and self.value(of[0]) is not None
                if self._writes(node.args[0 if is_method else 1 :], node.keywords) or _last(of[0] if of else None) in (
                    "shelve",
                    "dbm",
                ):
                    yield from self._values([*of, *node.args[:1], *(word.value for word in node.keywords)])
            elif name.startswith(WRITERS) or name.endswith(WRITING_CLASSES):
                yield from self._values([*of, *node.args, *(word.value for word in node.keywords)])

    def changed_folders(self) -> Iterator[str | Path]:
        """Yield the folders in which the code makes files whose names are not known."""
        for call in self._calls:
            name = _last(call.func)
            of = [call.func.value] if isinstance(call.func, ast.Attribute) else []
            if name in ("mkdir", "makedirs"):
                yield from self._values([*of, *call.args[:1]])
            elif name.startswith(WRITERS) or name.endswith(WRITING_CLASSES):
                yield from self._known_parts([*of, *call.args, *(word.value for word in call.keywords)])
            elif name == "open" and self._writes([*call.args[: 1 if of else 2]][-1:], call.keywords):
                yield from self._known_parts([*of, *call.args[:1]])

    def _known_parts(self, nodes: list[ast.expr]) -> Iterator[str | Path]:
        """Yield the largest known parts of expressions whose values are not known."""
        for node in nodes:
            if self.value(node) is None:
                for part in ast.iter_child_nodes(node):
                    if isinstance(part, ast.expr):
                        value = self.value(part)
                        yield from self._known_parts([part]) if value is None else [value]

    def listed(self) -> Iterator[tuple[Path, str]]:
        """Yield the folders that the code lists, with the pattern of the files."""
        for node in self._calls:
            name, of = _last(node.func), None
            if isinstance(node.func, ast.Attribute):
                of = self.value(node.func.value)
            values = [self.value(argument) for argument in node.args[:1]]
            if isinstance(of, Path) and name in (*LISTERS, *LISTERS_BELOW):
                pattern = str(values[0]) if values and values[0] is not None else "*"
                names = f"**/{pattern}" if name in ("walk", "rglob") else pattern
                yield from ((folder, names) for folder in places(of, self._file.parent) if folder.is_dir())
            elif values and values[0] is not None and name in (*LISTERS, "walk"):
                names = "**/*" if name == "walk" else "*"
                yield from ((folder, names) for folder in places(values[0], self._file.parent) if folder.is_dir())
            elif values and values[0] is not None and name in ("glob", "iglob"):
                yield from self._of_pattern(str(values[0]), node.keywords)

    def _of_pattern(self, pattern: str, keywords: list[ast.keyword]) -> Iterator[tuple[Path, str]]:
        """Return the paths that `glob.glob(pattern, root_dir=...)` lists."""
        roots = [self.value(word.value) for word in keywords if word.arg == "root_dir"]
        parts = Path(*(root for root in roots if root is not None), os.path.expanduser(pattern)).parts
        magic = next((number for number, part in enumerate(parts) if glob.has_magic(part)), None)
        if magic is not None:
            folders = places(Path(*parts[:magic]), self._file.parent)
            yield from ((folder, "/".join(parts[magic:])) for folder in folders if folder.is_dir())

    def _writes(self, others: list[ast.expr], keywords: list[ast.keyword]) -> bool:
        """Whether the mode of an `open` says so, which is the first of its other arguments."""
        modes = [*others[:1], *(word.value for word in keywords if word.arg in ("mode", "flag"))]
        values = [self.value(mode) for mode in modes]
        return any(isinstance(value, str) and set(value) & set("wax+") for value in values)

    def _values(self, nodes: list[ast.expr]) -> Iterator[str | Path]:
        yield from (value for node in nodes if (value := self.value(node)) is not None)

    def value(self, node: ast.expr) -> str | Path | None:
        """The text or path that an expression has; None if that is not known."""
        if id(node) not in self._cache:
            self._cache[id(node)] = None  # of a name that is made of itself
            with contextlib.suppress(ValueError, IndexError, OSError, RuntimeError):  # no path can be made of it
                self._cache[id(node)] = self._compute(node)
        return self._cache[id(node)]

    def _compute(self, node: ast.expr) -> str | Path | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            if node.id == "__file__":
                return str(self._file)
            return self.value(self._assigned[node.id]) if node.id in self._assigned else None
        if isinstance(node, ast.Attribute):
            of = self.value(node.value)
            return of.parent if isinstance(of, Path) and node.attr == "parent" else None
        if isinstance(node, ast.Subscript):
            return self._parents(node)
        if isinstance(node, ast.BinOp):
            return _joined(node.op, self.value(node.left), self.value(node.right))
        if isinstance(node, ast.JoinedStr):
            parts = [self.value(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values]
            return None if None in parts else "".join(map(str, parts))
        return self._of_call(node) if isinstance(node, ast.Call) else None

    def _parents(self, node: ast.Subscript) -> Path | None:
        """`path.parents[N]`."""
        if isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
            of = self.value(node.value.value)
            if isinstance(of, Path) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
                return of.parents[node.slice.value]
        return None

    def _of_call(self, node: ast.Call) -> str | Path | None:
        name = _last(node.func)
        if name in ("getcwd", "cwd") and not node.args:
            return Path.cwd()
        arguments = [self.value(argument) for argument in node.args]
        of = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if name in _PATH_CLASSES:
            return None if None in arguments else Path(*(part for part in arguments if part is not None))
        if of is not None and name in _SAME:
            return of
        if isinstance(of, Path) and name in ("joinpath", "with_name", "with_suffix"):
            return None if None in arguments else _method(of, name, arguments)
        if not arguments or None in arguments or isinstance(of, str):
            return None
        first = str(arguments[0])
        if name == "dirname":
            return os.path.dirname(first)
        if name == "join":
            return os.path.join(*map(str, arguments))
        return arguments[0] if name in _SAME and len(arguments) == 1 else None


def _method(path: Path, name: str, arguments: list[Any]) -> Path:
    return Path(getattr(path, name)(*map(str, arguments)))


def _joined(operator: ast.operator, first: str | Path | None, second: str | Path | None) -> str | Path | None:
    if first is None or second is None:
        return None
    if isinstance(operator, ast.Div) and (isinstance(first, Path) or isinstance(second, Path)):
        return Path(first) / second
    return (
        first + second if isinstance(operator, ast.Add) and isinstance(first, str) and isinstance(second, str) else None
    )


def _last(node: ast.AST | None) -> str:
    """The last part of a dotted name."""
    return str(getattr(node, "attr", getattr(node, "id", "")))
