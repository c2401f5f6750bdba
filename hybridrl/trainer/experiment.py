"""What defines an experiment besides its model and algorithm: training data, reward, tools, environments, user code.

A checkpoint holds a digest of each setting that takes part. Where a setting names a file, its content counts and its
place does not, so that a resumed run notices an edited file, and takes a moved one for what it was.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridrl.checkpoint.files import digest, sha256
from hybridrl.config import PPOTrainerConfig
from hybridrl.config.differences import leaves
from hybridrl.config.schema.node import ConfigNode, declared
from hybridrl.data.files import contents
from hybridrl.observe.run_folder import as_dict
from hybridrl.utils.code_digest import digest_of_file, digest_of_pickle, local_file

#: of a checkpoint: its state, and the entry there that holds the experiment's definition
STATE_FILE, EXPERIMENT = "trainer.json", "experiment"
Definition = dict[str, dict[str, str]]

DATA = "data.train_files"
_MULTI_TURN, _AGENT = "actor_rollout_ref.rollout.multi_turn.", "actor_rollout_ref.rollout.agent."
_MODEL, _JUDGE = "reward.reward_model.", "reward.reward_model.judge."
#: settings that take part by their values, as keys or as what keys begin with
_SETTINGS = (
    "data.custom_cls.",
    *(f"data.{name}" for name in ("apply_chat_template_kwargs", "system_prompt", "last_assistant_turn")),
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
_TEXTS = (".jinja", ".jinja2", ".j2", ".txt", ".md")
_YAML = (".yaml", ".yml")
_REFERENCE = re.compile(r"(?:pkg://)?([A-Za-z_][\w.]*)(:[\w.]+)?")


def definition_of(config: ConfigNode) -> Definition:
    """Return digests of all settings that define the experiment, by key.

    Returns:
        `values`: the digests of settings with the contents of the files that they name; `code`: for those settings that
        name files, digests of their bytes. If either is as it was, nothing has changed: versions of Python differ in
        what the first is computed from.
    """
    found: Definition = {"values": {}, "code": {}}
    idle = () if isinstance(config, PPOTrainerConfig) and config.reward.reward_model.enable else (_MODEL,)
    for key, value in leaves(as_dict(config), set(declared(type(config)))):
        if key == DATA:
            found["values"][key] = found["code"][key] = digest(contents(value))[:12]
            continue
        if key.startswith((*_NOT_PART, *idle)) and key != f"{_MODEL}enable":
            continue
        if key == "reward.reward_kwargs" and isinstance(value, Mapping):
            value = {name: item for name, item in value.items() if name not in _WHERE and name != "token_env"}
        files: list[Path] = []
        resolved = _resolved(value, key, False, files)
        if files or key.startswith(_SETTINGS):
            found["values"][key] = _short_digest(resolved)
        if files:
            found["code"][key] = _short_digest(_resolved(value, key, True, files))
    return found


def code_of(config: ConfigNode) -> dict[str, str]:
    """Return digests of the settings that name files, without the training data, that do not change with layout."""
    found = definition_of(config)
    return {key: found["values"][key] for key in found["code"] if key != DATA}


def changed_keys(before: Definition, now: Definition) -> list[str]:
    """Return the settings whose values, or whose files' contents, differ between two results of `definition_of`.

    A setting that only one of them has counts if it names files: the other version may not have had the setting.
    """
    changed = []
    for key in dict.fromkeys([*before["values"], *now["values"]]):
        pairs = [(before[kind].get(key), now[kind].get(key)) for kind in ("values", "code")]
        is_new = pairs[0][0] is None or pairs[0][1] is None
        names_files = any(part is not None for part in pairs[1])
        same = any(was is not None and was == current for was, current in pairs)
        if not same and (names_files or not is_new):
            changed.append(key)
    return changed


def _short_digest(value: Any) -> str:
    return digest(value)[:12]


def _resolved(value: Any, key: str, exact: bool, files: list[Path]) -> Any:
    """Replace what names a file in a value by digests of the file's content, and add the files to `files`."""
    if isinstance(value, Mapping):
        return {str(name): _resolved(item, f"{key}.{name}", exact, files) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(item, key, exact, files) for item in value]
    if not isinstance(value, str):
        return value if value is None or isinstance(value, bool | int | float) else repr(value)
    if key == f"{_AGENT}command":
        return [_of_text(word, key, exact, files) for word in value.split()]
    if key.endswith("external_lib") and "," in value:
        return [_resolved(part.strip(), key, exact, files) for part in value.split(",")]
    return _of_text(value, key, exact, files)


def _of_text(text: str, key: str, exact: bool, files: list[Path]) -> Any:
    path, _, name = text.partition(":") if ".py:" in text else (text, "", "")
    file = Path(os.path.expanduser(path))  # pathlib's raises an error for a text such as ~~
    if file.suffix in _YAML and _is_file(file):
        files.append(file)
        return ["yaml", _of_yaml(file, key, exact, files)]
    is_text = file.suffix in _TEXTS or key == f"{_JUDGE}template"
    is_text = is_text or (file.suffix == ".json" and key.startswith((_MULTI_TURN, _AGENT)))  # servers of tools
    if is_text and _is_file(file):
        return _content(sha256, file, files)
    if file.suffix == ".py" and _is_file(file):
        return [*_content(functools.partial(digest_of_file, exact=exact), file, files), name]
    if file.suffix == ".pkl" and _is_file(file):
        return _content(functools.partial(digest_of_pickle, exact=exact), file, files)
    module = _local_module(text, key)
    return text if module is None else [*_content(functools.partial(digest_of_file, exact=exact), module, files), text]


def _content(compute: Callable[[Path], str], file: Path, files: list[Path]) -> list[str]:
    files.append(file)
    return ["content", compute(file)]


def _of_yaml(file: Path, key: str, exact: bool, files: list[Path]) -> Any:
    try:
        parsed = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError):
        return sha256(file)
    return _resolved(parsed, f"{key}.", exact, files)


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


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a long text, or one with a null byte
        return False
