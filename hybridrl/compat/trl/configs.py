"""TRL's configs: dataclasses with the fields and the defaults of TRL and transformers.

They hold values only. `hybridrl.config.short_table` says what each field means here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hybridrl.config.convert import nearest
from hybridrl.errors import ConfigError

#: fields of transformers.TrainingArguments, with TRL's defaults where it has others
_TRAINING: dict[str, Any] = {
    "output_dir": None, "per_device_train_batch_size": 8, "num_train_epochs": 3.0, "max_steps": -1,
    "learning_rate": 5e-5, "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None, "warmup_steps": 0,
    "warmup_ratio": None, "optim": "adamw_torch_fused", "optim_args": None, "weight_decay": 0.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-8, "optim_target_modules": None, "gradient_accumulation_steps": 1,
    "average_tokens_across_devices": True, "max_grad_norm": 1.0, "label_smoothing_factor": 0.0, "bf16": None,
    "fp16": False, "bf16_full_eval": False, "fp16_full_eval": False, "tf32": None, "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": None, "torch_compile": False, "torch_compile_backend": None,
    "torch_compile_mode": None, "use_liger_kernel": False, "liger_kernel_config": None, "use_cache": False,
    "neftune_noise_alpha": None, "torch_empty_cache_steps": None, "auto_find_batch_size": False,
    "logging_strategy": "steps", "logging_steps": 10, "logging_first_step": False, "log_on_each_node": True,
    "logging_nan_inf_filter": True, "include_num_input_tokens_seen": "no", "log_level": "passive",
    "log_level_replica": "warning", "disable_tqdm": None, "report_to": "none", "run_name": None,
    "project": "huggingface", "trackio_space_id": None, "trackio_bucket_id": None, "trackio_static_space_id": None,
    "eval_strategy": "no", "eval_steps": None, "eval_delay": 0, "per_device_eval_batch_size": 8,
    "prediction_loss_only": False, "eval_on_start": False, "eval_do_concat_batches": True,
    "eval_use_gather_object": False, "eval_accumulation_steps": None, "include_for_metrics": None,
    "batch_eval_metrics": False, "save_only_model": False, "save_strategy": "steps", "save_steps": 500,
    "save_on_each_node": False, "save_total_limit": None, "enable_jit_checkpoint": False, "push_to_hub": False,
    "hub_token": None, "hub_private_repo": None, "hub_model_id": None, "hub_strategy": "every_save",
    "hub_always_push": False, "hub_revision": None, "load_best_model_at_end": False, "metric_for_best_model": None,
    "greater_is_better": None, "ignore_data_skip": False, "restore_callback_states_from_checkpoint": False,
    "full_determinism": False, "seed": 42, "data_seed": None, "use_cpu": False, "accelerator_config": None,
    "parallelism_config": None, "dataloader_drop_last": False, "dataloader_num_workers": 0,
    "dataloader_pin_memory": True, "dataloader_persistent_workers": False, "dataloader_prefetch_factor": None,
    "dataloader_multiprocessing_context": None, "dataloader_in_order": True, "remove_unused_columns": True,
    "label_names": None, "train_sampling_strategy": "random", "length_column_name": "length",
    "ddp_find_unused_parameters": None, "ddp_bucket_cap_mb": None, "ddp_broadcast_buffers": None,
    "ddp_static_graph": None, "ddp_backend": None, "ddp_timeout": 1800, "fsdp": None, "fsdp_config": None,
    "deepspeed": None, "debug": "", "skip_memory_metrics": True, "do_train": False, "do_eval": False,
    "do_predict": False, "resume_from_checkpoint": None, "local_rank": -1, "model_init_kwargs": None,
    "trust_remote_code": False, "pad_to_multiple_of": "auto", "disable_dropout": False, "logging_dir": None,
    "overwrite_output_dir": False, "save_safetensors": True,
}  # fmt: skip
#: fields of GRPOConfig and RLOOConfig
_ONLINE: dict[str, Any] = {
    "learning_rate": 1e-6, "router_aux_loss_coef": None, "remove_unused_columns": False, "num_generations": 8,
    "num_generations_eval": None, "max_prompt_length": None, "max_completion_length": 512,
    "ds3_gather_for_generation": True, "shuffle_dataset": True, "generation_batch_size": None,
    "steps_per_generation": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
    "generation_kwargs": None, "chat_template_kwargs": None, "repetition_penalty": 1.0, "cache_implementation": None,
    "use_vllm": False, "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": False,
    "vllm_structured_outputs_regex": None, "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": None, "vllm_tensor_parallel_size": 1,
    "num_iterations": 1, "epsilon": 0.2, "epsilon_high": None, "reward_weights": None,
    "mask_truncated_completions": False, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512, "log_completions": False, "log_multimodal": True, "num_completions_to_print": None,
    "log_unique_prompts": False, "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None, "use_transformers_paged": False,
}  # fmt: skip
_GRPO: dict[str, Any] = {
    "cast_lm_head_to_fp32": False, "beta": 0.0, "delta": None, "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "importance_sampling_level": "token", "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group", "loss_type": "dapo", "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
    "use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005,
    "entropy_target": 0.2, "max_tool_calling_iterations": None, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_cap": None, "off_policy_mask_threshold": None,
    "use_bias_correction_kl": True, "log_completions_hub_repo": None,
}  # fmt: skip
_SUPERVISED: dict[str, Any] = {
    "dataset_num_proc": None, "max_length": 1024, "activation_offloading": False, "pad_token": None,
}  # fmt: skip
_SFT: dict[str, Any] = {
    "learning_rate": 2e-5, "router_aux_loss_coef": None, "chat_template_path": None, "dataset_text_field": "text",
    "dataset_kwargs": None, "eos_token": None, "truncation_mode": "keep_start", "shuffle_dataset": False,
    "packing": False, "packing_strategy": "bfd", "padding_free": False, "eval_packing": None,
    "completion_only_loss": None, "assistant_only_loss": False, "loss_type": "nll",
}  # fmt: skip
_DPO: dict[str, Any] = {
    "learning_rate": 1e-6, "router_aux_loss_coef": None, "disable_dropout": True, "truncation_mode": "keep_start",
    "padding_free": False, "precompute_ref_log_probs": False, "precompute_ref_batch_size": None,
    "loss_type": ["sigmoid"], "loss_weights": None, "ld_alpha": None, "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5, "label_smoothing": 0.0, "beta": 0.1, "use_weighting": False, "discopop_tau": 0.05,
    "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
}  # fmt: skip
_KTO: dict[str, Any] = {
    "learning_rate": 1e-6, "router_aux_loss_coef": None, "disable_dropout": True,
    "train_sampling_strategy": "sequential", "precompute_ref_log_probs": False, "precompute_ref_batch_size": None,
    "loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
}  # fmt: skip
_REWARD: dict[str, Any] = {
    "learning_rate": 1e-4, "chat_template_path": None, "disable_dropout": True, "eos_token": None,
    "center_rewards_coefficient": None,
}  # fmt: skip


class TRLConfig:
    """Base of the configs."""

    def to_dict(self) -> dict[str, Any]:
        """The fields with their values."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}  # type: ignore[arg-type]


