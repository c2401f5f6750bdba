"""Settings of the value model: `critic`."""

from dataclasses import dataclass

from hybridrl.config.schema import choices
from hybridrl.config.schema.actor import MICRO_BATCH_SIZE
from hybridrl.config.schema.conditions import among, off, on
from hybridrl.config.schema.engine import CheckpointConfig, FSDPConfig, OptimConfig, strategy_key
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.node import ConfigNode, Follow, group, key
from hybridrl.config.schema.profiler import RoleProfilerConfig

_POLICY = "${actor_rollout_ref.model."


@dataclass
class CriticConfig(ConfigNode):
    """`critic`: the value model and how it is updated."""

    enable: bool | None = key(None, "null: there is a critic when algorithm.adv_estimator=gae", needs=())
    strategy: str = strategy_key(follows="${oc.select:actor_rollout_ref.actor.strategy,fsdp2}")
    model: ModelConfig = group(
        ModelConfig,
        path=Follow(_POLICY + "path}", ""),
        tokenizer_path=Follow(_POLICY + "tokenizer_path}", None),
        custom_chat_template=Follow(_POLICY + "custom_chat_template}", None),
        external_lib=Follow(_POLICY + "external_lib}", None),
        trust_remote_code=Follow(_POLICY + "trust_remote_code}", False),
    )
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    ppo_mini_batch_size: int = key(
        256,
        "prompts per optimizer step, counted over all processes",
        follows="${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}",
        gt=0,
    )
    ppo_micro_batch_size_per_gpu: int = key(
        MICRO_BATCH_SIZE,
        "sequences that a process computes at once",
        follows="${oc.select:actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,8}",
        gt=0,
        needs=off(".use_dynamic_bsz"),
    )
    forward_micro_batch_size_per_gpu: int = key(
        MICRO_BATCH_SIZE,
        "sequences that a process computes at once for values",
        follows="${.ppo_micro_batch_size_per_gpu}",
        gt=0,
        needs=off(".use_dynamic_bsz"),
    )
    use_dynamic_bsz: bool = key(
        False,
        "fill micro-batches by tokens, not by sequences",
        follows="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}",
    )
    ppo_max_token_len_per_gpu: int = key(32768, "most tokens per micro-batch", gt=0, needs=on(".use_dynamic_bsz"))
    forward_max_token_len_per_gpu: int = key(
        32768,
        "most tokens per micro-batch for values",
        follows="${.ppo_max_token_len_per_gpu}",
        gt=0,
        needs=on(".use_dynamic_bsz"),
    )
    ppo_epochs: int = key(1, "passes over a batch", follows="${oc.select:actor_rollout_ref.actor.ppo_epochs,1}", gt=0)
    shuffle: bool = key(
        False,
        "shuffle the batch before it is split into mini-batches",
        follows="${oc.select:actor_rollout_ref.actor.shuffle,false}",
    )
    data_loader_seed: int = key(42, "seed of this shuffle", ge=0, needs=on(".shuffle"))
    cliprange_value: float = key(0.5, "clip range of the value around its old value", gt=0)
    loss_agg_mode: str = key(
        "token-mean",
        "how token losses are aggregated",
        follows="${oc.select:actor_rollout_ref.actor.loss_agg_mode,token-mean}",
        choices=choices.LOSS_AGG_MODES,
    )
    loss_scale_factor: float | None = key(
        None,
        "divisor of seq-mean-token-sum-norm; null: rollout.response_length",
        follows="${oc.select:actor_rollout_ref.actor.loss_scale_factor,null}",
        gt=0,
        needs=among(".loss_agg_mode", "seq-mean-token-sum-norm"),
    )
    rollout_n: int = key(1, "samples per prompt", follows="${oc.select:actor_rollout_ref.rollout.n,1}", gt=0)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    profiler: RoleProfilerConfig = group(RoleProfilerConfig)
    fsdp: FSDPConfig = group(FSDPConfig, strategy=Follow("${critic.strategy}", "fsdp2"))
    megatron: MegatronConfig = group(MegatronConfig, strategy=Follow("${critic.strategy}", "fsdp2"))
