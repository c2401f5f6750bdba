"""Settings of slime, Megatron-LM and SGLang that have no effect here, or are refused whatever the run."""

from __future__ import annotations

from hybridrl.compat.projects.project_settings import ProjectSetting, flag, idle, refused, row

_CONFIG = "config.json of the model says so"
_TRANSFER = "weights are sent in memory, without files"
_LOG = "the metrics of every step are logged (docs/observe.md)"
_DEBUG = "there are other means: docs/observe.md"
_OF_DISTILLATION = "it belongs to use-opd"
_FUNCTION = "functions in slime's form are not called here"

#: of the model's architecture and of kernels, which config.json and the engine decide
MODEL: tuple[ProjectSetting, ...] = (
    *idle(
        "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels normalization "
        "norm-epsilon rotary-base rotary-percent rotary-scaling-factor position-embedding-type vocab-size "
        "padded-vocab-size make-vocab-size-divisible-by max-position-embeddings num-experts moe-layer-freq "
        "moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-topk moe-router-score-function "
        "moe-router-topk-scaling-factor moe-router-num-groups moe-router-group-topk moe-router-bias-update-rate "
        "moe-router-load-balancing-type q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mscale "
        "mscale-all-dim mtp-num-layers model-name seq-length init-method-std rope-scaling-factor beta-fast beta-slow",
        _CONFIG,
    ),
    *idle("spec", _CONFIG, kind="words"),
    *idle(
        "swiglu group-query-attention use-rotary-position-embeddings disable-bias-linear add-qkv-bias add-bias-linear "
        "qk-layernorm untie-embeddings-and-output-weights multi-latent-attention no-position-embedding "
        "apply-layernorm-1p use-gated-attention attention-output-gate rotary-interleaved post-self-attn-layernorm "
        "post-mlp-layernorm moe-shared-expert-gate moe-router-pre-softmax moe-router-enable-expert-bias "
        "use-rope-scaling rope-type",
        _CONFIG, kind="flag",
    ),
    *idle(
        "moe-token-dispatcher-type moe-router-dtype moe-token-drop-policy attention-backend transformer-impl "
        "qwen-gdn-backend decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers recompute-method "
        "recompute-num-layers log-probs-chunk-size data-pad-size-multiplier train-backend distributed-backend",
        "the engine chooses it, and results do not depend on it",
    ),
    *idle(
        "moe-grouped-gemm moe-permute-fusion moe-enable-deepep no-rope-fusion no-masked-softmax-fusion "
        "no-gradient-accumulation-fusion accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 "
        "sequence-parallel use-distributed-optimizer overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer "
        "no-check-for-nan-in-loss-and-grad recompute-loss-function allgather-cp enable-experimental balance-by-flops "
        "bf16 no-load-optim no-load-rng finetune use-cpu-initialization",
        "the engine chooses it, and results do not depend on it", kind="flag",
    ),
    *refused("attention-dropout hidden-dropout", "models keep the dropout of their config.json", "0", "0.0", 0.0, 0,
             kind="float"),
    *refused("fp16", "training in float16 is not built", False, kind="flag"),
    *refused("fp8-format fp8-recipe fp8-param-gather", "training is in bfloat16 with weights in float32"),
    *refused("megatron-deepgemm-*", "training is in bfloat16 with weights in float32"),
    *refused("freeze-params-name-list only-train-params-name-list", "all weights, or a LoRA adapter, are trained",
             kind="words"),
    flag("freeze-indexer", refused="all weights, or a LoRA adapter, are trained"),
    flag("enable-mtp-training", refused="layers that predict further tokens are not trained"),
    *idle("mtp-loss-scaling-factor", "it belongs to enable-mtp-training"),
)  # fmt: skip

