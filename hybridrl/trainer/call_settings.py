"""Settings of the calls, typed.

Generated from the schema and the table of short names by tests/trainer/call_signatures.py.
"""

from typing import Any, TypedDict


class PolicySettings(TypedDict, total=False):
    """Settings of `hybridrl.grpo` and `hybridrl.ppo`."""

    activation_offloading: bool
    adam_beta1: Any
    adam_beta2: Any
    adam_epsilon: Any
    adv_estimator: str
    agent_loop_config_path: str | None
    allow_unisolated: bool
    apply_chat_template_kwargs: dict[str, Any]
    asynchronous: Any
    attempts: int
    auto: bool
    backend: str | None
    background_validation: bool
    balance_batch: bool
    base_url: str | None
    best_metric: Any
    beta: Any
    bf16: Any
    bypass_mode: bool
    calculate_entropy: bool
    calculate_sum_pi_squared: bool
    chat_template_kwargs: dict[str, Any]
    check_weights: bool
    class_name: str | None
    class_path: str | None
    clip_cov_lb: float
    clip_cov_ratio: float
    clip_cov_ub: float
    clip_grad: float
    clip_ratio_c: float
    clip_rewards: float | None
    cliprange_value: float
    column: str | None
    combine: str
    command: str | None
    critic_warmup: int
    cudagraph_capture_sizes: list[int] | None
    data_parallel_size: int
    data_seed: Any
    dataloader_num_workers: int
    default_agent_loop: str | None
    default_environment: str | None
    default_local_dir: str
    delta: Any
    device: str
    devices: str | None
    distillation_loss_coef: float
    do_sample: bool
    drain: bool
    dro_beta: float | None
    dropped: str
    dump_dir: str | None
    dump_freq: int
    dump_tokens: int
    early_stopping_patience: int | None
    early_stopping_threshold: float
    enable_chunked_prefill: bool
    enable_gradient_checkpointing: bool
    enable_prefix_caching: bool
    enable_resource_pool: bool
    enforce_eager: bool
    engine_kwargs: dict[str, Any]
    entropy_coef: float
    entropy_coeff: float
    environment_config_path: str | None
    environment_timeout_s: float
    environment_turn_tokens: int | None
    epsilon: float
    epsilon_high: Any
    eval_on_start: bool
    eval_steps: Any
    eval_strategy: Any
    experiment_name: str
    expert_parallel_size: int
    external_lib: str | None
    extra_body: dict[str, Any]
    file: str
    filter_overlong_prompts: bool
    filter_overlong_prompts_workers: int
    floor: float
    flowrl_beta: float
    format: str
    forward_micro_batch_size_per_gpu: int
    free_cache_engine: bool
    full_determinism: bool
    function: str | None
    functions: dict[str, Any]
    gamma: float
    gdpo_reward_keys: list[str]
    gdpo_reward_weights: list[float] | None
    gen_batch_size: int | None
    generation_batch_size: Any
    gigpo_mode: str
    gigpo_step_advantage_w: float
    gpu_memory_utilization: float
    gradient_accumulation_steps: Any
    gradient_checkpointing: bool
    grading: str
    greater_is_better: bool | None
    ground_truth_key: str | None
    growth: float
    gvpo_beta: float
    horizon: int
    host: str | None
    hub_model_id: Any
    hub_private_repo: bool | None
    hub_revision: str | None
    ignore_eos: bool
    image_key: str
    importance_sampling_level: Any
    infra: str
    interaction_config_path: str | None
    journal: bool
    kl_coef: float
    kl_cov_ratio: float
    kl_loss_coef: float
    kl_loss_type: str
    kl_penalty: str
    lam: float
    last_assistant_turn: str
    learning_rate: float
    limit_images: int | None
    load_format: str
    load_in_4bit: bool
    log_prob_min_clamp: float | None
    log_val_generations: int
    logger: str | list[str]
    lora_alpha: int
    lora_r: int
    lora_rank: int
    lora_target_modules: str | list[str]
    lora_transfer: str
    loss_agg_mode: str
    loss_max_clamp: float | None
    loss_type: Any
    lr: float
    lr_scheduler_type: Any
    lr_warmup_steps: int
    lr_warmup_steps_ratio: float
    m2_threshold: float
    machine: int | None
    mark: str | None
    match: str
    max: int | None
    max_actor_ckpt_to_keep: int | None
    max_assistant_turns: int | None
    max_body_mb: int | None
    max_completion_length: int
    max_concurrency: int
    max_connections: int
    max_critic_ckpt_to_keep: int | None
    max_error_rate: float
    max_grad_norm: float
    max_length: int | None
    max_local: int | None
    max_model_len: int | None
    max_new_tokens: int
    max_num_batched_tokens: int
    max_num_gen_batches: int
    max_num_seqs: int
    max_off_policy_threshold: int | None
    max_parallel_calls: int
    max_prompt_length: int
    max_refills: int
    max_requests: int
    max_response_length: int
    max_restarts: int
    max_retries: int
    max_rollbacks: int
    max_running: int | None
    max_samples_per_step_per_worker: int | None
    max_sessions: int
    max_share: float
    max_steps: Any
    max_tokens: int
    max_tokens_name: str
    max_tool_response_length: int
    max_user_turns: int | None
    memory_limit_mb: int
    method: str
    metric: str | None
    metric_for_best_model: Any
    micro_batch_size_per_gpu: int
    min: int | None
    mm_processor_kwargs: dict[str, Any]
    mode: str
    model_engine: str
    model_id: str | None
    model_init_kwargs: Any
    n: int
    n_gpus_per_node: int
    nccl_timeout: int
    nnodes: int
    norm_adv_by_std_in_grpo: bool
    normalize_rewards: str
    num_generations: int
    num_iterations: int
    num_train_epochs: Any
    on_nonfinite: str
    online_dpo_beta: float
    optim: Any
    output_dir: str
    parameter_sync_step: int | None
    peak_tflops: float | None
    per_device_train_batch_size: Any
    phase_timeout_s: float
    planned: dict[str, Any]
    policy_loss_mode: str
    pools: dict[str, list[int]]
    ppo_epochs: int
    ppo_kl_coef: float
    ppo_max_token_len_per_gpu: int
    ppo_micro_batch_size_per_gpu: int
    ppo_mini_batch_size: int
    prime_norm: str
    prime_whiten: bool
    private: bool | None
    probe_threshold: float | None
    progress_bar: bool
    project: str
    project_name: str
    prompt: float | None
    prompt_key: str
    prompt_length: int
    push_to_hub: Any
    ray_init: dict[str, Any]
    ray_wait_register_center_timeout: int
    recompute_old_log_prob: str
    record: bool
    remote_dir: str | None
    replay: str | None
    report: bool
    report_rollouts: int
    report_to: str | list[str]
    response: float | None
    response_length: int
    resume_from_checkpoint: Any
    resume_from_path: str | None
    resume_mode: str
    retries: int
    revision: str | None
    reward_dpo_coef: float
    reward_fn_key: str
    reward_gt_coef: float
    reweight_method: str
    rollout_data_dir: str | None
    rollout_is: str | None
    rollout_is_batch_normalize: bool
    rollout_is_threshold: float | str | None
    rollout_rs: str | None
    rollout_rs_threshold: float | str | None
    router_aux_loss_coef: Any
    run_name: str
    sampling: str
    sapo_temperature_neg: float
    sapo_temperature_pos: float
    save_freq: Any
    save_last: bool
    save_path: str
    save_steps: Any
    save_strategy: Any
    save_total_limit: int | None
    scale_rewards: Any
    scheduling_policy: str
    seed: Any
    separator: str
    served_model_name: str | None
    session_idle_s: float
    sglang: dict[str, Any]
    shuffle: bool
    shuffle_dataset: bool
    significance: float
    sleep_level: int
    smoothing: float
    source: str
    spo_rho: float
    sppo_eta: float
    sppo_preference_scale: float | None
    start_timeout_s: float
    steps_per_generation: Any
    stop: list[str]
    stuck_timeout_s: float
    system_prompt: str | None
    target: float
    target_kl: float
    target_modules: str | list[str]
    tau_neg: float
    tau_pos: float
    teacher_key: str
    teacher_models: dict[str, Any]
    temperature: float
    template: str | None
    test_freq: Any
    threads_per_worker: int | None
    timeline_json_file: str | None
    timeout: str
    token2text: bool
    token_env: str | None
    tokenization_sanity_check_mode: str
    tool: str | None
    tool_response_truncate_side: str
    tool_timeout_s: float
    top_k: Any
    top_p: float
    topk: int
    torch_compile: bool
    total_epochs: Any
    total_training_steps: Any
    trace_alloc_max_entries: int
    trace_dir: str | None
    train_batch_size: int
    train_files: str | list[str]
    train_max_samples: int
    trainer_mode: str
    truncation: str
    trust_remote_code: bool
    turn_rewards: bool
    type: str
    update_weights_bucket_megabytes: int
    use_cpu: Any
    use_dynamic_bsz: bool
    use_kl_in_reward: bool
    use_kl_loss: bool
    use_liger_kernel: bool
    use_pf_ppo: bool
    use_policy_gradient: bool
    use_task_rewards: bool
    use_vllm: Any
    val_batch_size: int | None
    val_before_train: bool
    val_files: str | list[str]
    val_max_samples: int
    val_only: bool
    validation_data_dir: str | None
    validation_shuffle: bool
    video_key: str
    vllm: dict[str, Any]
    vllm_enable_sleep_mode: bool
    vllm_gpu_memory_utilization: float
    vllm_max_model_length: int | None
    vllm_tensor_parallel_size: int
    wait_s: float
    warmup_ratio: float
    warmup_steps: Any
    weight: float
    weight_decay: float
    weight_pow: float
    weights: dict[str, Any]


