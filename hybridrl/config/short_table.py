"""The table of short names: TRL's names and those of hybridrl, with TRL's meaning where both have one."""

from pathlib import Path
from typing import Any

from hybridrl.config.schema.choices import BYPASS_LOSSES
from hybridrl.config.short_foreign import FOREIGN
from hybridrl.config.short_names import RefusedValueError, ShortName, Translation

_PPO, _SFT, _DPO, _KTO, _RM = "ppo_trainer", "sft_trainer", "dpo_trainer", "kto_trainer", "rm_trainer"
_SUPERVISED = (_SFT, _DPO, _KTO, _RM)


def _row(names: str, key: str | dict[str, str] = "", translate: Translation | None = None, **more: Any) -> ShortName:
    return ShortName(tuple(names.split()), key, translate, **more)


def _common(names: str, key: str | dict[str, str] = "", translate: Translation | None = None, **more: Any) -> ShortName:
    return _row(names, key, translate, common=True, **more)


def _supervised(key: str) -> dict[str, str]:
    return dict.fromkeys(_SUPERVISED, key)


def _text(value: Any) -> str:
    """A value as text; members of an enumeration, as transformers has them, by their value."""
    return str(getattr(value, "value", value)).lower()


def _is_on(value: Any) -> bool:
    return value is True or _text(value) == "true"


def _one_of(**meanings: Any) -> Translation:
    """Translate names; a hyphen of a name is an underscore."""

    def translate(value: Any) -> Any:
        name = _text(value).replace("-", "_")
        if name not in meanings:
            raise RefusedValueError(f"there is {', '.join(meanings)} here")
        return meanings[name]

    return translate


def _whole(value: Any) -> Any:
    if isinstance(value, float) and not value.is_integer():
        raise RefusedValueError("epochs are whole here; max_steps ends a run earlier")
    return int(value) if isinstance(value, float) else value


def split_place(text: str) -> tuple[str, str | None]:
    """Split `FILE.py` or `FILE.py:NAME` into the file and the name; a `pkg://` module has no name."""
    path, _, name = (text, "", "") if text.startswith("pkg://") else text.partition(":")
    return path, name or None


def _reward(value: Any) -> Any:
    if isinstance(value, str):
        path, name = split_place(value)
        prefix = "reward.custom_reward_function"
        return {f"{prefix}.path": path, **({f"{prefix}.name": name} if name else {})}
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise RefusedValueError("give FILE.py, FILE.py:NAME, or a list of them")
    functions = {}
    for each in value:
        path, name = split_place(each)
        if (label := name or Path(path).stem) in functions:
            raise RefusedValueError(f"two functions are called {label}; set reward.functions={{NAME: {{path: ...}}}}")
        functions[label] = {"path": path, **({"name": name} if name else {})}
    return {"reward.functions": functions}


def _beta(value: Any) -> Any:
    on = float(value) > 0
    return {"{actor}.use_kl_loss": on, **({"{actor}.kl_loss_coef": value} if on else {})}


def _warmup_steps(value: Any) -> Any:
    return {"{optim}.lr_warmup_steps_ratio": value} if 0 < value < 1 else {"{optim}.lr_warmup_steps": int(value)}


def _loss_of_policy(value: Any) -> Any:
    name = _text(value)
    if name in BYPASS_LOSSES:
        return {"algorithm.rollout_correction.loss_type": name}
    mode = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
    if name in mode:
        return {"{actor}.loss_agg_mode": mode[name]}
    if name in ("cispo", "sapo"):
        return {"{actor}.policy_loss.loss_mode": name}
    raise RefusedValueError(
        "there is dapo, grpo, dr_grpo, cispo and sapo here, and by actor_rollout_ref.actor.policy_loss.loss_mode others"
    )


def _loss_of_pairs(value: Any) -> Any:
    names = list(value) if isinstance(value, list | tuple) else [value]
    if len(names) != 1:
        raise RefusedValueError("one loss at a time; dpo.sft_coef adds the likelihood of chosen answers")
    return _text(names[0])


_PLAIN = {"{optim}.optimizer": "AdamW"}
_EIGHT_BITS = {"{optim}.optimizer": "AdamW8bit", "{optim}.optimizer_impl": "torchao.optim"}
_optimizer = _one_of(
    adamw=_PLAIN,
    adamw_torch=_PLAIN,
    adamw_torch_fused=_PLAIN,
    adamw_hf=_PLAIN,
    adamw_8bit=_EIGHT_BITS,
    adamw_bnb_8bit=_EIGHT_BITS,
    adamw_torch_8bit=_EIGHT_BITS,
    paged_adamw_8bit=_EIGHT_BITS,
    sgd={"{optim}.optimizer": "SGD"},
    muon={"{optim}.optimizer": "Muon"},
)
_scheduler = _one_of(
    constant="constant", constant_with_warmup="constant", linear="linear", cosine="cosine",
    warmup_stable_decay="wsd", wsd="wsd",
)  # fmt: skip


