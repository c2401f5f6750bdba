"""Settings of the algorithm: advantages, KL, off-policy correction."""

from dataclasses import dataclass

from hybridrl.config.schema import choices
from hybridrl.config.schema.conditions import A_CRITIC, above, among, any_of, entry, entry_has, is_set, off, on
from hybridrl.config.schema.node import ConfigNode, group, key
from hybridrl.registry import ADV_ESTIMATORS


@dataclass
class KLControlConfig(ConfigNode):
    """`algorithm.kl_ctrl`: the weight of the KL penalty in the reward."""

    type: str = key("fixed", "fixed, or adaptive towards target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "weight of the KL; adaptive: its initial value", ge=0)
    horizon: int = key(
        10000,
        "adaptive: approximate number of samples in which the weight may double or halve",
        gt=0,
        needs=among(".type", "adaptive"),
    )
    target_kl: float = key(0.1, "adaptive: target of the KL", gt=0, needs=among(".type", "adaptive"))


#: arguments of the defaults for responses that may be older than the weights that are updated (`trainer.v1`)
_STALENESS = (
    "${trainer.v1.trainer_mode},${trainer.v1.colocate_async.num_warmup_batches},"
    "${trainer.v1.separate_async.num_warmup_batches},${actor_rollout_ref.actor.policy_loss.loss_mode}"
)


@dataclass
class RolloutCorrectionConfig(ConfigNode):
    """`algorithm.rollout_correction`: correction for the sampler's probabilities differing from the trainer's."""

    rollout_is: str | None = key(
        None,
        "level of the importance weights on the loss; null: none",
        choices=("token", "sequence"),
        # in bypass mode the clipped ratio is against the sampler already
        needs=any_of(off(".bypass_mode"), among(".loss_type", "reinforce")),
        follows=f"${{weights_if_stale:{_STALENESS}}}",
    )
    rollout_is_threshold: float | str | None = key(
        2.0,
        "a number: larger weights are clipped to it; lo_hi: weights outside are 0 (IcePop)",
        needs=is_set(".rollout_is"),
    )
    rollout_is_batch_normalize: bool = key(
        False, "divide the weights by their mean over the batch", needs=is_set(".rollout_is")
    )
    rollout_rs: str | None = key(None, "what is rejected: token_k1, seq_mean_k3, ..., several separated by commas")
    rollout_rs_threshold: float | str | None = key(
        None, "threshold of rejection: lo_hi for k1, an upper bound for k2 and k3", needs=is_set(".rollout_rs")
    )
    bypass_mode: bool = key(
        False,
        "use the sampler's log-probabilities as the old ones",
        follows=f"${{bypass_if_stale:{_STALENESS}}}",
    )
    loss_type: str = key("ppo_clip", "the loss in bypass mode", choices=choices.BYPASS_LOSSES, needs=on(".bypass_mode"))
    probe_threshold: float | None = key(
        0.2, "mean |log pi_train - log pi_rollout| of the first step above which the run is stopped; null: never", gt=0
    )


@dataclass
class FilterGroupsConfig(ConfigNode):
    """`algorithm.filter_groups`: DAPO's dynamic sampling."""

    enable: bool = key(False, "drop prompts whose samples all score the same, and generate until the batch is full")
    metric: str | None = key(
        None,
        "score, reward, seq_reward (each the summed score, with the overlong penalty), or what the reward function "
        "returns besides it; null: score",
        needs=on(".enable"),
    )
    max_num_gen_batches: int = key(
        0,
        "stop the run if a step needs more generation batches; 0: if one pass over the data does not fill it",
        ge=0,
        needs=on(".enable"),
    )


_OF_MISSING = (
    "refill: it alone is generated again; drop: it leaves its group, and a group that is too small for the estimator "
    "is replaced by another prompt; raise: the run ends"
)


@dataclass
class MissingConfig(ConfigNode):
    """`algorithm.missing`: samples without a reward, by the reason why they have none; they never count as 0."""

    infra: str = key("refill", f"a session, server or process failed. {_OF_MISSING}", choices=choices.ON_MISSING)
    timeout: str = key("refill", "something took longer than its limit; as infra", choices=choices.ON_MISSING)
    grading: str = key("refill", "the scorer could not judge the sample; as infra", choices=choices.ON_MISSING)
    dropped: str = key(
        "drop", "a loop, environment or filter left the sample out; as infra", choices=choices.ON_MISSING
    )
    max_refills: int = key(
        3,
        "times that one sample is generated again; then it leaves its group",
        ge=0,
        needs=any_of(
            *(among(f".{reason}", "refill") for reason in ("infra", "timeout", "grading", "dropped")),
            among("reward.on_error", "refill"),
        ),
    )
    max_share: float = key(
        0.5,
        "the run ends if a larger share of a generation batch has no reward at first (batches of less than 16 samples "
        "count together); samples that are left out on purpose (dropped) do not count",
        ge=0,
        le=1,
    )
    window: int = key(
        50,
        "steps over which is tested whether missing samples differ in length or reward",
        gt=0,
        needs=above(".significance"),
    )
    significance: float = key(1e-3, "probability of a false warning of that test per window; 0: no test", ge=0, lt=1)


@dataclass
class PFPPOConfig(ConfigNode):
    """`algorithm.pf_ppo`: policy filtration, which draws rows by their reward."""

    reweight_method: str = key(
        "pow", "how the probability of drawing a row depends on its score", choices=choices.PF_PPO_METHODS
    )
    weight_pow: float = key(2.0, "pow: by |score| to this power", gt=0, needs=among(".reweight_method", "pow"))


@dataclass
class AlgorithmConfig(ConfigNode):
    """`algorithm`."""

    adv_estimator: str = key(
        "gae",
        "advantage estimator by its registered name",
        registry=ADV_ESTIMATORS,
    )
    gamma: float = key(
        1.0,
        "discount of a token's reward",
        ge=0,
        le=1,
        needs=any_of(entry(".adv_estimator", ADV_ESTIMATORS, "gae", "prime", "reinforce_plus_plus", "gigpo"), A_CRITIC),
    )
    lam: float = key(1.0, "lambda of GAE", ge=0, le=1, needs=entry(".adv_estimator", ADV_ESTIMATORS, "gae"))
    norm_adv_by_std_in_grpo: bool = key(
        True,
        "GRPO: divide by the group's standard deviation (false: Dr. GRPO)",
        needs=entry(".adv_estimator", ADV_ESTIMATORS, "grpo", "grpo_passk", "gdpo"),
    )
    gdpo_reward_keys: list[str] = key(
        [],
        "gdpo: names of the reward components that the reward function returns",
        needs=entry_has(".adv_estimator", ADV_ESTIMATORS, "reads_components"),
    )
    gdpo_reward_weights: list[float] | None = key(
        None, "gdpo: their weights; null: 1 each", needs=entry_has(".adv_estimator", ADV_ESTIMATORS, "reads_components")
    )
    sppo_preference_scale: float | None = key(
        None,
        "sppo: a sample wins with probability sigmoid(scale * difference of scores); null: if it scores more",
        gt=0,
        needs=entry(".adv_estimator", ADV_ESTIMATORS, "sppo"),
    )
    spo_rho: float = key(
        0.9,
        "spo: what remains of the rewards of a prompt that were seen before, when new ones arrive",
        gt=0,
        lt=1,
        needs=entry(".adv_estimator", ADV_ESTIMATORS, "spo"),
    )
    reward_dpo_coef: float = key(
        1.0,
        "prime: weight of the process rewards in the advantage",
        ge=0,
        needs=entry(".adv_estimator", ADV_ESTIMATORS, "prime"),
    )
    reward_gt_coef: float = key(
        1.0,
        "prime: weight of the outcome in the advantage",
        ge=0,
        needs=entry(".adv_estimator", ADV_ESTIMATORS, "prime"),
    )
    prime_norm: str = key(
        "none",
        "prime; batch_norm: divide process rewards by the batch's largest sum of remaining ones",
        choices=("none", "batch_norm"),
        needs=entry(".adv_estimator", ADV_ESTIMATORS, "prime"),
    )
    prime_whiten: bool = key(
        False,
        "prime: whiten the advantages over all response tokens",
        needs=entry(".adv_estimator", ADV_ESTIMATORS, "prime"),
    )
    gigpo_step_advantage_w: float = key(
        1.0,
        "gigpo: weight of the comparison of turns in the same situation",
        ge=0,
        needs=entry(".adv_estimator", ADV_ESTIMATORS, "gigpo"),
    )
    gigpo_mode: str = key(
        "mean_norm",
        "gigpo: differences from the mean; mean_std_norm: divided by the standard deviation",
        choices=("mean_norm", "mean_std_norm"),
        needs=entry(".adv_estimator", ADV_ESTIMATORS, "gigpo"),
    )
    normalize_rewards: str = key(
        "none",
        "batch, running: a sequence's score minus the mean and divided by the standard deviation of the batch, of the "
        "run so far",
        choices=choices.REWARD_NORMS,
    )
    clip_rewards: float | None = key(
        None, "then clip a sequence's score to plus or minus this; null: no clipping", gt=0
    )
    use_kl_in_reward: bool = key(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = key("kl", "estimator of that KL", choices=choices.KL_PENALTIES, needs=on(".use_kl_in_reward"))
    kl_ctrl: KLControlConfig = group(KLControlConfig, needs=on(".use_kl_in_reward"))
    rollout_correction: RolloutCorrectionConfig = group(RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig)
    missing: MissingConfig = group(MissingConfig)
    use_pf_ppo: bool = key(False, "PF-PPO: train on rows drawn by their score, each with its own advantages")
    pf_ppo: PFPPOConfig = group(PFPPOConfig, needs=on(".use_pf_ppo"))
