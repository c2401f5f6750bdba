"""Settings that several programs of OpenRLHF have."""

from __future__ import annotations

from collections.abc import Mapping
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

#: schedules of transformers: the type here, and the share of the learning rate at the end
SCHEDULES: dict[str, tuple[str, float | None]] = {
    "cosine_with_min_lr": ("cosine", None),
    "cosine_warmup_with_min_lr": ("cosine", None),
    "cosine": ("cosine", 0.0),
    "linear": ("linear", 0.0),
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
}


def constant(keys: Mapping[str, Any]) -> Any:
    """A translator for an option that is on or off: the keys if it is on."""
    return lambda value, _: dict(keys) if value else {}


def schedule(value: str, floor: float, prefix: str) -> dict[str, Any]:
    """The settings of a schedule of transformers.

    Args:
        floor: `min_lr_ratio`, which only the cosine with a minimum reads.
        prefix: the group of the optimizer.

    Raises:
        RefusedValueError: there is no such schedule here.
    """
    if value not in SCHEDULES:
        raise RefusedValueError(f"there is {', '.join(SCHEDULES)} here")
    kind, end = SCHEDULES[value]
    end = floor if value.endswith("min_lr") else end
    return {f"{prefix}.lr_scheduler_type": kind, **({} if end is None else {f"{prefix}.min_lr_ratio": end})}


def files(names: str, split: str, probabilities: str | None) -> Any:
    """The files of a data set; a data set of the hub gets its split."""
    if probabilities is not None and "," in names:
        raise RefusedValueError(
            f"probabilities ({probabilities}) are weights by name here: set data.mixture.weights, with "
            "data.mixture.column=null where files are the sources"
        )
    listed = [name.strip() for name in names.split(",") if name.strip()]
    places = []
    for name in listed:
        is_file = name.startswith(("/", "./", "../", "~")) or name.rsplit(".", 1)[-1] in _ENDINGS or name.count("/") > 1
        config, _, data = name.partition("@")
        place = f"{data}@{config}" if data else name
        places.append(place if is_file else f"{place}:{split}")
    return places if len(places) > 1 else places[0]


_ENDINGS = {"json", "jsonl", "parquet", "csv", "txt"}


def loggers(values: ProjectValues) -> list[str]:
    """The loggers of a run."""
    wandb = ["wandb"] if values["logger.wandb.key"] is not None else []
    return ["console", *wandb, *(["tensorboard"] if values["logger.tensorboard_dir"] is not None else [])]


def samples(key: str) -> Any:
    """A translator of a largest number of rows; OpenRLHF's defaults mean all of them."""
    return lambda value, _: {key: -1 if value >= 1_000_000 else value}


def lora(value: Any, values: ProjectValues, key: str) -> Meaning:
    """A setting of the adapter, if there is one."""
    if not values["ds.lora.rank"]:
        return Ineffective("ds.lora.rank is 0: there is no adapter")
    names = value if isinstance(value, list) else [value]
    return {f"{{model}}.{key}": value if key != "target_modules" or len(names) > 1 else names[0]}


def _adam_eps(value: float, _: ProjectValues) -> Meaning:
    return {} if value == 1e-8 else {"{optim}.override_optimizer_config.eps": value}


def optimizer(prefix: str, learning_rate: float, older: Mapping[str, str]) -> tuple[ProjectSetting, ...]:
    """Settings of the optimizer and its schedule.

    Args:
        prefix: before their names, `actor.` or nothing.
        learning_rate: the default.
        older: names of older versions, by the new name without the prefix.
    """

    def name(new: str) -> str:
        return f"{prefix}{new} {older.get(new, '')}"

    def rate(value: str, values: ProjectValues) -> Meaning:
        return schedule(value, values[f"{prefix}min_lr_ratio"], "{optim}")

    def floor(_: float, values: ProjectValues) -> Meaning:
        used = values[f"{prefix}lr_scheduler"].endswith("min_lr")
        return {} if used else Ineffective(f"the schedule {values[f'{prefix}lr_scheduler']} does not read it")

    return (
        row(name("adam.lr"), "{optim}.lr", kind="float", default=learning_rate),
        row(name("adam.betas"), "{optim}.betas", kind="numbers", default=[0.9, 0.95]),
        row(name("adam.eps"), kind="float", default=1e-8, translate=_adam_eps),
        row(name("adam.weight_decay"), "{optim}.weight_decay", kind="float", default=0.0),
        row(name("lr_scheduler"), default="cosine_with_min_lr", translate=rate),
        row(name("lr_warmup_ratio"), "{optim}.lr_warmup_steps_ratio", kind="float", default=0.03),
        row(name("min_lr_ratio"), kind="float", default=0.1, translate=floor),
        row(name("max_norm"), "{optim}.clip_grad", kind="float", default=1.0),
        *refused(f"{prefix}optim", "Muon has one learning rate here: set optim.optimizer=Muon and optim.lr", "adam"),
        *idle(
            f"{prefix}muon.lr {prefix}muon.momentum {prefix}muon.ns_steps",
            "only Muon reads it, which has one learning rate here",
        ),
        *idle(f"{prefix}muon.nesterov {prefix}muon.no_nesterov", "only Muon reads it", kind="flag"),
    )


def _seed(value: int, _: ProjectValues) -> Meaning:
    return {"data.seed": value, "{engine}.seed": value}