def _strategy(key: str, epochs: bool) -> Translation:
    each = {key: "after_each_epoch"} if epochs else None

    def translate(value: Any) -> Any:
        name = _text(value)
        if name in ("no", "false"):
            return {key: -1}
        if name == "epoch" and each:
            return each
        if name != "steps":
            raise RefusedValueError(f"there is no and steps here; {key} is the number of steps between")
        return None

    return translate


def _loggers(value: Any) -> Any:
    names = [value] if isinstance(value, str) else [str(each) for each in value or ["none"]]
    return ["console", *(name for name in names if name not in ("none", "console"))]


def _resume(value: Any) -> Any:
    if _text(value) in ("none", "false"):
        return {"trainer.resume_mode": "disable"}
    if _is_on(value):
        return None
    return {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(value)}


def _validation_metric(value: Any) -> Any:
    return "val/loss" if value in ("loss", "eval_loss") else value


def _model_init(value: Any) -> Any:
    settings: dict[str, Any] = {}
    for name, setting in (value or {}).items():
        if name in ("dtype", "torch_dtype"):
            settings["{engine}.model_dtype"] = str(setting).removeprefix("torch.")
        elif name == "attn_implementation":
            settings["{model}.override_config"] = {name: setting}
        elif name == "trust_remote_code":
            settings["{model}.trust_remote_code"] = setting
        elif name not in ("device_map", "use_cache", "revision") or (
            name == "revision" and setting not in (None, "main")
        ):
            raise RefusedValueError(f"{name} has no setting here; entries of config.json are model.override_config")
    return settings


def _engine_dtype(value: Any) -> Any:
    return None if value is None else ("bfloat16" if _is_on(value) else "float32")


_DATA = "data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows"
_BATCH = "of the batch in TRL's way"

_SAVES, _TESTS = "steps between checkpoints", "steps between validations"
_LOSSES = "how token losses are aggregated: dapo, grpo or dr_grpo; or another loss: cispo or sapo"

