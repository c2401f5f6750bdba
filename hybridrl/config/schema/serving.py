"""Settings of an inference engine that serves a fixed model: a reward model or a teacher."""

from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema import choices
from hybridrl.config.schema.conditions import is_set, off
from hybridrl.config.schema.node import ConfigNode, key
from hybridrl.registry import INFERENCE_ENGINES

#: an inference engine serves the model
_SERVED = is_set(".name")


@dataclass
class ServingConfig(ConfigNode):
    """An engine that serves a fixed model in replicas. All settings but `name` act only with a name."""

    name: str | None = key(
        None,
        "inference engine that serves the model in replicas; null: a training engine computes it",
        registry=INFERENCE_ENGINES,
        later=choices.ROLLOUTS_LATER,
    )
    tensor_model_parallel_size: int = key(1, "devices that share each layer of a replica", gt=0, needs=_SERVED)
    pipeline_model_parallel_size: int = key(1, "groups of devices that share a replica's layers", gt=0, needs=_SERVED)
    expert_parallel_size: int = key(
        1, "devices that share the experts of a mixture-of-experts model", gt=0, needs=_SERVED
    )
    dtype: str = key(
        "auto",
        "dtype of the computation; auto: bfloat16 on a GPU (float16 on one that lacks it), float32 on a CPU",
        choices=(*choices.DTYPES, "float16"),
        synonyms=choices.DTYPE_SYNONYMS,
        needs=_SERVED,
    )
    gpu_memory_utilization: float = key(
        0.5, "share of a GPU's memory for weights and KV cache", gt=0, le=1, needs=_SERVED
    )
    free_cache_engine: bool = key(
        True,
        "on devices of the policy: release that memory, and keep the weights in host memory, between uses",
        needs=_SERVED,
    )
    max_model_len: int | None = key(
        None, "most tokens that it reads; null: what prompt and response need", gt=0, needs=_SERVED
    )
    max_num_batched_tokens: int = key(8192, "tokens computed at once", gt=0, needs=_SERVED)
    max_num_seqs: int = key(1024, "sequences computed at once", gt=0, needs=_SERVED)
    enforce_eager: bool = key(True, "no CUDA graphs, of which reading prompts makes little use", needs=_SERVED)
    cudagraph_capture_sizes: list[int] | None = key(
        None, "batch sizes of CUDA graphs; null: the engine's default", needs=(_SERVED, off(".enforce_eager"))
    )
    enable_chunked_prefill: bool = key(True, "compute long texts in chunks", needs=_SERVED)
    enable_prefix_caching: bool = key(
        True, "compute common beginnings of texts once, where the engine can", needs=_SERVED
    )
    engine_kwargs: dict[str, Any] = key(
        {},
        "further arguments of the engine by their own names, below vllm or sglang; they override everything here",
        needs=_SERVED,
        read_by="engine-arguments",
    )
