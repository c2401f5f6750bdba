"""From command-line words and YAML files to one typed configuration.

The steps are: read the overrides and the user's file, check and rewrite their names, let Hydra compose the groups in
`configs/` with the user's file over them, apply the overrides, resolve interpolations, and convert to typed groups.
"""

import copy
import functools
import os
import pickle
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.checks.branches import value_at
from hybridrl.config.checks.idle import default_at
from hybridrl.config.convert import build, nearest, put, show
from hybridrl.config.differences import differences
from hybridrl.config.entry_settings import add_own_settings
from hybridrl.config.output import as_dict
from hybridrl.config.resolvers import register_resolvers
from hybridrl.config.schema.node import ConfigNode, default_tree
from hybridrl.config.schema.root import (
    ROOTS,
    SHARED_GROUPS,
)
from hybridrl.config.short_derived import acting_seeds, derive
from hybridrl.config.short_names import TREES, ShortSettings, is_short
from hybridrl.config.unread import not_read_by, unread_by
from hybridrl.config.userfile import UserFile, base_choices, read_user_file
from hybridrl.config.verl.fully_async import keys_of_fully_async
from hybridrl.config.verl.keys import COMMAND_LINE, Assignment, KeyBook, RewriteResult, key_book
from hybridrl.config.verl.tables import Choice, choices
from hybridrl.errors import ConfigError
from hybridrl.notify import notify
from hybridrl.utils.urls import masked_text

_USER_CONFIG = "hybridrl_user_config"


@dataclass
class Composed:
    """A composed configuration: the typed groups, the tree that `--cfg job` prints, and where keys were set."""

    config: ConfigNode
    tree: dict[str, Any]
    notices: list[str]
    origins: Mapping[str, str]


@dataclass
class Overrides:
    """Command-line words sorted by kind: Hydra's group choices, assignments to keys, and short names.

    `derived` holds values of short names whose keys follow from several of them.
    """

    choices: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    derived: dict[str, tuple[Any, str]] = field(default_factory=dict)


def configs_folder() -> Path:
    """The folder of the shipped YAML: next to the package in a source tree, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    candidates = [package / "_configs"]
    if (package.parent / "pyproject.toml").is_file():  # a source tree; site-packages may hold any `configs`
        candidates.append(package.parent / "configs")
    for folder in candidates:
        if (folder / "ppo_trainer.yaml").is_file():
            return folder
    raise ConfigError(
        f"the YAML files of hybridrl are missing: there is no _configs in {package} and no configs next to it"
    )


def _groups(folders: Sequence[Path]) -> set[str]:
    """Names of the config groups: folders of YAML files."""
    shipped, *others = folders
    return set().union(_groups_in_shipped(shipped), *map(_groups_in, others))


def _groups_in(folder: Path) -> frozenset[str]:
    return frozenset(
        path.relative_to(folder).as_posix()
        for path in folder.glob("**/")
        if path != folder and any(path.glob("*.yaml"))
    )


_groups_in_shipped = functools.cache(_groups_in)


def parse_overrides(words: Sequence[str], book: KeyBook, folders: Sequence[Path], faults: list[str]) -> Overrides:
    """Read `key=value`, `+key=value`, `++key=value`, `~key` and `group=choice` by Hydra's grammar.

    Args:
        words: the words of the command line.
        book: the keys of the tree, to tell a setting from a config group.
        folders: folders in which config groups are searched.
        faults: receives a sentence for each word that cannot be used.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    parser, groups, overrides = OverridesParser.create(), _groups(folders), Overrides()
    short = ShortSettings()
    for word in words:
        try:
            override = parser.parse_override(_quoted(word))
        except HydraException as error:
            faults.append(_unreadable(word, str(error).splitlines()[0]))
            continue
        name = override.key_or_group
        if not name:
            faults.append(_unreadable(word, "no key"))
            continue
        if name.split(".")[0].split("/")[0] == "hydra":
            if name == "hydra.searchpath":
                overrides.choices.append(word)
            else:
                overrides.notices.append(
                    f"{word} has no effect: no hydra folder is written; see trainer.default_local_dir"
                )
            continue
        if override.is_sweep_override():
            faults.append(f"{word}: several values are a sweep: add -m to run each, or write a list as {name}=[a,b]")
            continue
        delete = override.type is OverrideType.DEL
        value: Any = None if delete else override.value()
        if not delete and _means_short(book, name, value, groups, folders):
            short.read(book.root, name, value, COMMAND_LINE)
            continue
        if (choice := _choice(book.root, name)) is not None and isinstance(value, str) and not delete:
            if value in choice.same:
                continue
            if value in choice.means:
                settings = choice.means[value].items()
                overrides.assignments.extend(Assignment(key, setting, COMMAND_LINE) for key, setting in settings)
                continue
            if value in choice.why:
                faults.append(f"{word}: not supported yet: {choice.why[value]}. {choice.instead}")
                continue
            if name not in groups:
                faults.append(f"{word}: {name} has no choice {value}; it has {', '.join(choice.options)}")
                continue
        if name in groups and (delete or value is None or isinstance(value, str)):
            fault = _check_choice(word, name, value, folders)
            faults.extend(fault)
            overrides.choices.extend([] if fault else [word])
            continue
        origin = COMMAND_LINE
        if isinstance(value, Mapping) and not delete:
            nested: dict[str, Any] = {}
            put(nested, name, dict(value))
            overrides.assignments.extend(Assignment(item.key, item.value, origin) for item in book.flatten(nested, {}))
        else:
            overrides.assignments.append(Assignment(name, value, origin, delete))
    overrides.assignments += short.assignments
    overrides.notices += short.notices
    overrides.derived = short.derived
    faults += short.faults
    return overrides


