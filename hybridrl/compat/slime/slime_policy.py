"""`train.py` and `train_async.py` of slime: settings of reinforcement learning."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from hybridrl.compat.projects.project_settings import (
    Ineffective,
    Meaning,
    ProjectSetting,
    ProjectValues,
    ReadWith,
    SettingTable,
    WrittenSetting,
    flag,
    idle,
    read_with,
    refused,
    row,
)
from hybridrl.compat.projects.script_functions import attributes_of, parameters_of
from hybridrl.compat.slime.slime_reward import ATTRIBUTES
from hybridrl.compat.slime.slime_sizes import (
    asynchronous,
    by_rows,
    by_tokens,
    context_length,
    engine_devices,
    engine_of,
    expert_tensor,
    global_batch,
    has_critic,
    in_engine,
    layout,
    partial_rollout,
    prompt_length,
    splits_model,
    steps_per_rollout,
)
from hybridrl.compat.slime.slime_without_effect import MODEL, RUN
from hybridrl.config.short_names import RefusedValueError

#: a ratio that no token reaches, for losses without the bound of the dual clip
UNBOUNDED = 1e9
_ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.adv_estimator": "grpo"},
    "gspo": {"algorithm.adv_estimator": "grpo", "{actor}.policy_loss.loss_mode": "gspo"},
    "cispo": {"algorithm.adv_estimator": "grpo", "{actor}.policy_loss.loss_mode": "cispo"},
    "reinforce_plus_plus": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "ppo": {"algorithm.adv_estimator": "gae"},
}
_GROUPS = ("grpo", "gspo", "cispo")
_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
#: module and function of the scorers for `--rm-type`
_SCORERS = {
    "deepscaler": ("hybridrl.compat.slime.slime_reward", "score_after_thinking"),
    "dapo": ("hybridrl.reward.score.math_dapo", "compute_score"),
    "math": ("hybridrl.reward.score.math_reward", "compute_score"),
}
_CORRECTION = "algorithm.rollout_correction"
_VALIDATION = "{rollout}.val_kwargs"


def _with_critic(key: str) -> Any:
    """slime has one setting for the policy and the critic."""

    def translate(value: Any, values: ProjectValues) -> Meaning:
        return {f"{{optim}}.{key}": value, **({f"critic.optim.{key}": value} if has_critic(values) else {})}

    return translate


def _betas(value: float, values: ProjectValues) -> Meaning:
    return _with_critic("betas")([values["adam-beta1"], values["adam-beta2"]], values)


def _schedule(value: str, values: ProjectValues) -> Meaning:
    if value not in _SCHEDULES:
        raise RefusedValueError(f"there is {', '.join(_SCHEDULES)} here, and wsd by optim.lr_scheduler_type")
    return _with_critic("lr_scheduler_type")(_SCHEDULES[value], values)


def _floor(value: float, values: ProjectValues) -> Meaning:
    if values["lr-decay-style"] == "constant":
        return Ineffective("the schedule constant does not read it")
    return _with_critic("min_lr")(value, values)


def _clip(value: float, values: ProjectValues) -> Meaning:
    return {"{actor}.clip_ratio_low": value, "{actor}.clip_ratio_high": values["eps-clip-high"] or value}


def _dual_clip(value: float, values: ProjectValues) -> Meaning:
    if values["advantage-estimator"] in ("gspo", "cispo"):
        raise RefusedValueError(f"{values['advantage-estimator']} has no dual clip here")
    return {"{actor}.clip_ratio_c": value}


def _estimator(value: str, values: ProjectValues) -> Meaning:
    if value not in _ESTIMATORS:
        raise RefusedValueError(f"there is {', '.join(_ESTIMATORS)} here")
    return _ESTIMATORS[value]


def _spread(value: bool, values: ProjectValues) -> Meaning:
    if values["advantage-estimator"] not in _GROUPS:
        return Ineffective(f"{values['advantage-estimator']} does not divide by the spread of a group")
    return {"algorithm.norm_adv_by_std_in_grpo": not value}


def _whitened(value: bool, values: ProjectValues) -> Meaning:
    if value and values["advantage-estimator"] in _GROUPS:
        raise RefusedValueError("grpo is not whitened over the batch; "
            "algorithm.adv_estimator=reinforce_plus_plus_baseline "
                                "is")  # fmt: skip
    return {}


def _for_critic(key: str) -> Any:
    def translate(value: Any, values: ProjectValues) -> Meaning:
        return {key: value} if has_critic(values) else Ineffective("advantage-estimator ppo alone reads it")

    return translate


def _discount(value: float, values: ProjectValues) -> Meaning:
    if values["advantage-estimator"] in ("ppo", "reinforce_plus_plus"):
        return {"algorithm.gamma": value}
    return Ineffective(f"{values['advantage-estimator']} does not read it")


def _kl_of_reward(value: float, values: ProjectValues) -> Meaning:
    if not value:
        return {}
    if values["advantage-estimator"] in _GROUPS:
        return Ineffective(f"{values['advantage-estimator']} does not read it, in slime either; use-kl-loss does")
    kind = values["kl-loss-type"]
    return {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": value, "algorithm.kl_penalty": kind}


def _kl_loss(key: str) -> Any:
    def translate(value: Any, values: ProjectValues) -> Meaning:
        return {f"{{actor}}.{key}": value} if values["use-kl-loss"] else Ineffective("use-kl-loss is off")

    return translate


def _correction(value: bool, values: ProjectValues) -> Meaning:
    if not value:
        return {}
    low, high = values["tis-clip-low"], values["tis-clip"]
    if low > 0:
        raise RefusedValueError(f"weights below tis-clip-low={low:g} are not raised to it; leave it out")
    return {f"{_CORRECTION}.rollout_is": "token", f"{_CORRECTION}.rollout_is_threshold": high}


def _of_correction(_: float, values: ProjectValues) -> Meaning:
    return {} if values["use-tis"] else Ineffective("use-tis is off")


def _replay(mode: str) -> Any:
    def translate(value: bool, values: ProjectValues) -> Meaning:
        if mode == "R2" and values["use-rollout-routing-replay"]:
            return Ineffective("use-rollout-routing-replay is on")
        return {"{actor}.router_replay.mode": mode} if value else {}

    return translate


def _filter(value: str, _: ProjectValues) -> Meaning:
    if value.rpartition(".")[2] != "check_reward_nonzero_std":
        raise RefusedValueError("groups whose scores are all the same are dropped (check_reward_nonzero_std); other "
                                "filters are not called here")  # fmt: skip
    return {"algorithm.filter_groups.enable": True}


def _over_sampling(value: int, values: ProjectValues) -> Meaning:
    if value == values["rollout-batch-size"]:
        return {}
    if values["dynamic-sampling-filter-path"] is None:
        raise RefusedValueError("responses that finish first are not preferred: a step trains on all of its prompts")
    return {"data.gen_batch_size": value}


def _scorer(value: str, values: ProjectValues) -> Meaning:
    if values["custom-rm-path"] is not None:
        return Ineffective("custom-rm-path is set")
    if value not in _SCORERS:
        raise RefusedValueError(f"there is {', '.join(_SCORERS)} here; write a reward function (docs/reward.md)")
    module, name = _SCORERS[value]
    return {"reward.custom_reward_function.path": f"pkg://{module}", "reward.custom_reward_function.name": name}


def _reward(value: str, values: ProjectValues) -> Meaning:
    module, _dot, name = value.replace(":", ".").rpartition(".")
    path = Path(*module.split(".")).with_suffix(".py")
    parameters = parameters_of(path, name)
    prefix = "reward.custom_reward_function"
    if parameters is not None and not {"sample", "samples"} & set(parameters):
        return {f"{prefix}.path": str(path), f"{prefix}.name": name}
    if parameters == ["args", "sample"]:
        reads = attributes_of(path, name, "sample")
        column = "metadata" not in (reads or ()) or values["metadata-key"] == "metadata"
        if reads is not None and reads <= set(ATTRIBUTES) and column and attributes_of(path, name, "args") == set():
            key = values["reward-key"]
            return {
                f"{prefix}.path": "pkg://hybridrl.compat.slime.slime_reward", f"{prefix}.name": "score_sample",
                f"{prefix}.reward_kwargs.path": str(path), f"{prefix}.reward_kwargs.name": name,
                **({} if key is None else {f"{prefix}.reward_kwargs.key": key}),
            }  # fmt: skip
    raise RefusedValueError(
        f"{name}(args, sample) gets a Sample of slime, and a file that is there may read {', '.join(ATTRIBUTES)} of it "
        f"alone; write {name}(solution_str, ground_truth), which may be async, and add {prefix}.path={path} "
        "(docs/reward.md)"
    )


def _reward_key(value: str, values: ProjectValues) -> Meaning:
    if value == "score":
        return {}
    if values["custom-rm-path"] is None:
        raise RefusedValueError("the score of a reward that is a dict is its entry score")
    return ReadWith("custom-rm-path")


def _media(value: Any, _: ProjectValues) -> Meaning:
    keys = {"image": "data.image_key", "video": "data.video_key"}
    if not isinstance(value, dict) or set(value) - set(keys):
        raise RefusedValueError(f"there is {', '.join(keys)} here")
    return {keys[kind]: column for kind, column in value.items()}


def prompts(value: str, _: ProjectValues) -> Meaning:
    """The training files; slime's slices `FILE@[0:100]` are refused."""
    if "@[" in value:
        raise RefusedValueError("a slice of a file is not read; data.train_max_samples limits the rows")
    return {"data.train_files": value}


