"""Settings of a model: which one, and how it is built."""

from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema.node import ConfigNode, key


@dataclass
class ModelConfig(ConfigNode):
    """`actor_rollout_ref.model`, `critic.model`, and `model` of supervised fine-tuning."""

    path: str = key("", "directory in Hugging Face format, or a hub id `org/name`; must be set")
    tokenizer_path: str | None = key(None, "directory or hub id of the tokenizer; null: that of the model")
    hf_config_path: str | None = key(None, "directory or hub id of the model's config.json; null: that of the model")
    custom_chat_template: str | None = key(None, "a Jinja chat template that replaces the tokenizer's")
    external_lib: str | None = key(
        None, "Python module, or several joined by commas, imported before anything is built, to register user code"
    )
    override_config: dict[str, Any] = key({}, "entries that override the model's config.json, e.g. attn_implementation")
    enable_gradient_checkpointing: bool = key(True, "recompute activations in the backward pass: less memory, slower")
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    use_remove_padding: bool = key(True, "compute without padding if the attention kernel supports it")
