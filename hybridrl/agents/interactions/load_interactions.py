"""The simulated users of a run, from a YAML file."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hybridrl.agents.entries import checked_config, class_of, named_entries
from hybridrl.agents.interactions.interaction import BaseInteraction
from hybridrl.errors import RolloutError, UserError
from hybridrl.registry import INTERACTIONS

_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"


class Interactions:
    """The simulated users of a run, by name."""

    def __init__(self, users: Mapping[str, BaseInteraction], path: str) -> None:
        self.users = users
        self._path = path

    def of(self, kwargs: Mapping[str, Any]) -> BaseInteraction | None:
        """The user of a row with these `interaction_kwargs`; None where the row has none.

        Raises:
            RolloutError: there is no such user.
        """
        if not kwargs:
            return None
        only = next(iter(self.users)) if len(self.users) == 1 else ""
        name = str(kwargs.get("name") or only)
        if name not in self.users:
            raise RolloutError(
                f"a row's interaction_kwargs.name is {kwargs.get('name')!r}; {_KEY}={self._path} has "
                f"{', '.join(self.users)}"
            )
        return self.users[name]

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check that rows name the users.

        Args:
            rows: `interaction_kwargs` of each row.

        Raises:
            RolloutError: a row names an unknown user, or no row names one.
        """
        answered = [self.of(kwargs) is not None for kwargs in rows]  # each row is checked
        if not any(answered):
            raise RolloutError(
                f"{_KEY}={self._path}: no row has interaction_kwargs (a column, or that entry of extra_info), so no "
                "user would answer; add {name: ..., further arguments}, or remove the setting"
            )


def check_file(path: str) -> Iterator[str]:
    """Yield a sentence for each fault of a file of simulated users that shows without making them."""
    for name, (class_name, config) in named_entries(path, _KEY, "interaction").items():
        try:
            _class(class_name, config, f"{_KEY}={path}: {name}")
        except RolloutError as error:
            yield str(error)


def _class(class_name: str, config: Mapping[str, Any], where: str) -> Any:
    cls = class_of(class_name, where, INTERACTIONS, BaseInteraction)
    checked_config(config, vars(cls).get("config_names"), f"{where} ({class_name})")
    return cls


def load_interactions(path: str) -> Interactions:
    """Load the users of a file.

    Args:
        path: `multi_turn.interaction_config_path`: `{interaction: [{name, class_name, config}]}`.

    Raises:
        RolloutError: the file or an entry is wrong.
    """
    users: dict[str, BaseInteraction] = {}
    for name, (class_name, config) in named_entries(path, _KEY, "interaction").items():
        where = f"{_KEY}={path}: {name}"
        cls = _class(class_name, config, where)
        try:
            users[name] = cls(config={**config, "name": name})
        except UserError as error:
            raise RolloutError(f"{where}: {error}") from error
        except Exception as error:  # the user's class may raise anything
            raise RolloutError(f"{where}: making {class_name} failed: {type(error).__name__}: {error}") from error
    return Interactions(users, path)
