"""Arguments of `hybridrl.grpo` and its relatives that are objects: other names for them, an adapter, TRL's `args`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hybridrl.config.short_names import rows
from hybridrl.errors import ConfigError
from hybridrl.notify import notify

#: other names of the arguments that take objects
OTHER_NAMES = {
    "train_dataset": "data",
    "train_data": "data",
    "eval_dataset": "val_data",
    "eval_data": "val_data",
    "reward_funcs": "reward",
    "reward_function": "reward",
    "model_name_or_path": "model",
}
_ADAPTER = {"r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
#: fields of a LoraConfig that say nothing about the adapter that is trained
_SILENT = frozenset(
    ("peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version")
)
_STEPS_OF = {"save_strategy": "save_steps", "eval_strategy": "eval_steps"}


def renamed(settings: dict[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """Take the arguments that hold objects out of settings, under one name each, and add those that were given.

    Args:
        settings: the keywords of a call; names of such arguments are removed.
        given: arguments by name; None: not given.

    Raises:
        ConfigError: an argument is given under two names.
    """
    arguments = dict(passed)
    faults = []
    for other, name in OTHER_NAMES.items():
        if other not in settings:
            continue
        value = settings.pop(other)
        if value is not None and arguments.get(name) is not None:
            faults.append(f"{name}= and {other}=: the same argument twice; remove one of them")
        arguments[name] = value if value is not None else arguments.get(name)
    if faults:
        raise ConfigError(faults)
    return arguments


def adapter_settings(peft_config: Any) -> dict[str, Any]:
    """Return short names for a `peft.LoraConfig`.

    Raises:
        ConfigError: it asks for something that an adapter has not here.
    """
    if not hasattr(peft_config, "r") or not dataclasses.is_dataclass(peft_config):
        raise ConfigError(
            f"peft_config is {type(peft_config).__name__}; give a peft.LoraConfig, or lora_rank= and lora_alpha="
        )
    settings: dict[str, Any] = {}
    faults = []
    for item in dataclasses.fields(peft_config):
        value = getattr(peft_config, item.name)
        if item.name in _ADAPTER:
            settings[_ADAPTER[item.name]] = value
        elif item.name == "target_modules":
            if value is None:
                notify("peft_config.target_modules is not set: all linear layers get an adapter (docs/lora.md)")
            else:
                settings["target_modules"] = value if isinstance(value, str) else sorted(value)
        elif item.name == "exclude_modules":
            if value:
                settings["exclude_modules"] = value if isinstance(value, str) else sorted(value)
        elif item.name not in _SILENT and value != _default_of(item):
            faults.append(f"peft_config.{item.name}={value!r}: an adapter is plain LoRA here (docs/lora.md); remove it")
    if faults:
        raise ConfigError(faults)
    return {name: value for name, value in settings.items() if value is not None}


def _default_of(item: dataclasses.Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default


def settings_of_args(args: Any, tree: str, *, validates: bool = True) -> dict[str, Any]:
    """Return short names for TRL's `args`: a `GRPOConfig`, `SFTConfig`, ... of TRL or of `hybridrl.compat.trl`.

    Values that are TRL's defaults are set, too, where hybridrl has others. What has no effect, or is refused, is
    returned where it differs from its default, so that the run tells it.

    Args:
        args: the config.
        tree: the tree of settings.
        validates: the run has data for validation.

    Raises:
        ConfigError: it is no such object.
    """
    if not dataclasses.is_dataclass(args) or isinstance(args, type):
        raise ConfigError(f"args is {type(args).__name__}; give a config of TRL or of hybridrl.compat.trl, or settings")
    values = {item.name: (getattr(args, item.name), _default_of(item)) for item in dataclasses.fields(args)}
    table = rows(tree)
    settings: dict[str, Any] = {}
    for name, (value, default) in values.items():
        row = table.get(name)
        if row is not None and not row.idle and not row.refused:
            if value is not None:
                settings[name] = getattr(value, "value", value)
        elif value != default and value is not None and not name.startswith("_"):
            settings[name] = getattr(value, "value", value)
    if not validates:
        settings.pop("eval_on_start", None)
    return _without_what_does_not_act(settings, tree)


def _without_what_does_not_act(settings: dict[str, Any], tree: str) -> dict[str, Any]:
    """Leave out fields that TRL itself does not read with these values, and defaults that mean nothing here."""
    for strategy, steps in _STEPS_OF.items():
        name = str(settings.get(strategy, "no")).lower()
        settings.pop(strategy if name == "steps" else steps, None)
        if strategy == "eval_strategy" and name == "steps":
            settings.setdefault(steps, settings.get("logging_steps", 10))
    for name in ("warmup_steps", "warmup_ratio"):
        if not settings.get(name):
            settings.pop(name, None)
    if not settings.get("use_vllm"):
        settings = {name: value for name, value in settings.items() if not name.startswith("vllm_")}
    loss = str(settings.get("loss_type"))
    if loss != "sapo":
        settings.pop("sapo_temperature_pos", None)
        settings.pop("sapo_temperature_neg", None)
    if tree == "ppo_trainer":
        if loss in ("dapo", "grpo", "dr_grpo") and settings.get("importance_sampling_level", "token") == "token":
            settings.setdefault("delta", 1e6)  # TRL clips negative advantages once unless delta is set
    else:
        settings.pop("shuffle_dataset", None)  # it is about one more shuffle; TRL's own sampler shuffles as well
    if settings.get("project") == "huggingface":
        del settings["project"]
    if not settings.get("precompute_ref_log_probs"):
        settings.pop("precompute_ref_log_probs", None)
    return settings
