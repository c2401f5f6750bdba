"""Conditions of a setting on other settings, declared with the setting (`key(..., needs=...)`).

The name of another setting is that in the tree (`algorithm.use_kl_in_reward`), or begins with a dot: `.use_kl_loss` is
in the same group, `..ref.strategy` in the group around it. Several names, separated by `|`, stand for the first of them
that the tree has. A condition whose setting the tree does not have holds: `generation`, for one, accepts the settings
of training.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hybridrl.registry import Registry

#: reads a setting by its name in the tree; `...` if there is none
Lookup = Callable[[str], Any]


@dataclass(frozen=True)
class Unmet:
    """Why a condition does not hold, and what to do, as parts of a sentence. Empty remedy: the setting can only go."""

    because: str
    remedy: str


@dataclass(frozen=True)
class Need:
    """A condition on one other setting.

    Attributes:
        key: the other setting.
        holds: whether the setting may act with its value.
        remedy: what follows the name of the other setting in `Set NAME...`.
    """

    key: str
    holds: Callable[[Any], bool]
    remedy: str

    def unmet(self, group: str, lookup: Lookup) -> Unmet | None:
        """Return why the condition does not hold for a setting of `group`; None where it holds."""
        name, value = read(self.key, group, lookup)
        if value is ... or self.holds(value):
            return None
        return Unmet(_stated(name, value), f"set {name}{self.remedy}")


@dataclass(frozen=True)
class AnyNeed:
    """A condition that holds if one of several does; `also` are further ones, which are not offered as a remedy."""

    needs: tuple["Condition", ...]
    also: tuple["Condition", ...] = ()

    def unmet(self, group: str, lookup: Lookup) -> Unmet | None:
        """Return why none of them holds for a setting of `group`; None where one does."""
        if any(need.unmet(group, lookup) is None for need in self.also):
            return None
        unmet = []
        for need in self.needs:
            reason = need.unmet(group, lookup)
            if reason is None:
                return None
            unmet.append(reason)
        return Unmet(
            " and ".join(dict.fromkeys(reason.because for reason in unmet)),
            " or ".join(dict.fromkeys(reason.remedy for reason in unmet)).replace(" or set ", " or "),
        )


@dataclass(frozen=True)
class MetadataNeed:
    """A condition on the metadata of the entry that another setting chooses. A user's own entry may read everything.

    Attributes:
        key: the other setting.
        registry: what it chooses from.
        name: the field of the metadata.
        values: the values of the field with which the setting acts; a field that is a tuple has one of them.
    """

    key: str
    registry: Registry[Any]
    name: str
    values: tuple[Any, ...] = (True,)

    def unmet(self, group: str, lookup: Lookup) -> Unmet | None:
        """Return why the condition does not hold for a setting of `group`; None where it holds."""
        name, value = read(self.key, group, lookup)
        if value is ... or not self.registry.is_builtin(value) or self._fits(value):
            return None
        fitting = " or ".join(filter(self._fits, self.registry.names()))
        return Unmet(_stated(name, value), f"set {name}={fitting}")

    def met_by(self, entry_name: str) -> bool:
        """Whether an entry of the registry has one of the values; a user's own entry may read everything."""
        return not self.registry.is_builtin(entry_name) or self._fits(entry_name)

    def _fits(self, entry_name: str) -> bool:
        value = getattr(self.registry.metadata(entry_name), self.name)
        return any(member in value for member in self.values) if isinstance(value, tuple) else value in self.values


@dataclass(frozen=True)
class PartNeed:
    """A condition on the whole run: a property of the tree, such as whether there is a critic.

    Attributes:
        key: the property's name in the tree, from its root.
        because, remedy: see `Unmet`; `{name}` in them is the value of the setting `name`.
        chosen_by: settings whose values `because` names.
    """

    key: str
    because: str
    remedy: str
    chosen_by: tuple[str, ...] = ()

    def unmet(self, group: str, lookup: Lookup) -> Unmet | None:
        """Return why the condition does not hold; None where it holds."""
        value = lookup(self.key)
        if value is ... or value:
            return None
        settings = ", ".join(f"{name}={lookup(name)}" for name in self.chosen_by)
        return Unmet(f"{self.because} ({settings})" if settings else self.because, self.remedy)


