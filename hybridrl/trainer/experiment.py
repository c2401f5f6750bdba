"""The definition of an experiment besides its algorithm: models, training data, reward, tools, environments, user code.

A checkpoint holds a digest of each setting that takes part. Where a setting names a file or a model, its content counts
and its place does not, so that a resumed run notices an edited file, and takes a moved one for what it was.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridrl.checkpoint.checkpoint_files import digest
from hybridrl.config.differences import leaves
from hybridrl.config.entry_mappings import idle_settings, open_mappings
from hybridrl.config.places import place_of
from hybridrl.config.schema.node import ConfigNode, declared
from hybridrl.data.data_files import contents
from hybridrl.observe.run_folder import as_dict
from hybridrl.trainer.model_content import CONTENT, identities_of
from hybridrl.utils.code_digest import digest_of_pickle, local_file, parts_of_file
from hybridrl.utils.content_digest import digest_of_content, digest_of_files, digest_of_model, is_model

#: of a checkpoint: its state, and the entry there that holds the experiment's definition
STATE_FILE, EXPERIMENT = "trainer.json", "experiment"
Definition = dict[str, dict[str, Any]]

DATA, _OWN_CLASS = "data.train_files", "data.custom_cls.path"
_MULTI_TURN, _AGENT = "actor_rollout_ref.rollout.multi_turn.", "actor_rollout_ref.rollout.agent."
_MODEL, _JUDGE = "reward.reward_model.", "reward.reward_model.judge."
#: settings that take part by their values, as keys or as what keys begin with
_SETTINGS = (
    "data.custom_cls.",
    *(f"data.{name}" for name in ("apply_chat_template_kwargs", "system_prompt", "last_assistant_turn")),
    *(f"data.{name}" for name in ("enable_thinking_default", "prompt_dict_keys", "response_dict_keys")),
    "data.mm_processor_kwargs",
    *(f"data.{name}_key" for name in ("prompt", "response", "messages", "tools", "enable_thinking", "ground_truth")),
    *(f"data.{name}_key" for name in ("chosen", "rejected", "margin", "reward_fn", "image", "video")),
    "actor_rollout_ref.model.custom_chat_template",
    "model.custom_chat_template",
    "reward.custom_reward_function.",
    "reward.functions",
    "reward.reward_manager.",
    "reward.reward_kwargs",
    *(f"{_MODEL}{name}" for name in ("enable", "combine", "weight", "max_length", "steps.")),
    *(f"{_JUDGE}{name}" for name in ("enable", "model", "template", "system_prompt", "parse.", "temperature")),
    *(f"{_JUDGE}{name}" for name in ("max_tokens", "extra_body")),
    *(f"{_MULTI_TURN}{name}" for name in ("enable", "format", "turn_rewards", "tool_config_path")),
    *(f"{_MULTI_TURN}{name}" for name in ("function_tool_path", "interaction_config_path")),
    *(f"{_AGENT}{name}" for name in ("default_agent_loop", "agent_loop_config_path", "default_environment")),
    *(f"{_AGENT}{name}" for name in ("environment_config_path", "function", "command")),
)
#: arguments of reward managers that say where and how fast, and not what, they score
_WHERE = ("url", "max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request", "batch_size", "attempts")
#: groups of settings that say how and where a run computes
_NOT_PART = (
    "trainer.",
    "data.output_path",
    "data.path",
    "ray_kwargs.",
    "global_profiler.",
    "data.val_files",
    "placement.",
)
#: settings whose values are modules, also without a colon
_MODULES = ("external_lib", "optimizer_impl", "class_path", "function_tool_path", "custom_cls.path", "module.path")
#: settings whose `path` is a file or module of functions
_CALLED = ("reward.custom_reward_function.", "reward.functions.", f"{_JUDGE}parse.")
#: settings with arguments for code, whose texts may name any file
_WITH_ARGUMENTS = ("reward.", _MULTI_TURN, _AGENT)
_TEXTS = (".jinja", ".jinja2", ".j2", ".txt", ".md")
_YAML = (".yaml", ".yml")
#: files of an environment's or a tool's folder that are its code and texts
_OF_FOLDERS = (".py", ".toml", ".json", ".sh", *_TEXTS, *_YAML)
_NAMES_FOLDER = re.compile(r"(folder|dir|directory|path|root|model|judge)s?$")
_REFERENCE = re.compile(r"(?:pkg://)?([A-Za-z_][\w.]*)(:[\w.]+)?")


def definition_of(config: ConfigNode) -> Definition:
    """Return digests of all settings that define the experiment, by key.

    Returns:
        `values`: the digests of settings with the contents of the files that they name; `code`: for those settings that
        name files, digests of their bytes. If either is as it was, nothing has changed: versions of Python differ in
        what the first is computed from. `parts`: for those settings, the digest of each file by name, for messages.
        `models`: what identifies the model that a setting names, see `identities_of`.
    """
    definition: Definition = {"values": {}, "code": {}, "parts": {}, "models": {}}
    idle = tuple(idle_settings(config))
    tree = dict(leaves(as_dict(config), set(declared(type(config)))))
    open_mappings(tree)
    for key, value in tree.items():
        if key == DATA:
            definition["values"][key] = definition["code"][key] = digest(
                contents(value, fetch=not tree.get(_OWN_CLASS))
            )[:12]
            continue
        if key.startswith((*_NOT_PART, *idle)) and key != f"{_MODEL}enable":
            continue
        if place_of(type(config), key) == "model":
            if value and (identities := identities_of(value)):
                definition["models"][key] = identities
            continue
        if isinstance(value, Mapping) and not key.startswith(_SETTINGS):
            definition["models"] |= {name: identities_of(model) for name, model in _models_in(value, key)}
        if key == "reward.reward_kwargs" and isinstance(value, Mapping):
            value = {name: item for name, item in value.items() if name not in _WHERE and name != "token_env"}
        reader = _Reader(exact=False)
        content = reader.content_of(value, key)
        if reader.parts or key.startswith(_SETTINGS):
            definition["values"][key] = _short_digest(content)
        if reader.parts:
            definition["code"][key] = _short_digest(_Reader(exact=True).content_of(value, key))
            definition["parts"][key] = {name: part[:12] for name, part in reader.parts.items()}
    return definition


def complete_models(definition: Definition, config: ConfigNode) -> Definition:
    """Add the contents of models that had not been downloaded when `definition` was made, and are now."""
    models = {
        key: identities if any(identity.startswith(CONTENT) for identity in identities) else None
        for key, identities in definition.get("models", {}).items()
    }
    if all(models.values()):
        return definition
    tree = dict(leaves(as_dict(config), set(declared(type(config)))))
    open_mappings(tree)
    now = {key: complete or identities_of(tree[key]) or definition["models"][key] for key, complete in models.items()}
    return {**definition, "models": now}


def contents_of(config: ConfigNode) -> dict[str, str]:
    """Return what models and files hold that settings name, without the training data, by setting.

    The result does not change with the layout of code, or with the place of files.
    """
    definition = definition_of(config)
    models = {key: identities[0] for key, identities in definition["models"].items()}
    return models | {key: definition["values"][key] for key in definition["code"] if key != DATA}


def changed_keys(before: Definition, now: Definition) -> list[str]:
    """Return the settings whose values, or whose files' contents, differ between two results of `definition_of`.

    A setting that only one of them has counts if it names files: the other version may not have had the setting. A
    model counts if both know what it is.
    """
    changed = []
    for key in dict.fromkeys([*before["values"], *now["values"]]):
        pairs = [(before[kind].get(key), now[kind].get(key)) for kind in ("values", "code")]
        is_new = pairs[0][0] is None or pairs[0][1] is None
        names_files = any(part is not None for part in pairs[1])
        same = any(was is not None and was == current for was, current in pairs)
        if not same and (names_files or not is_new):
            changed.append(key)
    models = before.get("models", {})
    return changed + [key for key in models if key in now["models"] and not set(models[key]) & set(now["models"][key])]


def compared_keys(before: Definition, now: Definition) -> set[str]:
    """Return the settings whose contents were compared."""
    return set(before["values"]) & set(now["values"]) | set(before.get("models", {})) & set(now["models"])


def changed_parts(key: str, before: Definition, now: Definition) -> list[str]:
    """Return the names of the files of a setting that have other contents, or that only one of both has."""
    was, current = before.get("parts", {}).get(key), now["parts"].get(key)
    if was is None or current is None:
        return []
    return [name for name in dict.fromkeys([*was, *current]) if was.get(name) != current.get(name)]


def shown_content(key: str, definition: Definition) -> str | None:
    """Return what messages call the content of a setting; None if it names no file."""
    models: Mapping[str, list[str]] = definition.get("models", {})
    return models[key][0].removeprefix(CONTENT)[:12] if key in models else definition["code"].get(key)


def _short_digest(value: Any) -> str:
    return digest(value)[:12]


class _Reader:
    """Replaces what names a file in a value by digests of the file's content.

    Args:
        exact: whether code is compared by its bytes, see `parts_of_file`.

    Attributes:
        parts: a digest of each file, by its name.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self.parts: dict[str, str] = {}

    def content_of(self, value: Any, key: str) -> Any:
        """Return the value of a setting, as plain data, with contents in the place of names."""
        if isinstance(value, Mapping):
            return {str(name): self.content_of(item, f"{key}.{name}") for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.content_of(item, key) for item in value]
        if not isinstance(value, str):
            return value if value is None or isinstance(value, bool | int | float) else repr(value)
        if key == f"{_AGENT}command":
            words = value.split()
            modules = [before == "-m" for before in ["", *words]]
            return [
                self._of_text(word, f"{key}.module.path" if is_module else key)
                for word, is_module in zip(words, modules, strict=False)
            ]
        if key.endswith("external_lib") and "," in value:
            return [self.content_of(part.strip(), key) for part in value.split(",")]
        return self._of_text(value, key)

    def _of_text(self, text: str, key: str) -> Any:
        path, _, name = text.partition(":") if ".py:" in text else (text, "", "")
        file = Path(os.path.expanduser(path))  # pathlib's raises an error for a text such as ~~
        if not _exists(file):
            pass
        elif file.is_dir():
            if key.startswith(_WITH_ARGUMENTS) and _NAMES_FOLDER.search(key):
                return ["content", self._add(file, _digest_of_folder(file))]
        elif file.suffix in _YAML:
            self.parts[file.name] = digest_of_content(file)
            return ["yaml", self._of_yaml(file, key)]
        elif file.suffix == ".py":
            return ["content", self._of_code(file), name]
        elif file.suffix == ".pkl":
            return ["content", self._add(file, digest_of_pickle(file, self._exact))]
        elif file.suffix in _TEXTS or key.startswith(_WITH_ARGUMENTS):
            is_program = key == f"{_AGENT}command" and file.is_absolute() and os.access(file, os.X_OK)
            return text if is_program else ["content", self._add(file, digest_of_content(file))]
        module = _local_module(text, key)
        return text if module is None else ["content", self._of_code(module), text]

    def _add(self, file: Path, content: str) -> str:
        self.parts[file.name] = content
        return content

    def _of_code(self, file: Path) -> str:
        parts = sorted(parts_of_file(file, self._exact))
        self.parts |= {name.removeprefix("file ") or file.name: part for name, part in parts}
        return digest(parts)

    def _of_yaml(self, file: Path, key: str) -> Any:
        try:
            parsed = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError):
            return digest_of_content(file)
        return self.content_of(parsed, f"{key}.")


