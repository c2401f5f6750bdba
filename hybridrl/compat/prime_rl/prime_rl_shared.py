"""Settings that prime-rl's `rl` and `sft` have, the second one without the prefix `trainer.`."""

from __future__ import annotations

from typing import Any

from hybridrl.compat.projects.project_settings import (
    Ineffective,
    Meaning,
    ProjectSetting,
    ProjectValues,
    flag,
    idle,
    refused,
    row,
)
from hybridrl.config.short_names import RefusedValueError

_MEMORY = "memory and speed alone depend on it"
_LOG = "the metrics of every step are logged (docs/observe.md)"


def is_on(value: Any) -> bool:
    """Whether a group of settings is on: a table is, and "None" or false are not."""
    return value is not False and str(value) != "None"


def group(key: str) -> Any:
    """A translator of a group that turns something on or off."""
    return lambda value, _: {key: is_on(value)}


def optimizer(prefix: str, steps: str) -> tuple[ProjectSetting, ...]:
    """Settings of the optimizer and the schedule.

    Args:
        prefix: before their names.
        steps: the setting with the number of steps.
    """
    kind, schedule = f"{prefix}optim.type", f"{prefix}scheduler.type"

    def optimizer_of(value: str, values: ProjectValues) -> Meaning:
        if value == "adamw":
            return {"{optim}.optimizer": "AdamW"}
        if value == "muon":
            return {"{optim}.optimizer": "Muon"}
        if value == "sgd":
            more = {"momentum": values[f"{prefix}optim.momentum"], "nesterov": values[f"{prefix}optim.nesterov"]}
            return {"{optim}.optimizer": "SGD", "{optim}.override_optimizer_config": more}
        raise RefusedValueError("there is adamw, muon and sgd here")

    def betas(_: float, values: ProjectValues) -> Meaning:
        if values[kind] != "adamw":
            return Ineffective(f"{values[kind]} does not read it")
        return {"{optim}.betas": [values[f"{prefix}optim.betas1"], values[f"{prefix}optim.betas2"]]}

    def of_sgd(_: Any, values: ProjectValues) -> Meaning:
        return {} if values[kind] == "sgd" else Ineffective(f"{values[kind]} does not read it")

    def schedule_of(value: str, values: ProjectValues) -> Meaning:
        if value == "linear":
            total, warmup = values[steps], values[f"{prefix}scheduler.warmup_steps"]
            if total is None or values[f"{prefix}scheduler.decay_steps"] < total - warmup:
                raise RefusedValueError(
                    "the rate falls from the end of the warm-up to the end of the run; wsd keeps it first"
                )
        elif value not in ("constant", "cosine"):
            raise RefusedValueError("there is constant, linear and cosine here")
        return {"{optim}.lr_scheduler_type": value}

    def of_schedule(key: str | None) -> Any:
        def translate(value: Any, values: ProjectValues) -> Meaning:
            if values[schedule] == "constant":
                return Ineffective("the schedule constant does not read it")
            return {} if key is None else {key: value}

        return translate

    return (
        row(f"{prefix}optim.type", default="adamw", translate=optimizer_of),
        row(f"{prefix}optim.lr", "{optim}.lr", kind="float", default=1e-6),
        row(f"{prefix}optim.weight_decay", "{optim}.weight_decay", kind="float", default=0.01),
        row(f"{prefix}optim.max_norm", kind="float", default=1.0,
            translate=lambda value, _: {"{optim}.clip_grad": UNCLIPPED if value is None else value}),
        row(f"{prefix}optim.betas1", kind="float", default=0.9, translate=betas),
        row(f"{prefix}optim.betas2", kind="float", default=0.999, translate=betas),
        row(f"{prefix}optim.momentum", kind="float", default=0.9, translate=of_sgd),
        flag(f"{prefix}optim.nesterov", default=True, translate=of_sgd),
        *idle(f"{prefix}optim.mu", "Muon has its usual momentum here (optim.override_optimizer_config)"),
        row(f"{prefix}scheduler.type", default="constant", translate=schedule_of),
        row(f"{prefix}scheduler.warmup_steps", kind="int", default=10,
            translate=of_schedule("{optim}.lr_warmup_steps")),
        row(f"{prefix}scheduler.decay_steps", kind="int", default=10, translate=of_schedule(None)),
        row(f"{prefix}scheduler.min_lr", kind="float", default=0.0, translate=of_schedule("{optim}.min_lr")),
    )  # fmt: skip


#: a norm of gradients that none reaches
UNCLIPPED = 1e9


