"""Fine-tuning with slime: `train.py` and `train_async.py` with `--loss-type sft_loss`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridrl.compat.projects.project_settings import (
    Ineffective,
    Meaning,
    ProjectSetting,
    ProjectValues,
    SettingTable,
    flag,
    refused,
    row,
)
from hybridrl.compat.slime.slime_policy import COMMON, POLICY
from hybridrl.compat.slime.slime_sizes import by_rows, splits_model
from hybridrl.config.short_names import RefusedValueError

_SCHEDULES = ("constant", "linear", "cosine")
_NOT_READ = "fine-tuning (loss-type sft_loss) does not read it"


def _layout(name: str) -> Any:
    def translate(value: int, values: ProjectValues) -> Meaning:
        return {"engine.strategy": "megatron", f"engine.{name}": value} if splits_model(values) else {}

    return translate


def _schedule(value: str, _: ProjectValues) -> Meaning:
    if value not in _SCHEDULES:
        raise RefusedValueError(f"there is {', '.join(_SCHEDULES)} here")
    return {"{optim}.lr_scheduler_type": value}


def _tokens(value: int, values: ProjectValues) -> Meaning:
    if not values["use-dynamic-batch-size"]:
        return Ineffective("use-dynamic-batch-size is off")
    return {"data.max_token_len_per_gpu": value}


def _betas(_: float, values: ProjectValues) -> Meaning:
    return {"{optim}.betas": [values["adam-beta1"], values["adam-beta2"]]}


def _floor(value: float, values: ProjectValues) -> Meaning:
    if values["lr-decay-style"] == "constant":
        return Ineffective("the schedule constant does not read it")
    return {"{optim}.min_lr": value}


_OWN: tuple[ProjectSetting, ...] = (
    *COMMON,
    row("loss-type", translate=lambda *_: {}),
    *refused("rollout-function-path", "rows are conversations", "slime.rollout.sft_rollout.generate_rollout"),
    row("rollout-batch-size", kind="int",
        translate=lambda value, values: Ineffective("global-batch-size is the batch of an update")
        if values["global-batch-size"] else {"data.train_batch_size": value}),
    row("global-batch-size", "data.train_batch_size", kind="int"),
    row("micro-batch-size", kind="int", default=1, translate=by_rows("data.micro_batch_size_per_gpu")),
    flag("use-dynamic-batch-size", "data.use_dynamic_bsz"),
    row("max-tokens-per-gpu", kind="int", translate=_tokens),
    row("input-key", "data.messages_key", default="input"),
    row("rollout-seed", "data.seed", kind="int", default=42),
    row("seed", "engine.seed", kind="int", default=1234),
    flag("calculate-per-token-loss", translate=lambda *_: {}),
    row("tensor-model-parallel-size", kind="int", default=1, translate=_layout("tensor_model_parallel_size")),
    row("pipeline-model-parallel-size", kind="int", default=1, translate=_layout("pipeline_model_parallel_size")),
    row("context-parallel-size", kind="int", default=1, translate=_layout("context_parallel_size")),
    row("expert-model-parallel-size", kind="int", default=1, translate=_layout("expert_model_parallel_size")),
    row("expert-tensor-parallel-size", kind="int", translate=lambda value, values: (
        {"engine.expert_tensor_parallel_size": value} if values["expert-model-parallel-size"] > 1
        else Ineffective("the experts are not split"))),
    row("lr", "{optim}.lr", kind="float", default=1e-6),
    row("lr-decay-style", default="linear", translate=_schedule),
    row("min-lr", kind="float", default=0.0, translate=_floor),
    row("lr-warmup-fraction", "{optim}.lr_warmup_steps_ratio", kind="float"),
    row("lr-warmup-iters", "{optim}.lr_warmup_steps", kind="int"),
    row("weight-decay", "{optim}.weight_decay", kind="float", default=0.01),
    row("adam-beta1", kind="float", default=0.9, translate=_betas),
    row("adam-beta2", kind="float", default=0.999, translate=_betas),
    row("clip-grad", "{optim}.clip_grad", kind="float", default=1.0),
    flag("optimizer-cpu-offload", "engine.optimizer_offload"),
)  # fmt: skip


def _others() -> tuple[ProjectSetting, ...]:
    """The other settings of slime, which fine-tuning does not read."""
    own = {name for each in _OWN for name in each.names}
    return tuple(
        each if each.idle or (each.refused and each.kind != "flag") else replace(
            each, idle=_NOT_READ, refused="", translate=None, default=None, key="")
        for each in POLICY.rows
        if not own & set(each.names)
    )  # fmt: skip


def _constant(values: ProjectValues) -> dict[str, Any]:
    return {"data.truncation": "right", **({} if values["load"] else {"trainer.resume_mode": "disable"})}


def _differences(values: ProjectValues) -> list[str]:
    lines = ["slime does not limit conversations: set data.max_length, which is 1024"]
    if not values["calculate-per-token-loss"]:
        lines.append("without calculate-per-token-loss each conversation counts the same; here each token does")
    return lines


TUNING = SettingTable(
    "slime", (*_OWN, *_others()), program=lambda _: "sft", constant=_constant, differences=_differences
)