def _validation_files(value: list[str], _: ProjectValues) -> Meaning:
    if len(value) > 1 and len(value) % 2:
        raise RefusedValueError("it is pairs of a name and a file")
    paths = value if len(value) == 1 else value[1::2]
    return {"data.val_files": paths if len(paths) > 1 else paths[0]}


def _in_evaluation(keys: Any) -> Any:
    def translate(value: Any, values: ProjectValues) -> Meaning:
        return dict(keys(value)) if values["eval-prompt-data"] else Ineffective("there is no eval-prompt-data")

    return translate


def _same_as(name: str) -> Any:
    def translate(value: str, values: ProjectValues) -> Meaning:
        if value == values[name]:
            return {}
        raise RefusedValueError(f"validation has the columns of training: rename its column to {name}={values[name]}")

    return translate


def _validation_length(value: int, values: ProjectValues) -> Meaning:
    if value == values["rollout-max-response-len"]:
        return {}
    return Ineffective("responses of validation end at data.max_response_length, as those of training do")


def loggers(values: ProjectValues) -> Meaning:
    """The loggers of a run."""
    wandb = ["wandb"] if values["use-wandb"] else []
    return {"trainer.logger": ["console", *wandb, *(["tensorboard"] if values["use-tensorboard"] else [])]}


