"""`openrlhf.cli.train_sft`, `train_dpo` and `train_rm`: their settings, with the dotted names and those before."""

from __future__ import annotations

from typing import Any

from hybridrl.compat.openrlhf.openrlhf_shared import SHARED, files, full_determinism, optimizer, samples
from hybridrl.compat.projects.project_settings import (
    Ineffective,
    Meaning,
    ProjectSetting,
    ProjectValues,
    SettingTable,
    flag,
    idle,
    read_with,
    refused,
    row,
)
from hybridrl.config.short_names import RefusedValueError

_OLDER = {
    "adam.lr": "learning_rate", "adam.betas": "adam_betas", "adam.weight_decay": "l2", "max_norm": "",
}  # fmt: skip


def _rows(rate: float, epochs: int, length: int, micro: int, split: str) -> tuple[ProjectSetting, ...]:
    """The rows that the three programs have, with the defaults that differ."""
    return (
        row("model.model_name_or_path pretrain", "{model}.path"),
        flag("model.gradient_checkpointing_enable gradient_checkpointing", "{model}.enable_gradient_checkpointing",
             default=None),
        *idle("model.gradient_checkpointing_reentrant|gradient_checkpointing_use_reentrant",
              "activations are recomputed without reentrance", kind="flag"),
        row("model.aux_loss_coef aux_loss_coef", "{engine}.router_aux_loss_coef", kind="float", default=0.0),
        row("train.batch_size train_batch_size", "data.train_batch_size", kind="int", default=128),
        row("train.micro_batch_size micro_train_batch_size", "data.micro_batch_size_per_gpu", kind="int",
            default=micro),
        row("train.max_epochs max_epochs", "trainer.total_epochs", kind="int", default=epochs),
        row("train.seed seed", kind="int", default=42,
            translate=lambda value, _: {"data.seed": value, "{engine}.seed": value}),
        full_determinism("{engine}.full_determinism"),
        row("data.dataset dataset",
            translate=lambda value, values: {
                "data.train_files": files(value, values["data.dataset_split"], values["data.dataset_probs"])}),
        row("data.dataset_probs dataset_probs", translate=read_with("data.dataset")),
        row("data.dataset_split dataset_split train_split", default="train", translate=read_with("data.dataset")),
        row("data.max_samples max_samples", kind="int", translate=samples("data.train_max_samples")),
        row("data.max_len max_len", "data.max_length", kind="int", default=length),
        row("data.tokenizer_chat_template tokenizer_chat_template", "{model}.custom_chat_template"),
        row("data.dataloader_num_workers dataloader_num_workers", "data.num_workers", kind="int"),
        row("eval.dataset eval_dataset",
            translate=lambda value, values: {"data.val_files": files(value, values["eval.split"], None)}),
        row("eval.split eval_split", default=split, translate=_of_evaluation(None)),
        row("eval.steps eval_steps", kind="int", default=-1, translate=_of_evaluation("trainer.test_freq")),
        *optimizer("", rate, _OLDER),
        *SHARED,
    )  # fmt: skip


def _of_evaluation(key: str | None) -> Any:
    def translate(value: Any, values: ProjectValues) -> Meaning:
        if values["eval.dataset"] is None:
            return Ineffective("there is no eval.dataset")
        return {} if key is None else {key: value}

    return translate


def _columns(value: str, values: ProjectValues) -> Meaning:
    """The prompts' column, or that of whole conversations."""
    if values["data.output_key"] is not None:
        return {"data.prompt_key": value}
    if not values["data.apply_chat_template"]:
        raise RefusedValueError(
            "plain text without a prompt is not learned here; give messages, or prompts and answers"
        )
    return {"data.messages_key": value}


def _template(value: str, values: ProjectValues) -> Meaning:
    if values["data.apply_chat_template"]:
        return Ineffective("data.apply_chat_template has the tokenizer's template")
    raise RefusedValueError(
        "prompts are rendered by the tokenizer's chat template; model.custom_chat_template is another"
    )


