"""Values a user may choose from, and names that this build does not support yet.

Estimators, losses, reward managers and engines are not here but in `hybridrl.registry`. A name leaves its `*_LATER`
tuple when its implementation is added.
"""

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

#: sampling methods of PF-PPO
PF_PPO_METHODS: tuple[str, ...] = ("pow", "max_min", "max_random")

#: how sequence scores are normalised, to be comparable over a run
REWARD_NORMS: tuple[str, ...] = ("none", "batch", "running")

#: what becomes of a sample without a reward
ON_MISSING: tuple[str, ...] = ("refill", "drop", "raise")

#: actions of a health check when its threshold is exceeded
HEALTH_ACTIONS: tuple[str, ...] = ("off", "warn", "stop", "rollback")

STRATEGIES_LATER: tuple[str, ...] = ("fsdp_turbo", "mindspeed", "veomni", "torchtitan", "automodel")

ROLLOUTS_LATER: tuple[str, ...] = ("trtllm",)
#: what gradient checkpointing computes again
RECOMPUTE_GRANULARITIES: tuple[str, ...] = ("full", "selective")
#: how an engine gets its first weights
LOAD_FORMATS: tuple[str, ...] = ("dummy", "auto")
LOAD_FORMAT_SYNONYMS: dict[str, str] = {
    **{"safetensors": "auto", "hf": "auto"},
    **{"dummy_dtensor": "dummy", "dummy_hf": "dummy", "dummy_megatron": "dummy"},
}
#: how often something is done, other than a number of steps
FREQUENCIES: tuple[str, ...] = ("after_each_epoch",)

LOGGERS: tuple[str, ...] = ("console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "clearml")
LOGGERS_LATER: tuple[str, ...] = ("vemlp_wandb", "rl_insight")

#: where training continues
RESUME_MODES: tuple[str, ...] = ("auto", "disable", "resume_path")

#: what is done with more tokens than fit
TRUNCATIONS: tuple[str, ...] = ("error", "left", "right", "middle")

#: what a last turn of the assistant in a prompt is
LAST_ASSISTANT_TURN: tuple[str, ...] = ("error", "ground_truth", "continue")

LR_SCHEDULERS: tuple[str, ...] = ("constant", "linear", "cosine", "wsd")

#: what a checkpoint may hold
CHECKPOINT_CONTENTS: tuple[str, ...] = ("model", "optimizer", "extra", "hf_model")

DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16")

#: other spellings of a value, mapped to its canonical name
OPTIMIZER_SYNONYMS: dict[str, str] = {"adam": "AdamW", "muon": "Muon"}
STRATEGY_SYNONYMS: dict[str, str] = {"fsdp": "fsdp2", "dp": "fsdp2"}
DTYPE_SYNONYMS: dict[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

#: values of `algorithm.filter_groups.metric` that mean the summed score
SCORES = (None, "score", "reward", "seq_reward")