def _config(name: str, about: str, *tables: Mapping[str, Any]) -> Any:
    defaults = {key: value for table in tables for key, value in table.items()}

    def field(value: Any) -> Any:
        return dataclasses.field(default_factory=lambda: list(value)) if isinstance(value, list) else value

    fields = [(key, Any if value is None else type(value), field(value)) for key, value in defaults.items()]
    cls = dataclasses.make_dataclass(name, fields, bases=(TRLConfig,), namespace={"__module__": __name__})
    cls.__doc__ = about
    plain = cls.__init__  # type: ignore[misc]  # of this very class

    def checked(self: Any, *positional: Any, **named: Any) -> None:
        names = [item.name for item in dataclasses.fields(self)]
        unknown = [f"{name}({key}=): TRL has no such field{nearest(key, names)}" for key in named if key not in names]
        if unknown:
            raise ConfigError(unknown)
        plain(self, *positional, **named)

    checked.__wrapped__ = plain  # type: ignore[attr-defined]  # for signatures
    cls.__init__ = checked  # type: ignore[misc]
    return cls


GRPOConfig = _config("GRPOConfig", "Fields of TRL's `GRPOConfig`, for `GRPOTrainer`.", _TRAINING, _ONLINE, _GRPO)
RLOOConfig = _config(
    "RLOOConfig",
    "Fields of TRL's `RLOOConfig`, for `RLOOTrainer`.",
    _TRAINING,
    _ONLINE,
    {"num_generations": 2, "beta": 0.05, "normalize_advantages": False, "reward_clip_range": None},
)
SFTConfig = _config("SFTConfig", "Fields of TRL's `SFTConfig`, for `SFTTrainer`.", _TRAINING, _SUPERVISED, _SFT)
DPOConfig = _config("DPOConfig", "Fields of TRL's `DPOConfig`, for `DPOTrainer`.", _TRAINING, _SUPERVISED, _DPO)
KTOConfig = _config("KTOConfig", "Fields of TRL's `KTOConfig`, for `KTOTrainer`.", _TRAINING, _SUPERVISED, _KTO)
RewardConfig = _config(
    "RewardConfig", "Fields of TRL's `RewardConfig`, for `RewardTrainer`.", _TRAINING, _SUPERVISED, _REWARD
)


def rloo_settings(beta: float) -> dict[str, Any]:
    """Return the settings of TRL's RLOO besides its fields: KL is taken from rewards, a sequence's loss is a sum.

    Args:
        beta: of `RLOOConfig`, the coefficient of the KL.
    """
    penalty = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": beta} if beta else {}
    loss = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum"}
    return {"algorithm.adv_estimator": "rloo", **loss, **penalty}