#: rows of every program
SHARED: tuple[ProjectSetting, ...] = (
    # checkpoints
    row("ckpt.save_steps save_steps", "trainer.save_freq", kind="int", default=-1),
    row("ckpt.max_num max_ckpt_num", "trainer.max_actor_ckpt_to_keep", kind="int", default=3),
    flag(
        "ckpt.load_enable load_checkpoint",
        translate=lambda value, _: {"trainer.resume_mode": "auto" if value else "disable"},
    ),
    row("ckpt.path ckpt_path", "trainer.default_local_dir"),
    row(
        "ckpt.output_dir save_path",
        translate=lambda value, values: (
            Ineffective("checkpoints hold the model, so ckpt.path is the folder of all")
            if values.has("ckpt.path") else {"trainer.default_local_dir": value}
        ),
    ),
    flag(
        "ckpt.disable_ds disable_ds_ckpt",
        translate=constant({"{checkpoint}.save_contents": ["hf_model"]}),
    ),
    *idle("ckpt.save_hf|save_hf_ckpt", "checkpoints hold the model in Hugging Face format", kind="flag"),
    *idle("ckpt.max_mem|max_ckpt_mem", "the number of checkpoints is limited, not their size"),
    *idle("ckpt.best_metric_key|best_metric_key", "metrics have other names here; trainer.best_metric names the one "
        "by which the best checkpoint is kept"),
    *idle("ds.use_universal_ckpt|use_ds_universal_ckpt", "checkpoints are read with any number of GPUs", kind="flag"),
    # how the model is held
    *idle("ds.zero_stage|zero_stage ds.zpg|zpg", "FSDP2 shards over all processes; results do not depend on it"),
    *idle("ds.grad_accum_dtype|grad_accum_dtype", "gradients are summed in the dtype of the weights, float32"),
    *idle("ds.overlap_comm|overlap_comm", "FSDP2 overlaps communication", kind="flag"),
    *idle("ds.deepcompile|deepcompile", "engine.use_torch_compile compiles parts of the loss", kind="flag"),
    *idle("ds.experts_implementation", "transformers chooses how experts are computed"),
    *idle("local_rank", "the processes are Ray's workers, started by the run"),
    *idle("flash_attn", "ds.attn_implementation chooses the attention", kind="flag"),
    *idle("bf16", "bfloat16 is the dtype anyway", kind="flag"),
    *idle("actor_init_on_gpu perf", "there is nothing to choose here", kind="flag"),
    row(
        "ds.param_dtype param_dtype", default="bf16",
        translate=lambda value, _: _dtype(value),
    ),
    flag("ds.adam_offload adam_offload", "{engine}.optimizer_offload"),
    row(
        "ds.attn_implementation attn_implementation",
        translate=lambda value, _: {"{model}.override_config.attn_implementation": value},
    ),
    flag("ds.use_liger_kernel use_liger_kernel", "{model}.use_liger"),
    flag("ds.packing_samples packing_samples", "{model}.use_remove_padding", default=None),
    flag("ds.load_in_4bit load_in_4bit", "{model}.load_in_4bit"),
    row("ds.lora.rank lora_rank", "{model}.lora_rank", kind="int", default=0),
    row("ds.lora.alpha lora_alpha", kind="int", default=16, translate=lambda v, vs: lora(v, vs, "lora_alpha")),
    row(
        "ds.lora.target_modules target_modules", kind="words", default="all-linear",
        translate=lambda v, vs: lora(v, vs, "target_modules"),
    ),
    row(
        "ds.lora.dropout lora_dropout", kind="float", default=0, usual=(0.0,),
        refused="an adapter has no dropout here (docs/lora.md); leave it out",
    ),
    row("ds.ring_attn_size ring_attn_size", "{engine}.ulysses_sequence_parallel_size", kind="int", default=1),
    *idle("ds.ring_attn_head_stride|ring_head_stride", "Ulysses shares a sequence by heads, in one exchange"),
    row(
        "ds.tensor_parallel_size ds_tensor_parallel_size", kind="int", default=1,
        refused="FSDP2 has no tensor parallelism; strategy=megatron with megatron.tensor_model_parallel_size has it",
    ),
    # data and the run
    *refused("data.disable_fast_tokenizer|disable_fast_tokenizer", "the tokenizer is the fast one", False, kind="flag"),
    *refused("use_ms", "models and data are a folder or of Hugging Face's hub; download from ModelScope before", False,
             kind="flag"),
    *idle("logger.logging_steps|logging_steps", "the metrics of every step are logged"),
    row("logger.wandb.key use_wandb", secret=True, translate=lambda _, values: {"trainer.logger": loggers(values)}),
    row("logger.tensorboard_dir use_tensorboard", translate=lambda _, values: {"trainer.logger": loggers(values)}),
    row("logger.wandb.project wandb_project", "trainer.project_name"),
    row("logger.wandb.run_name wandb_run_name", "trainer.experiment_name"),
    *idle("logger.wandb.org|wandb_org", "set the variable WANDB_ENTITY"),
    *idle("logger.wandb.group|wandb_group", "set the variable WANDB_RUN_GROUP"),
)  # fmt: skip


def _dtype(value: str) -> dict[str, Any]:
    if value != "bf16":
        raise RefusedValueError("training in float16 is not built; use bf16")
    return {"{engine}.dtype": "bfloat16"}


def full_determinism(*keys: str) -> ProjectSetting:
    """The row of full determinism."""
    return flag("train.full_determinism_enable full_determinism", translate=constant(dict.fromkeys(keys, True)))