def _means_short(book: KeyBook, name: str, value: Any, groups: Container[str], folders: Sequence[Path]) -> bool:
    """Whether a word is a short name, or a name without dots that means nothing else either."""
    if "." in name or "/" in name or "@" in name or book.root not in TREES:
        return False
    if (kind := book.kind(name)) not in ("group", "unknown"):
        return False
    if kind == "unknown" and name not in groups and _choice(book.root, name) is None:
        return True
    if not is_short(book.root, name) or isinstance(value, Mapping) or value is None:
        return False
    choice = _choice(book.root, name)
    if not isinstance(value, str):
        return True
    options = {path.stem for folder in folders for path in (folder / name).glob("*.yaml")}
    return value not in options and (choice is None or value not in {*choice.same, *choice.means, *choice.why})


def _choice(root: str, group: str) -> Choice | None:
    """verl's config group of this name in a tree."""
    other, shared = SHARED_GROUPS.get(root, ("", ()))
    roots = {root, other} if group in shared else {root}
    return next((entry for entry in choices() if roots & set(entry.roots) and group in entry.groups), None)


def _quoted(word: str) -> str:
    """Quote a bare `~/path`, which Hydra's grammar cannot read and no shell expands after `=`."""
    name, sign, value = word.partition("=")
    return f"{name}='{value}'" if sign and value.startswith("~/") and "'" not in value else word


def _unreadable(word: str, reason: str) -> str:
    if "=" not in word and word.endswith((".yaml", ".yml")):
        return f"{word!r}: not an override; give a file of settings as --config {word}"
    if "=" not in word and not word.startswith("~"):
        return f"{word!r}: not an override; write key=value, e.g. trainer.total_epochs=3"
    name, _, value = word.partition("=")
    if not re.fullmatch(r"[+~]{0,2}[\w@/-]+(\.[\w@/-]+)*", name):
        return f"{word!r}: {name!r} is not a key; write group.key=value, e.g. trainer.total_epochs=3"
    return f"{word!r}: cannot be read ({reason}); quote the value for Hydra: \"{name}='{value}'\""


def _check_choice(word: str, name: str, value: str | None, folders: Sequence[Path]) -> list[str]:
    """Return a fault if the group has no such option."""
    options = sorted({path.stem for folder in folders for path in (folder / name).glob("*.yaml")})
    if value in options:
        return []
    if value is None:
        return [f"{word}: {name} is a config group, which cannot be removed; it has {', '.join(options)}"]
    return [f"{word}: {name} is a config group without the option {value}; it has {', '.join(options)}"]