#: of the run around the training
RUN: tuple[ProjectSetting, ...] = (
    *idle("offload", "rollout.free_cache_engine and fsdp_config.param_offload; memory alone depends on it",
        kind="flag"),
    *idle("num-gpus-per-node", "trainer.n_gpus_per_node and rollout.n_gpus_per_node are set by the other numbers"),
    *idle("no-offload-train no-offload-rollout release-train", "memory alone depends on it", kind="flag"),
    *idle(
        "update-weight-transport update-weight-disk-dir update-weight-delta-encoding update-weight-delta-checksum "
        "update-weight-local-checkpoint-dir rollout-data-transport", _TRANSFER,
    ),
    *idle("update-weight-disk-keep-files", _TRANSFER, kind="flag"),
    *idle("use-fault-tolerance", "replicas that die are restarted (rollout.max_restarts)", kind="flag"),
    *idle("rollout-health-check-interval rollout-health-check-timeout rollout-health-check-first-wait",
          "replicas that hang are noticed by rollout.stuck_timeout_s"),
    *idle("rollout-skip-special-tokens use-rollout-entropy", "it is decided here", kind="flag"),
    *idle("tool-key loss-mask-type rollout-task-type", "columns of the data reach the reward function"),
    *idle("min-batch-collection-ratio fetch-trajectory-retry-times http-proxy", "the run has its own server"),
    *idle("use-distributed-post", "the run has its own server", kind="flag"),
    row("wandb-key", idle="set the variable WANDB_API_KEY", secret=True),
    *idle("wandb-host wandb-team wandb-mode wandb-dir wandb-run-id",
          "set the variables WANDB_API_KEY, WANDB_BASE_URL, WANDB_ENTITY, WANDB_MODE, ..."),
    *idle("disable-wandb-random-suffix wandb-always-use-train-step log-multi-turn log-passrate log-correct-samples",
        _LOG,
          kind="flag"),
    *idle("log-reward-category custom-rollout-log-function-path custom-eval-rollout-log-function-path log-interval",
        _LOG),
    *idle("get-mismatch-metrics", "every step measures the mismatch of sampler and trainer", kind="flag"),
    *idle("save-debug-train-data memory-snapshot-dir memory-snapshot-num-steps memory-recorder memory-snapshot-path",
          _DEBUG),
    *idle("profile-target", _DEBUG, kind="words"),
    *idle("record-memory-history check-weight-update-equal ci-test ci-disable-kl-checker", _DEBUG, kind="flag"),
    *idle("ci-save-grad-norm ci-load-grad-norm ci-train-rollout-logprob-abs-diff-threshold "
        "load-debug-rollout-data-subsample",
          _DEBUG),
    *idle("opd-type opd-kl-coef opd-teacher-load opd-teacher-ckpt-step", _OF_DISTILLATION),
    *idle("ref-ckpt-step opsm-delta", "it belongs to a setting that is refused"),
    *idle("eval-min-new-tokens eval-max-context-len eval-max-prompt-len",
          "validation has the limits of training (data.max_prompt_length, data.max_response_length)"),
    *idle("save-hf", "checkpoints hold the model in Hugging Face format"),
    # refused
    *refused("train-env-vars", "export variables before the command", "{}"),
    *refused(
        "custom-rm-post-process-path custom-reward-post-process-path custom-advantage-function-path "
        "custom-tis-function-path custom-pg-loss-reducer-function-path custom-loss-function-path "
        "custom-convert-samples-to-train-data-path rollout-data-postprocess-path rollout-sample-hook-path "
        "rollout-sample-filter-path rollout-all-samples-process-path buffer-filter-path "
        "custom-update-weight-post-write-path custom-model-provider-path custom-megatron-init-path "
        "custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path",
        f"{_FUNCTION}; losses, estimators, reward managers and engines of your own are registered (docs/extending.md)",
    ),
    *refused("custom-generate-function-path",
             f"{_FUNCTION}; sessions of your own are agent loops (docs/agents.md), tools or environments "
             "(docs/environments.md)"),
    *refused("eval-function-path", f"{_FUNCTION}; validation samples as training does"),
    *refused("custom-config-path megatron-config-path sglang-config eval-config",
             "a YAML file of settings is not read: give them by their keys"),
    *refused("data-source-path", f"{_FUNCTION}; data.custom_cls takes a data set of your own",
             "slime.rollout.data_source.RolloutDataSourceWithBuffer", "slime.rollout.data_source.RolloutDataSource"),
    flag("disable-rollout-global-dataset", refused="the prompts come from data.train_files"),
    *refused("rollout-external-engine-addrs", "the run starts its engines (docs/rollout.md)", kind="words"),
    *refused("rollout-buffer-url", "the run has its own server (docs/gateway.md)"),
    *refused("start-rollout-id", "a run starts at its newest checkpoint (trainer.resume_mode)", 0, kind="int"),
    *refused("ref-update-interval", "the reference stays the model before training"),
    flag("keep-old-actor", refused="the old log-probabilities are those of the weights before the update"),
    flag("mask-offpolicy-in-partial-rollout",
         refused="all generated tokens are trained on; trainer.v1.drain=True keeps responses of one version"),
    flag("reset-optimizer-states", refused="the optimizer keeps its state over the run"),
    flag("use-stateless-adam", refused="optim.optimizer=AdamW keeps its state"),
    flag("use-unbiased-kl", refused="the KL of the loss is not weighted by the ratio"),
    flag("use-opsm", refused="algorithm.rollout_correction.rollout_rs rejects sequences by the ratio"),
    flag("use-opd", refused="on-policy distillation is distillation.enabled=True (docs/distillation.md)"),
    flag("disable-rewards-normalization", refused="the estimators compare the rewards of a group"),
    flag("group-rm", refused="a reward function of a whole batch takes lists (docs/reward.md#names-of-parameters)"),
    flag("debug-rollout-only", refused="hybridrl generate writes responses without training"),
    *refused("load-debug-rollout-data load-forge-rollout-data",
             "batches of other runs are not trained on; trainer.record and trainer.replay repeat a run"),
    *refused("rm-url", "a server that scores has a protocol of its own: reward.reward_manager.name=remote "
        "(docs/reward.md)"),
)  # fmt: skip
