"""Settings of the policy: `actor_rollout_ref.actor` and `actor_rollout_ref.ref`."""

from dataclasses import InitVar, dataclass
from typing import Any

from hybridrl.config.schema import choices
from hybridrl.config.schema.conditions import AnyNeed, among, any_of, entry, entry_has, off, on
from hybridrl.config.schema.engine import (
    CheckpointConfig,
    FSDPConfig,
    OptimConfig,
    chunk_size_key,
    chunking_key,
    compile_key,
    strategy_key,
)
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.node import ConfigNode, Follow, group, key
from hybridrl.config.schema.profiler import RoleProfilerConfig
from hybridrl.errors import ConfigError
from hybridrl.notify import notify
from hybridrl.registry import ADV_ESTIMATORS, POLICY_LOSSES

#: sequences that a process runs through a model at once, unless set otherwise
MICRO_BATCH_SIZE = 8
#: settings that the reference policy shares with the actor unless they are set for it
_REF_FOLLOWS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "param_offload": False,
    "seed": 42,
    "override_transformer_config": {},
}
_AS_ACTOR: dict[str, Any] = {
    name: Follow(f"${{actor_rollout_ref.actor.megatron.{name}}}", value) for name, value in _REF_FOLLOWS.items()
}


#: policy losses that clip the ratio
_CLIPPED = ("vanilla", "gspo", "geo_mean", "cispo", "clip_cov", "dppo_tv", "dppo_kl", "flowrl_vargrad")
#: losses that read these settings whatever `policy_loss.loss_mode` is
_OTHER_LOSSES = (
    on("distillation.distillation_loss.use_policy_gradient"),
    on("algorithm.rollout_correction.bypass_mode"),
)


#: the policy has a loss of its own, next to that of distillation
_OWN_LOSS = any_of(on("distillation.distillation_loss.use_task_rewards"), also=(off("distillation.enabled"),))


def _loss(*losses: str, group: bool = False) -> AnyNeed:
    """One of these policy losses, for settings of the actor or of its group `policy_loss`."""
    key = ".loss_mode" if group else ".policy_loss.loss_mode"
    return any_of(entry(key, POLICY_LOSSES, *losses), also=_OTHER_LOSSES)


def _chunks(*groups: str) -> AnyNeed:
    """The limit of temporary memory is on, in one of these groups or in one for an engine."""
    names = [f"{group}{engine}" for group in groups for engine in ("", "fsdp_config.", "megatron.")]
    first, *others = [on(f"{name}entropy_from_logits_with_chunking") for name in names]
    return any_of(first, also=tuple(others))


def _chunking_of(role: str) -> dict[str, Any]:
    """An engine's limit of temporary memory, which is that of its role unless it is set for the engine."""
    values = {"entropy_from_logits_with_chunking": False, "entropy_from_logits_chunk_size": 2048}
    return {name: Follow(f"${{actor_rollout_ref.{role}.{name}}}", value) for name, value in values.items()}


@dataclass
class PolicyLossConfig(ConfigNode):
    """`actor.policy_loss`."""

    loss_mode: str = key(
        "vanilla",
        "policy loss by its registered name",
        registry=POLICY_LOSSES,
    )
    dro_beta: float | None = key(
        None, "dro: weight of the quadratic term; must be set for it", gt=0, needs=_loss("dro", group=True)
    )
    clip_cov_ratio: float = key(
        0.0002, "clip_cov: share of the tokens that is excluded", ge=0, le=1, needs=_loss("clip_cov", group=True)
    )
    clip_cov_lb: float = key(
        1.0, "clip_cov: tokens are drawn from those with a covariance above this", needs=_loss("clip_cov", group=True)
    )
    clip_cov_ub: float = key(5.0, "clip_cov: and below this", needs=_loss("clip_cov", group=True))
    kl_cov_ratio: float = key(
        0.0002,
        "kl_cov: share of the tokens, those with the largest covariance, that is penalised",
        ge=0,
        le=1,
        needs=_loss("kl_cov", group=True),
    )
    m2_threshold: float = key(
        0.04,
        "m2po: largest mean of squared log-ratios of the tokens that stay in the loss, of those that move away",
        gt=0,
        needs=_loss("m2po", group=True),
    )
    gvpo_beta: float = key(
        0.1,
        "gvpo, gvpo_ref: weight of the log-ratio of a sequence, in units of the reward; larger moves less",
        gt=0,
        needs=_loss("gvpo", "gvpo_ref", group=True),
    )
    online_dpo_beta: float = key(
        0.1,
        "online_dpo: scale of the implied rewards: larger values keep nearer to the reference",
        gt=0,
        needs=_loss("online_dpo", group=True),
    )
    flowrl_beta: float = key(
        15.0,
        "flowrl_vargrad: weight of the reward; samples are to be as likely as exp of it says",
        gt=0,
        needs=_loss("flowrl_vargrad", group=True),
    )
    sppo_eta: float = key(
        1.0,
        "sppo: step size; the log-ratio of a sequence moves towards eta times its advantage",
        gt=0,
        needs=_loss("sppo", group=True),
    )
    ppo_kl_coef: float = key(0.1, "kl_cov: weight of that penalty", ge=0, needs=_loss("kl_cov", group=True))