def _value_at(tree: Any, name: str) -> Any:
    """The value of a dotted key that exists."""
    return functools.reduce(lambda inner, part: inner[part], name.split("."), tree)


def _reset(tree: dict[str, Any], defaults: dict[str, Any], name: str) -> None:
    """Reset a dotted key to its default; an entry of a free-form mapping that has no default is removed."""
    *parents, last = name.split(".")
    for part in parents:
        tree = tree.get(part) or {}
        defaults = defaults.get(part) or {}
    if last in defaults:
        tree[last] = defaults[last]
    else:
        tree.pop(last, None)


def _hydra_compose(root: str, overrides: Overrides, folders: Sequence[Path], user: UserFile | None) -> dict[str, Any]:
    """Let Hydra compose the groups, with the user's file over them; interpolations stay unresolved."""
    if user is None:
        return copy.deepcopy(_compose_base(root, tuple(overrides.choices), folders[0]))
    from hydra.core.config_store import ConfigStore

    _store_schemas(root)
    ConfigStore.instance().store(name=_USER_CONFIG, node={"defaults": user.defaults, **user.tree})
    searched = [f"file://{folder}" for folder in folders[1:]] + user.searchpath
    words = list(overrides.choices)
    if not any(word.lstrip("+").startswith("hydra.searchpath") for word in words):
        words.append("hydra.searchpath=[" + ",".join(f"'{path}'" for path in searched) + "]")
    try:
        return _run_hydra(_USER_CONFIG, words, folders[0])
    except ConfigError as error:
        raise ConfigError(f"{user.path}: {str(error).replace(_USER_CONFIG, user.path.stem)}") from error.__cause__


@functools.lru_cache(maxsize=16)
def _compose_base(root: str, choices: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """The shipped tree with some group choices; cached, because it depends only on shipped files."""
    _store_schemas(root)
    return _run_hydra(root, choices, folder)


def _run_hydra(name: str, words: Sequence[str], folder: Path) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
            composed = compose(name, overrides=list(words))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error)) from error
    tree = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _store_schemas(root: str) -> None:
    """Offer the schema of a tree, and of the tree that it shares groups with."""
    for name in dict.fromkeys((SHARED_GROUPS.get(root, (root, ()))[0], root)):
        _store_schema(name, default_tree(ROOTS[name]), f"schema/{name}")