_ACTING: tuple[ShortName, ...] = (
    # model, data, reward
    _common("model model_name_or_path", "{model}.path"),
    _common("data train_dataset train_data", "data.train_files", meaning=f"training {_DATA}"),
    _common("val_data eval_data eval_dataset", "data.val_files", meaning=f"validation {_DATA}"),
    _common(
        "reward reward_funcs reward_function",
        {_PPO: "reward.custom_reward_function.path"},
        _reward,
        meaning="FILE.py, FILE.py:NAME, or a list of them; in Python also functions; default: scorers by data source",
    ),
    _common("max_prompt_length", {_PPO: "data.max_prompt_length"}),
    _common("max_completion_length max_response_length max_new_tokens", {_PPO: "data.max_response_length"}),
    _common("max_length max_seq_length", _supervised("data.max_length")),
    _row("truncation_mode", _supervised("data.truncation"), _one_of(keep_start="right", keep_end="left")),
    _row("shuffle shuffle_dataset", "data.shuffle"),
    _row("train_sampling_strategy", {_KTO: "data.shuffle"}, _one_of(random=True, sequential=False)),
    _row("chat_template_kwargs", "data.apply_chat_template_kwargs"),
    _row("system_prompt", "data.system_prompt"),
    _row("dataset_text_field", {_SFT: "data.messages_key"}, lambda value: None if value == "text" else value),
    # adapter
    _common("lora_rank lora_r", "{model}.lora_rank"),
    _common("lora_alpha", "{model}.lora_alpha"),
    _row("target_modules lora_target_modules", "{model}.target_modules"),
    _row("load_in_4bit", "{model}.load_in_4bit"),
    _row("external_lib", "{model}.external_lib"),
    _row(
        "lora_dropout",
        refused="an adapter has no dropout here (docs/lora.md); leave it out",
        usual=(None, 0, 0.0),
    ),
    # steps and learning rate
    _common("lr learning_rate", "{optim}.lr"),
    _common(
        "max_steps total_training_steps",
        "trainer.total_training_steps",
        derived=True,
        meaning="end after this many steps (with per_device_train_batch_size, in updates); -1: epochs decide",
    ),
    _common("num_train_epochs total_epochs", "trainer.total_epochs", _whole, default="30"),
    _common("lr_scheduler_type", "{optim}.lr_scheduler_type", _scheduler, default="constant"),
    _row("warmup_steps", "{optim}.lr_warmup_steps", derived=True, meaning="steps of linear warm-up; below 1: a share"),
    _row("lr_warmup_steps", "{optim}.lr_warmup_steps"),
    _row("warmup_ratio lr_warmup_steps_ratio", "{optim}.lr_warmup_steps_ratio"),
    _common("weight_decay", "{optim}.weight_decay"),
    _common("max_grad_norm clip_grad", "{optim}.clip_grad"),
    _row("optim", "{optim}.optimizer", _optimizer),
    _row("adam_beta1", "{optim}.betas", derived=True, meaning="Adam's first decay rate"),
    _row("adam_beta2", "{optim}.betas", derived=True, meaning="Adam's second decay rate"),
    _row(
        "adam_epsilon",
        "{optim}.override_optimizer_config",
        lambda value: None if value is None or float(value) == 1e-8 else {"eps": value},
        meaning="Adam's epsilon",
    ),
    _common(
        "seed", "data.seed", derived=True, meaning="one seed for data, sampling and training: every seed that acts"
    ),
    _row("data_seed", "data.seed", lambda value: value, meaning="seed of shuffling alone"),
    # batches
    _common("train_batch_size", "data.train_batch_size"),
    _common("ppo_mini_batch_size", {_PPO: "{actor}.ppo_mini_batch_size"}),
    _common(
        "per_device_train_batch_size",
        {_PPO: "{actor}.ppo_micro_batch_size_per_gpu"} | _supervised("data.micro_batch_size_per_gpu"),
        derived=True, meaning=f"sequences that a process computes at once, and a factor {_BATCH}",
    ),
    _common(
        "gradient_accumulation_steps", {_PPO: "{actor}.ppo_mini_batch_size"} | _supervised("data.train_batch_size"),
        derived=True, meaning=f"micro-batches per update, a factor {_BATCH}",
    ),
    _row(
        "steps_per_generation", {_PPO: "data.train_batch_size"}, derived=True,
        meaning="micro-batches per generation; default: gradient_accumulation_steps",
    ),
    _row(
        "generation_batch_size", {_PPO: "data.train_batch_size"}, derived=True,
        meaning="responses per generation, in place of steps_per_generation",
    ),
    _row("ppo_micro_batch_size_per_gpu", {_PPO: "{actor}.ppo_micro_batch_size_per_gpu"}),
    _row("use_dynamic_bsz", {_PPO: "{actor}.use_dynamic_bsz"}),
    _row("ppo_max_token_len_per_gpu", {_PPO: "{actor}.ppo_max_token_len_per_gpu"}),
    # reinforcement learning
    _row(
        "asynchronous", {_PPO: "trainer.v1.trainer_mode"},
        _one_of(false="sync", true="colocate_async", colocate="colocate_async", separate="separate_async"),
        meaning="answer prompts ahead of training: true or colocate, on its devices; separate, on devices of their own",
    ),
    _common("num_generations n", {_PPO: "{rollout}.n"}),
    _common("temperature", {_PPO: "{rollout}.temperature"}),
    _row("top_p", {_PPO: "{rollout}.top_p"}),
    _row("top_k", {_PPO: "{rollout}.top_k"}, lambda value: -1 if value in (0, None) else value),
    _row("do_sample", {_PPO: "{rollout}.do_sample"}),
    _common(
        "beta", {_PPO: "{actor}.kl_loss_coef"}, _beta,
        meaning="weight of the KL to the reference in the loss; 0: no reference", default="0",
    ),
    _common("beta", {_DPO: "dpo.beta", _KTO: "kto.beta"}),
    _common("num_iterations ppo_epochs", {_PPO: "{actor}.ppo_epochs"}, meaning="passes over a batch"),
    _row("epsilon", {_PPO: "{actor}.clip_ratio"}),
    _row("epsilon_high", {_PPO: "{actor}.clip_ratio_high"}, lambda value: value),
    _row(
        "delta", {_PPO: "{actor}.clip_ratio_c"},
        lambda value: {"{rollout}.checkpoint_engine.delta": value} if isinstance(value, bool) else value,
        meaning="bound of the ratio for negative advantages",
    ),
    _common("loss_type", {_PPO: "{actor}.loss_agg_mode"}, _loss_of_policy, meaning=_LOSSES, default="dapo"),
    _row("loss_type", {_SFT: "sft.loss_type"}, lambda value: {"chunked_nll": "nll"}.get(_text(value), value)),
    _row("loss_type", {_DPO: "dpo.loss_type"}, _loss_of_pairs),
    _row("loss_type", {_KTO: "kto.loss_type"}),
    _row("loss_agg_mode", {_PPO: "{actor}.loss_agg_mode"}),
    _row(
        "scale_rewards",
        {_PPO: "algorithm.norm_adv_by_std_in_grpo"},
        _one_of(group=True, true=True, none=False, false=False),
    ),
    _row(
        "importance_sampling_level",
        {_PPO: "{actor}.policy_loss.loss_mode"},
        _one_of(token=None, sequence="gspo"),
        meaning="token, or sequence (GSPO)",
        default="token",
    ),
    _row("entropy_coef entropy_coeff", {_PPO: "{actor}.entropy_coeff"}),
    _row("sapo_temperature_pos", {_PPO: "{actor}.tau_pos"}),
    _row("sapo_temperature_neg", {_PPO: "{actor}.tau_neg"}),
    _row("label_smoothing", {_DPO: "dpo.label_smoothing"}),
    _row(
        "precompute_ref_log_probs", {_DPO: "dpo.reference", _KTO: "kto.reference"},
        lambda value: "cache" if _is_on(value) else None,
        meaning="true: compute the reference before the first step and keep it",
    ),
    _row("desirable_weight", {_KTO: "kto.desirable_weight"}),
    _row("undesirable_weight", {_KTO: "kto.undesirable_weight"}),
    _row("center_rewards_coefficient", {_RM: "rm.centering_coef"}, lambda value: value),
    # generation
    _common(
        "use_vllm", {_PPO: "{rollout}.name"}, lambda value: "vllm" if _is_on(value) else None,
        meaning="true: generate with vLLM; else by what is installed", default="false",
    ),
    _row("gpu_memory_utilization vllm_gpu_memory_utilization", {_PPO: "{rollout}.gpu_memory_utilization"}),
    _row("vllm_tensor_parallel_size", {_PPO: "{rollout}.tensor_model_parallel_size"}),
    _row("max_model_len vllm_max_model_length", {_PPO: "{rollout}.max_model_len"}),
    _row("free_cache_engine vllm_enable_sleep_mode", {_PPO: "{rollout}.free_cache_engine"}),
    *(
        _row(name, {_PPO: f"{{rollout}}.{name}"})
        for name in (
            *("max_num_seqs", "max_num_batched_tokens", "enforce_eager", "enable_chunked_prefill"),
            *("enable_prefix_caching", "cudagraph_capture_sizes", "expert_parallel_size"),
        )
    ),
    _row("extra_body", {_PPO: "{rollout}.openai.extra_body"}),
    # the run
    _common("output_dir default_local_dir", "trainer.default_local_dir"),
    _common("run_name experiment_name", "trainer.experiment_name"),
    _row("push_to_hub", "trainer.hub.model_id", derived=True, meaning="upload the trained model to hub_model_id"),
    _row("hub_model_id", "trainer.hub.model_id", derived=True, meaning="repository of push_to_hub, ORG/NAME"),
    _row("hub_private_repo", "trainer.hub.private"),
    _row("hub_revision", "trainer.hub.revision"),
    _common("project project_name", "trainer.project_name"),
    _common("report_to logger", "trainer.logger", _loggers, default="console"),
    _common("save_steps save_freq", "trainer.save_freq", derived=True, meaning=f"{_SAVES}; -1: none", default="-1"),
    _common("eval_steps test_freq", "trainer.test_freq", derived=True, meaning=f"{_TESTS}; -1: none", default="-1"),
    *(
        _row(name, {tree: key}, _strategy(key, epochs=tree != _PPO), meaning=f"no, steps (see {steps}){more}")
        for name, key, steps in (
            ("save_strategy", "trainer.save_freq", "save_steps"),
            ("eval_strategy", "trainer.test_freq", "eval_steps"),
        )
        for tree, more in ((_PPO, ""), *((tree, ", or epoch") for tree in _SUPERVISED))
    ),
    _row("eval_on_start", {_PPO: "trainer.val_before_train"}),
    _row("save_total_limit", "trainer.max_actor_ckpt_to_keep"),
    _row("best_metric metric_for_best_model", "trainer.best_metric", _validation_metric),
    _row("greater_is_better", "trainer.greater_is_better"),
    _row("resume_from_checkpoint", "trainer.resume_mode", _resume, meaning="true, false, or a checkpoint's folder"),
    _common("nnodes", "trainer.nnodes"),
    _common("n_gpus_per_node", "trainer.n_gpus_per_node"),
    _row("dataloader_num_workers", {_PPO: "data.dataloader_num_workers"} | _supervised("data.num_workers")),
    # how it is computed
    _row("gradient_checkpointing enable_gradient_checkpointing", "{model}.enable_gradient_checkpointing"),
    _row("bf16", "{engine}.dtype", _engine_dtype, meaning="true: bfloat16, false: float32; default: by device"),
    _row(
        "model_init_kwargs", "{model}.override_config", _model_init,
        meaning="dtype: of the master weights; attn_implementation: attention kernels",
    ),
    _row("use_liger_kernel", "{model}.use_liger"),
    _row("full_determinism", "{engine}.full_determinism"),
    _row("torch_compile", {_PPO: "{actor}.use_torch_compile"} | _supervised("{engine}.use_torch_compile")),
    _row("activation_offloading", "{model}.enable_activation_offload"),
    _row("trust_remote_code", "{model}.trust_remote_code"),
    _row("use_cpu", "trainer.device", lambda value: "cpu" if _is_on(value) else None, meaning="true: train on the CPU"),
    _row(
        "router_aux_loss_coef", "{engine}.router_aux_loss_coef", lambda value: value, meaning="weight of that loss",
    ),
)  # fmt: skip

