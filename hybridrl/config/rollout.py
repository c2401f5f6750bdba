"""Settings of generation: `actor_rollout_ref.rollout`."""

from dataclasses import dataclass

from hybridrl.config import names
from hybridrl.config.actor import MICRO_BATCH_SIZE
from hybridrl.config.node import ConfigNode, group, key


@dataclass
class SamplingConfig(ConfigNode):
    """`rollout.val_kwargs`: how validation samples; greedy by default."""

    n: int = key(1, "samples a prompt", gt=0)
    do_sample: bool = key(False, "false: greedy")
    temperature: float = key(0.0, "softmax temperature; 0 is greedy", ge=0)
    top_k: int = key(-1, "sample from the k likeliest tokens; -1: all", ge=-1)
    top_p: float = key(1.0, "sample from the smallest set of tokens with this probability", gt=0, le=1)


@dataclass
class RolloutConfig(ConfigNode):
    """`actor_rollout_ref.rollout`: how the policy generates and how its log-probabilities are computed again."""

    name: str = key(
        "auto",
        "generation engine; auto: the fastest that is installed and supports the model",
        choices=names.ROLLOUTS,
        later=names.ROLLOUTS_LATER,
    )
    n: int = key(1, "samples a prompt", gt=0)
    temperature: float = key(1.0, "softmax temperature, of the sampler and of the trained distribution", gt=0)
    top_k: int = key(-1, "sample from the k likeliest tokens; -1: all", ge=-1)
    top_p: float = key(1.0, "sample from the smallest set of tokens with this probability", gt=0, le=1)
    do_sample: bool = key(True, "false: greedy")
    ignore_eos: bool = key(False, "generate to the length limit whatever is sampled")
    val_kwargs: SamplingConfig = group(SamplingConfig)
    prompt_length: int = key(512, "prompt width in tokens", follows="${oc.select:data.max_prompt_length,512}", gt=0)
    response_length: int = key(512, "most tokens a response", follows="${oc.select:data.max_response_length,512}", gt=0)
    max_model_len: int | None = key(None, "most tokens of prompt and response together; null: their sum", gt=0)
    max_num_seqs: int = key(256, "sequences generated at once by a process", gt=0)
    dtype: str = key(
        "auto",
        "dtype of generation; auto: bfloat16 on a GPU, float32 on a CPU",
        choices=(*names.DTYPES, "float16"),
        synonyms=names.DTYPE_SYNONYMS,
    )
    seed: int = key(42, "seed of the sampling noise", ge=0)
    calculate_log_probs: bool = key(True, "keep the sampler's own log-probabilities")
    log_prob_micro_batch_size_per_gpu: int = key(
        MICRO_BATCH_SIZE,
        "sequences a process puts through at once for old log-probabilities",
        follows="${oc.select:actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,8}",
        gt=0,
    )
    log_prob_use_dynamic_bsz: bool = key(
        False,
        "fill those micro-batches by tokens",
        follows="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}",
    )
    log_prob_max_token_len_per_gpu: int = key(
        16384,
        "tokens of such a micro-batch",
        follows="${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}",
        gt=0,
    )