def _store_schema(root: str, tree: dict[str, Any], group: str) -> None:
    """Offer every group of the schema to the YAML files as `/schema/ROOT/PATH`, its own settings as `.../own`."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    own = {name: value for name, value in tree.items() if not isinstance(value, dict) or not value}
    if own:
        store.store(group=group, name="own", node=own)
    for name, value in tree.items():
        if isinstance(value, dict):
            store.store(group=group, name=name, node=value)
            if name == "actor_rollout_ref":
                _store_schema(root, value, f"{group}/{name}")


def compose_config(
    root: str,
    overrides: Sequence[str] = (),
    config_dir: str | os.PathLike[str] | None = None,
    config_name: str | None = None,
    launched: Mapping[str, int] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    derived: Mapping[str, tuple[Any, str]] | None = None,
) -> Composed:
    """Compose, check and convert without printing anything. Arguments and errors are those of `load_config`.

    `launched` holds the values that torchrun was given, by key. They replace defaults; a file or a word that sets such
    a key to a different value is a fault. `defaults` replace defaults of the tree; files and words replace them in
    turn. `settings` are values by dotted key, or nested, that a program sets; they count as words. `derived` are its
    values of short names that are computed from others.
    """
    if root not in ROOTS:
        raise ConfigError(f"no configuration is called {root!r}{nearest(root, list(ROOTS), 1)}")
    book, user = key_book(root), None
    faults: list[str] = []
    folders = [configs_folder()]
    if config_dir is not None or config_name is not None:
        try:
            user = read_user_file(root, config_dir, config_name, book, folders[0])
        except ConfigError as error:
            faults.extend(error.faults)  # the words are checked all the same, against the shipped base
    if user is not None:
        folders.append(user.path.parent)
    parsed = parse_overrides([*base_choices(root, config_dir, config_name), *overrides], book, folders, faults)
    set_by_words = book.rewrite([*parsed.assignments, *book.flatten(settings or {}, {})])

    try:
        composed_tree = _hydra_compose(root, parsed, folders, user)
    except ConfigError as error:
        earlier = [*faults, *(user.outcome.faults if user else []), *set_by_words.faults]
        raise ConfigError([*earlier, *error.faults]) from error.__cause__
    composed = book.rewrite(book.flatten(composed_tree, user.origins if user else {}), has_defaults=True)
    origins = {**(user.origins if user else {}), **{item.key: item.origin for item in set_by_words.assignments}}
    shipped = default_tree(ROOTS[root])
    tree = default_tree(ROOTS[root])
    for item in (*composed.assignments, *set_by_words.assignments):
        if item.delete:
            _reset(tree, shipped, item.key)
        else:
            put(tree, item.key, item.value)
    _set_twins(book, tree, origins, parsed.notices)
    from_torchrun = {key: value for key, value in (launched or {}).items() if key in book.fields}
    taken_back = {item.key for item in set_by_words.assignments if item.delete}
    for key, value in {**(defaults or {}), **from_torchrun}.items():
        is_default = key in book.fields and _value_at(tree, key) == _value_at(shipped, key)
        if is_default and (key not in origins or key in taken_back):
            put(tree, key, value)
    short = {**parsed.derived, **(derived or {})}
    set_by_words.add(book.rewrite(_put_derived(root, short, tree, origins, faults)))

    everything = RewriteResult(renamed=parsed.notices, wrong=faults)
    for outcome in (*([user.outcome] if user else []), composed, set_by_words):
        everything.add(outcome)
    of_program = {key: (value, "") for key, value in (defaults or {}).items() if key not in book.fields}
    _put_fully_async({**of_program, **everything.computed}, tree, origins, everything)
    config = _typed(root, tree, everything, origins, book.suggest)
    if "seed" in short and not everything.faults:
        for key in acting_seeds(config, origins):
            put(tree, key, short["seed"][0])
        config = _typed(root, tree, everything, origins, book.suggest)
    everything.set_aside(functools.partial(not_read_by, config))
    _note_unread(book, config, origins, everything)
    for key, value in from_torchrun.items():
        if (configured := functools.reduce(getattr, key.split("."), config)) != value:
            everything.wrong.append(
                f"{key}={configured}{origins.get(key, '')}: torchrun was asked for {value}; give both the same number, "
                f"or leave out {key}"
            )
    if faults := everything.faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    object.__setattr__(config, "set_keys", frozenset(origins) - taken_back)
    return Composed(config, tree, everything.notices(), origins)


def with_settings(config: ConfigNode, settings: Mapping[str, Any]) -> Any:
    """Return a whole configuration with other values of some settings, and of those that follow them.

    Args:
        settings: values by dotted key; they count as set.

    Raises:
        ConfigError: a value is of a wrong type.
    """
    root = next(name for name, cls in ROOTS.items() if cls is type(config))
    current, tree = as_dict(config), default_tree(ROOTS[root])
    for item in differences(current):
        put(tree, item.key, item.value)
    for key in config.set_keys:
        put(tree, key, value_at(config, key))
    for key, value in settings.items():
        put(tree, key, value)
    so_far = RewriteResult()
    changed = _typed(root, tree, so_far, dict.fromkeys(settings, ""), key_book(root).suggest)
    if so_far.faults:
        raise ConfigError(so_far.faults)
    object.__setattr__(changed, "set_keys", config.set_keys | frozenset(settings))
    return changed


def _put_derived(
    root: str,
    derived: Mapping[str, tuple[Any, str]],
    tree: dict[str, Any],
    origins: dict[str, str],
    faults: list[str],
) -> list[Assignment]:
    """Set the keys that follow from several short names, and return their assignments."""
    assignments, wrong = derive(root, derived, functools.partial(_value_at, tree), origins)
    faults += wrong
    for item in assignments:
        earlier = _value_at(tree, item.key)
        if item.key in origins and earlier != item.value:
            faults.append(
                f"{item.key}={show(earlier)}{origins[item.key]} and {show(item.value)}{item.origin}: two values for "
                "one setting; remove one of them"
            )
        put(tree, item.key, item.value)
        origins[item.key] = item.origin
    return assignments


def _put_fully_async(
    written: Mapping[str, tuple[Any, str]], tree: dict[str, Any], origins: dict[str, str], so_far: RewriteResult
) -> None:
    """Set the keys that the settings of verl's fully_async_main stand for, in place of what was set for them."""
    meaning = keys_of_fully_async(written, functools.partial(_value_at, tree), origins)
    so_far.renamed += meaning.notices
    so_far.wrong += meaning.faults
    for key, value in meaning.keys.items():
        put(tree, key, value)
        origins[key] = meaning.origin


