"""Lets `import verl` find the modules of `hybridrl.verl_compat`.

There are two strengths. `activate` puts them before a verl that is installed or lies in the current folder, in this
process and in all that it starts: the user asked for it. `allow` lets them answer only where there is no verl; it is
called before hybridrl loads a file that the user names in the configuration.

This module must stay light: the processes that score rewards import it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hybridrl.errors import UserError

NAME = "verl"
PACKAGE = "hybridrl.verl_compat"
_RAY_HOOK = "RAY_RUNTIME_ENV_HOOK"
_USERS_RAY_HOOK = "HYBRIDRL_USERS_RAY_RUNTIME_ENV_HOOK"  # what it was before
_OWN_RAY_HOOK = f"{PACKAGE}.alias.ray_runtime_env"

#: a folder with a package `verl` that calls `activate`; on the import path, it reaches processes of every kind
STUB = Path(__file__).parent / "path"


class _Alias(MetaPathFinder, Loader):
    """Finds `verl.x.y` as the module object of `hybridrl.verl_compat.x.y`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of verl's; None for any other name.

        Raises:
            ModuleNotFoundError: hybridrl has no counterpart; the message says why.
        """
        head, _, rest = fullname.partition(".")
        if head != NAME or (rest and not _is_ours(sys.modules.get(NAME))):
            return None
        if not rest and not _active and _is_installed():
            return None
        try:
            real = importlib.util.find_spec(_real(fullname))
        except ImportError as error:
            if error.name != _real(fullname):
                raise
            raise ModuleNotFoundError(str(error), name=fullname) from None
        assert real is not None, "_missing raises"
        return ModuleSpec(fullname, self, origin=real.origin, is_package=real.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of hybridrl that stands for the one of verl."""
        module = importlib.import_module(_real(spec.name))
        spec.loader_state = module.__spec__  # importlib replaces it by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore what importlib changed, and make the module explain names that it lacks."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
        if not hasattr(module, "__path__"):
            # `from verl.x import y` tries a submodule y of whatever has a path, and _Missing says what is missing.
            module.__path__ = []

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module, for `run -m verl.trainer.main_ppo`."""
        real = importlib.util.find_spec(_real(fullname))
        assert real is not None and real.loader is not None
        return real.loader.get_code(real.name)  # type: ignore[attr-defined]  # of an ordinary source file


class _Missing(MetaPathFinder):
    """The last finder: explains a name of verl's that nothing here has."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Return nothing for names of other packages.

        Raises:
            ImportError: the name would belong to `hybridrl.verl_compat`.
        """
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is None or not f"{parent.__name__}.".startswith(f"{PACKAGE}."):
            return
        from hybridrl.verl_compat.absent import reason

        # No ModuleNotFoundError: in `from verl.x import y`, the import system would replace it by its own message.
        raise ImportError(reason(NAME + fullname.removeprefix(PACKAGE), parent), name=fullname)


_alias, _missing = _Alias(), _Missing()
_active = False


def _real(name: str) -> str:
    return PACKAGE + name.removeprefix(NAME)


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and module.__name__ == PACKAGE


def _is_installed() -> bool:
    """Whether another finder knows a package verl. A folder without `__init__.py`, such as a clone, is none."""
    for finder in sys.meta_path:
        if finder not in (_alias, _missing) and (spec := finder.find_spec(NAME, None)) is not None and spec.loader:
            return True
    return False


def _forget_namespace() -> None:
    """Forget a `verl` that was imported from a folder without `__init__.py`, unless it holds imported modules."""
    present = sys.modules.get(NAME)
    if present is None or _is_ours(present) or getattr(present, "__file__", None) is not None:
        return
    if not any(name.startswith(f"{NAME}.") for name in sys.modules):
        del sys.modules[NAME]


def allow() -> None:
    """Let hybridrl's modules answer to the name `verl` in this process if no verl is installed."""
    _forget_namespace()
    if _alias not in sys.meta_path:
        # Before the finder of files: a folder `verl` without `__init__.py` would end the search there.
        at = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(at, _alias)
        sys.meta_path.append(_missing)


def activate() -> None:
    """Let hybridrl's modules answer to the name `verl`, in this process and in those that it starts.

    Ray's workers are among them, also where a program calls `ray.init` itself or joins a cluster.

    Raises:
        UserError: another verl is imported already.
    """
    global _active
    _forget_namespace()
    present = sys.modules.get(NAME)
    if present is not None and not _is_ours(present):
        raise UserError(
            f"verl is imported already, from {getattr(present, '__file__', None)}. Put `import hybridrl.verl_compat."
            "as_verl` before the first import of verl, or start the program with `python -m hybridrl.verl_compat run`."
        )
    if _active:
        return
    _active = True
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in (_alias, _missing)]
    sys.meta_path.insert(0, _alias)
    sys.meta_path.append(_missing)
    _put_stub_first(sys.path)
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join(_put_stub_first(inherited))
    users = os.environ.get(_RAY_HOOK, _OWN_RAY_HOOK)
    if users != _OWN_RAY_HOOK:
        os.environ[_USERS_RAY_HOOK] = users
    os.environ[_RAY_HOOK] = _OWN_RAY_HOOK


def ray_runtime_env(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Add `activate` to what Ray's workers do when they start. Ray calls this in `ray.init`."""
    users = os.environ.get(_USERS_RAY_HOOK)
    changed = dict((_named(users)(runtime_env) if users else runtime_env) or {})
    user_hook = changed.get("worker_process_setup_hook")
    if user_hook is None:
        changed["worker_process_setup_hook"] = f"{PACKAGE}.alias.activate"
    elif user_hook != f"{PACKAGE}.alias.activate":
        changed["worker_process_setup_hook"] = _activate_and(user_hook)
    return changed


def _activate_and(user_hook: str | Callable[[], Any]) -> Callable[[], None]:
    def set_up() -> None:
        activate()
        (_named(user_hook) if isinstance(user_hook, str) else user_hook)()

    return set_up


def _named(path: str) -> Any:
    """Return the object of a dotted path, which is how Ray names hooks."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _put_stub_first(entries: list[str]) -> list[str]:
    stub = str(STUB)
    entries[:] = [stub, *(entry for entry in entries if entry != stub)]
    return entries
