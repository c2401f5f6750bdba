"""Settings of the algorithm: advantages, KL, off-policy correction."""

from dataclasses import dataclass

from hybridrl.config import names
from hybridrl.config.node import ConfigNode, group, key


@dataclass
class KLControlConfig(ConfigNode):
    """`algorithm.kl_ctrl`: the weight of the KL penalty in the reward."""

    type: str = key("fixed", "fixed, or adaptive towards target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "the weight, or its first value", ge=0)
    horizon: int = key(10000, "adaptive: samples over which the weight may double or halve, roughly", gt=0)
    target_kl: float = key(0.1, "adaptive: the KL to hold", gt=0)


@dataclass
class RolloutCorrectionConfig(ConfigNode):
    """`algorithm.rollout_correction`: importance sampling between sampler and trainer; off in this build."""

    rollout_is: str | None = key(None, "level of the importance weights")
    rollout_is_threshold: float | str | None = key(2.0, "where the weights are cut")
    rollout_is_batch_normalize: bool = key(False, "divide the weights by their mean")
    rollout_rs: str | None = key(None, "criterion by which samples are rejected")
    rollout_rs_threshold: float | str | None = key(None, "where they are rejected")
    bypass_mode: bool = key(False, "take the sampler's log-probabilities as the old ones")
    loss_type: str = key("ppo_clip", "loss in bypass mode")


@dataclass
class AlgorithmConfig(ConfigNode):
    """`algorithm`."""

    adv_estimator: str = key(
        "gae",
        "advantage estimator by its registered name",
        choices=names.ADV_ESTIMATORS,
        later=names.ADV_ESTIMATORS_LATER,
        open_names=True,
    )
    gamma: float = key(1.0, "discount of a token's reward", ge=0, le=1)
    lam: float = key(1.0, "lambda of GAE", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(True, "GRPO: divide by the group's standard deviation (false: Dr. GRPO)")
    use_kl_in_reward: bool = key(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = key("kl", "estimator of that KL", choices=names.KL_PENALTIES)
    kl_ctrl: KLControlConfig = group(KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = group(RolloutCorrectionConfig)