def model(prefix: str) -> tuple[ProjectSetting, ...]:
    """Settings of the model and how it is held.

    Args:
        prefix: before their names.
    """

    def lora(key: str) -> Any:
        return lambda value, values: {f"{{model}}.{key}": value}

    return (
        row(f"{prefix}model.attn", default="auto", translate=lambda value, _: {} if value == "auto" else {
            "{model}.override_config": {"attn_implementation": value}}),
        row(f"{prefix}model.ac", kind="json", translate=group("{model}.enable_gradient_checkpointing")),
        row(f"{prefix}model.ac.mode", default=None, translate=lambda value, _: {
            "{model}.enable_gradient_checkpointing": True, "{model}.recompute_granularity": value}),
        row(f"{prefix}model.ac_offloading", kind="json", translate=group("{model}.enable_activation_offload")),
        flag(f"{prefix}model.fsdp_cpu_offload", "{engine}.offload_policy"),
        flag(f"{prefix}model.optim_cpu_offload", "{engine}.optimizer_offload", default=None),
        flag(f"{prefix}model.reshard_after_forward", "{engine}.reshard_after_forward", default=True),
        row(f"{prefix}model.cp", "{engine}.ulysses_sequence_parallel_size", kind="int", default=1),
        row(f"{prefix}model.ep", default="auto", translate=lambda value, _: {} if value == "auto" else {
            "{engine}.expert_parallel_size": int(value)}),
        row(f"{prefix}model.optimization_dtype", "{engine}.model_dtype", default="float32"),
        row(f"{prefix}model.lora", kind="json", translate=lambda value, _: (
            {"{model}.lora_rank": 16, "{model}.lora_alpha": 32} if is_on(value) else {})),
        row(f"{prefix}model.lora.rank", kind="int", translate=lora("lora_rank")),
        row(f"{prefix}model.lora.alpha", kind="float", translate=lambda value, _: {"{model}.lora_alpha": int(value)}),
        row(f"{prefix}model.lora.target_modules", kind="words", translate=lora("target_modules")),
        *refused(f"{prefix}model.lora.dropout", "an adapter has no dropout here (docs/lora.md)", 0, 0.0, kind="float"),
        *refused(f"{prefix}model.lora.modules_to_save", "an adapter is plain LoRA here (docs/lora.md)", [],
            kind="words"),
        *refused(f"{prefix}model.quantization {prefix}model.quantization.*", "training is in bfloat16"),
        *refused(f"{prefix}model.index_cache {prefix}model.index_cache.*",
            "indices of sparse attention are computed anew"),
        *refused(f"{prefix}model.debug.*", "the model is the one of its folder"),
        flag(f"{prefix}model.freeze_moe_router", refused="all weights, or a LoRA adapter, are trained"),
        *idle(f"{prefix}model.compile {prefix}model.compile.* {prefix}model.ac.freq {prefix}model.ac.targets "
              f"{prefix}model.ac_offloading.* {prefix}model.full_offload {prefix}model.full_offload.* "
              f"{prefix}model.ep_comm_backend {prefix}model.deepep_num_sms {prefix}model.deepep_token_chunk_size "
              f"{prefix}model.cp_style {prefix}model.impl {prefix}model.reduce_dtype {prefix}model.moe_router_dtype "
              f"{prefix}model.moe_use_grouped_mm {prefix}model.moe_fused_kernel {prefix}model.conversion_dir "
              f"{prefix}model.fused_lm_head_token_chunk_size {prefix}model.load_using_meta", _MEMORY),
    )  # fmt: skip


#: settings of the run that both programs have
RUN: tuple[ProjectSetting, ...] = (
    row("output_dir", "trainer.default_local_dir"),
    row("run.name", "trainer.experiment_name"),
    row("run.dir", translate=lambda *_: Ineffective("output_dir is the folder of the run")),
    row("resume", kind="json", translate=lambda value,
        _: {"trainer.resume_mode": "auto" if is_on(value) else "disable"}),
    *refused("resume.step resume.dir", "checkpoints of prime-rl are not read; resume alone continues a run of "
        "hybridrl"),
    *refused("ckpt.resume_step", "checkpoints of prime-rl are not read", kind="int"),
    row("ckpt", kind="json", translate=lambda value, _: {"trainer.save_last": is_on(value)}),
    row("ckpt.interval trainer.ckpt.interval", "trainer.save_freq", kind="int"),
    row("ckpt.keep_last trainer.ckpt.keep_last", "trainer.max_actor_ckpt_to_keep", kind="int"),
    *refused("ckpt.keep_interval|trainer.ckpt.keep_interval", "the newest checkpoints are kept", kind="int"),
    *idle("ckpt.output_dir ckpt.* trainer.ckpt trainer.ckpt.* orchestrator.ckpt orchestrator.ckpt.*",
          "checkpoints hold the whole state"),
    row("monitors.wandb wandb", kind="json",
        translate=lambda value, _: {"trainer.logger": ["console", "wandb"]} if is_on(value) else {}),
    row("monitors.wandb.project wandb.project", translate=lambda value, _: {
        "trainer.logger": ["console", "wandb"], "trainer.project_name": value}),
    row("monitors.wandb.name wandb.name", translate=lambda value, _: {
        "trainer.logger": ["console", "wandb"], "trainer.experiment_name": value}),
    *idle("monitors.wandb.*|wandb.*", "set the variables WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_TAGS, WANDB_MODE"),
    *idle("monitors.* trainer.monitors.* orchestrator.monitors.* orchestrator.prime_monitor.* trainer.wandb "
          "trainer.wandb.* orchestrator.wandb orchestrator.wandb.*", _LOG),
    *idle("log.* trainer.log.* orchestrator.log.*", "it only changes messages"),
    *idle("clean dry_run bench dump_config trainer.bench orchestrator.bench", "hybridrl check tries the settings",
          kind="flag"),
    *idle("slurm slurm.*", "a run over several nodes begins with Ray: docs/multi_node.md"),
    *refused("env_vars.* trainer.env_vars.* orchestrator.env_vars.*", "export variables before the command"),
    *idle("deployment.type deployment.orchestrator_on_inference", "the numbers of GPUs and nodes decide"),
)  # fmt: skip
#: settings of the trainer's process, by their names without a prefix
PROCESS = (
    "matmul_precision gc gc.* memory_profiler_path trace_path dist_timeout_seconds heartbeat heartbeat.* "
    "metrics_server "
    "metrics_server.* enable_token_export"
)