def _pair_template() -> ProjectSetting:
    return row("data.input_template input_template", translate=_template)


def _pair_columns() -> tuple[ProjectSetting, ...]:
    return (
        row("data.prompt_key prompt_key", "data.prompt_key"),
        row("data.chosen_key chosen_key", "data.chosen_key", default="chosen"),
        row("data.rejected_key rejected_key", "data.rejected_key", default="rejected"),
        _pair_template(),
        flag("data.apply_chat_template apply_chat_template", translate=lambda *_: {}),
    )


def _reference(value: str, values: ProjectValues) -> Meaning:
    if value == values["model.model_name_or_path"]:
        return {}
    raise RefusedValueError("the reference is the model before training; leave it out")


def _pair_loss(value: str, _: ProjectValues) -> Meaning:
    if value not in ("sigmoid", "logexp"):
        raise RefusedValueError("there is sigmoid and logexp, which are the same function")
    return {"rm.loss_type": "bradley_terry"}


def _constant(_: ProjectValues) -> dict[str, Any]:
    return {"data.truncation": "right"}


def _differences(values: ProjectValues) -> list[str]:
    lines = ["deepspeed takes all GPUs of the machine: set trainer.n_gpus_per_node, which is 1"]
    if not values["data.apply_chat_template"]:
        lines.append("without data.apply_chat_template prompts of text go to the model in data.input_template; here "
            "they are "
                     "one message of the user, in the chat template")  # fmt: skip
    return lines


def _table(program: str, rows: tuple[ProjectSetting, ...]) -> SettingTable:
    return SettingTable("OpenRLHF", rows, program=lambda _: program, constant=_constant, differences=_differences)


SUPERVISED = _table(
    "sft",
    (
        *_rows(5e-6, epochs=2, length=2048, micro=8, split="train"),
        flag("data.multiturn multiturn",
             translate=lambda value, _: {} if value else Ineffective("all answers of a conversation are learned from")),
        row("data.input_key input_key", default="input", translate=_columns),
        row("data.output_key output_key", "data.response_key"),
        row("data.input_template input_template", translate=_template),
        flag("data.apply_chat_template apply_chat_template", translate=lambda *_: {}),
        *refused("model.pretrain_mode_enable|pretrain_mode", "plain text without a prompt is not learned here", False,
                 kind="flag"),
    ),
)  # fmt: skip
PAIRS = _table(
    "dpo",
    (
        *_rows(1e-5, epochs=1, length=512, micro=8, split="test"),
        *_pair_columns(),
        row("model.beta beta", "dpo.beta", kind="float", default=0.1),
        flag("model.ipo_enable ipo", translate=lambda value, _: {"dpo.loss_type": "ipo"} if value else {}),
        row("model.label_smoothing label_smoothing", kind="float", default=0.0,
            translate=lambda value, _: {"dpo.label_smoothing": value} if value else {}),
        row("model.nll_loss_coef nll_loss_coef", kind="float", default=0.0,
            translate=lambda value, _: {"dpo.sft_coef": value} if value else {}),
        row("ref.model_name_or_path ref_pretrain", translate=_reference),
        *idle("ref.offload|ref_offload", "dpo.reference=cache needs no second model", kind="flag"),
    ),
)  # fmt: skip
REWARD_MODEL = _table(
    "rm",
    (
        *_rows(9e-6, epochs=1, length=512, micro=1, split="train"),
        *_pair_columns(),
        row("model.loss_type loss", default="sigmoid", translate=_pair_loss),
        flag("model.margin_loss_enable margin_loss",
             translate=lambda value, _: {"data.margin_key": "margin"} if value else {}),
        *idle("model.compute_fp32_loss_enable|compute_fp32_loss", "losses are computed in float32", kind="flag"),
        *refused("ds.value_head_prefix|value_head_prefix", "the head of a reward model is called score", "score"),
    ),
)  # fmt: skip