@dataclass(frozen=True)
class Explained:
    """Other conditions, of which each has to hold, with words of its own where one does not; see `Unmet`."""

    need: "Conditions"
    because: str
    remedy: str = ""

    def unmet(self, group: str, lookup: Lookup) -> Unmet | None:
        """Return why the condition does not hold for a setting of `group`; None where it holds."""
        holds = all(need.unmet(group, lookup) is None for need in conditions(self.need))
        return None if holds else Unmet(self.because, self.remedy)


@dataclass(frozen=True)
class LoopNeed(Explained):
    """A loop of sessions that fulfils a condition has to run.

    Rows may choose the loop, too: whether such a need is met is decided with the data.

    Attributes:
        condition: holds for the entry of the loop.
    """

    condition: MetadataNeed = field(kw_only=True)


Condition = Need | MetadataNeed | AnyNeed | PartNeed | Explained
#: what a setting or a group needs: one condition, or all of several
Conditions = Condition | tuple[Condition, ...]


def on(key: str) -> Need:
    """The other setting is true."""
    return Need(key, bool, "=True")


def off(key: str) -> Need:
    """The other setting is false."""
    return Need(key, lambda value: not value, "=False")


def is_set(key: str) -> Need:
    """The other setting has a value."""
    return Need(key, lambda value: value not in (None, "", [], {}), "")


def is_not_set(key: str) -> Need:
    """The other setting has no value."""
    return Need(key, lambda value: value in (None, "", [], {}), "=null")


def above(key: str, limit: float = 0) -> Need:
    """The other setting is greater than `limit`."""
    return Need(key, lambda value: value is not None and value > limit, f" above {limit}")


def among(key: str, *values: Any) -> Need:
    """The other setting has one of these values."""
    return Need(key, lambda value: value in values, "=" + " or ".join(map(str, values)))


def not_among(key: str, *values: Any) -> Need:
    """The other setting has none of these values."""
    return Need(key, lambda value: value not in values, " to another value")


def entry(key: str, registry: Registry[Any], *names: str) -> Need:
    """The other setting chooses one of these entries, or one of the user's, which may read every setting."""

    def reads(value: Any) -> bool:
        return value in names or not registry.is_builtin(value)

    return Need(key, reads, "=" + " or ".join(names))


def entry_has(key: str, registry: Registry[Any], name: str, *values: Any) -> MetadataNeed:
    """The other setting chooses an entry that has one of these values in its metadata (default: true), or a user's."""
    return MetadataNeed(key, registry, name, values or (True,))


def any_of(*needs: Condition, also: tuple[Condition, ...] = ()) -> AnyNeed:
    """One of these conditions holds; see `AnyNeed`."""
    return AnyNeed(needs, also)


#: the program trains, and does not only generate
TRAINS = PartNeed("trains", "this program does not train", "")
#: the program has sessions of agents
SESSIONS = PartNeed("has_sessions", "this program answers each prompt once, without tools", "")
#: a model that learns, for settings of its training engine
LEARNS = Explained(off(".forward_only"), "the model does not learn", "")
#: the run has a value model
A_CRITIC = PartNeed(
    "use_critic",
    "the run is without a critic",
    "set algorithm.adv_estimator=gae or critic.enable=True",
    ("algorithm.adv_estimator",),
)


def _stated(name: str, value: Any) -> str:
    """A clause that states the value of a setting."""
    if value in (None, "", [], {}):
        return f"{name} is not set"
    return f"{name} is {value}" if isinstance(value, bool) else f"{name}={value}"


def conditions(needs: Conditions | None) -> tuple[Condition, ...]:
    """Return the conditions of a declaration as a tuple."""
    if needs is None:
        return ()
    return needs if isinstance(needs, tuple) else (needs,)


def read(key: str, group: str, lookup: Lookup) -> tuple[str, Any]:
    """Return the name in the tree of a setting that is named from `group`, and its value; `...` if there is none."""
    name, value = "", ...
    for alternative in key.split("|"):
        name = resolved(alternative, group)
        value = lookup(name)
        if value is not ...:
            break
    return name, value


def resolved(key: str, group: str) -> str:
    """The name in the tree of a setting that is named from `group`."""
    if not key.startswith("."):
        return key
    ups = len(key) - len(key.lstrip(".")) - 1
    parts = group.split(".") if group else []
    return ".".join([*parts[: len(parts) - ups], key.lstrip(".")])
