"""Known settings that this build does not honour yet: the table that shrinks.

Set to the default they pass, because nothing would be different; set to anything else they are refused with the reason
and what to use instead. To build one, delete its line here and declare it in its group.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ARR = "actor_rollout_ref"
_PPO = ("ppo_trainer",)

#: in `Pending.keys`: the key is declared in its group, and its default stands there
DECLARED = ...


@dataclass(frozen=True)
class Pending:
    """Settings not supported yet.

    Attributes:
        prefixes: dotted groups, each of which has all of `keys`.
        keys: name below the prefix to default; a key also stands for everything below it.
        why: the reason, as the end of a sentence.
        instead: what to use or set, a full sentence.
        roots: trees that know these keys.
    """

    prefixes: tuple[str, ...]
    keys: Mapping[str, Any]
    why: str
    instead: str
    roots: tuple[str, ...] = _PPO

    def items(self) -> Iterator[tuple[str, Any]]:
        """Dotted keys with their defaults."""
        for prefix in self.prefixes:
            for name, default in self.keys.items():
                yield f"{prefix}.{name}".lstrip("."), default


_MODELS = (f"{_ARR}.model", "critic.model")
_ACTORS = (f"{_ARR}.actor", f"{_ARR}.ref")
_FSDP = (f"{_ARR}.actor.fsdp_config", f"{_ARR}.ref.fsdp_config", "critic.fsdp")
_OPTIMS = (f"{_ARR}.actor.optim", "critic.optim")
_ROUTER_REPLAY = {
    "router_replay.mode": "disabled",
    "router_replay.record_file": None,
    "router_replay.replay_file": None,
}
_ENTROPY = {
    "entropy_checkpointing": False,
    "entropy_from_logits_chunk_size": 2048,
    "entropy_from_logits_with_chunking": False,
}
_SKIP = {"action": "cache", "dump_dir": "~/.verl/rollout_dump", "enable": False, "steps": []}
_REMOVE = "Remove it."

_SERVER_KEYS: dict[str, Any] = {  # how a generation server works; the same in every place that configures one
    "cudagraph_capture_sizes": None,
    "data_parallel_size": 1,
    "disable_log_stats": True,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "engine_kwargs": {},
    "expert_parallel_size": 1,
    "free_cache_engine": True,
    "gpu_memory_utilization": 0.5,
    "load_format": "auto",
    "max_model_len": None,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 1024,
    "skip_tokenizer_init": True,
    "tensor_model_parallel_size": 2,
    "limit_images": None,
}
_DISAGGREGATION = {
    "disaggregation.bootstrap_port": None,
    "disaggregation.decode_replicas": 1,
    "disaggregation.decode_tensor_model_parallel_size": None,
    "disaggregation.enabled": False,
    "disaggregation.ib_device": None,
    "disaggregation.prefill_replicas": 1,
    "disaggregation.transfer_backend": "nixl",
}

PENDING: tuple[Pending, ...] = (
    # ---- models
    Pending(
        _MODELS,
        {"lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear", "exclude_modules": None}
        | {"lora_adapter_path": None},
        "LoRA is not built",
        "Train all weights: leave lora_rank at 0.",
    ),
    Pending(
        _MODELS,
        {"use_liger": False, "use_fused_kernels": False, "fused_kernel_options.impl_backend": "torch"},
        "fused kernels are not built",
        "Leave it off; results are the same without.",
    ),
    Pending(
        _MODELS,
        {"tiled_mlp.enabled": False, "tiled_mlp.num_shards": 4, "enable_activation_offload": False},
        "memory saving by tiled MLP or activation offload is not built",
        "Use enable_gradient_checkpointing and smaller micro-batches.",
    ),
    Pending(
        _MODELS,
        {
            "mtp.detach_encoder": False,
            "mtp.enable": False,
            "mtp.enable_rollout": False,
            "mtp.enable_train": False,
            "mtp.method": "mtp",
            "mtp.mtp_loss_scaling_factor": 0.1,
            "mtp.num_speculative_tokens": 1,
            "mtp.speculative_algorithm": "EAGLE",
            "mtp.speculative_eagle_topk": 1,
            "mtp.speculative_num_draft_tokens": 4,
            "mtp.speculative_num_steps": 3,
        },
        "multi-token prediction is not built",
        _REMOVE,
    ),
    Pending(
        ("actor_rollout_ref.model", "critic.model", "data"),
        {"use_shm": False},
        "copying into shared memory first is not built",
        "Put the files on a local disk.",
    ),
    # ---- actor, reference, critic
    Pending(
        _ACTORS,
        _ROUTER_REPLAY,
        "router replay for mixture-of-experts models is not built",
        _REMOVE,
    ),
    Pending(
        _ACTORS,
        {**_ENTROPY, "pad_to_length": False},
        "chunked entropy and padding to a fixed length are not built",
        "Use smaller micro-batches.",
    ),
    Pending(
        (*_ACTORS, "critic"),
        {"ulysses_sequence_parallel_size": 1},
        "sequence parallelism is not built",
        "Leave it at 1 and use smaller micro-batches for long sequences.",
    ),
    Pending(
        (f"{_ARR}.actor",),
        {
            "use_fused_kernels": False,
            "use_prefix_grouper": False,
            "freeze_vision_tower": False,
        },
        "fused kernels, shared prompt attention and vision models are not built",
        "Leave it off.",
    ),
    Pending(
        (f"{_ARR}.actor.checkpoint", "critic.checkpoint"),
        {"async_save": False, "strict": True},
        "checkpoints are written whole before the next step, and read strictly",
        "Leave it at its default.",
    ),
    Pending(
        (*_FSDP,),
        {**_ENTROPY, "pad_to_length": False, "pad_to_length_bucket": 1024, "ulysses_sequence_parallel_size": 1},
        "chunked entropy, fixed-length padding and sequence parallelism are not built",
        "Leave it at its default.",
    ),
    Pending(
        _OPTIMS,
        {"zero_indexed_step": True},
        "steps of the schedule count from zero",
        "Leave it true.",
    ),
    Pending(
        ("critic",),
        {
            "profiler.all_ranks": False,
            "profiler.enable": False,
            "profiler.finish_hook_all_ranks": False,
            "profiler.finish_hook_cmd": None,
            "profiler.finish_hook_ranks": [],
            "profiler.ranks": [],
            "profiler.relocate_results": False,
            "profiler.save_path": None,
            "profiler.tool": None,
        },
        "profilers are not built",
        "The timing_s/* metrics say where a step's time goes.",
    ),
    Pending(
        (_ARR,),
        {"hybrid_engine": True},
        "policy training and generation share their workers here",
        "Leave it true.",
    ),
    # ---- rollout
    Pending(
        (f"{_ARR}.rollout",),
        {
            "multi_turn.enable": False,
            "multi_turn.format": "hermes",
            "multi_turn.function_tool_path": None,
            "multi_turn.max_assistant_turns": None,
            "multi_turn.max_parallel_calls": 1,
            "multi_turn.max_tool_response_length": 256,
            "multi_turn.max_user_turns": None,
            "multi_turn.num_repeat_rollouts": None,
            "multi_turn.tokenization_sanity_check_mode": "strict",
            "multi_turn.tool_config_path": None,
            "multi_turn.tool_response_truncate_side": "middle",
            "multi_turn.use_inference_chat_template": False,
            "agent.agent_loop_config_path": None,
            "agent.custom_async_server.name": None,
            "agent.custom_async_server.path": None,
            "agent.default_agent_loop": "single_turn_agent",
        },
        "multi-turn rollouts and agents are not built",
        "Use single-turn prompts.",
    ),
    Pending(
        (f"{_ARR}.rollout",),
        {"quantization": None, "quantization_config_file": None},
        "quantized generation is not built",
        "Leave it null.",
    ),
    Pending(
        (f"{_ARR}.rollout",),
        {
            "logprobs_mode": "processed_logprobs",
            "over_sample_rate": 0,
            "calculate_log_probs": DECLARED,
        },
        "a rollout always returns log-probabilities, and always those of the sampled distribution",
        "Leave it at its default.",
    ),
    Pending(
        (f"{_ARR}.rollout",),
        {"enable_rollout_routing_replay": False, "moe_load_balance_metrics_interval": 0, "mtp": None},
        "mixture-of-experts replay and multi-token prediction are not built",
        _REMOVE,
    ),
    Pending(
        (f"{_ARR}.rollout",),
        {
            **_DISAGGREGATION,
            "trace.backend": None,
            "trace.experiment_name": None,
            "trace.max_samples_per_step_per_worker": None,
            "trace.project_name": None,
            "trace.token2text": False,
        },
        "prefill on machines of its own and traces are not built",
        "Rollouts are written as JSONL with trainer.dump_freq.",
    ),
    # ---- algorithm
    Pending(
        ("algorithm",),
        {"filter_groups.max_inflight_gen_batches": 1},
        "generation batches follow one another",
        "Leave it at 1.",
    ),
    # ---- data
    Pending(
        ("data",),
        {
            "audio_key": "audios",
            "image_key": "images",
            "video_key": "videos",
            "image_patch_size": 14,
            "mm_processor_kwargs": {},
        },
        "prompts are text",
        _REMOVE,
    ),
    Pending(
        ("data",),
        {"function_tool_path": None, "tool_config_path": None, "return_full_prompt": False, "return_raw_chat": True},
        "tools are not built, and a batch always carries the raw messages",
        "Leave it at its default.",
    ),
    Pending(
        ("data",),
        {"datagen.path": None, "datagen.name": None},
        "data made during training is not built",
        "Write the prompts to files first.",
    ),
    # ---- reward
    Pending(
        ("reward.reward_model",),
        {
            "enable": False,
            "enable_resource_pool": False,
            "model_path": None,
            "n_gpus_per_node": 8,
            "nnodes": 0,
            **{f"rollout.{name}": default for name, default in (_SERVER_KEYS | _DISAGGREGATION).items()},
            "rollout.do_sample": True,
            "rollout.dtype": "bfloat16",
            "rollout.full_determinism": False,
            "rollout.ignore_eos": False,
            "rollout.layered_summon": False,
            "rollout.mtp": None,
            "rollout.multi_stage_wake_up": False,
            "rollout.n": 1,
            "rollout.name": "???",
            "rollout.pipeline_model_parallel_size": 1,
            "rollout.prompt_length": 2048,
            "rollout.quantization": None,
            "rollout.quantization_config_file": None,
            "rollout.response_length": 2048,
            "rollout.scheduling_policy": "fcfs",
            "rollout.seed": 42,
            "rollout.skip_tokenizer_init": False,
            "rollout.temperature": 1.0,
            "rollout.top_k": -1,
            "rollout.top_p": 1,
        },
        "reward models are not built",
        "Score with reward.custom_reward_function.path, which may call a model of yours.",
    ),
    Pending(
        ("reward.sandbox_fusion",),
        {"url": None, "max_concurrent": 64, "memory_limit_mb": 1024},
        "scoring of programs in a sandbox is not built",
        "Score with reward.custom_reward_function.path.",
    ),
    # ---- trainer
    Pending(
        ("trainer",),
        {"default_hdfs_dir": None, "del_local_ckpt_after_load": False, "esi_redundant_time": 0},
        "checkpoints live in trainer.default_local_dir",
        "Use trainer.max_actor_ckpt_to_keep to bound their number.",
    ),
    Pending(
        ("trainer.v1",),
        {
            "trainer_mode": "sync",
            "sync": {},
            "colocate_async.num_warmup_batches": 1,
            "sampler.custom_sampler.name": None,
            "sampler.custom_sampler.path": None,
            "sampler.max_off_policy_strategy": "drop",
            "sampler.max_off_policy_threshold": 8,
            "sampler.sampler_kwargs": {},
            "sampler.sync_refill_failed_groups": False,
            "separate_async.hybrid_rollout.adaptive_switch_threshold": True,
            "separate_async.hybrid_rollout.enable_switch": False,
            "separate_async.hybrid_rollout.switch_cost_window_size": 3,
            "separate_async.hybrid_rollout.switch_threshold_ratio": 0.4,
            "separate_async.hybrid_rollout.switch_threshold_release_steps": 2,
            "separate_async.hybrid_rollout.switch_threshold_step_down": 0.03,
            "separate_async.hybrid_rollout.switch_threshold_step_up": 0.05,
            "separate_async.num_warmup_batches": 1,
            "separate_async.parameter_sync_step": 4,
        },
        "asynchronous training is not built",
        "Leave trainer.v1.trainer_mode=sync.",
    ),
    Pending(
        ("ray_kwargs",),
        {"timeline_json_file": None},
        "Ray's timeline is not written",
        "The timing_s/* metrics say where a step's time goes.",
        roots=("ppo_trainer", "sft_trainer"),
    ),
    # ---- whole groups
    Pending(
        ("distillation",),
        {
            "distillation_loss.clip_ratio": 0.2,
            "distillation_loss.clip_ratio_high": 0.2,
            "distillation_loss.clip_ratio_low": 0.2,
            "distillation_loss.distillation_loss_coef": 1.0,
            "distillation_loss.log_prob_min_clamp": None,
            "distillation_loss.loss_max_clamp": None,
            "distillation_loss.loss_mode": "k3",
            "distillation_loss.policy_loss_mode": "vanilla",
            "distillation_loss.topk": 32,
            "distillation_loss.use_policy_gradient": False,
            "distillation_loss.use_task_rewards": True,
            "enabled": False,
            "n_gpus_per_node": 8,
            "nnodes": 0,
            "teacher_key": "data_source",
            **{f"teacher_models.teacher_model.inference.{name}": value for name, value in _SERVER_KEYS.items()},
            "teacher_models.teacher_model.inference.dtype": "auto",
            "teacher_models.teacher_model.inference.name": "auto",
            "teacher_models.teacher_model.inference.prompt_length": 512,
            "teacher_models.teacher_model.inference.response_length": 512,
            "teacher_models.teacher_model.inference.temperature": 1.0,
            "teacher_models.teacher_model.key": None,
            "teacher_models.teacher_model.model_path": None,
            "teacher_models.teacher_model.num_replicas": 0,
        },
        "distillation from teachers is not built",
        "Leave distillation.enabled off.",
    ),
    Pending(
        ("global_profiler",),
        {
            "finish_hook_all_ranks": False,
            "finish_hook_cmd": None,
            "finish_hook_ranks": [],
            "global_tool_config.nsys.controller_nsight_options.cuda-graph-trace": "graph",
            "global_tool_config.nsys.controller_nsight_options.cuda-memory-usage": True,
            "global_tool_config.nsys.controller_nsight_options.trace": "cuda,nvtx,cublas,ucx",
            "global_tool_config.nsys.discrete": False,
            "global_tool_config.nsys.worker_nsight_options.capture-range": "cudaProfilerApi",
            "global_tool_config.nsys.worker_nsight_options.capture-range-end": None,
            "global_tool_config.nsys.worker_nsight_options.cuda-graph-trace": "graph",
            "global_tool_config.nsys.worker_nsight_options.cuda-memory-usage": True,
            "global_tool_config.nsys.worker_nsight_options.kill": "none",
            "global_tool_config.nsys.worker_nsight_options.trace": "cuda,nvtx,cublas,ucx",
            "global_tool_config.torch_memory.context": "all",
            "global_tool_config.torch_memory.kw_args": {},
            "global_tool_config.torch_memory.stack_depth": 32,
            "global_tool_config.torch_memory.stacks": "all",
            "global_tool_config.torch_memory.trace_alloc_max_entries": 100000,
            "profile_continuous_steps": False,
            "relocate_results": False,
            "save_path": "outputs/profile",
            "steps": None,
            "tool": None,
        },
        "profilers are not built",
        "The timing_s/* metrics say where a step's time goes.",
    ),
    Pending(
        ("skip.rollout", "skip.rollout_tq", "skip.async_rollout"),
        _SKIP,
        "replaying stored rollouts is not built",
        "Leave it off.",
    ),
    # ---- supervised fine-tuning
    Pending(
        ("model",),
        {
            "lora_rank": 0,
            "lora_alpha": 16,
            "target_modules": "all-linear",
            "use_liger": False,
            "use_fused_kernels": False,
            "use_shm": False,
            "enable_activation_offload": False,
        },
        "LoRA, fused kernels and activation offload are not built",
        "Leave it at its default.",
        roots=("sft_trainer",),
    ),
    Pending(
        ("data",),
        {
            "tools_key": "tools",
            "enable_thinking_key": "enable_thinking",
            "enable_thinking_default": None,
            "pad_mode": "no_padding",
            "balance_dp_token": False,
            "use_shm": False,
            "ignore_input_ids_mismatch": False,
        },
        "tool calls and thinking columns are not built",
        "Leave it at its default; apply_chat_template_kwargs reaches the chat template.",
        roots=("sft_trainer",),
    ),
    Pending(
        ("engine",),
        {"ulysses_sequence_parallel_size": 1},
        "sequence parallelism is not built",
        "Leave it at 1.",
        roots=("sft_trainer",),
    ),
    Pending(
        ("checkpoint",),
        {"async_save": False, "strict": True},
        "checkpoints are written whole before the next step, and read strictly",
        "Leave it at its default.",
        roots=("sft_trainer",),
    ),
    Pending(
        ("trainer",),
        {"default_hdfs_dir": None},
        "checkpoints live in trainer.default_local_dir",
        "Leave it null.",
        roots=("sft_trainer",),
    ),
)