@dataclass
class RouterReplayConfig(ConfigNode):
    """`actor.router_replay`."""

    mode: str = key(
        "disabled",
        "mixture of experts: updates use the experts that tokens chose in the pass for old log-probabilities (R2) or "
        "in generation (R3)",
        choices=("disabled", "R2", "R3"),
    )

    @property
    def records_in_pass(self) -> bool:
        """Whether the pass for old log-probabilities records the experts."""
        return self.mode == "R2"

    @property
    def records_in_generation(self) -> bool:
        """Whether the sampler records the experts."""
        return self.mode == "R3"


@dataclass
class ActorConfig(ConfigNode):
    """`actor_rollout_ref.actor`: how the policy is updated."""

    strategy: str = strategy_key(follows="${oc.select:model_engine,fsdp2}")
    ppo_mini_batch_size: int = key(
        256,
        "prompts per optimizer step, counted over all processes; 256, or the whole batch where it has fewer",
        follows="${at_most:256,${oc.select:data.train_batch_size,256}}",
        gt=0,
    )
    ppo_micro_batch_size_per_gpu: int = key(
        MICRO_BATCH_SIZE,
        "sequences that a process computes at once",
        gt=0,
        needs=any_of(
            off(".use_dynamic_bsz"),
            off("..rollout.log_prob_use_dynamic_bsz"),
            off("..ref.log_prob_use_dynamic_bsz"),
            off("critic.use_dynamic_bsz"),
        ),
    )
    use_dynamic_bsz: bool = key(False, "fill micro-batches by tokens, not by sequences")
    ppo_max_token_len_per_gpu: int = key(
        16384,
        "most tokens per micro-batch",
        gt=0,
        needs=any_of(
            on(".use_dynamic_bsz"),
            also=(on("..rollout.log_prob_use_dynamic_bsz"), on("..ref.log_prob_use_dynamic_bsz")),
        ),
    )
    ppo_epochs: int = key(1, "passes over a batch", gt=0)
    shuffle: bool = key(False, "shuffle the batch before it is split into mini-batches")
    data_loader_seed: int = key(
        42, "seed of this shuffle", ge=0, needs=any_of(on(".shuffle"), on("algorithm.use_pf_ppo"))
    )
    clip_ratio: float = key(0.2, "clip range of the probability ratio, both sides", ge=0, needs=_loss(*_CLIPPED))
    clip_ratio_low: float = key(0.2, "clip range below 1", follows="${.clip_ratio}", ge=0, needs=_loss(*_CLIPPED))
    clip_ratio_high: float = key(0.2, "clip range above 1", follows="${.clip_ratio}", ge=0, needs=_loss(*_CLIPPED))
    clip_ratio_c: float = key(
        3.0, "bound of the dual clip for negative advantages", gt=1, needs=_loss("vanilla", "dppo_tv", "dppo_kl")
    )
    tau_pos: float = key(1.0, "sapo: temperature for positive advantages", gt=0, needs=_loss("sapo"))
    tau_neg: float = key(1.05, "sapo: temperature for negative advantages", gt=0, needs=_loss("sapo"))
    policy_loss: PolicyLossConfig = group(PolicyLossConfig)
    loss_agg_mode: str = key("token-mean", "how token losses are aggregated", choices=choices.LOSS_AGG_MODES)
    loss_scale_factor: float | None = key(
        None,
        "divisor of seq-mean-token-sum-norm; null: rollout.response_length",
        gt=0,
        needs=among(".loss_agg_mode", "seq-mean-token-sum-norm"),
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus", needs=_OWN_LOSS)
    calculate_sum_pi_squared: bool = key(
        False,
        "compute the sum of squared probabilities of each token; the optimal token baselines need it",
        needs=entry_has("algorithm.adv_estimator", ADV_ESTIMATORS, "needs", "sum_pi_squared"),
    )
    calculate_entropy: bool = key(False, "report entropy even with entropy_coeff 0")
    use_kl_loss: bool = key(False, "add the KL to the reference policy to the loss", needs=_OWN_LOSS)
    kl_loss_coef: float = key(0.001, "weight of that KL", ge=0, needs=on(".use_kl_loss"))
    kl_loss_type: str = key(
        "low_var_kl", "estimator of that KL", choices=choices.KL_PENALTIES, needs=on(".use_kl_loss")
    )
    recompute_old_log_prob: str = key(
        "auto",
        "auto: skip the extra pass when a batch has one update (old = detached current); always: never skip it",
        choices=("auto", "always"),
    )
    router_replay: RouterReplayConfig = group(RouterReplayConfig)
    entropy_from_logits_with_chunking: bool = chunking_key()
    entropy_from_logits_chunk_size: int = chunk_size_key(needs=_chunks(".", "..ref."))
    freeze_vision_tower: bool = key(False, "train a vision-language model without its vision tower")
    use_torch_compile: bool = compile_key()
    rollout_n: int = key(1, "samples per prompt", follows="${oc.select:actor_rollout_ref.rollout.n,1}", gt=0)
    optim: OptimConfig = group(OptimConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    profiler: RoleProfilerConfig = group(RoleProfilerConfig)
    fsdp_config: FSDPConfig = group(
        FSDPConfig,
        needs=(),  # main_generation reads them, too
        strategy=Follow("${actor_rollout_ref.actor.strategy}", "fsdp2"),
        use_torch_compile=Follow("${actor_rollout_ref.actor.use_torch_compile}", False),
        freeze_vision_tower=Follow("${actor_rollout_ref.actor.freeze_vision_tower}", False),
        **_chunking_of("actor"),
    )
    megatron: MegatronConfig = group(
        MegatronConfig, strategy=Follow("${actor_rollout_ref.actor.strategy}", "fsdp2"), **_chunking_of("actor")
    )
    #: verl's old name, for code that builds these settings; on the command line it is renamed
    ppo_micro_batch_size: InitVar[int | None] = None

    def __post_init__(self, ppo_micro_batch_size: int | None) -> None:
        if ppo_micro_batch_size is None:
            return
        if self.ppo_micro_batch_size_per_gpu not in (MICRO_BATCH_SIZE, None):
            raise ConfigError(
                f"ActorConfig: ppo_micro_batch_size={ppo_micro_batch_size} and "
                f"ppo_micro_batch_size_per_gpu={self.ppo_micro_batch_size_per_gpu} are both set; leave out the first."
            )
        self.ppo_micro_batch_size_per_gpu = ppo_micro_batch_size
        notify(
            f"ActorConfig: ppo_micro_batch_size={ppo_micro_batch_size} is used as ppo_micro_batch_size_per_gpu; it "
            "counts sequences per process, not over all processes"
        )


@dataclass
class RefConfig(ConfigNode):
    """`actor_rollout_ref.ref`: the frozen policy against which KL is measured."""

    strategy: str = strategy_key(follows="${actor_rollout_ref.actor.strategy}")
    log_prob_micro_batch_size_per_gpu: int = key(
        MICRO_BATCH_SIZE,
        "sequences that a process computes at once",
        follows="${oc.select:actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,8}",
        gt=0,
        needs=off(".log_prob_use_dynamic_bsz"),
    )
    log_prob_use_dynamic_bsz: bool = key(
        False,
        "fill micro-batches by tokens",
        follows="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}",
    )
    log_prob_max_token_len_per_gpu: int = key(
        16384,
        "most tokens per micro-batch",
        follows="${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}",
        gt=0,
        needs=on(".log_prob_use_dynamic_bsz"),
    )
    use_torch_compile: bool = compile_key(follows="${oc.select:actor_rollout_ref.actor.use_torch_compile,false}")
    entropy_from_logits_with_chunking: bool = chunking_key(
        follows="${oc.select:actor_rollout_ref.actor.entropy_from_logits_with_chunking,false}"
    )
    entropy_from_logits_chunk_size: int = chunk_size_key(
        follows="${oc.select:actor_rollout_ref.actor.entropy_from_logits_chunk_size,2048}", needs=_chunks(".")
    )
    rollout_n: int = key(1, "samples per prompt", follows="${oc.select:actor_rollout_ref.rollout.n,1}", gt=0)
    fsdp_config: FSDPConfig = group(
        FSDPConfig,
        forward_only=True,
        strategy=Follow("${actor_rollout_ref.ref.strategy}", "fsdp2"),
        use_torch_compile=Follow("${actor_rollout_ref.ref.use_torch_compile}", False),
        ulysses_sequence_parallel_size=Follow(
            "${oc.select:actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size,1}", 1
        ),
        expert_parallel_size=Follow("${oc.select:actor_rollout_ref.actor.fsdp_config.expert_parallel_size,1}", 1),
        **_chunking_of("ref"),
    )
    megatron: MegatronConfig = group(
        MegatronConfig,
        forward_only=True,
        strategy=Follow("${actor_rollout_ref.ref.strategy}", "fsdp2"),
        **_AS_ACTOR,
        **_chunking_of("ref"),
    )
