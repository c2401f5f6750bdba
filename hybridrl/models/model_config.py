"""Reads the configuration of a model, with the changes that the settings make to it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from hybridrl.config import ModelConfig
from hybridrl.config.convert import nearest
from hybridrl.errors import ModelError
from hybridrl.models.attention import attention_implementation
from hybridrl.models.tokenizer import looks_local

#: fields of a configuration that say how positions become rotations, the present one first
ROPE_NAMES = ("rope_parameters", "rope_scaling", "rope_theta")
_OF_EVERY_ROPE = ("rope_theta", "partial_rotary_factor")


def config_of(model: ModelConfig) -> PreTrainedConfig:
    """Load the Hugging Face configuration that a `model` group of the configuration names."""
    return load_model_config(
        model.hf_config_path or model.path, model.trust_remote_code, override=model.override_config
    )


def load_model_config(
    path: str | Path, trust_remote_code: bool = False, override: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Read a model's `config.json` and apply `override` to it. Nested mappings are merged.

    Dropout is switched off, because the old and new log-probabilities of a token must come from the same function.
    Otherwise the first importance ratio would not be 1.

    Raises:
        ModelError: there is no such directory or no readable configuration, or `override` has a field that the model
            does not have.
    """
    source = checked_source(path)
    try:
        config = AutoConfig.from_pretrained(source, **({"trust_remote_code": True} if trust_remote_code else {}))
    except Exception as error:  # transformers may raise anything for a broken file
        raise ModelError(
            f"the model configuration of {source} cannot be read: {type(error).__name__}: {error}"
        ) from error
    override = dict(override or {})
    config._attn_implementation = attention_implementation(config, override)
    override.pop("attn_implementation", None)
    _apply_override(config, override, "model.override_config")
    for target in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in target.to_dict().items():
            if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
                setattr(target, name, 0.0)
    return config


def checked_source(path: str | Path, key: str = "actor_rollout_ref.model.path (critic.model.path)") -> str | Path:
    """Return a local directory as a path, and a hub name unchanged.

    Args:
        key: the setting that names it.

    Raises:
        ModelError: a local directory does not exist or has no `config.json`.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is no model directory: it has no config.json; set {key} to one that has")
        return folder
    if looks_local(path):
        raise ModelError(f"model directory {folder} does not exist; set {key} to one that does")
    return path


def _apply_override(config: PreTrainedConfig, override: Mapping[str, Any], where: str) -> None:
    for name, value in sorted(override.items(), key=lambda item: item[0] in ROPE_NAMES):  # checked against the others
        if name in ROPE_NAMES and hasattr(config, "rope_parameters"):
            _override_rope(config, name, value, f"{where}.{name}")
            continue
        if name not in (fields := _fields_of(config)):
            close = nearest(name, sorted(fields))
            raise ModelError(f"{where}.{name}={value}: a {type(config).__name__} has no such field{close}; remove it")
        current = getattr(config, name)
        if isinstance(value, Mapping) and isinstance(current, PreTrainedConfig):
            _apply_override(current, value, f"{where}.{name}")
        elif isinstance(value, Mapping) and isinstance(current, dict):
            setattr(config, name, {**current, **value})
        else:
            setattr(config, name, value)


def _fields_of(config: PreTrainedConfig) -> set[str]:
    """The fields of a configuration: those of its class, and further ones of the model's config.json."""
    named = inspect.signature(type(config).__init__).parameters.keys() - {"self", "kwargs"}
    return {name for name in (*vars(config), *config.to_dict(), *named, *config.attribute_map) if name[0] != "_"}


def _override_rope(config: Any, name: str, value: Any, where: str) -> None:
    """Merge rotary positions into those of the model, under their present or an older name.

    transformers takes an unknown entry for none, and finds a missing one when the model is built.
    """
    if name == "rope_theta":
        value = {"rope_theta": value}
    if value is None:  # without scaling
        value = {"rope_type": "default"}
    if not isinstance(value, Mapping):
        raise ModelError(f"{where}={value} must be a mapping, such as {{rope_type: yarn, factor: 4.0}}")
    current = dict(config.rope_parameters or {})
    kinds = [kind for kind, entries in current.items() if isinstance(entries, Mapping)]
    if kinds and not set(value) <= set(kinds):
        raise ModelError(
            f"{where} has {', '.join(map(str, value))}, and this model has rotary positions for each kind of layer: "
            f"name one of {', '.join(kinds)}"
        )
    if kinds:
        merged = {**current, **{kind: _merged_rope(current[kind], entries) for kind, entries in value.items()}}
    else:
        merged = _merged_rope(current, value)
    config.rope_parameters = merged
    entry_names = {*RopeParameters.__annotations__, *(getattr(config, "ignore_keys_at_rope_validation", None) or ())}
    for before, entries in [(current[kind], merged[kind]) for kind in kinds] or [(current, merged)]:
        kind = entries.get("rope_type", "default")
        if kind not in (*ROPE_INIT_FUNCTIONS, "default", getattr(config, "default_rope_type", "default")):
            raise ModelError(f"{where}: rope_type={kind} is unknown; it can be {', '.join(ROPE_INIT_FUNCTIONS)}")
        unknown = sorted(entries.keys() - entry_names - before.keys())
        if unknown:
            raise ModelError(f"{where}: {', '.join(unknown)} is unknown; there are {', '.join(sorted(entry_names))}")
    try:
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"{where}: {error.args[0] if error.args else error}") from error


def _merged_rope(current: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    entries = {"rope_type" if name == "type" else name: value for name, value in entries.items()}
    if entries.get("rope_type", current.get("rope_type")) == current.get("rope_type"):
        return {**current, **entries}
    # Another type has other entries; those that every type has stay.
    return {**{name: current[name] for name in _OF_EVERY_ROPE if name in current}, **entries}
