"""Settings of the training engine `megatron`: how a model is laid out over the ranks, and what Megatron-core gets."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hybridrl.config.schema.conditions import LEARNS, above, on
from hybridrl.config.schema.engine import EngineConfig, FSDPConfig
from hybridrl.config.schema.node import key


@dataclass
class MegatronConfig(EngineConfig):
    """`actor.megatron`, `ref.megatron`, `critic.megatron`, and part of `engine` of supervised fine-tuning."""

    sequence_shared_by: ClassVar[str] = "context_parallel_size"

    grad_offload: bool = key(False, "free the memory of gradients between updates", needs=LEARNS)
    tensor_model_parallel_size: int = key(1, "ranks that share each layer (TP)", ge=1)
    pipeline_model_parallel_size: int = key(1, "stages of consecutive layers (PP)", ge=1)
    virtual_pipeline_model_parallel_size: int | None = key(
        None,
        "model chunks per stage, in an interleaved schedule (VPP); null: one, not interleaved",
        ge=2,
    )
    context_parallel_size: int = key(1, "ranks that share each sequence (CP)", ge=1)
    expert_model_parallel_size: int = key(1, "ranks that share the experts of each layer (EP)", ge=1)
    expert_tensor_parallel_size: int | None = key(
        None, "ranks that share each expert (ETP); null: tensor_model_parallel_size", ge=1
    )
    sequence_parallel: bool = key(
        True,
        "with TP, also split the activations between the tensor-parallel parts along the sequence (SP)",
        needs=above(".tensor_model_parallel_size", 1),
    )
    use_distributed_optimizer: bool = key(True, "split the optimizer state over the data-parallel ranks", needs=LEARNS)
    use_dist_checkpointing: bool = key(False, "load the first weights from dist_checkpointing_path")
    dist_checkpointing_path: str | None = key(
        None, "folder of a distributed checkpoint of Megatron-core", needs=on(".use_dist_checkpointing"), place="model"
    )
    override_ddp_config: dict[str, Any] = key(
        {}, "fields of Megatron-core's DistributedDataParallelConfig", needs=LEARNS, read_by="ddp-fields"
    )
    override_transformer_config: dict[str, Any] = key(
        {}, "fields of Megatron-core's TransformerConfig, e.g. recompute_granularity", read_by="transformer-fields"
    )


@dataclass
class SFTEngineConfig(FSDPConfig, MegatronConfig):
    """`engine` of supervised fine-tuning: the settings of the built-in engines, of which the strategy reads its own."""