class SupervisedSettings(TypedDict, total=False):
    """Settings that the supervised programs share."""

    activation_offloading: bool
    adam_beta1: Any
    adam_beta2: Any
    adam_epsilon: Any
    all_ranks: bool
    apply_chat_template_kwargs: dict[str, Any]
    async_save: bool
    best_metric: Any
    betas: list[float]
    bf16: Any
    chat_template_kwargs: dict[str, Any]
    clip_grad: float
    column: str | None
    context_parallel_size: int
    custom_chat_template: str | None
    data_seed: Any
    dataloader_num_workers: int
    default_local_dir: str
    device: str
    dist_checkpointing_path: str | None
    dtype: str
    early_stopping_patience: int | None
    early_stopping_threshold: float
    enable: bool
    enable_activation_offload: bool
    enable_gradient_checkpointing: bool
    enable_thinking_default: bool | None
    enable_thinking_key: str
    enabled: bool
    entropy_from_logits_chunk_size: int
    entropy_from_logits_with_chunking: bool
    eval_steps: Any
    eval_strategy: Any
    exclude_modules: str | list[str] | None
    experiment_name: str
    expert_model_parallel_size: int
    expert_parallel_size: int
    expert_tensor_parallel_size: int | None
    external_lib: str | None
    forward_only: bool
    forward_prefetch: bool
    freeze_vision_tower: bool
    fsdp_size: int
    full_determinism: bool
    grad_offload: bool
    gradient_accumulation_steps: Any
    gradient_checkpointing: bool
    greater_is_better: bool | None
    hf_config_path: str | None
    hub_model_id: Any
    hub_private_repo: bool | None
    hub_revision: str | None
    image_key: str
    learning_rate: float
    load_contents: list[str]
    load_in_4bit: bool
    logger: str | list[str]
    lora_adapter_path: str | None
    lora_alpha: int
    lora_r: int
    lora_rank: int
    lora_target_modules: str | list[str]
    lr: float
    lr_scheduler_type: Any
    lr_warmup_steps: int
    lr_warmup_steps_ratio: float
    max_actor_ckpt_to_keep: int | None
    max_grad_norm: float
    max_length: int
    max_seq_length: int
    max_steps: Any
    max_token_len_per_gpu: int
    metric_for_best_model: Any
    micro_batch_size_per_gpu: int
    min_lr: float | None
    min_lr_ratio: float
    min_num_params: int
    mm_processor_kwargs: dict[str, Any]
    model_dtype: str
    model_id: str | None
    model_init_kwargs: Any
    n_gpus_per_node: int
    name: str | None
    nnodes: int
    num_cycles: float
    num_shards: int
    num_train_epochs: Any
    num_workers: int
    offload_policy: bool
    on_nonfinite: str
    optim: Any
    optimizer: str
    optimizer_impl: str
    optimizer_offload: bool
    output_dir: str
    override_config: dict[str, Any]
    override_ddp_config: dict[str, Any]
    override_optimizer_config: dict[str, Any] | None
    override_transformer_config: dict[str, Any]
    param_offload: bool
    peak_tflops: float | None
    per_device_train_batch_size: Any
    phase_timeout_s: float
    pipeline_model_parallel_size: int
    pools: dict[str, list[int]]
    private: bool | None
    progress_bar: bool
    project: str
    project_name: str
    push_to_hub: Any
    ranks: list[int]
    ray_init: dict[str, Any]
    ray_wait_register_center_timeout: int
    recompute_granularity: str
    remote_dir: str | None
    report: bool
    report_to: str | list[str]
    reshard_after_forward: bool
    resume_from_checkpoint: Any
    resume_from_path: str | None
    resume_mode: str
    revision: str | None
    roles: dict[str, str]
    router_aux_loss_coef: Any
    run_name: str
    save_contents: list[str]
    save_freq: Any
    save_last: bool
    save_path: str
    save_steps: Any
    save_strategy: Any
    save_total_limit: int | None
    seed: Any
    sequence_parallel: bool
    share_prefixes: bool | None
    shuffle: bool
    shuffle_dataset: bool
    steps: list[int] | None
    strategy: str
    system_prompt: str | None
    target_modules: str | list[str]
    tensor_model_parallel_size: int
    test_freq: Any
    threads_per_worker: int | None
    timeline_json_file: str | None
    tokenizer_path: str | None
    tool: str | None
    tools_key: str
    torch_compile: bool
    total_epochs: Any
    total_training_steps: Any
    trace_alloc_max_entries: int
    train_batch_size: int
    train_files: str | list[str]
    train_max_samples: int
    truncation: str
    truncation_mode: Any
    trust_remote_code: bool
    ulysses_sequence_parallel_size: int
    use_cpu: Any
    use_dist_checkpointing: bool
    use_distributed_optimizer: bool
    use_dynamic_bsz: bool
    use_fused_kernels: bool
    use_liger: bool
    use_liger_kernel: bool
    use_remove_padding: bool
    use_torch_compile: bool
    val_files: str | list[str]
    val_max_samples: int
    video_key: str
    virtual_pipeline_model_parallel_size: int | None
    warmup_ratio: float
    warmup_steps: Any
    weight_decay: float
    weights: dict[str, Any]


