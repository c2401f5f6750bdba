"""Loads code that a user names in the configuration, the same way everywhere.

A path is one of

- `path/to/file.py`: a Python file. Its folder is put on `sys.path`, so that it can import the files next to it.
- `package.module` or `pkg://package.module`: a module that can be imported.

If an object is needed, `:name` may follow either form, or the path is

- `path/to/file.pkl`: a file that holds one object, pickled (`hybridrl.reward.reward_settings` writes functions so).

Before code is loaded, the entry points of the group
`hybridrl.import_hooks` are called: hybridrl's own one lets `import verl` find `hybridrl.verl_compat` where no verl is
installed. Processes that score rewards import this module, so it must stay light.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pickle
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.errors import UserError

IMPORT_HOOKS = "hybridrl.import_hooks"  # the group of entry points: functions without arguments

OBJECT_SUFFIX = ".pkl"  # of files that hold one object
_PREFIX = "hybridrl_user_"  # of the names of modules that are loaded from files


def load_module(path: str, key: str, error: type[UserError] = UserError) -> ModuleType:
    """Load a file or import a module. A file that was loaded before, and has not changed, is not run again.

    Args:
        path: as described above, without `:name`.
        key: the setting that holds `path`, for messages.
        error: the class of the errors that are raised.

    Raises:
        UserError: there is no such file or module, or importing it raises.
    """
    return _load(path, f"{key}={path}", error)


def names_file(path: str) -> bool:
    """Whether a path without `:name` is that of a file, which need not exist, rather than a module's name."""
    file = _file(path)
    return not path.startswith("pkg://") and (file.suffix == ".py" or file.is_file() or "/" in path)


def can_import(module: str) -> bool:
    """Whether the package of a module is there. Nothing of it is run, so a part of it may still be missing."""
    for hook in _import_hooks():
        hook()
    try:
        return importlib.util.find_spec(module.removeprefix("pkg://").partition(".")[0]) is not None
    except (ImportError, ValueError):  # a name that no module can have, or one without a specification
        return False


def _file(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _load(path: str, where: str, error: type[UserError]) -> ModuleType:
    """Do what `load_module` does; `where` is the setting with its value."""
    name, file = path.removeprefix("pkg://"), _file(path)
    for hook in _import_hooks():
        hook()
    is_file = names_file(path)
    if is_file and not file.is_file():
        raise error(f"{where}: no such file (looked for {file}).")
    if is_file and file.suffix != ".py":
        raise error(f"{where}: not a Python file; its name must end in .py.")
    try:
        return _load_file(file.resolve()) if is_file else importlib.import_module(name)
    except Exception as cause:  # the user's code may raise anything
        reason = f"fails to import: {type(cause).__name__}: {cause}{_place(cause)}"
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            reason = f"neither a Python file (looked for {file}) nor a module that can be imported ({cause})."
        elif isinstance(cause, ModuleNotFoundError) and not _import_hooks():
            reason += f". hybridrl is on the path but not installed (no entry point {IMPORT_HOOKS}): run pip install"
        raise error(f"{where}: {reason}") from cause


@functools.cache
def _import_hooks() -> tuple[Callable[[], None], ...]:
    """The functions that installed packages registered to be called before a user's code is imported."""
    return tuple(point.load() for point in importlib.metadata.entry_points(group=IMPORT_HOOKS))


def load_object(path: str, name: str | None, key: str, name_key: str, error: type[UserError] = UserError) -> Any:
    """Load an object from the user's code: `name` in the module at `path`, or `path:name` in one string.

    Args:
        path: as described above.
        name: the object's name; None if `path` ends in `:name`.
        key: the setting that holds `path`.
        name_key: the setting that holds `name`.
        error: the class of the errors that are raised.

    Raises:
        UserError: see `load_module`, or the module has no such object.
    """
    file, where = f"{key}={path}", f"{name_key}={name}"
    if name is None and ":" in path.removeprefix("pkg://"):
        where = file  # one setting holds both
        path, _, name = path.rpartition(":")
    if not name:
        raise error(f"{key}={path} is set but {name_key} is not. Set {name_key} to a name defined in it.")
    module = _load(path, file, error)
    if not hasattr(module, name):
        raise error(f"{where}: {path} defines no {name}. It defines {', '.join(defined_in(module)) or 'nothing'}.")
    return getattr(module, name)


def load_pickled(path: str, key: str, error: type[UserError] = UserError) -> Any:
    """Load the object that a file with `OBJECT_SUFFIX` holds.

    Args:
        path: of the file.
        key: the setting that holds it.
        error: the class of the errors that are raised.

    Raises:
        UserError: there is no such file, or its content cannot be loaded here.
    """
    try:
        return pickle.loads(_file(path).read_bytes())
    except FileNotFoundError:
        raise error(f"{key}={path}: no such file.") from None
    except Exception as cause:  # the modules of the object are imported, which may raise anything
        raise error(
            f"{key}={path}: the object in it cannot be loaded ({type(cause).__name__}: {cause}). Write it again (a "
            "reward function with hybridrl.reward.reward_settings), and keep the modules that it uses importable."
        ) from cause


def load_entries(path: str, key: str, error: type[UserError] = UserError) -> None:
    """Load a file of pickled entries (`hybridrl.registered_entries`) and register those that are not there yet.

    Args, raises: those of `load_pickled`.
    """
    load_pickled(path, key, error).register()


def load_class(
    path: str, name: str | None, key: str, name_key: str, base: type = object, error: type[UserError] = UserError
) -> Any:
    """Call `load_object` for a class derived from `base`."""
    loaded = load_object(path, name, key, name_key, error)
    if not inspect.isclass(loaded) or not issubclass(loaded, base):
        needed = "" if base is object else f" derived from {base.__module__}.{base.__qualname__}"
        raise error(f"{name_key}={name}: it is not a class{needed} in {path}, but {loaded!r}.")
    return loaded


def loaded_file(entry: Any) -> str | None:
    """The file that `load_module` loaded and that defines this class or function; None: it comes from elsewhere."""
    name = getattr(entry, "__module__", None) or ""
    if not name.startswith(_PREFIX):
        return None
    return sys.modules[name].__file__ if name in sys.modules else None


def defined_in(module: ModuleType, kind: Callable[[Any], bool] = callable) -> list[str]:
    """Return the public names of one kind that a module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if kind(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _load_file(file: Path) -> ModuleType:
    stamp = zlib.crc32(file.read_bytes(), zlib.crc32(bytes(file)))
    name = f"{_PREFIX}{file.stem}_{stamp:08x}"
    if name in sys.modules:
        return _pickled_by_value(sys.modules[name])
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return _pickled_by_value(module)


def _pickled_by_value(module: ModuleType) -> ModuleType:
    """The module, which no other process can import by its name. Ray may have been imported since it was loaded."""
    if (ray := sys.modules.get("ray")) is not None:
        ray.cloudpickle.register_pickle_by_value(module)
    return module


def _place(error: Exception) -> str:
    """Return the last executed line of the user's module, as ` (FILE, line N)`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    inside = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({inside[-1].filename}, line {inside[-1].lineno})" if inside else ""
