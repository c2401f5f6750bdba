"""Settings of a model: which one, and how it is built."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hybridrl.config.schema import choices
from hybridrl.config.schema.conditions import Need, above, entry, is_not_set, on
from hybridrl.config.schema.node import ConfigNode, group, key
from hybridrl.registry import TRAIN_ENGINES


def _fsdp2(up: str) -> Need:
    """The training engine of the model is fsdp2. `up` are the dots that lead to what is around the model's group."""
    return entry(
        "|".join(f"{up}{name}" for name in ("actor.strategy", "strategy", "engine.strategy")), TRAIN_ENGINES, "fsdp2"
    )


@dataclass
class TiledMLPConfig(ConfigNode):
    """`model.tiled_mlp`."""

    enabled: bool = key(
        False,
        "fsdp2: compute MLPs for a part of the tokens at a time: less memory, computed again in the backward pass",
        needs=_fsdp2("..."),
    )
    num_shards: int = key(4, "parts of the tokens", ge=1, needs=on(".enabled"))


@dataclass
class ModelConfig(ConfigNode):
    """`actor_rollout_ref.model`, `critic.model`, and `model` of supervised fine-tuning."""

    #: the output layer gets an adapter, too; no setting, because engines of generation know no such adapters
    adapts_head: ClassVar[bool] = False

    path: str = key("", "directory in Hugging Face format, or a hub id `org/name`; must be set", place="model")
    tokenizer_path: str | None = key(
        None, "directory or hub id of the tokenizer; null: that of the model", place="model"
    )
    hf_config_path: str | None = key(
        None, "directory or hub id of the model's config.json; null: that of the model", place="model"
    )
    custom_chat_template: str | None = key(None, "a Jinja chat template that replaces the tokenizer's")
    external_lib: str | None = key(
        None,
        "Python module or file, or several joined by commas, imported before anything is built, to register user code",
        place="code",
    )
    override_config: dict[str, Any] = key(
        {}, "entries that override the model's config.json, e.g. attn_implementation", read_by="model-fields"
    )
    lora_rank: int = key(
        0, "fsdp2: rank of a LoRA adapter (PEFT), which is trained while the model's weights are frozen; 0: none", ge=0
    )
    lora_alpha: int = key(
        16,
        "scale of the adapter: its product is multiplied by lora_alpha / lora_rank",
        gt=0,
        needs=(is_not_set(".lora_adapter_path"), above(".lora_rank")),
    )
    target_modules: str | list[str] = key(
        "all-linear",
        "linear layers that get an adapter: names or ends of names, or a regular expression of whole names; "
        "all-linear: all but the output layer and routers",
        needs=(is_not_set(".lora_adapter_path"), above(".lora_rank")),
    )
    exclude_modules: str | list[str] | None = key(
        None,
        "of these layers, those that get none; written likewise",
        needs=(is_not_set(".lora_adapter_path"), above(".lora_rank")),
    )
    lora_adapter_path: str | None = key(
        None, "folder of an adapter in PEFT's format to go on from; its own rank, alpha and layers count", place="model"
    )
    load_in_4bit: bool = key(
        False,
        "fsdp2: keep the frozen weights of linear layers in 4 bits (NF4), next to an adapter (QLoRA) or in a model "
        "that is not trained: a quarter of the memory of bfloat16, and slower",
    )
    enable_gradient_checkpointing: bool = key(True, "recompute activations in the backward pass: less memory, slower")
    recompute_granularity: str = key(
        "full",
        "fsdp2: what gradient checkpointing computes again. full: whole layers; selective: what is cheap, while "
        "results of linear layers and fused attention are kept (more memory, less to compute)",
        choices=choices.RECOMPUTE_GRANULARITIES,
        needs=(on(".enable_gradient_checkpointing"), _fsdp2("..")),
    )
    enable_activation_offload: bool = key(
        False,
        "fsdp2: keep the inputs of checkpointed layers in host memory until the backward pass",
        needs=(on(".enable_gradient_checkpointing"), _fsdp2("..")),
    )
    tiled_mlp: TiledMLPConfig = group(TiledMLPConfig)
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    use_liger: bool = key(
        False,
        "fsdp2, on a GPU: compute norms, gated MLPs and rotary embeddings by the kernels of the package liger-kernel: "
        "faster, and fewer activations are kept",
        needs=_fsdp2(".."),
    )
    use_fused_kernels: bool = key(
        False,
        "compute log-probabilities and entropy by chunks of tokens, so that logits never exist as a whole: less "
        "memory, and an update computes the output layer once more",
    )
    share_prefixes: bool | None = key(
        None,
        "fsdp2: compute tokens once that sequences of a micro-batch share (the prompt of a group, the history of "
        "sessions), forward and backward; results are the same up to rounding. null: where the model and the settings "
        "allow it and it saves enough tokens of a batch",
        needs=_fsdp2(".."),
    )
    use_remove_padding: bool = key(True, "compute without padding if the attention kernel supports it")

    @property
    def adapted(self) -> bool:
        """Whether an adapter is trained, or used, with the weights frozen."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None
