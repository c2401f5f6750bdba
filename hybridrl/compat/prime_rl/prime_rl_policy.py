"""prime-rl's `rl`: settings of trainer, orchestrator and inference, with the names of 2026 and those before."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

import yaml

from hybridrl.compat.prime_rl.prime_rl_shared import PROCESS, RUN, is_on, model, optimizer
from hybridrl.compat.prime_rl.toml_files import tree_under
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
from hybridrl.config.short_names import RefusedValueError

#: a ratio that no token reaches
UNBOUNDED = 1e9
#: the file with the agent loops, and the folder of their rows
LOOPS, ROWS = "verifiers.yaml", "verifiers_rows"
_VALIDATION = "{rollout}.val_kwargs"
_TRAIN, _EVAL = "orchestrator.train.source", "orchestrator.eval.source"


def sources(values: ProjectValues, prefix: str) -> list[dict[str, Any]]:
    """The tables of the sources of tasks, in their order."""
    tree = tree_under(values.settings, prefix)
    return [tree[number] for number in sorted(tree, key=int)]


def source_name(source: dict[str, Any], number: int, prefix: str) -> str:
    """The name of a source, which is that of its tasks unless it has one."""
    tasks = source.get("env", {}).get("taskset", {}).get("id")
    name = str(source.get("name") or tasks or f"source{number}")
    return f"eval-{name}" if prefix == _EVAL else name


def preparation(values: ProjectValues) -> list[str]:
    """The lines of shell that write the agent loops of the sources, and the rows of their tasks."""
    loops, commands = [], []
    for prefix in (_TRAIN, _EVAL):
        for number, source in enumerate(sources(values, prefix)):
            name = source_name(source, number, prefix)
            loops.append({"name": name, "_target_": "verifiers_agent", "env": source.get("env", {})})
            commands.append(
                f"python -m hybridrl.data.preprocess.verifiers --loops {LOOPS} --name {name} --out {ROWS}/{name}"
            )
    if not loops:
        return []
    text = yaml.safe_dump(loops, sort_keys=False, allow_unicode=True).rstrip().splitlines()
    return [f"cat > {LOOPS} <<'EOF'", *text, "EOF", *commands, ""]


def _files(values: ProjectValues, prefix: str) -> list[str]:
    return [
        f"{ROWS}/{source_name(source, number, prefix)}/train.parquet"
        for number, source in enumerate(sources(values, prefix))
    ]


def _environment(item: WrittenSetting, values: ProjectValues) -> Meaning:
    """The block of an environment is written to the file of loops; its first setting has the keys of the run."""
    if item.name != next(each.name for each in values.settings if fnmatchcase(each.name, f"{_TRAIN}.*.env.*")):
        return ReadWith(LOOPS)
    return {
        "{rollout}.agent.agent_loop_config_path": LOOPS,
        "{rollout}.server.enable": True,
        "{rollout}.server.host": "127.0.0.1",
        "reward.reward_manager.name": "session",
        "data.train_files": _files(values, _TRAIN),
    }


def _validation(item: WrittenSetting, values: ProjectValues) -> Meaning:
    if item.name != next(each.name for each in values.settings if fnmatchcase(each.name, f"{_EVAL}.*.env.*")):
        return ReadWith(LOOPS)
    return {"data.val_files": _files(values, _EVAL)}


def _ratio(_: WrittenSetting, values: ProjectValues) -> Meaning:
    ratios = {float(source.get("ratio", 1.0)) for source in sources(values, _TRAIN)}
    if len(ratios) == 1:
        return {}
    raise RefusedValueError(
        "ratios are weights by name here: set data.mixture.weights, with data.mixture.column=null where files are the "
        "sources"
    )


def _group_size(item: WrittenSetting, values: ProjectValues) -> Meaning:
    if int(item.value) == values["orchestrator.group_size"]:
        return {}
    raise RefusedValueError("all sources have orchestrator.group_size")


def _limits(values: ProjectValues) -> tuple[int, int]:
    """The tokens of a prompt, and of a session after it."""
    total, turn = values["seq_len"], values["orchestrator.train.sampling.max_completion_tokens"]
    response = total - total // 4 if turn is None else turn
    if response >= total:
        response = total - max(1, total // 4)
    return total - response, response


def _lengths(_: int, values: ProjectValues) -> Meaning:
    prompt, response = _limits(values)
    return {"data.max_prompt_length": prompt, "data.max_response_length": response}


def _turn(value: int, values: ProjectValues) -> Meaning:
    if value >= values["seq_len"]:
        return Ineffective(f"seq_len={values['seq_len']} ends a session before")
    return {"data.max_response_length": value}


def _batch(value: int, values: ProjectValues) -> Meaning:
    n = values["orchestrator.group_size"]
    if value % n:
        raise RefusedValueError(f"{value} samples are no whole number of groups of group_size={n}; "
                                f"{math.ceil(value / n) * n} are")  # fmt: skip
    return {"data.train_batch_size": value // n, "{actor}.ppo_mini_batch_size": value // n}


def _algorithm(value: str, _: ProjectValues) -> Meaning:
    if value == "grpo":
        return {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}
    instead = {
        "opd": "distillation.enabled=True distils from a teacher that the run serves (docs/distillation.md)",
        "sft": "hybridrl generate writes a teacher's responses, and hybridrl sft learns them",
        "echo": "tokens of tools are not trained on",
    }
    raise RefusedValueError(
        instead.get(value, "there is grpo here; estimators of your own are registered (docs/extending.md)")
    )


def _loss(value: str, _: ProjectValues) -> Meaning:
    if value != "default":
        raise RefusedValueError(
            "there is the default, DPPO, here; losses of your own are registered (docs/extending.md)"
        )
    return {"{actor}.policy_loss.loss_mode": "dppo_tv", "{actor}.clip_ratio_c": UNBOUNDED}


def _drift(value: float, _: ProjectValues) -> Meaning:
    if value:
        raise RefusedValueError("the squared log-ratio to the sampler is no part of the loss")
    return {}


def _zero_advantages(value: bool, _: ProjectValues) -> Meaning:
    if value:
        raise RefusedValueError("responses of advantage 0 stay in the batch and count in the mean over tokens; "
                                "algorithm.filter_groups.enable=True draws other prompts for them")  # fmt: skip
    return {}


def _gate(item: WrittenSetting, _: ProjectValues) -> Meaning:
    if item.value != "advantage_range":
        raise RefusedValueError("there is advantage_range here")
    return {"algorithm.filter_groups.enable": True}


def _gate_range(item: WrittenSetting, _: ProjectValues) -> Meaning:
    if float(item.value):
        raise RefusedValueError("groups whose scores are all the same are dropped, not a range of advantages")
    return {}


def _train_devices(value: int, values: ProjectValues) -> Meaning:
    return Ineffective("deployment.num_train_nodes is set") if values["deployment.num_train_nodes"] else {
        "trainer.n_gpus_per_node": value}  # fmt: skip


def _infer_devices(value: int, values: ProjectValues) -> Meaning:
    if values["deployment.num_infer_nodes"]:
        return Ineffective("deployment.num_infer_nodes is set")
    return {"{rollout}.nnodes": 1, "{rollout}.n_gpus_per_node": value}


def _train_nodes(value: int, values: ProjectValues) -> Meaning:
    return {"trainer.nnodes": value, "trainer.n_gpus_per_node": values["deployment.gpus_per_node"]}


def _infer_nodes(value: int, values: ProjectValues) -> Meaning:
    nodes = value * values["deployment.num_infer_replicas"]
    return {"{rollout}.nnodes": nodes, "{rollout}.n_gpus_per_node": values["deployment.gpus_per_node"]}


def _shards(value: int, values: ProjectValues) -> Meaning:
    nodes = values["deployment.num_train_nodes"]
    devices = nodes * values["deployment.gpus_per_node"] if nodes else values["deployment.num_train_gpus"]
    if devices % value:
        raise RefusedValueError(f"{devices} GPUs are no multiple of {value} copies")
    return {"{engine}.fsdp_size": devices // value} if value > 1 else {}


def _body(value: Any, _: ProjectValues) -> Meaning:
    names = {"top_p": "{rollout}.top_p", "top_k": "{rollout}.top_k"}
    if not isinstance(value, dict) or set(value) - set(names):
        raise RefusedValueError("the trained distribution has temperature, top_p and top_k only")
    return {names[name]: each for name, each in value.items()}


def _in_evaluation(keys: Any) -> Any:
    def translate(value: Any, values: ProjectValues) -> Meaning:
        if not sources(values, _EVAL):
            return Ineffective("there is no source of eval")
        return dict(keys(value))

    return translate


def _same_as(name: str) -> Any:
    def translate(item: WrittenSetting, values: ProjectValues) -> Meaning:
        if item.value == values[name]:
            return {}
        raise RefusedValueError(f"all sources have {name}")

    return translate


def _of_vllm(item: WrittenSetting, _: ProjectValues) -> Meaning:
    return {f"{{rollout}}.engine_kwargs.vllm.{item.name.rpartition('.')[2]}": item.value}


_OLD_ENVIRONMENT = (
    "environments of verifiers before 0.4 are not run; with verifiers 0.4 an environment is a task set and a harness "
    "(docs/environments.md#verifiers)"
)
_ROWS: tuple[ProjectSetting, ...] = (
    row("model.name trainer.model.name orchestrator.model.name inference.vllm.model inference.model.name",
        "{model}.path",
        default="Qwen/Qwen3-0.6B"),
    flag("model.trust_remote_code trainer.model.trust_remote_code orchestrator.model.trust_remote_code "
         "inference.vllm.trust_remote_code inference.model.trust_remote_code", "{model}.trust_remote_code"),
    row("tokenizer.name trainer.tokenizer.name orchestrator.tokenizer.name", "{model}.tokenizer_path"),
    row("tokenizer.chat_template orchestrator.tokenizer.chat_template inference.vllm.chat_template",
        "{model}.custom_chat_template"),
    *idle("tokenizer.trust_remote_code trainer.tokenizer.* orchestrator.tokenizer.trust_remote_code",
          "it follows model.trust_remote_code"),
    *idle("model.vlm.vision_encoder_attr model.vlm.language_model_attr", "the parts of a model are found by its type"),
    flag("model.vlm.freeze_vision_encoder", "{actor}.freeze_vision_tower"),
    row("max_steps trainer.max_steps orchestrator.max_steps", "trainer.total_training_steps", kind="int"),
    row("seq_len orchestrator.seq_len max_model_len", kind="int", default=2048, translate=_lengths),
    row("trainer.model.seq_len", kind="int", translate=lambda value, _: {
        "{actor}.use_dynamic_bsz": True, "{actor}.ppo_max_token_len_per_gpu": value}),
    # devices
    row("deployment.gpus_per_node", kind="int", default=8, translate=read_with("the numbers of nodes")),
    row("deployment.num_train_gpus", kind="int", default=1, translate=_train_devices),
    row("deployment.num_infer_gpus", kind="int", default=1, translate=_infer_devices),
    row("deployment.num_train_nodes", kind="int", translate=_train_nodes),
    row("deployment.num_infer_nodes", kind="int", translate=_infer_nodes),
    row("deployment.num_infer_replicas", kind="int", default=1, translate=read_with("deployment.num_infer_nodes")),
    row("deployment.nodes_per_fsdp_group", kind="int", translate=lambda value, values: {
        "{engine}.fsdp_size": value * values["deployment.gpus_per_node"]}),
    row("trainer_gpu_ids", kind="json", translate=lambda value, _: {"trainer.n_gpus_per_node": len(value)}),
    row("inference_gpu_ids", kind="json", translate=lambda value, _: {
        "{rollout}.nnodes": 1, "{rollout}.n_gpus_per_node": len(value)}),
    row("trainer.model.dp_replicate", kind="int", default=1, translate=_shards),
    # batches and staleness
    row("orchestrator.batch_size", kind="int", default=128, translate=_batch),
    row("orchestrator.group_size orchestrator.rollouts_per_example", "{rollout}.n", kind="int", default=1),
    *refused("orchestrator.token_batch_size", "a batch is a number of samples: set orchestrator.batch_size",
        kind="int"),
    row("orchestrator.max_off_policy_steps", "trainer.v1.sampler.max_off_policy_threshold", kind="int", default=8),
    row("max_async_level trainer.max_async_level orchestrator.max_async_level",
        "trainer.v1.separate_async.num_warmup_batches", kind="int", default=1),
    *idle("orchestrator.strict_async_level", "generation is never further ahead than that", kind="flag"),
    *idle("orchestrator.oversampling_factor orchestrator.max_concurrent orchestrator.concurrency.* "
          "orchestrator.tasks_per_minute orchestrator.max_inflight_rollouts",
          "rollout.agent.max_running limits the sessions that run at once"),
    # sampling
    row("orchestrator.train.sampling.temperature orchestrator.sampling.temperature", "{rollout}.temperature",
        kind="float",
        default=1.0),
    row("orchestrator.train.sampling.max_completion_tokens orchestrator.sampling.max_tokens", kind="int",
        translate=_turn),
    row("orchestrator.train.sampling.extra_body orchestrator.sampling.extra_body", kind="json", translate=_body),
    row("orchestrator.train.sampling.extra_body.top_p orchestrator.sampling.extra_body.top_p", "{rollout}.top_p",
        kind="float"),
    row("orchestrator.train.sampling.extra_body.top_k orchestrator.sampling.extra_body.top_k", "{rollout}.top_k",
        kind="int"),
    row("orchestrator.sampling.seed", "{rollout}.seed", kind="int"),
    *refused("orchestrator.sampling.repetition_penalty", "the trained distribution has temperature, top_p and top_k "
        "only",
             1.0, kind="float"),
    *refused("orchestrator.sampling.min_tokens", "responses end where the model ends them", 0, kind="int"),
    *refused("orchestrator.sampling.temp_scheduler.* orchestrator.train.sampling.* orchestrator.sampling.*",
             "the trained distribution has temperature, top_p and top_k only"),
    # algorithm and loss
    row("orchestrator.algo.type", default="grpo", translate=_algorithm),
    *refused("orchestrator.algo.length_penalty orchestrator.algo.length_penalty.*",
             "reward.reward_manager.name=dapo gives long responses a penalty"),
    *refused("orchestrator.algo.*", "it belongs to an algorithm that is not here"),
    row("trainer.loss.type", default="default", translate=_loss),
    row("trainer.loss.dppo_mask_low", "{actor}.clip_ratio_low", kind="float", default=0.2),
    row("trainer.loss.dppo_mask_high", "{actor}.clip_ratio_high", kind="float", default=0.2),
    *refused("trainer.loss.adv_tau", "advantages have the weight 1; optim.lr scales the update", 1, 1.0, kind="float"),
    row("trainer.loss.kl_tau", kind="float", default=1e-3, translate=_drift),
    *refused("trainer.loss.teacher_tau", "distillation.enabled=True distils from a teacher (docs/distillation.md)", 0,
        0.0,
             kind="float"),
    *refused("trainer.loss.*", "the loss is DPPO with dppo_mask_low and dppo_mask_high; others are named by "
             "policy_loss.loss_mode"),
    flag("orchestrator.train.filter_zero_advantages", default=True, translate=_zero_advantages),
    *refused("orchestrator.advantage.type", "estimators of your own are registered (docs/extending.md)", "default"),
    flag("orchestrator.advantage.length_weighted_mean", refused="algorithm.adv_estimator=opo weights rewards by "
        "lengths"),
    *refused("orchestrator.advantage.* orchestrator.filters.*", "estimators and filters of your own are registered "
             "(docs/extending.md)"),
    flag("orchestrator.buffer.online_difficulty_filtering", "algorithm.filter_groups.enable"),
    *idle("orchestrator.buffer.hash_keys orchestrator.buffer.skip_verification",
        "a resumed run continues with the next row"),
    row("orchestrator.buffer.seed orchestrator.seed", "data.seed", kind="int"),
    *refused("orchestrator.buffer.*", "tasks are not drawn by their difficulty; data.sampler takes a class of your "
        "own"),
    # environments
    row(f"{_TRAIN}.*.env.*", translate=_environment),
    row(f"{_TRAIN}.*.name", translate=read_with("verifiers.yaml")),
    row(f"{_TRAIN}.*.ratio", translate=_ratio),
    row(f"{_TRAIN}.*.group_size", translate=_group_size),
    row(f"{_TRAIN}.*.curriculum.gates.*.type", translate=_gate),
    row(f"{_TRAIN}.*.curriculum.gates.*.reject_m*", translate=_gate_range),
    *refused(f"{_TRAIN}.*.curriculum.*", "single tasks are not drawn by their difficulty; data.mixture.curriculum "
        "weighs sources by it, and data.sampler takes a class of your own"),
    *idle(f"{_TRAIN}.*.serve.* {_EVAL}.*.serve.* orchestrator.env_server_base_port", "the run starts the servers"),
    *refused(f"{_TRAIN}.*.algo.* {_TRAIN}.*.sampling.*", "all sources have the algorithm and the sampling of the run"),
    *refused(f"{_TRAIN}.*", "it is no setting of a source that is known here"),
    *refused("orchestrator.env.*.* orchestrator.eval.env.*.* orchestrator.environment.*", _OLD_ENVIRONMENT),
    # validation
    row(f"{_EVAL}.*.env.*", translate=_validation),
    row(f"{_EVAL}.*.name", translate=read_with("verifiers.yaml")),
    row(f"{_EVAL}.*.group_size", translate=_same_as("orchestrator.eval.group_size")),
    row(f"{_EVAL}.*.num_examples", translate=_same_as("orchestrator.eval.num_examples")),
    row(f"{_EVAL}.*.interval", translate=_same_as("orchestrator.eval.interval")),
    *refused(f"{_EVAL}.*", "all sources have the settings of orchestrator.eval"),
    row("orchestrator.eval.interval", kind="int", default=100,
        translate=_in_evaluation(lambda v: {"trainer.test_freq": v})),
    row("orchestrator.eval.group_size orchestrator.eval.rollouts_per_example", kind="int", default=1,
        translate=_in_evaluation(lambda value: {f"{_VALIDATION}.n": value})),
    row("orchestrator.eval.num_examples", kind="int", default=-1,
        translate=_in_evaluation(lambda value: {"data.val_max_samples": value})),
    flag("orchestrator.eval.skip_first_step",
         translate=_in_evaluation(lambda value: {"trainer.val_before_train": not value})),
    row("orchestrator.eval.sampling.temperature", kind="float", translate=_in_evaluation(lambda value: {
        f"{_VALIDATION}.temperature": value, f"{_VALIDATION}.do_sample": value > 0})),
    row("orchestrator.eval.sampling.top_p", kind="float",
        translate=_in_evaluation(lambda value: {f"{_VALIDATION}.top_p": value})),
    row("orchestrator.eval.sampling.top_k", kind="int",
        translate=_in_evaluation(lambda value: {f"{_VALIDATION}.top_k": value})),
    *idle("orchestrator.eval.sampling.max_completion_tokens orchestrator.eval.sampling.max_tokens",
          "responses of validation end at data.max_response_length, as those of training do"),
    *refused("orchestrator.eval.sampling.*", "validation has temperature, top_p and top_k"),
    *idle("orchestrator.eval.retrigger_on_resume orchestrator.eval.skip_eval_on_resume "
          "orchestrator.eval.cancel_inflight_rollouts_on_eval orchestrator.eval.eval_base_model "
          "orchestrator.eval.max_retries", "validation takes place between steps", kind="flag"),
    # generation
    row("inference.vllm.tensor_parallel_size inference.parallel.tp", "{rollout}.tensor_model_parallel_size", kind="int",
        default=1),
    *idle("inference.vllm.data_parallel_size|inference.parallel.dp inference.vllm.data_parallel_size_local "
          "inference.vllm.data_parallel_rpc_port inference.vllm.api_server_count",
          "there are as many replicas as the devices allow"),
    row("inference.vllm.gpu_memory_utilization inference.gpu_memory_utilization", "{rollout}.gpu_memory_utilization",
        kind="float"),
    row("inference.vllm.max_model_len inference.model.max_model_len", kind="int", translate=lambda value, values: (
        {"{rollout}.max_model_len": value} if value is not None and value >= values["seq_len"]
        else Ineffective("prompts and responses are limited by seq_len"))),
    row("inference.vllm.enforce_eager inference.model.enforce_eager", "{rollout}.enforce_eager", kind="flag",
        default=False),
    row("inference.vllm.dtype inference.model.dtype", "{rollout}.dtype", default="auto"),
    row("inference.vllm.seed inference.seed", "{rollout}.seed", kind="int", default=0),
    row("inference.vllm.enable_prefix_caching", "{rollout}.enable_prefix_caching", kind="flag"),
    row("inference.vllm.enable_expert_parallel", kind="flag", translate=lambda value, values: {
        "{rollout}.expert_parallel_size": values["inference.vllm.tensor_parallel_size"]} if value else {}),
    *idle("inference.vllm.enable_lora inference.vllm.max_loras inference.vllm.max_cpu_loras "
        "inference.vllm.max_lora_rank "
          "inference.vllm.lora_target_modules inference.enable_lora inference.max_loras orchestrator.model.lora "
          "orchestrator.model.lora.*", "rollout.lora_transfer says how an adapter is sent"),
    *idle("inference.vllm.tool_call_parser inference.vllm.reasoning_parser inference.model.tool_call_parser "
          "orchestrator.renderer.* orchestrator.use_renderer", "the run's server parses by rollout.multi_turn.format"),
    *idle("inference.vllm.enable_return_routed_experts inference.vllm.enable_eplb inference.vllm.enable_dbo "
          "inference.vllm.all2all_backend", "the engine chooses it, or actor.router_replay.mode"),
    *refused("inference.vllm.quantization", "the engine has the dtype of rollout.dtype"),
    row("inference.vllm.*", translate=_of_vllm),
    row("inference", kind="json", translate=lambda value, _: {} if is_on(value)
        else Ineffective("the run starts its engines")),
    *idle("inference.* orchestrator.model.client.* orchestrator.client.*",
        "the run starts its engines (docs/rollout.md)"),
    # the trainer's process
    *model("trainer."),
    *optimizer("trainer.", "max_steps"),
    flag("trainer.enable_router_replay",
         translate=lambda value, _: {"{actor}.router_replay.mode": "R3"} if value else {}),
    *idle(" ".join(f"trainer.{name}" for name in PROCESS.split()), "there is nothing to choose here (docs/observe.md)"),
    *refused("trainer.data.*", "batches come from sessions"),
    *idle("trainer orchestrator", "a table without settings"),
    *idle("weight_broadcast.* trainer.weight_broadcast.* orchestrator.weight_broadcast.* rollout_transport.* "
          "trainer.rollout_transport.* orchestrator.rollout_transport.*", "weights and samples are sent in memory"),
    *idle("trainer.output_dir orchestrator.output_dir trainer.max_concurrent_runs orchestrator.num_train_workers "
          "orchestrator.pad_to_multiple_of orchestrator.heartbeat.* orchestrator.collect_inference_metrics "
          "orchestrator.inference_metrics_roles", "the run decides it"),
    *refused("teacher_inference.* teacher_gpu_ids orchestrator.teacher_model.* orchestrator.teacher_rollout_model.*",
             "distillation.enabled=True distils from a teacher that the run serves (docs/distillation.md)"),
    *RUN,
)  # fmt: skip


def _constant(values: ProjectValues) -> dict[str, Any]:
    """prime-rl trains while vLLM generates on other devices, one update per batch, and packs samples."""
    packed = values["trainer.model.seq_len"] or values["seq_len"]
    validates = bool(sources(values, _EVAL)) and values["orchestrator.eval.sampling.temperature"] is None
    sampled = {f"{_VALIDATION}.temperature": 1.0, f"{_VALIDATION}.do_sample": True} if validates else {}
    return {
        "trainer.v1.trainer_mode": "separate_async",
        "{rollout}.name": "vllm",
        "{actor}.use_dynamic_bsz": True,
        "{actor}.ppo_max_token_len_per_gpu": max(packed, values["seq_len"]),
        **({} if any(item.name == "resume" for item in values.settings) else {"trainer.resume_mode": "disable"}),
        **sampled,
    }


def _differences(values: ProjectValues) -> list[str]:
    lines = [
        "DPPO compares with the probabilities of the sampler there; here with those of the policy before the update, "
        "and "
        "algorithm.rollout_correction weights the difference to the sampler"
    ]
    if values["max_steps"] is None:
        lines.append("without max_steps a run has no end there; here it ends after trainer.total_epochs=30")
    if sources(values, _TRAIN):
        prompt, response = _limits(values)
        lines.append(
            f"seq_len={values['seq_len']} limits prompt and responses together: the command shares it, {prompt} and "
            f"{response}. data.max_response_length limits all turns of a session; max_completion_tokens one turn"
        )
        lines.append(f"packages and folders of the task sets are named in {LOOPS} (docs/environments.md#verifiers)")
    else:
        lines.append("no source of tasks is read: set data.train_files and a reward function")
    return lines


POLICY = SettingTable(
    "prime-rl", _ROWS, program=lambda _: "grpo", constant=_constant, differences=_differences, look="prime-rl's uv "
        "run rl "
    "--help, docs/coming_from.md"
)  # fmt: skip