def _checkpoint(value: str, values: ProjectValues) -> Meaning:
    if value in (values["save"], values["ref-load"]) or value == values["hf-checkpoint"]:
        return {"trainer.resume_mode": "auto" if value == values["save"] else "disable"}
    raise RefusedValueError("a checkpoint of Megatron-LM is not read: convert it, and give the folder as hf-checkpoint")


def _recompute(value: str, _: ProjectValues) -> Meaning:
    if value not in ("full", "selective"):
        raise RefusedValueError("there is full and selective here")
    return {"{model}.enable_gradient_checkpointing": True, "{model}.recompute_granularity": value}


def _of_engine(item: WrittenSetting, _: ProjectValues) -> Meaning:
    """An argument of SGLang that has no setting of its own."""
    texts = item.value if isinstance(item.value, list) else [item.value]
    values = [_literal(each) for each in texts]
    name = item.name.removeprefix("sglang-").replace("-", "_")
    return {f"{{rollout}}.engine_kwargs.sglang.{name}": values if len(values) > 1 else values[0]}


def _literal(text: Any) -> Any:
    try:
        return ast.literal_eval(text) if isinstance(text, str) else text
    except (ValueError, SyntaxError):
        return text


#: rows that fine-tuning has as well, with these keys
COMMON: tuple[ProjectSetting, ...] = (
    row("actor-num-nodes", "trainer.nnodes", kind="int", default=1),
    row("actor-num-gpus-per-node", "trainer.n_gpus_per_node", kind="int", default=8),
    row("hf-checkpoint", "{model}.path"),
    *idle("ref-load", "the reference is hf-checkpoint, the model before training"),
    row("save", "trainer.default_local_dir"),
    row("save-interval", "trainer.save_freq", kind="int"),
    row("load", translate=_checkpoint),
    flag("async-save", "{checkpoint}.async_save"),
    flag("no-save-optim",
         translate=lambda value, _: {"{checkpoint}.save_contents": ["model", "extra", "hf_model"]} if value else {}),
    row("prompt-data", translate=prompts),
    flag("rollout-shuffle", "data.shuffle"),
    row("num-epoch", kind="int",
        translate=lambda value, values: Ineffective("num-rollout is set") if values["num-rollout"] is not None
        else {"trainer.total_epochs": value}),
    row("num-rollout", "trainer.total_training_steps", kind="int"),
    row("apply-chat-template-kwargs", "data.apply_chat_template_kwargs", kind="json"),
    row("multimodal-keys", kind="json", translate=_media),
    *refused("optimizer", "there is adam, and others by optim.optimizer", "adam"),
    row("recompute-granularity", translate=_recompute),
    row("use-wandb", kind="flag", default=False, translate=lambda value, values: loggers(values) if value else {}),
    row("use-tensorboard", kind="flag", default=False, translate=lambda value,
        values: loggers(values) if value else {}),
    row("wandb-project tb-project-name", "trainer.project_name"),
    row("wandb-group tb-experiment-name", "trainer.experiment_name"),
    row("distributed-timeout-minutes", kind="float", translate=lambda value, _: Ineffective(
        "trainer.phase_timeout_s is the limit, in seconds")),
)  # fmt: skip

