"""From command-line words and YAML files to one typed configuration.

The steps are: read the overrides and the user's file, check and rewrite their names, let Hydra compose the groups in
`configs/` with the user's file over them, apply the overrides, resolve interpolations, and convert to typed groups.
"""

import copy
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.convert import build, nearest, put
from hybridrl.config.own_settings import add_own_settings
from hybridrl.config.schema.node import ConfigNode, default_tree
from hybridrl.config.schema.root import ROOTS, EvaluationConfig, GenerationConfig, PPOTrainerConfig, SFTTrainerConfig
from hybridrl.config.userfile import UserFile, read_user_file
from hybridrl.config.verl.keys import Assignment, KeyBook, Outcome
from hybridrl.errors import ConfigError
from hybridrl.notify import notify

_USER_CONFIG = "hybridrl_user_config"


@dataclass
class Composed:
    """A composed configuration: the typed groups, and the unresolved tree that `--cfg job` prints."""

    config: ConfigNode
    tree: dict[str, Any]
    notices: list[str]


@dataclass
class Overrides:
    """Command-line words sorted by kind: Hydra's group choices, and assignments to keys."""

    choices: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


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
    return {
        path.relative_to(folder).as_posix()
        for folder in folders
        for path in folder.glob("**/")
        if path != folder and any(path.glob("*.yaml"))
    }


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

    parser, groups, found = OverridesParser.create(), _groups(folders), Overrides()
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
                found.choices.append(word)
            else:
                found.notices.append(f"{word} has no effect: no hydra folder is written; see trainer.default_local_dir")
            continue
        if override.is_sweep_override():
            faults.append(f"{word}: several values are a sweep, which is not supported; a list is written {name}=[a,b]")
            continue
        delete = override.type is OverrideType.DEL
        value: Any = None if delete else override.value()
        if name in groups and (delete or value is None or isinstance(value, str)):
            fault = _check_choice(word, name, value, folders)
            faults.extend(fault)
            found.choices.extend([] if fault else [word])
            continue
        origin = " (command line)"
        if isinstance(value, Mapping) and not delete:
            nested: dict[str, Any] = {}
            put(nested, name, dict(value))
            found.assignments.extend(Assignment(item.key, item.value, origin) for item in book.flatten(nested, {}))
        else:
            found.assignments.append(Assignment(name, value, origin, delete))
    return found


def _quoted(word: str) -> str:
    """Quote a bare `~/path`, which Hydra's grammar cannot read and no shell expands after `=`."""
    name, sign, value = word.partition("=")
    return f"{name}='{value}'" if sign and value.startswith("~/") and "'" not in value else word


def _unreadable(word: str, reason: str) -> str:
    if "=" not in word and not word.startswith("~"):
        return f"{word!r}: not an override; write key=value, e.g. trainer.total_epochs=3"
    name, _, value = word.partition("=")
    if not re.fullmatch(r"[+~]{0,2}[\w@/-]+(\.[\w@/-]+)*", name):
        return f"{word!r}: {name!r} is no key; write group.key=value, e.g. trainer.total_epochs=3"
    return f"{word!r}: cannot be read ({reason}); quote the value for Hydra: \"{name}='{value}'\""


def _check_choice(word: str, name: str, value: str | None, folders: Sequence[Path]) -> list[str]:
    """Return a fault if the group has no such option."""
    options = sorted({path.stem for folder in folders for path in (folder / name).glob("*.yaml")})
    if value in options:
        return []
    if value is None:
        return [f"{word}: {name} is a config group, which cannot be removed; it has {', '.join(options)}"]
    return [f"{word}: {name} is a config group without the option {value}; it has {', '.join(options)}"]


def _found(tree: Any, name: str) -> Any:
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


def _hydra_compose(root: str, given: Overrides, folders: Sequence[Path], user: UserFile | None) -> dict[str, Any]:
    """Let Hydra compose the groups, with the user's file over them; interpolations stay unresolved."""
    if user is None:
        return copy.deepcopy(_compose_base(root, tuple(given.choices), folders[0]))
    from hydra.core.config_store import ConfigStore

    _store_schema(root, default_tree(ROOTS[root]), f"schema/{root}")
    ConfigStore.instance().store(name=_USER_CONFIG, node={"defaults": user.defaults, **user.tree})
    searched = [f"file://{folder}" for folder in folders[1:]] + user.searchpath
    words = list(given.choices)
    if not any(word.lstrip("+").startswith("hydra.searchpath") for word in words):
        words.append("hydra.searchpath=[" + ",".join(f"'{path}'" for path in searched) + "]")
    try:
        return _run_hydra(_USER_CONFIG, words, folders[0])
    except ConfigError as error:
        raise ConfigError(f"{user.path}: {str(error).replace(_USER_CONFIG, user.path.stem)}") from error.__cause__


