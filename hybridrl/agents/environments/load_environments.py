"""The environments of a run: from a YAML file, by registered name, or as `module:Class`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.agents.entries import checked_config, class_of, named_entries, parameter_names
from hybridrl.errors import RolloutError, UserError
from hybridrl.notify import notify
from hybridrl.registry import ENVIRONMENTS

_KEY = "actor_rollout_ref.rollout.agent"


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
        self._open = True

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
        """End what the environments started in this process. A second call has no effect."""
        if not self._open:
            return
        self._open = False
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
    listed = {} if path is None else named_entries(path, f"{_KEY}.environment_config_path", "environments")
    if default is None and len(listed) == 1:
        default = next(iter(listed))
    names = dict.fromkeys([*listed, *([default] if default is not None else []), *named])
    if not names:
        registered = ", ".join(ENVIRONMENTS.names())
        raise RolloutError(
            f"the loop env_agent has no environment: name one with {_KEY}.default_environment (registered: "
            f"{registered}; or module:Class), list them in {_KEY}.environment_config_path, "
            "or give rows env_kwargs with a name"
        )
    entries: dict[str, EnvironmentEntry] = {}
    try:
        for name in names:
            where = f"{_KEY}.environment_config_path={path}: {name}" if name in listed else f"environment {name!r}"
            entries[name] = _started(*_checked(*listed.get(name, (name, {})), where), where)
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


def check_file(path: str) -> Iterator[str]:
    """Yield a sentence for each fault of a file of environments that shows without starting them."""
    key = f"{_KEY}.environment_config_path"
    for name, (class_name, config) in named_entries(path, key, "environments").items():
        try:
            _checked(class_name, config, f"{key}={path}: {name}")
        except RolloutError as error:
            yield str(error)


def _checked(class_name: str, config: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """The class of an environment, and its config, whose entries the class takes."""
    cls = _class(class_name, where)
    names = vars(cls).get("config_names", parameter_names(cls))
    return cls, checked_config(config, names, f"{where} ({class_name})")


def _class(name: str, where: str) -> Any:
    cls = class_of(name, where, ENVIRONMENTS)
    lacks = [method for method in ("reset", "step") if not callable(getattr(cls, method, None))]
    if lacks:
        raise RolloutError(f"{where}: {name} has no {' and no '.join(lacks)}; see hybridrl.agents.Environment")
    return cls