def _models_in(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the folders of models that arguments of engines name, such as that of a draft model."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _models_in(item, f"{key}.{name}")
    elif isinstance(value, str) and _exists(Path(os.path.expanduser(value))) and is_model(Path(value).expanduser()):
        yield key, value


def _digest_of_folder(folder: Path) -> str:
    """The digest of a model, or of the code and texts in a folder, without hidden ones."""
    if is_model(folder):
        return digest_of_model(folder)
    paths = (path for path in folder.rglob("*") if path.suffix in _OF_FOLDERS and path.is_file())
    visible = (path for path in paths if not any(part[0] == "." for part in path.relative_to(folder).parts))
    return digest_of_files(folder, visible)


def _local_module(text: str, key: str) -> Path | None:
    """The file of a module that is not installed, if a text names a module or something in one."""
    reference = _REFERENCE.fullmatch(text)
    is_module = key.endswith(_MODULES) or "pkg://" in text or (key.startswith(_CALLED) and key.endswith(".path"))
    if reference is None or not (is_module or reference[2] or "." in text):
        return None
    parts = reference[1].split(".")
    shortest = len(parts) if is_module or reference[2] else 1  # MODULE.CLASS
    for count in range(len(parts), shortest - 1, -1):
        if (file := local_file(".".join(parts[:count]))) is not None:
            return file
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a long text, or one with a null byte
        return False
