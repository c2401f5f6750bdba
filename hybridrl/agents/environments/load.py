"""The environments of a run: from a YAML file, by registered name, or as `module:Class`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybridrl.errors import RolloutError, UserError
from hybridrl.notify import notify
from hybridrl.registry import ENVIRONMENTS
from hybridrl.utils.user_code import load_class

_KEY = "actor_rollout_ref.rollout.agent"
_ENTRY = "{name: NAME, class_name: NAME or MODULE.CLASS, config: {...}}"


@dataclass(frozen=True)
class EnvironmentEntry:
    """An environment that was started.

    Attributes:
        cls: makes one object per session.
        config: its arguments.
    """

    cls: Any
    config: dict[str, Any] = field(default_factory=dict)


class Environments:
    """The environments of a run, started.

    Args:
        entries: by name.
        default: of rows that name none; None: each row must name one.
    """

    def __init__(self, entries: Mapping[str, EnvironmentEntry], default: str | None) -> None:
        self.entries = entries
        self.default = default

    def entry(self, kwargs: Mapping[str, Any]) -> EnvironmentEntry:
        """The environment of a row with these `env_kwargs`.

        Raises:
            RolloutError: the row names none, or one that there is not.
        """
        name = kwargs.get("name") or self.default
        if name is None or name not in self.entries:
            raise RolloutError(
                f"a row's env_kwargs.name is {kwargs.get('name')!r}; there are {', '.join(self.entries) or 'none'}. "
                f"{_KEY}.default_environment is for rows without it"
            )
        return self.entries[name]

    def close(self) -> None:
        """End what the environments started for the run."""
        for name, entry in self.entries.items():
            if hasattr(entry.cls, "stop"):
                try:
                    entry.cls.stop(entry.config)
                except Exception as error:  # the others must end too
                    notify(f"environment {name}: ending it failed: {error!r}", "warning")


def load_environments(path: str | None, default: str | None, named: Iterable[str]) -> Environments:
    """Load and start the environments of a run.

    Args:
        path: `agent.environment_config_path`.
        default: `agent.default_environment`.
        named: those that rows name.

    Raises:
        RolloutError: a file, an entry or a name is wrong, or an environment does not start.
    """
    listed = {} if path is None else _entries(path)
    if default is None and len(listed) == 1:
        default = next(iter(listed))
    wanted = dict.fromkeys([*listed, *([default] if default is not None else []), *named])
    if not wanted:
        raise RolloutError(
            f"the loop env_agent has no environment: name one with {_KEY}.default_environment (a registered name or "
            f"module:Class; known are {', '.join(ENVIRONMENTS.names())}), list them in {_KEY}.environment_config_path, "
            "or give rows env_kwargs with a name"
        )
    entries: dict[str, EnvironmentEntry] = {}
    try:
        for name in wanted:
            where = f"{_KEY}.environment_config_path={path}: {name}" if name in listed else f"environment {name!r}"
            class_name, config = listed.get(name, (name, {}))
            entries[name] = _started(_class(class_name, where), config, where)
    except BaseException:
        Environments(entries, None).close()
        raise
    return Environments(entries, default)


def _started(cls: Any, config: dict[str, Any], where: str) -> EnvironmentEntry:
    try:
        return EnvironmentEntry(cls, dict(cls.start(dict(config)) if hasattr(cls, "start") else config))
    except UserError as error:
        raise RolloutError(f"{where}: {error}") from error
    except Exception as error:  # the user's class may raise anything
        raise RolloutError(f"{where}: starting it failed: {type(error).__name__}: {error}") from error


def _class(name: str, where: str) -> Any:
    if name in ENVIRONMENTS.names():
        found = ENVIRONMENTS.get(name)
    else:
        path, _, short = name.rpartition(":" if ":" in name else ".")
        if not path:
            known = ", ".join(ENVIRONMENTS.names())
            raise RolloutError(f"{where}: there is no environment {name!r}; known are {known}, or MODULE.CLASS")
        found = load_class(path, short, where, f"{where}: class_name", object, RolloutError)
    lacks = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if lacks:
        raise RolloutError(f"{where}: {name} has no {' and no '.join(lacks)}; see hybridrl.agents.Environment")
    return found


def _entries(path: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (class name, config)."""
    key = f"{_KEY}.environment_config_path={path}"
    file = Path(path).expanduser()
    if not file.is_file():
        raise RolloutError(f"{key}: there is no such file")
    try:
        whole = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except Exception as error:  # errors of YAML and OmegaConf have no common base
        raise RolloutError(f"{key}: it is not readable YAML: {error}") from error
    entries = whole.get("environments") if isinstance(whole, Mapping) else None
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise RolloutError(f"{key}: it must be {{environments: [...]}} with entries {_ENTRY}")
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for number, entry in enumerate(entries):
        known = {"name", "class_name", "config"}
        if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str) or set(entry) - known:
            raise RolloutError(f"{key}: environments[{number}] is {entry!r}, and must be {_ENTRY}")
        name = str(entry.get("name") or entry["class_name"])
        if name in found:
            raise RolloutError(f"{key}: two environments are called {name}; rename one")
        found[name] = (entry["class_name"], {str(k): v for k, v in (entry.get("config") or {}).items()})
    return found