#: every row; of two rows with one name, a tree has the first whose key it has
TABLE = (*_ACTING, *FOREIGN)

#: words of other libraries, or of everyday language, and the names that they may mean
OTHER_WORDS: dict[str, tuple[str, ...]] = {
    "epochs": ("num_train_epochs",),
    "num_epochs": ("num_train_epochs",),
    "num_steps": ("max_steps",),
    "total_steps": ("max_steps",),
    "batch_size": ("train_batch_size", "per_device_train_batch_size"),
    "global_batch_size": ("train_batch_size",),
    "rollout_batch_size": ("train_batch_size",),
    "micro_batch_size": ("per_device_train_batch_size",),
    "micro_train_batch_size": ("per_device_train_batch_size",),
    "mini_batch_size": ("ppo_mini_batch_size", "train_batch_size"),
    "learningrate": ("learning_rate",),
    "actor_learning_rate": ("learning_rate",),
    "samples": ("num_generations",),
    "num_samples": ("num_generations",),
    "n_samples": ("num_generations",),
    "n_samples_per_prompt": ("num_generations",),
    "group_size": ("num_generations",),
    "num_rollouts": ("num_generations",),
    "init_kl_coef": ("beta",),
    "kl_beta": ("beta",),
    "clip_range": ("epsilon",),
    "eps_clip": ("epsilon",),
    "cliprange": ("epsilon",),
    "max_tokens": ("max_completion_length", "max_length"),
    "generate_max_len": ("max_completion_length",),
    "prompt_max_len": ("max_prompt_length",),
    "max_len": ("max_length", "max_completion_length"),
    "output": ("output_dir",),
    "out_dir": ("output_dir",),
    "save_path": ("output_dir",),
    "save_dir": ("output_dir",),
    "checkpoint_dir": ("output_dir",),
    "wandb": ("report_to",),
    "use_wandb": ("report_to",),
    "tracker": ("report_to",),
    "dataset": ("data",),
    "prompts": ("data",),
    "prompt_data": ("data",),
    "train_file": ("data",),
    "eval_file": ("val_data",),
    "valid_data": ("val_data",),
    "validation_data": ("val_data",),
    "test_data": ("val_data",),
    "reward_fn": ("reward",),
    "reward_func": ("reward",),
    "custom_reward": ("reward",),
    "pretrain": ("model",),
    "model_path": ("model",),
    "model_name": ("model",),
    "num_gpus": ("n_gpus_per_node",),
    "gpus": ("n_gpus_per_node",),
    "num_nodes": ("nnodes",),
    "random_seed": ("seed",),
    "r": ("lora_rank",),
    "rank": ("lora_rank",),
    "grad_clip": ("max_grad_norm",),
    "max_norm": ("max_grad_norm",),
    "warmup": ("warmup_steps", "warmup_ratio"),
    "scheduler": ("lr_scheduler_type",),
    "save_every": ("save_steps",),
    "eval_every": ("eval_steps",),
    "name": ("run_name",),
    "early_stopping": ("best_metric", "early_stopping_patience"),
}
