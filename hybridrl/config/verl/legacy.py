"""Old and loose names of settings, and what they are called now: one table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ARR = "actor_rollout_ref"


@dataclass(frozen=True)
class Alias:
    """One old name, of a key or of everything below it.

    Attributes:
        old: the old dotted key or prefix.
        new: the present one; None where the old key has nothing left to do.
        note: said with the notice, or as the reason of a refusal.
        transform: makes the new value from the old one; KeyError, TypeError or ValueError refuse it.
        weak: gives way where the new key is also set.
        null_is_unset: null, the old default, is no setting at all.
        roots: trees that know the old name.
    """

    old: str
    new: str | None
    note: str = ""
    transform: Callable[[Any], Any] | None = None
    weak: bool = False
    null_is_unset: bool = True
    roots: tuple[str, ...] = ("ppo_trainer",)

    def target(self, name: str) -> str | None:
        """The present name of `name`, which is the old key or lies below it."""
        return None if self.new is None else self.new + name[len(self.old) :]


def _backend(value: Any) -> str:
    return {"fsdp": "fsdp2", "fsdp2": "fsdp2", "hf": "fsdp2", "dp": "fsdp2", "megatron": "megatron"}[str(value).lower()]


def _only_false(value: Any) -> None:
    if value not in (False, "false", "False"):
        raise ValueError(value)


_PER_PROCESS = "it counts sequences a process, not over all processes"
_LATER = "remove it, this build does not support it yet"


def _moved(old: str, new: str, *tails: str) -> tuple[Alias, ...]:
    return tuple(Alias(f"{old}.{tail}", f"{new}.{tail}") for tail in tails)


ALIASES: tuple[Alias, ...] = (
    # optimizer settings written directly on the actor or critic
    Alias(f"{_ARR}.actor.lr", f"{_ARR}.actor.optim.lr"),
    Alias(f"{_ARR}.actor.weight_decay", f"{_ARR}.actor.optim.weight_decay"),
    Alias(f"{_ARR}.actor.grad_clip", f"{_ARR}.actor.optim.clip_grad"),
    Alias(f"{_ARR}.actor.max_grad_norm", f"{_ARR}.actor.optim.clip_grad"),
    Alias("critic.lr", "critic.optim.lr"),
    Alias("critic.weight_decay", "critic.optim.weight_decay"),
    Alias("critic.grad_clip", "critic.optim.clip_grad"),
    Alias("critic.max_grad_norm", "critic.optim.clip_grad"),
    Alias(f"{_ARR}.actor.optim.warmup_style", f"{_ARR}.actor.optim.lr_scheduler_type"),
    Alias("critic.optim.warmup_style", "critic.optim.lr_scheduler_type"),
    Alias("optim.warmup_style", "optim.lr_scheduler_type", roots=("sft_trainer",)),
    # LoRA
    Alias(
        f"{_ARR}.actor.lora.enabled",
        f"{_ARR}.model.lora_rank",
        "true means rank 16 unless a rank is set",
        lambda value: {"true": 16, "false": 0}[str(value).lower()],
        weak=True,
    ),
    Alias(f"{_ARR}.actor.lora.r", f"{_ARR}.model.lora_rank"),
    Alias(f"{_ARR}.actor.lora.alpha", f"{_ARR}.model.lora_alpha"),
    Alias(f"{_ARR}.actor.lora.target_modules", f"{_ARR}.model.target_modules"),
    # engines and parallel sizes
    Alias(f"{_ARR}.model.backend", f"{_ARR}.actor.strategy", "fsdp or fsdp2", _backend),
    Alias("critic.model.backend", "critic.strategy", "fsdp or fsdp2", _backend),
    Alias("critic.model.fsdp_config", "critic.fsdp"),
    Alias(f"{_ARR}.actor.tensor_model_parallel_size", f"{_ARR}.actor.megatron.tensor_model_parallel_size"),
    Alias(f"{_ARR}.actor.pipeline_model_parallel_size", f"{_ARR}.actor.megatron.pipeline_model_parallel_size"),
    Alias(f"{_ARR}.rollout.tensor_parallel_size", f"{_ARR}.rollout.tensor_model_parallel_size"),
    Alias(f"{_ARR}.actor.use_remove_padding", f"{_ARR}.model.use_remove_padding"),
    Alias(f"{_ARR}.rollout.enable_vision", None, "prompts are text in this build; remove it", _only_false),
    # micro-batches counted over all processes
    Alias(f"{_ARR}.actor.ppo_micro_batch_size", f"{_ARR}.actor.ppo_micro_batch_size_per_gpu", _PER_PROCESS),
    Alias(f"{_ARR}.ref.log_prob_micro_batch_size", f"{_ARR}.ref.log_prob_micro_batch_size_per_gpu", _PER_PROCESS),
    Alias(
        f"{_ARR}.rollout.log_prob_micro_batch_size", f"{_ARR}.rollout.log_prob_micro_batch_size_per_gpu", _PER_PROCESS
    ),
    Alias("critic.ppo_micro_batch_size", "critic.ppo_micro_batch_size_per_gpu", _PER_PROCESS),
    Alias("critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu", _PER_PROCESS),
    Alias("data.micro_batch_size", "data.micro_batch_size_per_gpu", _PER_PROCESS, roots=("sft_trainer",)),
    # data and trainer
    Alias("data.tokenizer", f"{_ARR}.model.tokenizer_path"),
    Alias("data.trust_remote_code", f"{_ARR}.model.trust_remote_code", weak=True),
    Alias("data.trust_remote_code", "model.trust_remote_code", weak=True, roots=("sft_trainer",)),
    Alias(
        "trainer.async_weight_update",
        "trainer.v1.trainer_mode",
        "false: sync, true: separate_async",
        lambda value: {"true": "separate_async", "false": "sync"}[str(value).lower()],
    ),
    Alias("trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep", roots=("ppo_trainer", "sft_trainer")),
    Alias("trainer.use_v1", None, "there is one trainer here"),
    # generation and evaluation
    Alias("rollout.prompt_length", "data.max_prompt_length", roots=("generation",)),
    Alias("rollout.response_length", "data.max_response_length", roots=("generation",)),
    Alias("rollout", f"{_ARR}.rollout", roots=("generation",)),
    Alias("model", f"{_ARR}.model", roots=("generation",)),
    Alias("actor", f"{_ARR}.actor", roots=("generation",)),
    Alias("data.train_files", "data.path", weak=True, roots=("generation",)),
    Alias("data.prompt_key", None, "evaluation does not read prompts", roots=("evaluation",)),
    Alias("data.reward_fn_key", "data.data_source_key", roots=("evaluation",)),
    Alias("ray_kwargs", None, "evaluation starts no Ray", roots=("evaluation",)),
    # rewards before they had a group of their own
    Alias("custom_reward_function", "reward.custom_reward_function", roots=("ppo_trainer", "evaluation")),
    Alias("reward_model.reward_manager", "reward.reward_manager.name"),
    Alias("reward_model.reward_loop_source", "reward.reward_manager.source"),
    Alias("reward_model.reward_loop_module_path", "reward.reward_manager.module.path"),
    Alias("reward_model.reward_loop_class_name", "reward.reward_manager.module.name"),
    Alias("reward_model.num_workers", "reward.num_workers"),
    Alias("reward_model.reward_kwargs", "reward.reward_kwargs"),
    Alias("reward_model.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg"),
    Alias("reward.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg"),
    *_moved("reward_model", "reward.reward_model", "enable", "enable_resource_pool", "n_gpus_per_node", "nnodes"),
    Alias("reward_model.model.path", "reward.reward_model.model_path"),
    Alias("reward_model.model.external_lib", f"{_ARR}.model.external_lib"),
    Alias("reward_model.model.trust_remote_code", None, _LATER, _only_false),
    Alias("reward_model.rollout", "reward.reward_model.rollout"),
    Alias("sandbox_fusion", "reward.sandbox_fusion"),
)
