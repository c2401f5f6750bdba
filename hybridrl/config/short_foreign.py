"""Settings of TRL and transformers that act here without being set, or not at all: the reason, told to who sets one."""

from typing import Any

from hybridrl.config.short_names import ShortName

_PPO, _SFT, _DPO, _KTO, _RM = "ppo_trainer", "sft_trainer", "dpo_trainer", "kto_trainer", "rm_trainer"


def _idle(names: str, reason: str, *defaults: Any) -> tuple[ShortName, ...]:
    return tuple(ShortName((name,), idle=reason, usual=(None, *defaults)) for name in names.split())


def _refused(names: str, reason: str, *defaults: Any) -> tuple[ShortName, ...]:
    return tuple(ShortName((name,), refused=reason, usual=(None, *defaults)) for name in names.split())


FOREIGN: tuple[ShortName, ...] = (
    # without effect
    *_idle("logging_steps logging_first_step logging_strategy logging_dir", "the metrics of every step are logged"),
    *_idle(
        "logging_nan_inf_filter log_level log_level_replica log_on_each_node disable_tqdm "
        "include_num_input_tokens_seen",
        "it only changes messages",
    ),
    *_idle(
        "log_completions num_completions_to_print log_multimodal log_unique_prompts",
        "samples are in rollouts.html and in the dumps of trainer.dump_freq",
    ),
    *_idle("remove_unused_columns", "all columns reach the reward function, and models get none"),
    *_idle("dataset_num_proc", "rows are tokenised by threads of the controller"),
    *_idle("pad_to_multiple_of padding_free", "rows are computed without padding where the attention kernel can"),
    *_idle("packing packing_strategy eval_packing", "rows share micro-batches without padding, and stay single rows"),
    *_idle("per_device_eval_batch_size eval_accumulation_steps", "validation takes the micro-batches of training"),
    *_idle("precompute_ref_batch_size", "the reference is computed in the micro-batches of training"),
    *_idle("ds3_gather_for_generation", "weights are sent to the sampler in memory, whatever shards them"),
    *_idle("deepspeed fsdp fsdp_config accelerator_config parallelism_config", "FSDP2 shards over all processes"),
    *_idle(
        "ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "local_rank debug",
        "the processes are Ray's workers, started by the run",
    ),
    *_idle(
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_drop_last "
        "dataloader_multiprocessing_context dataloader_in_order torch_empty_cache_steps skip_memory_metrics",
        "the controller reads the data, and results do not depend on how",
    ),
    *_idle("gradient_checkpointing_kwargs", "activations are recomputed without reentrance"),
    *_idle("tf32 bf16_full_eval", "the dtype is that of fsdp_config.dtype"),
    *_idle("use_cache cache_implementation", "the sampler has a cache"),
    *_idle("average_tokens_across_devices", "losses are normalised over all processes"),
    *_idle("disable_dropout", "models keep the dropout of their config.json, which is 0 in current decoders"),
    *_idle("overwrite_output_dir do_train do_eval do_predict", "the folder and the data decide"),
    *_idle("vllm_mode", "the engine shares the devices of the policy", "colocate"),
    *_idle(
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_model_impl",
        "the run starts replicas of the engine; actor_rollout_ref.rollout.nnodes gives them nodes of their own",
    ),
    *_idle("use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config",
           "rollout.name chooses the sampler"),
    *_idle(
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min use_bias_correction_kl",
        "every step measures the mismatch of sampler and trainer, and algorithm.rollout_correction corrects it",
    ),
    *_idle("save_only_model save_safetensors save_on_each_node enable_jit_checkpoint "
           "restore_callback_states_from_checkpoint",
           "checkpoints hold the whole state, and the model in Hugging Face format"),
    *_idle("ignore_data_skip", "a resumed run continues with the next row"),
    *_idle("label_names include_for_metrics prediction_loss_only batch_eval_metrics eval_do_concat_batches "
           "eval_use_gather_object", "validation computes the metrics of docs/observe.md"),
    *_idle("hub_strategy hub_always_push", "the model is uploaded once, when the run is finished"),
    *_idle("trackio_space_id trackio_bucket_id trackio_static_space_id log_completions_hub_repo",
           "only the model is sent to the hub"),
    *_idle("num_generations_eval", "actor_rollout_ref.rollout.val_kwargs.n is the number of validation samples"),
    *_idle("liger_kernel_config", "all kernels of the package that fit the model are used"),
    *_idle("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "there is no VESPO here"),
    *_idle("ref_model_mixup_alpha ref_model_sync_steps", "the reference stays the model before training"),
    *_idle("entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", "the entropy's weight is fixed"),
    *_idle("f_alpha_divergence_coef discopop_tau", "it belongs to a loss that is not here"),
    *_idle("completion_only_loss", "only answers of the assistant are learned from"),
    *_idle("assistant_only_loss", "only answers of the assistant are learned from"),
    *_idle("pad_token eos_token", "the tokens are those of the tokenizer"),
    *_idle("full_finetuning torch_compile_backend torch_compile_mode lr_scheduler_kwargs optim_args",
           "give the settings by their keys (--cfg job)"),
    ShortName(
        ("eval_on_start",), dict.fromkeys((_SFT, _DPO, _KTO, _RM), ""), usual=(None, False),
        idle="supervised training validates for the first time after eval_steps",
    ),
    # refused
    *_refused("fp16 fp16_full_eval", "training in float16 is not built; bf16=true, or neither", False),
    *_refused("hub_token", "settings are written to config.yaml; set HF_TOKEN, or log in with hf auth login"),
    *_refused("load_best_model_at_end",
              "set best_metric=NAME, which keeps the best checkpoint; its model is result.best_model_path", False),
    *_refused("auto_find_batch_size", "set use_dynamic_bsz=true, which fills micro-batches by tokens", False),
    *_refused("mask_truncated_completions",
              "truncated responses are not masked; reward.reward_manager.name=dapo gives long ones a penalty", False),
    *_refused("min_p", "the trained distribution has temperature, top_p and top_k only", 0, 0.0),
    *_refused("repetition_penalty", "the trained distribution has temperature, top_p and top_k only", 1, 1.0),
    *_refused("generation_kwargs", "set temperature, top_p, top_k, and rollout.vllm for the engine", {}),
    *_refused("sync_ref_model", "the reference stays the model before training", False),
    *_refused("top_entropy_quantile", "all tokens are trained on; policy_loss.loss_mode=clip_cov leaves some out",
              1.0, 1),
    *_refused("use_adaptive_entropy", "the weight of the entropy is fixed; set entropy_coef", False),
    *_refused("multi_objective_aggregation", "set algorithm.adv_estimator=gdpo, which normalises each reward",
              "sum_then_normalize"),
    *_refused("off_policy_mask_threshold", "set algorithm.rollout_correction.rollout_rs, which rejects by the ratio"),
    *_refused("cast_lm_head_to_fp32", "log-probabilities are computed in float32 from the logits", False),
    *_refused("vllm_structured_outputs_regex", "responses are sampled from the whole vocabulary"),
    *_refused("max_tool_calling_iterations", "set rollout.multi_turn.max_assistant_turns (docs/agents.md)"),
    *_refused("neftune_noise_alpha", "no noise is added to embeddings"),
    *_refused("dataset_kwargs", "columns are named by data.messages_key, data.prompt_key and data.response_key", {}),
    *_refused("chat_template_path", "set model.custom_chat_template to the text of the template"),
    *_refused("loss_weights", "one loss at a time; dpo.sft_coef adds the likelihood of chosen answers"),
    *_refused("ld_alpha use_weighting", "this variant of DPO is not built", False),
    *_refused("f_divergence_type", "the divergence is the reverse KL", "reverse_kl"),
    *_refused("label_smoothing_factor", "there is no label smoothing here", 0, 0.0),
    *_refused("optim_target_modules", "all weights, or a LoRA adapter, are trained"),
    ShortName(
        ("train_sampling_strategy",), dict.fromkeys((_PPO, _SFT, _DPO, _RM), ""), usual=(None, "random"),
        refused="rows are shuffled; data.sampler takes a class of your own",
    ),
    *_refused("length_column_name", "rows are not ordered by their length", "length"),
    *_refused("eval_delay", "validation begins with trainer.val_before_train or the first eval_steps", 0, 0.0),
    *_refused("normalize_advantages", "set algorithm.adv_estimator, e.g. reinforce_plus_plus_baseline", False),
    *_refused("reward_clip_range", "set algorithm.clip_rewards, the bound of both sides"),
    *_refused("reward_weights", "weights belong to a list of reward functions: reward=[A, B] in Python, or "
              "reward.functions={NAME: {path: FILE.py, weight: 1}}"),
)  # fmt: skip
