"""Settings of engines that are not selected: known, without effect on this run's result, passed with one notice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ARR = "actor_rollout_ref"
_PPO = ("ppo_trainer",)
_MODELS = (f"{_ARR}.model", "critic.model")
_FSDP = (f"{_ARR}.actor.fsdp_config", f"{_ARR}.ref.fsdp_config", "critic.fsdp")
_OPTIMS = (f"{_ARR}.actor.optim", "critic.optim")


@dataclass(frozen=True)
class Branch:
    """Settings of an engine that is not selected.

    Attributes:
        engine: who would read them.
        selected_by: what decides that it is not this run.
        prefixes, keys: dotted groups, and the names below each of them; a name also stands for everything below it.
        roots: trees that know these keys.
    """

    engine: str
    selected_by: str
    prefixes: tuple[str, ...]
    keys: tuple[str, ...]
    roots: tuple[str, ...] = _PPO

    def items(self) -> Iterator[str]:
        """Dotted keys."""
        for prefix in self.prefixes:
            for name in self.keys:
                yield f"{prefix}.{name}".lstrip(".")

    def notice(self, names: Sequence[str]) -> str:
        """What is said, once, where such keys are set."""
        they = "they belong" if len(names) > 1 else "it belongs"
        return f"no effect in this run, {they} to {self.engine} and {self.selected_by}: {', '.join(names)}"


_MEGATRON_KEYS = (
    "context_parallel_size",
    "dist_checkpointing_path",
    "dist_checkpointing_prefix",
    "dist_ckpt_optim_fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient",
    "dtype",
    "dynamic_context_parallel",
    "entropy_from_logits_chunk_size",
    "entropy_from_logits_with_chunking",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "forward_only",
    "grad_offload",
    "max_seqlen_per_dp_cp_rank",
    "optimizer_offload",
    "override_ddp_config",
    "override_mcore_model_config",
    "override_transformer_config",
    "pad_bshd_to_minibatch_max",
    "pad_to_length",
    "pad_to_length_bucket",
    "param_offload",
    "pipeline_model_parallel_size",
    "router_replay.mode",
    "router_replay.record_file",
    "router_replay.replay_file",
    "seed",
    "sequence_parallel",
    "tensor_model_parallel_size",
    "use_dist_checkpointing",
    "use_distributed_optimizer",
    "use_mbridge",
    "use_megatron_fsdp",
    "use_remove_padding",
    "vanilla_mbridge",
    "virtual_pipeline_model_parallel_size",
)
_MEGATRON_OPTIM_KEYS = (
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "lr_decay_steps",
    "lr_decay_style",
    "lr_warmup_init",
    "lr_wsd_decay_steps",
    "lr_wsd_decay_style",
    "main_grads_dtype",
    "min_lr",
    "muon_coefficient_type",
    "muon_extra_scale_factor",
    "muon_fp32_matmul_prec",
    "muon_match_adamw_update_rms",
    "muon_momentum",
    "muon_nesterov",
    "muon_num_ns_steps",
    "muon_scalar_optimizer",
    "muon_scale_mode",
    "muon_split_qkv",
    "muon_tp_mode",
    "use_checkpoint_opt_param_scheduler",
    "use_layer_wise_distributed_optimizer",
    "use_precision_aware_optimizer",
    "weight_decay_incr_style",
)
_MEGATRON_LORA_KEYS = (
    "a2a_experimental",
    "adapter_path",
    "alpha",
    "dropout",
    "dropout_position",
    "dtype",
    "exclude_modules",
    "freeze_language_model",
    "freeze_vision_model",
    "freeze_vision_projection",
    "lora_A_init_method",
    "lora_B_init_method",
    "merge",
    "rank",
    "target_modules",
    "type",
)
_BY_STRATEGY = "the strategy of this run is fsdp2"

BRANCHES: tuple[Branch, ...] = (
    Branch(
        "Megatron",
        _BY_STRATEGY,
        (f"{_ARR}.actor.megatron", f"{_ARR}.ref.megatron", "critic.megatron"),
        _MEGATRON_KEYS,
    ),
    Branch("Megatron", _BY_STRATEGY, _OPTIMS, _MEGATRON_OPTIM_KEYS),
    Branch("Megatron", _BY_STRATEGY, tuple(f"{prefix}.lora" for prefix in _MODELS), _MEGATRON_LORA_KEYS),
    Branch("Megatron", _BY_STRATEGY, (f"{_ARR}.actor.checkpoint", "critic.checkpoint"), ("mbridge_config",)),
    Branch("Megatron", _BY_STRATEGY, ("critic",), ("nccl_timeout",)),
    Branch("FSDP1", _BY_STRATEGY, _FSDP, ("use_orig_params",)),
    Branch("FSDP1", _BY_STRATEGY, ("engine",), ("use_orig_params",), roots=("sft_trainer",)),
    Branch(
        "other ways of running generation servers",
        "here the library decides",
        (f"{_ARR}.rollout",),
        (
            "agent.num_workers",
            "checkpoint_engine.backend",
            "checkpoint_engine.custom_backend_module",
            "checkpoint_engine.engine_kwargs",
            "disable_log_stats",
            "layered_summon",
            "mode",
            "multi_stage_wake_up",
            "skip_tokenizer_init",
        ),
    ),
)