def _note_unread(book: KeyBook, config: Any, origins: Mapping[str, str], so_far: RewriteResult) -> None:
    """Note the keys that were set and that belong to a training engine which was not chosen."""
    for key in origins:
        choice = unread_by(config, key) if key in book.fields or book.free_parent(key) else None
        if choice is not None and (key not in book.fields or value_at(config, key) != default_at(config, key)):
            so_far.unread.setdefault(choice, []).append(f"{key}{origins[key]}")


def _set_twins(book: KeyBook, tree: dict[str, Any], origins: Mapping[str, str], notices: list[str]) -> None:
    """Set the present name of each key that was given under its other name only."""
    for old, new in book.twins.items():
        if old in origins and new not in origins:
            put(tree, new, _value_at(tree, old))
            notices.append(f"{old}{origins[old]} sets {new} as well: they are the same thing")


def _typed(
    root: str, tree: dict[str, Any], so_far: RewriteResult, origins: Mapping[str, str], suggest: Callable[[str], str]
) -> Any:
    """Resolve interpolations and convert. Faults are added to `so_far`; an error is raised if nothing can be resolved.

    Raises:
        ConfigError: an interpolation cannot be resolved. If that is due to values of a wrong type, it names their keys.
    """
    register_resolvers()
    try:
        plain = OmegaConf.to_container(nodes_of(root, tree), resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        wrong = _wrong_types(root, tree, origins) or [" ".join(str(error).split())]
        raise ConfigError([*so_far.faults, *wrong]) from error
    assert isinstance(plain, dict)
    misfits: dict[str, str] = {}
    values = {str(key): value for key, value in plain.items()}
    config = build(ROOTS[root], values, misfits, origins)
    add_own_settings(config, values, misfits, origins, suggest)
    # a default that follows a wrong value is wrong too: name the key that was set, not its followers
    reported = {key: fault for key, fault in misfits.items() if key in origins} or misfits
    so_far.wrong.extend(reported.values())
    return config


def nodes_of(root: str, tree: Mapping[str, Any]) -> DictConfig:
    """`OmegaConf.create(tree)`, out of the defaults' nodes: to make all of them takes most of a composition's time."""
    pickled, defaults = _default_nodes(root)
    nodes: DictConfig = pickle.loads(pickled)
    _set_where_different(nodes, tree, defaults)
    return nodes


@functools.cache
def _default_nodes(root: str) -> tuple[bytes, dict[str, Any]]:
    defaults = default_tree(ROOTS[root])
    return pickle.dumps(OmegaConf.create(defaults)), defaults


def _set_where_different(nodes: DictConfig, tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for key in defaults.keys() - tree.keys():
        del nodes[key]
    for key, value in tree.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            _set_where_different(nodes[key], value, default)
        elif key not in defaults or type(value) is not type(default) or value != default or isinstance(value, list):
            nodes[key] = value


def _wrong_types(root: str, tree: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """A fault for each value that was set to a plain value of a wrong type."""
    plain: dict[str, Any] = {}
    for name in origins:
        value = _value_at(tree, name) if name in key_book(root).fields else None
        if value is not None and "${" not in str(value):
            put(plain, name, value)
    misfits: dict[str, str] = {}
    build(ROOTS[root], plain, misfits, origins)
    return list(misfits.values())


def print_notices(notices: Sequence[str]) -> None:
    """Print each notice once per process."""
    for notice in notices:
        notify(masked_text(notice), once=True)