_ROWS: tuple[ProjectSetting, ...] = (
    *COMMON,
    row("train_async.py", kind="flag", translate=asynchronous),
    flag("colocate", translate=read_with("rollout-num-gpus")),
    row("rollout-num-gpus", kind="int", translate=engine_devices),
    row("rollout-num-gpus-per-engine", "{rollout}.tensor_model_parallel_size", kind="int", default=1),
    flag("offload-train", translate=in_engine({"param_offload": True, "optimizer_offload": True})),
    flag("offload-rollout", "{rollout}.free_cache_engine", default=None),
    flag("optimizer-cpu-offload", translate=in_engine({"optimizer_offload": True})),
    row("tensor-model-parallel-size", kind="int", default=1, translate=layout("tensor_model_parallel_size")),
    row("pipeline-model-parallel-size", kind="int", default=1, translate=layout("pipeline_model_parallel_size")),
    row("context-parallel-size", kind="int", default=1, translate=layout("context_parallel_size")),
    row("expert-model-parallel-size", kind="int", default=1, translate=layout("expert_model_parallel_size")),
    row("expert-tensor-parallel-size", kind="int", translate=expert_tensor),
    row("moe-aux-loss-coeff", kind="float", default=0.0, translate=lambda value, values: {} if not value else (
        {"{actor}.megatron.override_transformer_config.moe_aux_loss_coeff": value} if splits_model(values)
        else {"{engine}.router_aux_loss_coef": value})),
    row("update-weight-mode", default="full",
        translate=lambda value, _: {"{rollout}.checkpoint_engine.delta": value == "delta"}),
    row("update-weight-buffer-size", kind="int", translate=lambda value, _: {
        "{rollout}.checkpoint_engine.update_weights_bucket_megabytes": max(1, value // 2**20)}),
    *refused("update-weights-interval", "weights are sent after each step", 1, kind="int"),
    # data and batches
    row("input-key", "data.prompt_key", default="input"),
    row("label-key", "data.ground_truth_key"),
    flag("apply-chat-template", translate=lambda *_: {}),
    row("rollout-batch-size", "data.train_batch_size", kind="int"),
    row("n-samples-per-prompt", "{rollout}.n", kind="int", default=1),
    row("global-batch-size", kind="int", translate=global_batch),
    row("num-steps-per-rollout", kind="int", translate=steps_per_rollout),
    row("micro-batch-size", kind="int", default=1, translate=by_rows("{actor}.ppo_micro_batch_size_per_gpu")),
    flag("use-dynamic-batch-size", "{actor}.use_dynamic_bsz"),
    row("max-tokens-per-gpu", kind="int", translate=by_tokens("{actor}.ppo_max_token_len_per_gpu")),
    row("log-probs-max-tokens-per-gpu", kind="int", translate=by_tokens("{rollout}.log_prob_max_token_len_per_gpu")),
    flag("balance-data", "trainer.balance_batch", default=None),
    # generation
    *refused("rollout-function-path", "sessions of your own are agent loops (docs/agents.md)",
             "slime.rollout.sglang_rollout.generate_rollout",
             "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
    row("rollout-temperature", "{rollout}.temperature", kind="float", default=1.0),
    row("rollout-top-p", "{rollout}.top_p", kind="float", default=1.0),
    row("rollout-top-k", "{rollout}.top_k", kind="int", default=-1),
    row("rollout-max-response-len", "data.max_response_length", kind="int"),
    row("rollout-max-prompt-len", kind="int", translate=prompt_length),
    row("rollout-max-context-len", kind="int", translate=context_length),
    row("rollout-stop", "{rollout}.stop", kind="words"),
    *refused("rollout-stop-token-ids", "rollout.stop takes texts; end tokens are those of generation_config.json",
             kind="words"),
    row("rollout-seed", kind="int", default=42, translate=lambda value, _: {"data.seed": value,
        "{rollout}.seed": value}),
    row("over-sampling-batch-size", kind="int", translate=_over_sampling),
    row("dynamic-sampling-filter-path", translate=_filter),
    flag("partial-rollout", translate=partial_rollout),
    # algorithm
    row("advantage-estimator", default="grpo", translate=_estimator),
    flag("disable-grpo-std-normalization", translate=_spread),
    flag("normalize-advantages", translate=_whitened),
    row("gamma", kind="float", default=1.0, translate=_discount),
    row("lambd", kind="float", default=1.0, translate=_for_critic("algorithm.lam")),
    row("eps-clip", kind="float", default=0.2, translate=_clip),
    row("eps-clip-high", kind="float", translate=lambda value, _: {"{actor}.clip_ratio_high": value}),
    row("eps-clip-c", kind="float", translate=_dual_clip),
    row("value-clip", kind="float", default=0.2, translate=_for_critic("critic.cliprange_value")),
    row("num-critic-only-steps", kind="int", default=0, translate=_for_critic("trainer.critic_warmup")),
    row("kl-coef", kind="float", default=0.0, translate=_kl_of_reward),
    flag("use-kl-loss", "{actor}.use_kl_loss"),
    row("kl-loss-coef", kind="float", default=0.0, translate=_kl_loss("kl_loss_coef")),
    row("kl-loss-type", default="k1", translate=lambda value,
        values: {} if values["kl-coef"] and not values["use-kl-loss"]
        else _kl_loss("kl_loss_type")(value, values)),
    row("entropy-coef", "{actor}.entropy_coeff", kind="float", default=0.0),
    flag("calculate-per-token-loss",
         translate=lambda value, _: {"{actor}.loss_agg_mode": "token-mean" if value else "seq-mean-token-mean"}),
    *refused("loss-type", "losses of your own are registered (docs/extending.md)", "policy_loss"),
    flag("disable-compute-advantages-and-returns", refused="only fine-tuning (loss-type sft_loss) has no advantages"),
    flag("debug-train-only", refused="only fine-tuning (loss-type sft_loss) generates nothing"),
    flag("use-rollout-logprobs",
         translate=lambda value, _: {f"{_CORRECTION}.bypass_mode": True} if value else {}),
    flag("use-tis", translate=_correction),
    row("tis-clip", kind="float", default=2.0, translate=_of_correction),
    row("tis-clip-low", kind="float", default=0.0, translate=_of_correction),
    flag("use-routing-replay", translate=_replay("R2")),
    flag("use-rollout-routing-replay", translate=_replay("R3")),
    # rewards
    row("rm-type", translate=_scorer),
    row("custom-rm-path", translate=_reward),
    row("metadata-key", default="metadata", translate=lambda *_: Ineffective("columns reach the reward function")),
    row("reward-key", translate=_reward_key),
    *refused("eval-reward-key", "the score of a reward that is a dict is its entry score", "score"),
    # validation
    row("eval-prompt-data", kind="words", translate=_validation_files),
    row("eval-interval", kind="int", translate=_in_evaluation(lambda value: {"trainer.test_freq": value})),
    flag("skip-eval-before-train",
         translate=lambda value, values: {"trainer.val_before_train": not value} if values["eval-prompt-data"] else {}),
    row("n-samples-per-eval-prompt", kind="int", default=1,
        translate=_in_evaluation(lambda value: {f"{_VALIDATION}.n": value})),
    row("eval-temperature", kind="float",
        translate=_in_evaluation(lambda value: {f"{_VALIDATION}.temperature": value,
                                                f"{_VALIDATION}.do_sample": value > 0})),
    row("eval-top-p", kind="float", translate=_in_evaluation(lambda value: {f"{_VALIDATION}.top_p": value})),
    row("eval-top-k", kind="int", translate=_in_evaluation(lambda value: {f"{_VALIDATION}.top_k": value})),
    row("eval-max-response-len", kind="int", translate=_validation_length),
    row("eval-input-key", translate=_same_as("input-key")),
    row("eval-label-key", translate=_same_as("label-key")),
    *idle("eval-tool-key", "columns of the data reach the reward function"),
    # optimizer
    row("lr", kind="float", default=1e-6, translate=_with_critic("lr")),
    row("lr-decay-style", default="linear", translate=_schedule),
    row("min-lr", kind="float", default=0.0, translate=_floor),
    row("lr-warmup-fraction", kind="float", translate=_with_critic("lr_warmup_steps_ratio")),
    row("lr-warmup-iters", kind="int", translate=_with_critic("lr_warmup_steps")),
    *refused("lr-warmup-init", "warm-up begins at 0", 0, 0.0, kind="float"),
    *refused("lr-decay-iters lr-wsd-decay-iters lr-wsd-decay-style",
             "the schedule ends with the run (optim.total_training_steps)"),
    row("weight-decay", kind="float", default=0.01, translate=_with_critic("weight_decay")),
    row("adam-beta1", kind="float", default=0.9, translate=_betas),
    row("adam-beta2", kind="float", default=0.999, translate=_betas),
    row("adam-eps", kind="float", default=1e-8, translate=lambda value, values: {} if value == 1e-8
        else _with_critic("override_optimizer_config.eps")(value, values)),
    row("clip-grad", kind="float", default=1.0, translate=_with_critic("clip_grad")),
    row("seed", kind="int", default=1234, translate=lambda value, values: {f"{engine_of(values)}.seed": value}),
    flag("deterministic-mode", "{rollout}.full_determinism"),
    # engine
    row("sglang-mem-fraction-static", "{rollout}.gpu_memory_utilization", kind="float"),
    row("sglang-ep-size sglang-expert-parallel-size", "{rollout}.expert_parallel_size", kind="int"),
    row("sglang-dp-size sglang-data-parallel-size", "{rollout}.data_parallel_size", kind="int"),
    row("sglang-max-running-requests", "{rollout}.max_num_seqs", kind="int"),
    row("sglang-context-length", "{rollout}.max_model_len", kind="int"),
    row("sglang-cuda-graph-bs", kind="words",
        translate=lambda value, _: {"{rollout}.cudagraph_capture_sizes": [int(each) for each in value]}),
    row("sglang-disable-cuda-graph", kind="flag", translate=lambda value, _: {"{rollout}.enforce_eager": value}),
    row("dump-details save-debug-rollout-data",
        translate=lambda value, _: {"trainer.rollout_data_dir": str(Path(value).parent) if "{" in value else value}),
    *idle("sglang-server-concurrency sglang-router-* sglang-log-level",
        "the run has its own server and balances requests"),
    *idle("sglang-enable-metrics", "metrics are in docs/observe.md", kind="flag"),
    *MODEL,
    *RUN,
    row("sglang-*", kind="words", translate=_of_engine),
)  # fmt: skip


def _constant(values: ProjectValues) -> dict[str, Any]:
    """slime generates with SGLang, trains one update per rollout unless a size says otherwise, and has no dual clip."""
    keys: dict[str, Any] = {"{rollout}.name": "sglang"}
    unset = values["global-batch-size"] is None and values["num-steps-per-rollout"] is None
    if unset and values["rollout-batch-size"]:
        keys["{actor}.ppo_mini_batch_size"] = values["rollout-batch-size"]
    if values["eps-clip-c"] is None and values["advantage-estimator"] not in ("gspo", "cispo"):
        keys["{actor}.clip_ratio_c"] = UNBOUNDED
    if values["load"] is None:
        keys["trainer.resume_mode"] = "disable"
    if values["eval-prompt-data"] and values["eval-temperature"] is None:
        keys |= {f"{_VALIDATION}.temperature": values["rollout-temperature"], f"{_VALIDATION}.do_sample": True}
    if values["eval-prompt-data"] and values["eval-top-p"] is None:
        keys[f"{_VALIDATION}.top_p"] = values["rollout-top-p"]
    return keys


def _differences(values: ProjectValues) -> list[str]:
    lines = []
    if values["rollout-max-prompt-len"] is None and values["rollout-max-context-len"] is None:
        lines.append("slime does not limit prompts: set data.max_prompt_length, which is 512")
    if not values["apply-chat-template"]:
        lines.append(
            "without apply-chat-template a prompt of text goes to the model as it is; here it is one message of the "
            "user, in the chat template"
        )
    if values["global-batch-size"] is None and values["num-steps-per-rollout"] is None:
        lines.append(
            "neither global-batch-size nor num-steps-per-rollout is set: the command has one update per rollout"
        )
    if has_critic(values) and not values["normalize-advantages"]:
        lines.append("advantages of ppo are not whitened without normalize-advantages; gae whitens them")
    return lines


POLICY = SettingTable(
    "slime",
    _ROWS,
    program=lambda values: "ppo" if has_critic(values) else "grpo",
    constant=_constant,
    differences=_differences,
)
