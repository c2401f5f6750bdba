"""`openrlhf.cli.train_ppo_ray`: its settings, with the names of version 0.10 (dotted) and those before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.compat.openrlhf.openrlhf_shared import (
    SHARED,
    constant,
    files,
    full_determinism,
    optimizer,
    samples,
    schedule,
)
from hybridrl.compat.projects.project_settings import (
    Ineffective,
    Meaning,
    ProjectSetting,
    ProjectValues,
    ReadWith,
    SettingTable,
    flag,
    idle,
    read_with,
    refused,
    row,
)
from hybridrl.compat.projects.script_functions import parameters_of
from hybridrl.config.short_names import RefusedValueError

_ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"algorithm.adv_estimator": "gae"},
    "reinforce": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "rloo": {"algorithm.adv_estimator": "rloo"},
    "reinforce_baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "group_norm": {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": True},
    "dr_grpo": {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
}
_WHITENED = ("gae", "reinforce", "reinforce_baseline")
#: a ratio that no token reaches, for losses without the bound of the dual clip
UNBOUNDED = 1e9


def _has_critic(values: ProjectValues) -> bool:
    return bool(values["algo.advantage.estimator"] == "gae")


def _of_critic(key: str) -> Any:
    def translate(value: Any, values: ProjectValues) -> Meaning:
        if not _has_critic(values):
            return Ineffective("there is no critic without estimator gae")
        return {f"critic.{key}": value}

    return translate


def _critic_schedule(value: str, values: ProjectValues) -> Meaning:
    if not _has_critic(values):
        return Ineffective("there is no critic without estimator gae")
    return schedule(value, values["critic.min_lr_ratio"], "critic.optim")


def _both(name: str) -> tuple[str, ...]:
    """The settings of the policy and the critic that one of an older version stands for."""
    return f"actor.{name}", f"critic.{name}"


def _shared_with_critic(key: str) -> Any:
    """Older versions have one setting for the policy and the critic."""

    def translate(value: Any, values: ProjectValues) -> Meaning:
        return {f"{{optim}}.{key}": value, **({f"critic.optim.{key}": value} if _has_critic(values) else {})}

    return translate


def _estimator(value: str, _: ProjectValues) -> Meaning:
    if value not in _ESTIMATORS:
        raise RefusedValueError(f"there is {', '.join(_ESTIMATORS)} here")
    return _ESTIMATORS[value]


def _rewards_alone(key: str) -> Any:
    def translate(value: float, values: ProjectValues) -> Meaning:
        estimator = values["algo.advantage.estimator"]
        reads = ("gae",) if key == "lam" else ("gae", "reinforce")
        return {f"algorithm.{key}": value} if estimator in reads else Ineffective(f"{estimator} does not read it")

    return translate


def _spread(value: bool, values: ProjectValues) -> Meaning:
    if not value:
        return {}
    if values["algo.advantage.estimator"] not in _WHITENED:
        return Ineffective(f"{values['algo.advantage.estimator']} does not whiten advantages")
    raise RefusedValueError(
        "advantages are whitened by mean and spread; estimator dr_grpo or rloo divides by no spread"
    )


def _mini_batch(value: int, values: ProjectValues) -> Meaning:
    n, prompts = values["rollout.n_samples_per_prompt"], values["rollout.batch_size"]
    if value % n:
        raise RefusedValueError(f"{value} samples are no whole number of groups of n_samples_per_prompt={n}; "
                                f"{math.ceil(value / n) * n} are")  # fmt: skip
    if prompts * n % value:
        raise RefusedValueError(f"{prompts} prompts x {n} samples are no multiple of {value} samples per update")
    return {"{actor}.ppo_mini_batch_size": value // n}


def _micro(key: str) -> Any:
    def translate(value: int, values: ProjectValues) -> Meaning:
        if values["train.dynamic_batch_enable"]:
            return Ineffective("micro-batches are filled by tokens (train.dynamic_batch_enable)")
        return {key: value}

    return translate


def _tokens(key: str) -> Any:
    def translate(value: int, values: ProjectValues) -> Meaning:
        if not values["train.dynamic_batch_enable"]:
            return Ineffective("micro-batches are filled by tokens with train.dynamic_batch_enable only")
        return {key: max(value, math.ceil(_longest(values) / values["ds.ring_attn_size"]))}

    return translate


def _longest(values: ProjectValues) -> int:
    """The tokens of the longest sequence, which a micro-batch must hold."""
    keys = _lengths(values["data.max_len"], values)
    limits = keys if isinstance(keys, Mapping) else {}
    prompt = values["prompt_max_len"] or limits.get("data.max_prompt_length", 0)
    return int(prompt + (values["rollout.max_new_tokens"] or limits.get("data.max_response_length", 0)))


def _lengths(value: int, values: ProjectValues) -> Meaning:
    """The limit of prompt and response together is shared here: half each, unless one of them is set."""
    prompt, response = values["prompt_max_len"], values["rollout.max_new_tokens"]
    if prompt is not None and response is not None:
        return Ineffective("prompt_max_len and generate_max_len are the limits")
    response = response if response is not None else value - (prompt or value // 2)
    if response >= value:
        raise RefusedValueError(f"{response} new tokens leave none of {value} for a prompt")
    return {"data.max_prompt_length": prompt or value - response, "data.max_response_length": response}


def _kl(value: float, values: ProjectValues) -> Meaning:
    kind = values["algo.kl.estimator"]
    if value <= 0:
        return {}
    if values["algo.kl.use_loss"]:
        return {"{actor}.use_kl_loss": True, "{actor}.kl_loss_coef": value, "{actor}.kl_loss_type": kind}
    return {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": value, "algorithm.kl_penalty": kind}


def _of_kl(_: Any, values: ProjectValues) -> Meaning:
    name = "algo.kl.init_coef"
    return ReadWith(name) if values[name] > 0 else Ineffective(f"{name} is 0: there is no reference")


def _target(value: float, values: ProjectValues) -> Meaning:
    if values["algo.kl.use_loss"] or values["algo.kl.init_coef"] <= 0:
        raise RefusedValueError("the weight of the KL follows a target only where the KL is part of the reward")
    return {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": value}


def _horizon(value: int, values: ProjectValues) -> Meaning:
    if values["algo.kl.target"] is None:
        return Ineffective("it belongs to algo.kl.target")
    return {"algorithm.kl_ctrl.horizon": value}


def _entropy(value: float, _: ProjectValues) -> Meaning:
    return {"{actor}.entropy_coeff": value} if value else {"{actor}.calculate_entropy": True}


def _loss(value: str, _: ProjectValues) -> Meaning:
    modes = {"ppo": ("vanilla", "token-mean"), "gspo": ("gspo", "seq-mean-token-mean")}
    if value not in modes:
        raise RefusedValueError("there is ppo and gspo here")
    mode, aggregation = modes[value]
    return {"{actor}.policy_loss.loss_mode": mode, "{actor}.loss_agg_mode": aggregation}


def _dual_clip(value: float, values: ProjectValues) -> Meaning:
    if values["actor.policy_loss_type"] != "ppo":
        raise RefusedValueError("gspo has no dual clip here")
    return {"{actor}.clip_ratio_c": value}


def _correction(value: bool, values: ProjectValues) -> Meaning:
    if not value:
        return {}
    low, high = values["algo.advantage.is_correction_threshold"]
    prefix = "algorithm.rollout_correction"
    bounds = f"{low:g}_{high:g}"
    kind = values["algo.advantage.is_correction_type"]
    if kind == "icepop":
        return {f"{prefix}.rollout_is": "token", f"{prefix}.rollout_is_threshold": bounds}
    if kind == "seq-mask-tis":
        return {
            f"{prefix}.rollout_is": "token", f"{prefix}.rollout_is_threshold": UNBOUNDED,
            f"{prefix}.rollout_rs": "seq_mean_k1", f"{prefix}.rollout_rs_threshold": bounds,
        }  # fmt: skip
    if kind != "tis":
        raise RefusedValueError(f"algo.advantage.is_correction_type={kind}: there is tis, icepop and seq-mask-tis here")
    return {f"{prefix}.rollout_is": "token", f"{prefix}.rollout_is_threshold": high}


def _of_correction(_: Any, values: ProjectValues) -> Meaning:
    name = "algo.advantage.is_correction_enable"
    return ReadWith(name) if values[name] else Ineffective(f"{name} is off")


def _clip_rewards(value: list[float], values: ProjectValues) -> Meaning:
    low, high = value
    estimator = values["algo.advantage.estimator"]
    if estimator == "group_norm" and high >= 10 and low <= -10:
        return Ineffective("normalised rewards of a group stay within 10 deviations")
    if estimator not in ("gae", "reinforce"):
        raise RefusedValueError(
            f"OpenRLHF clips rewards after the baseline of {estimator}; algorithm.clip_rewards clips them before"
        )
    if low != -high:
        raise RefusedValueError("algorithm.clip_rewards has one bound for both sides")
    return {"algorithm.clip_rewards": high}


def _reward(value: str, _: ProjectValues) -> Meaning:
    if not value.endswith(".py"):
        raise RefusedValueError(
            "a server that scores has a protocol of its own here: reward.reward_manager.name=remote (docs/reward.md)"
        )
    parameters = parameters_of(Path(value), "reward_func")
    if parameters is not None and "queries" not in parameters:
        return {"reward.custom_reward_function.path": value, "reward.custom_reward_function.name": "reward_func"}
    raise RefusedValueError(
        "reward_func(queries, prompts, labels) gets prompts with responses; write reward_func(responses, "
        "ground_truths), "
        f"which returns a list of scores, and add reward.custom_reward_function.path={value} (docs/reward.md)"
    )


def _reward_model(value: str, _: ProjectValues) -> Meaning:
    if "," in value:
        raise RefusedValueError("there is one reward model; others can be roles (docs/extending.md)")
    return {"reward.reward_model.enable": True, "reward.reward_model.model.path": value}


def _overlong(value: float, values: ProjectValues) -> Meaning:
    prefix = "reward.reward_kwargs.overlong_buffer_cfg"
    return {
        "reward.reward_manager.name": "dapo",
        f"{prefix}.enable": True,
        f"{prefix}.len": int(value),
        f"{prefix}.penalty_factor": values["reward.overlong_penalty_factor"],
    }


def _filter(value: bool, values: ProjectValues) -> Meaning:
    low, high = values["algo.dynamic_filtering_range"]
    if value and (low, high) != (0, 1):
        raise RefusedValueError(
            f"groups are dropped where all scores are the same, not by the range {low:g} to {high:g}"
        )
    return {"algorithm.filter_groups.enable": True} if value else {}


def _filter_range(_: list[float], values: ProjectValues) -> Meaning:
    name = "algo.dynamic_filtering_enable"
    return ReadWith(name) if values[name] else Ineffective(f"{name} is off")


def _engines(value: int, values: ProjectValues) -> Meaning:
    if not value:
        return {"{rollout}.name": "auto"}
    named = {"{rollout}.name": "vllm"}
    if values["train.colocate_all"] and not values["train.async_enable"]:
        return named
    return {**named, **_own_devices(value * values["vllm.tensor_parallel_size"], values)}


def _own_devices(devices: int, values: ProjectValues) -> dict[str, Any]:
    per_node = values["actor.num_gpus_per_node"]
    if devices > per_node and devices % per_node:
        raise RefusedValueError(f"{devices} GPUs of the engines are no whole number of nodes with {per_node} GPUs")
    return {"{rollout}.nnodes": max(1, devices // per_node), "{rollout}.n_gpus_per_node": min(devices, per_node)}


def _asynchronous(value: bool, values: ProjectValues) -> Meaning:
    if not value:
        return {}
    if not values["vllm.num_engines"]:
        raise RefusedValueError("set vllm.num_engines: generation needs devices of its own")
    return {"trainer.v1.trainer_mode": "separate_async", "trainer.v1.drain": not values["train.partial_rollout_enable"]}


def _queue(value: int, values: ProjectValues) -> Meaning:
    if not values["train.async_enable"]:
        return Ineffective("train.async_enable is off")
    return {"trainer.v1.separate_async.num_warmup_batches": value}


def _generate_batch(value: int, values: ProjectValues) -> Meaning:
    if value == values["rollout.batch_size"]:
        return {}
    if values["algo.dynamic_filtering_enable"]:
        return {"data.gen_batch_size": value}
    raise RefusedValueError("prompts are answered as the step needs them; data.gen_batch_size is for dynamic filtering")


def _in_evaluation(keys: Any) -> Any:
    def translate(value: Any, values: ProjectValues) -> Meaning:
        if values["eval.dataset"] is None:
            return Ineffective("there is no eval.dataset")
        return dict(keys(value))

    return translate


def _at(key: str) -> Any:
    return lambda value: {key: value}


_VALIDATION = "{rollout}.val_kwargs"
_ELSEWHERE = "the roles share the policy's devices (docs/rollout.md); results do not depend on it"

_ROWS: tuple[ProjectSetting, ...] = (
    # devices
    row("actor.num_nodes actor_num_nodes", "trainer.nnodes", kind="int", default=1),
    row("actor.num_gpus_per_node actor_num_gpus_per_node", "trainer.n_gpus_per_node", kind="int", default=8),
    *idle("ref.num_nodes|ref_num_nodes ref.num_gpus_per_node|ref_num_gpus_per_node reward.num_nodes|reward_num_nodes "
          "reward.num_gpus_per_node|reward_num_gpus_per_node critic.num_nodes|critic_num_nodes "
          "critic.num_gpus_per_node|critic_num_gpus_per_node", _ELSEWHERE),
    *idle("train.colocate_actor_ref|colocate_actor_ref train.colocate_critic_reward|colocate_critic_reward", _ELSEWHERE,
          kind="flag"),
    flag("train.colocate_all colocate_all_models", translate=read_with("vllm.num_engines")),
    row("vllm.num_engines vllm_num_engines", kind="int", translate=_engines),
    row("vllm.tensor_parallel_size vllm_tensor_parallel_size", "{rollout}.tensor_model_parallel_size", kind="int",
        default=1),
    row("vllm.gpu_memory_utilization vllm_gpu_memory_utilization", "{rollout}.gpu_memory_utilization", kind="float"),
    flag("vllm.enforce_eager enforce_eager", "{rollout}.enforce_eager"),
    flag("vllm.enable_prefix_caching enable_prefix_caching", "{rollout}.enable_prefix_caching", default=None),
    flag("vllm.enable_sleep vllm_enable_sleep", "{rollout}.free_cache_engine", default=None),
    *idle("vllm.sync_backend|vllm_sync_backend", "weights are sent by NCCL or in the memory of the device"),
    *idle("vllm.sync_with_ray|vllm_sync_with_ray", "weights are sent by NCCL or in the memory of the device",
          kind="flag"),
    flag("ds.enable_sleep deepspeed_enable_sleep",
         translate=constant({"{engine}.param_offload": True, "{engine}.optimizer_offload": True})),
    flag("ref.offload", "actor_rollout_ref.ref.fsdp_config.param_offload"),
    flag("reward.offload", "reward.reward_model.fsdp_config.param_offload"),
    flag("ref_reward_offload",
         translate=constant({"actor_rollout_ref.ref.fsdp_config.param_offload": True,
                             "reward.reward_model.fsdp_config.param_offload": True})),
    # asynchronous training
    flag("train.async_enable async_train", translate=_asynchronous),
    row("train.async_queue_size async_queue_size", kind="int", default=1, translate=_queue),
    flag("train.partial_rollout_enable partial_rollout",
         translate=lambda value, values: {} if values["train.async_enable"] or not value
         else Ineffective("train.async_enable is off")),
    # models
    row("actor.model_name_or_path pretrain", "{model}.path"),
    row("critic.model_name_or_path critic_pretrain", translate=_of_critic("model.path")),
    row("reward.model_name_or_path reward_pretrain", translate=_reward_model),
    row("reward.remote_url remote_rm_url", translate=_reward),
    *refused("train.agent_func_path|agent_func_path",
             "sessions of your own are agent loops (docs/agents.md) or environments (docs/environments.md)"),
    *refused("ds.value_head_prefix|value_head_prefix", "the head of a value model is called score", "score"),
    flag("actor.gradient_checkpointing_enable", "{model}.enable_gradient_checkpointing", default=None),
    flag("gradient_checkpointing", default=None,
         translate=lambda value, values: {"{model}.enable_gradient_checkpointing": value} | (
             {"critic.model.enable_gradient_checkpointing": value} if _has_critic(values) else {})),
    *idle("actor.gradient_checkpointing_reentrant|gradient_checkpointing_use_reentrant",
          "activations are recomputed without reentrance", kind="flag"),
    flag("actor.freeze_visual_encoder freeze_visual_encoder", "{actor}.freeze_vision_tower"),
    row("actor.aux_loss_coef aux_loss_coef", "{engine}.router_aux_loss_coef", kind="float", default=0.0),
    flag("train.enable_ema enable_ema", refused="there is no average of the weights"),
    *idle("train.ema_beta|ema_beta", "it belongs to train.enable_ema"),
    # batches
    row("rollout.batch_size rollout_batch_size", "data.train_batch_size", kind="int", default=1024),
    row("rollout.n_samples_per_prompt n_samples_per_prompt", "{rollout}.n", kind="int", default=1),
    row("train.batch_size train_batch_size", kind="int", default=128, translate=_mini_batch),
    row("train.micro_batch_size micro_train_batch_size", kind="int", default=1,
        translate=_micro("{actor}.ppo_micro_batch_size_per_gpu")),
    row("rollout.micro_batch_size micro_rollout_batch_size", kind="int", default=1,
        translate=_micro("{rollout}.log_prob_micro_batch_size_per_gpu")),
    flag("train.dynamic_batch_enable use_dynamic_batch", "{actor}.use_dynamic_bsz"),
    row("train.max_tokens_per_gpu train_max_tokens_per_gpu", kind="int", default=16192,
        translate=_tokens("{actor}.ppo_max_token_len_per_gpu")),
    row("rollout.max_tokens_per_gpu rollout_max_tokens_per_gpu", kind="int",
        translate=_tokens("{rollout}.log_prob_max_token_len_per_gpu")),
    row("rollout.vllm_generate_batch_size vllm_generate_batch_size", kind="int", translate=_generate_batch),
    row("train.max_epochs max_epochs", "{actor}.ppo_epochs", kind="int", default=1),
    row("train.num_episodes num_episodes", "trainer.total_epochs", kind="int", default=1),
    # lengths and sampling
    row("data.max_len max_len", kind="int", default=2048, translate=_lengths),
    row("prompt_max_len", "data.max_prompt_length", kind="int"),
    row("rollout.max_new_tokens max_new_tokens generate_max_len", "data.max_response_length", kind="int"),
    row("rollout.top_p top_p", "{rollout}.top_p", kind="float", default=1.0),
    row("rollout.temperature temperature", "{rollout}.temperature", kind="float", default=1.0),
    # algorithm
    row("algo.advantage.estimator advantage_estimator", default="gae", translate=_estimator),
    row("algo.advantage.lambd lambd", kind="float", default=1.0, translate=_rewards_alone("lam")),
    row("algo.advantage.gamma gamma", kind="float", default=1.0, translate=_rewards_alone("gamma")),
    flag("algo.advantage.no_std_norm no_advantage_std_norm", translate=_spread),
    flag("algo.advantage.is_correction_enable enable_vllm_is_correction", translate=_correction),
    row("algo.advantage.is_correction_threshold vllm_is_truncated_threshold", kind="numbers", default=[0.5, 5.0],
        translate=_of_correction),
    row("algo.advantage.is_correction_type vllm_is_correction_type", default="tis", translate=_of_correction),
    row("algo.kl.init_coef init_kl_coef", kind="float", default=0.01, translate=_kl),
    flag("algo.kl.use_loss use_kl_loss", translate=_of_kl),
    row("algo.kl.estimator kl_estimator", default="k1", translate=_of_kl),
    row("algo.kl.target kl_target", kind="float", translate=_target),
    row("algo.kl.horizon kl_horizon", kind="int", default=10000, translate=_horizon),
    flag("algo.dynamic_filtering_enable dynamic_filtering", translate=_filter),
    row("algo.dynamic_filtering_range dynamic_filtering_reward_range", kind="numbers", default=[0.0, 1.0],
        translate=_filter_range),
    row("actor.eps_clip eps_clip", kind="float", default=0.2,
        translate=lambda value, values: Ineffective("actor.eps_clip_low_high is set")
        if values.has("actor.eps_clip_low_high") else {"{actor}.clip_ratio": value}),
    row("actor.eps_clip_low_high eps_clip_low_high", kind="numbers",
        translate=lambda value, _: {"{actor}.clip_ratio_low": value[0], "{actor}.clip_ratio_high": value[1]}),
    row("actor.dual_clip dual_clip", kind="float", translate=_dual_clip),
    row("actor.policy_loss_type policy_loss_type", default="ppo", translate=_loss),
    row("actor.entropy_coef entropy_loss_coef", kind="float", translate=_entropy),
    row("critic.value_clip value_clip", kind="float", default=0.5, translate=_of_critic("cliprange_value")),
    row("critic.freezing_steps freezing_actor_steps", kind="int", default=-1,
        translate=lambda value, values: ({"trainer.critic_warmup": max(0, value)} if _has_critic(values)
                                         else Ineffective("there is no critic without estimator gae"))),
    *idle("critic.save_value_network|save_value_network", "checkpoints hold the critic", kind="flag"),
    *idle("ptx_coef", "there is no pretrain_data"),
    *refused("pretrain_data", "there is no loss of pretraining beside the policy's"),
    # rewards
    row("reward.clip_range reward_clip_range", kind="numbers", default=[-10.0, 10.0], translate=_clip_rewards),
    flag("reward.normalize_enable normalize_reward",
         refused="OpenRLHF takes the mean and spread that its reward model has saved; "
             "algorithm.normalize_rewards=running "
         "takes those of the run"),
    row("reward.overlong_buffer_len overlong_buffer_len", kind="float", translate=_overlong),
    row("reward.overlong_penalty_factor overlong_penalty_factor", kind="float", default=1.0,
        translate=lambda _, values: {} if values["reward.overlong_buffer_len"] is not None
        else Ineffective("it belongs to reward.overlong_buffer_len")),
    *refused("reward.stop_properly_penalty_coef|stop_properly_penalty_coef",
             "truncated responses have no penalty of their own; reward.overlong_buffer_len gives long ones one",
             kind="float"),
    # data
    row("data.prompt_dataset prompt_data",
        translate=lambda value, values: {
            "data.train_files": files(value, values["data.prompt_split"], values["data.prompt_probs"])}),
    row("data.prompt_probs prompt_data_probs", translate=read_with("data.prompt_dataset")),
    row("data.prompt_split prompt_split", default="train", translate=read_with("data.prompt_dataset")),
    row("data.max_samples max_samples", kind="int", translate=samples("data.train_max_samples")),
    row("data.input_key input_key", "data.prompt_key", default="input"),
    row("data.label_key label_key", "data.ground_truth_key"),
    *refused("data.input_template|input_template",
             "prompts are messages, or text as one message of the user; write the template into the data, or set "
             "model.custom_chat_template"),
    flag("data.apply_chat_template apply_chat_template", translate=lambda *_: {}),
    row("data.dataloader_num_workers dataloader_num_workers", "data.dataloader_num_workers", kind="int"),
    row("data.image_key image_key", "data.image_key", default="images"),
    row("data.max_images_per_prompt max_images_per_prompt", kind="int", default=0,
        translate=lambda value, _: {"{rollout}.limit_images": value} if value else {}),
    # validation
    row("eval.dataset eval_dataset",
        translate=lambda value, values: {"data.val_files": files(value, values["eval.split"], None)}),
    row("eval.split eval_split", default="train", translate=_in_evaluation(lambda _: {})),
    row("eval.steps eval_steps", kind="int", default=-1, translate=_in_evaluation(_at("trainer.test_freq"))),
    row("eval.temperature eval_temperature", kind="float", default=0.6,
        translate=_in_evaluation(lambda value: {f"{_VALIDATION}.temperature": value,
                                                f"{_VALIDATION}.do_sample": value > 0})),
    row("eval.n_samples_per_prompt eval_n_samples_per_prompt", kind="int", default=4,
        translate=_in_evaluation(_at(f"{_VALIDATION}.n"))),
    # optimizers
    *optimizer("actor.", 1e-6, {"adam.lr": "actor_learning_rate"}),
    row("critic.adam.lr critic_learning_rate", kind="float", default=9e-6, translate=_of_critic("optim.lr")),
    row("critic.adam.betas", kind="numbers", default=[0.9, 0.95], translate=_of_critic("optim.betas")),
    row("critic.adam.eps", kind="float", default=1e-8,
        translate=lambda value, _: {} if value == 1e-8 else {"critic.optim.override_optimizer_config.eps": value}),
    row("critic.adam.weight_decay", kind="float", default=0.0, translate=_of_critic("optim.weight_decay")),
    row("critic.lr_scheduler", default="cosine_with_min_lr", translate=_critic_schedule),
    row("critic.lr_warmup_ratio", kind="float", default=0.03, translate=_of_critic("optim.lr_warmup_steps_ratio")),
    row("critic.min_lr_ratio", kind="float", default=0.1,
        translate=lambda *_: {}),
    row("critic.max_norm", kind="float", default=1.0, translate=_of_critic("optim.clip_grad")),
    *refused("critic.optim", "Muon has one learning rate here: set critic.optim.optimizer=Muon", "adam"),
    *idle("critic.muon.lr critic.muon.momentum critic.muon.ns_steps", "only Muon reads it"),
    *idle("critic.muon.nesterov critic.muon.no_nesterov", "only Muon reads it", kind="flag"),
    row("l2", kind="float", covers=_both("adam.weight_decay"), translate=_shared_with_critic("weight_decay")),
    row("adam_betas", kind="numbers", covers=_both("adam.betas"), translate=_shared_with_critic("betas")),
    row("max_norm", kind="float", covers=_both("max_norm"), translate=_shared_with_critic("clip_grad")),
    row("lr_warmup_ratio", kind="float", covers=_both("lr_warmup_ratio"),
        translate=_shared_with_critic("lr_warmup_steps_ratio")),
    row("lr_scheduler", covers=_both("lr_scheduler"), translate=lambda value, values: {
        **schedule(value, 0.1, "{optim}"), **(schedule(value, 0.1, "critic.optim") if _has_critic(values) else {})}),
    # randomness
    row("train.seed seed", kind="int", default=42,
        translate=lambda value, _: {"data.seed": value, "{engine}.seed": value, "{rollout}.seed": value}),
    full_determinism("{engine}.full_determinism", "{rollout}.full_determinism"),
    *SHARED,
)  # fmt: skip


def _constant(values: ProjectValues) -> dict[str, Any]:
    """OpenRLHF has no dual clip unless it is set, and shuffles samples before it updates."""
    updates = values["rollout.batch_size"] * values["rollout.n_samples_per_prompt"] // values["train.batch_size"]
    shuffles = updates > 1 and not values["train.dynamic_batch_enable"] and values["ds.ring_attn_size"] == 1
    bound = values["actor.policy_loss_type"] == "ppo" and values["actor.dual_clip"] is None
    return {
        **({"{actor}.clip_ratio_c": UNBOUNDED} if bound else {}),
        **({"{actor}.shuffle": True} if shuffles else {}),
    }


def _differences(values: ProjectValues) -> list[str]:
    lines = []
    if not values["data.apply_chat_template"]:
        lines.append("a prompt of text goes to the model as it is; here it is one message of the user, in the chat "
                     "template")  # fmt: skip
    if values["data.max_len"] and values["rollout.max_new_tokens"] is None and values["prompt_max_len"] is None:
        lines.append(f"data.max_len={values['data.max_len']} limits prompt and response together; the command shares "
            f"it "
                     "in halves")  # fmt: skip
    estimator = values["algo.advantage.estimator"]
    if values["algo.kl.init_coef"] > 0 and not values["algo.kl.use_loss"] and estimator not in ("gae", "reinforce"):
        lines.append(
            f"{estimator} compares rewards before the KL is subtracted; here the KL is part of the rewards that it "
            "compares (set algo.kl.use_loss for the KL in the loss)"
        )
    correction = values["algo.advantage.is_correction_enable"] and values["algo.advantage.is_correction_type"] == "tis"
    if correction and (low := values["algo.advantage.is_correction_threshold"][0]) > 0:
        lines.append(f"weights of the correction below {low:g} are raised to it; here they stay")
    return lines


POLICY = SettingTable(
    "OpenRLHF",
    _ROWS,
    program=lambda values: "ppo" if _has_critic(values) else "grpo",
    constant=_constant,
    differences=_differences,
)