class SFTSettings(SupervisedSettings, total=False):
    """Settings of `hybridrl.sft`."""

    dataset_text_field: Any
    loss_type: Any
    messages_key: str
    prompt_dict_keys: list[str]
    prompt_key: str | None
    response_dict_keys: list[str]
    response_key: str | None


class DPOSettings(SupervisedSettings, total=False):
    """Settings of `hybridrl.dpo`."""

    beta: float
    chosen_key: str
    filter_pairs: bool
    label_smoothing: float
    length_normalise: bool
    loss_type: Any
    margin_key: str | None
    precompute_ref_log_probs: Any
    prompt_key: str
    reference: str | None
    rejected_key: str
    sft_coef: float | None
    simpo_gamma: float


class KTOSettings(SupervisedSettings, total=False):
    """Settings of `hybridrl.kto`."""

    beta: float
    chosen_key: str
    completion_key: str
    desirable_weight: float
    filter_rows: bool
    label_key: str
    loss_type: str
    precompute_ref_log_probs: Any
    prompt_key: str
    reference: str | None
    rejected_key: str
    train_sampling_strategy: Any
    undesirable_weight: float


class RMSettings(SupervisedSettings, total=False):
    """Settings of `hybridrl.rm`."""

    center_rewards_coefficient: Any
    centering_coef: float
    chosen_key: str
    filter_pairs: bool
    loss_type: str
    margin_key: str | None
    prompt_key: str
    rejected_key: str