@functools.lru_cache(maxsize=16)
def _compose_base(root: str, choices: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """The shipped tree with some group choices; cached, because it depends only on shipped files."""
    _store_schema(root, default_tree(ROOTS[root]), f"schema/{root}")
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


def _if_set(value: Any, then: Any, otherwise: Any) -> Any:
    """Return `then` if `value` is set, `otherwise` if it is null."""
    return otherwise if value is None else then


def _global_pool(processes: Any, nodes: Any) -> list[int]:
    return [int(processes)] * int(nodes)


def compose_config(
    root: str,
    overrides: Sequence[str] = (),
    config_dir: str | os.PathLike[str] | None = None,
    config_name: str | None = None,
    launched: Mapping[str, int] | None = None,
) -> Composed:
    """Compose, check and convert without printing anything. Arguments and errors are those of `load_config`.

    `launched` holds the values that torchrun was given, by key. They replace defaults; a file or a word that sets such
    a key to a different value is a fault.
    """
    if root not in ROOTS:
        raise ConfigError(f"no configuration is called {root!r}{nearest(root, list(ROOTS), 1)}")
    book, user = KeyBook(root), None
    faults: list[str] = []
    folders = [configs_folder()]
    if config_dir is not None or config_name is not None:
        user = read_user_file(root, config_dir, config_name, book, folders[0])
    if user is not None:
        folders.append(user.path.parent)
    given = parse_overrides(overrides, book, folders, faults)
    set_by_words = book.rewrite(given.assignments)

    try:
        composed_tree = _hydra_compose(root, given, folders, user)
    except ConfigError as error:
        earlier = [*faults, *(user.outcome.faults if user else []), *set_by_words.faults]
        raise ConfigError([*earlier, *error.faults]) from error.__cause__
    composed = book.rewrite(book.flatten(composed_tree, user.origins if user else {}))
    origins = {**(user.origins if user else {}), **{item.key: item.origin for item in set_by_words.assignments}}
    defaults = default_tree(ROOTS[root])
    tree = default_tree(ROOTS[root])
    for item in (*composed.assignments, *set_by_words.assignments):
        if item.delete:
            _reset(tree, defaults, item.key)
        else:
            put(tree, item.key, item.value)
    asked = {key: value for key, value in (launched or {}).items() if key in book.fields}
    taken_back = {item.key for item in set_by_words.assignments if item.delete}
    for key, value in asked.items():
        if (key not in origins or key in taken_back) and _found(tree, key) == _found(defaults, key):
            put(tree, key, value)

    everything = Outcome(renamed=given.notices, faults=faults)
    for outcome in (*([user.outcome] if user else []), composed, set_by_words):
        everything.add(outcome)
    config = _typed(root, tree, everything.faults, origins, book.suggest)
    for key, value in asked.items():
        if (found := functools.reduce(getattr, key.split("."), config)) != value:
            everything.faults.append(
                f"{key}={found}{origins.get(key, '')}: torchrun was asked for {value}; give both the same number, or "
                f"leave out {key}"
            )
    if everything.faults:
        raise ConfigError(list(dict.fromkeys(everything.faults)))
    return Composed(config, tree, everything.notices())


def _typed(
    root: str, tree: dict[str, Any], faults: list[str], origins: Mapping[str, str], suggest: Callable[[str], str]
) -> Any:
    """Resolve interpolations and convert. Faults are collected; an error is raised only if nothing can be resolved."""
    OmegaConf.register_new_resolver("global_pool", _global_pool, replace=True)
    OmegaConf.register_new_resolver("if_set", _if_set, replace=True)
    try:
        plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError([*faults, " ".join(str(error).split())]) from error
    assert isinstance(plain, dict)
    misfits: dict[str, str] = {}
    values = {str(key): value for key, value in plain.items()}
    config = build(ROOTS[root], values, misfits, origins)
    add_own_settings(config, values, misfits, origins, suggest)
    # a default that follows a wrong value is wrong too: name the key that was set, not its followers
    told = {key: fault for key, fault in misfits.items() if key in origins} or misfits
    faults.extend(told.values())
    return config


def print_notices(notices: Sequence[str]) -> None:
    """Print each notice once per process."""
    for notice in notices:
        notify(notice, once=True)


@overload
def load_config(
    name: Literal["ppo_trainer"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> PPOTrainerConfig: ...
@overload
def load_config(
    name: Literal["sft_trainer"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> SFTTrainerConfig: ...
@overload
def load_config(
    name: Literal["generation"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> GenerationConfig: ...
@overload
def load_config(
    name: Literal["evaluation"],
    overrides: Sequence[str] = ...,
    config_dir: str | os.PathLike[str] | None = ...,
    config_name: str | None = ...,
) -> EvaluationConfig: ...
def load_config(
    name: str,
    overrides: Sequence[str] = (),
    config_dir: str | os.PathLike[str] | None = None,
    config_name: str | None = None,
) -> Any:
    """Compose a configuration and return it typed, with interpolations resolved.

    Args:
        name: `ppo_trainer`, `sft_trainer`, `generation` or `evaluation`.
        overrides: words as on the command line, e.g. `["data.train_batch_size=64", "+trainer.report=false"]`.
        config_dir: folder with the user's YAML file, relative to the working directory.
        config_name: that file's name without `.yaml`; by default `name`. The file may be partial and needs no defaults
            list.

    Raises:
        ConfigError: there are unknown keys, unsupported settings or values of a wrong type; the message lists all of
            them. `validate` finds settings that contradict each other.
    """
    composed = compose_config(name, overrides, config_dir, config_name)
    print_notices(composed.notices)
    return composed.config
