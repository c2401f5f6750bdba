"""Names a user may choose from, and names that other builds know and this one does not yet: one place for both.

A name moves from a `*_LATER` tuple to the tuple above it when the code that honours it arrives.
"""

ADV_ESTIMATORS: tuple[str, ...] = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "gdpo",
    "remax",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
#: estimators that compare the samples of one prompt with each other, so that one sample a prompt teaches nothing
GROUP_ESTIMATORS: tuple[str, ...] = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "gdpo",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)

POLICY_LOSSES: tuple[str, ...] = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "geo_mean",
    "dro",
    "cispo",
    "clip_cov",
    "kl_cov",
    "reinforce",
)
#: the loss in bypass mode of the rollout correction
BYPASS_LOSSES: tuple[str, ...] = ("ppo_clip", "reinforce")

LOSS_AGG_MODES: tuple[str, ...] = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)

#: penalties; a trailing `+` keeps the value and takes the gradient of k2
KL_PENALTIES: tuple[str, ...] = (
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
    "full",
)

#: draws of PF-PPO
PF_PPO_METHODS: tuple[str, ...] = ("pow", "max_min", "max_random")

#: what makes a sequence's score comparable over a run
REWARD_NORMS: tuple[str, ...] = ("none", "batch", "running")

#: what a health check does when its threshold is passed
HEALTH_ACTIONS: tuple[str, ...] = ("off", "warn", "stop", "rollback")

STRATEGIES: tuple[str, ...] = ("fsdp2",)
STRATEGIES_LATER: tuple[str, ...] = ("megatron", "fsdp_turbo", "mindspeed", "veomni", "torchtitan", "automodel")

ROLLOUTS: tuple[str, ...] = ("auto", "hf", "vllm", "sglang", "openai")
ROLLOUTS_LATER: tuple[str, ...] = ("trtllm",)
#: engines that have weights of their own, in processes of their own
ENGINES: tuple[str, ...] = ("vllm", "sglang")
#: how an engine gets its first weights
LOAD_FORMATS: tuple[str, ...] = ("dummy", "auto")

REWARD_MANAGERS: tuple[str, ...] = ("naive", "batch", "dapo")
REWARD_MANAGERS_LATER: tuple[str, ...] = ("prime", "gdpo", "rate_limited", "remote")

LOGGERS: tuple[str, ...] = ("console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "clearml")
LOGGERS_LATER: tuple[str, ...] = ("vemlp_wandb", "rl_insight")

LR_SCHEDULERS: tuple[str, ...] = ("constant", "linear", "cosine", "wsd")

#: what a checkpoint may hold
CHECKPOINT_CONTENTS: tuple[str, ...] = ("model", "optimizer", "extra", "hf_model")

DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16")
DTYPES_LATER: tuple[str, ...] = ("float16",)

#: other spellings of a value, by the tuple of names they stand for
STRATEGY_SYNONYMS: dict[str, str] = {"fsdp": "fsdp2"}
DTYPE_SYNONYMS: dict[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
