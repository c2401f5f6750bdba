"""prime-rl's `sft`: its settings."""

from __future__ import annotations

from typing import Any

from hybridrl.compat.prime_rl.prime_rl_shared import PROCESS, RUN, model, optimizer
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

_EVALS = "validation computes the loss of data.val_files; hybridrl generate and hybridrl eval score responses"


def _data(value: str, values: ProjectValues) -> Meaning:
    subsets, splits = values["data.subsets"] or [None], values["data.splits"] or ["train"]
    if values["data.probabilities"]:
        raise RefusedValueError(
            "probabilities are weights by name here: set data.mixture.weights, with data.mixture.column=null where "
            "files are the sources"
        )
    places = [f"{value}{f'@{subset}' if subset else ''}:{split}" for subset in subsets for split in splits]
    return {"data.train_files": places if len(places) > 1 else places[0]}


def _masks(default: bool) -> Any:
    def translate(value: bool, _: ProjectValues) -> Meaning:
        if value == default:
            return {}
        raise RefusedValueError("answers of the assistant are learned from, and nothing else")

    return translate


def _validation(value: str, values: ProjectValues) -> Meaning:
    return {"data.val_files": f"{value}:{(values['val.data.splits'] or ['train'])[0]}"}


_ROWS: tuple[ProjectSetting, ...] = (
    row("model.name", "{model}.path", default="Qwen/Qwen3-0.6B"),
    flag("model.trust_remote_code", "{model}.trust_remote_code"),
    flag("model.vlm.freeze_vision_encoder", "{engine}.freeze_vision_tower"),
    *idle("model.vlm.vision_encoder_attr model.vlm.language_model_attr", "the parts of a model are found by its type"),
    *idle("model.seq_len", "data.seq_len is the limit"),
    row("tokenizer.name", "{model}.tokenizer_path"),
    row("tokenizer.chat_template", "{model}.custom_chat_template"),
    *idle("tokenizer.trust_remote_code", "it follows model.trust_remote_code"),
    *idle("renderer.*", "the tokenizer's chat template renders conversations"),
    *refused("data.type", "the data are conversations", "sft"),
    row("data.name", default="PrimeIntellect/Reverse-Text-SFT", translate=_data),
    row("data.subsets", kind="words", translate=read_with("data.name")),
    row("data.splits", kind="words", translate=read_with("data.name")),
    row("data.probabilities", kind="words", translate=read_with("data.name")),
    *refused("data.stopping_strategy", "a pass over the data has each row once", "all_exhausted"),
    row("data.batch_size", "data.train_batch_size", kind="int", default=128),
    row("data.micro_batch_size", kind="int", default=1,
        translate=lambda value, values: {"data.use_dynamic_bsz": True,
                                         "data.max_token_len_per_gpu": value * values["data.seq_len"]}),
    row("data.seq_len", "data.max_length", kind="int", default=128),
    row("data.num_workers", "data.num_workers", kind="int"),
    flag("data.shuffle", "data.shuffle", default=True),
    row("data.seed", "data.seed", kind="int", default=0),
    flag("data.loss_mask.assistant", default=True, translate=_masks(True)),
    *(flag(f"data.loss_mask.{role}", translate=_masks(False)) for role in ("system", "user", "tool")),
    *refused("data.*", "the data are conversations"),
    row("val", kind="json", translate=read_with("val.data.name")),
    row("val.interval", kind="int", default=50,
        translate=lambda value, values: {"trainer.test_freq": value} if values["val.data.name"]
        else Ineffective("there is no val.data.name")),
    row("val.data.name", translate=_validation),
    row("val.data.splits", kind="words", translate=read_with("data.name")),
    *idle("val.eval_on_start val.data.*", "validation has the sizes of training, and begins after val.interval steps"),
    *refused("eval.*", _EVALS),
    *idle("inference inference.* weight_broadcast.*", "it belongs to eval"),
    row("max_steps", "trainer.total_training_steps", kind="int"),
    row("deployment.num_train_gpus", "trainer.n_gpus_per_node", kind="int", default=1),
    *idle("deployment.num_infer_gpus deployment.num_infer_nodes deployment.num_eval_gpus", "it belongs to eval"),
    row("deployment.gpus_per_node", kind="int", default=8, translate=read_with("deployment.num_train_nodes")),
    row("deployment.num_train_nodes", kind="int", translate=lambda value, values: {
        "trainer.nnodes": value, "trainer.n_gpus_per_node": values["deployment.gpus_per_node"]}),
    row("deployment.nodes_per_fsdp_group", kind="int", translate=lambda value, values: {
        "{engine}.fsdp_size": value * values["deployment.gpus_per_node"]}),
    *refused("model.dp_replicate", "set engine.fsdp_size, the GPUs that share a copy", 1, kind="int"),
    *model(""),
    *optimizer("", "max_steps"),
    *idle(PROCESS, "there is nothing to choose here (docs/observe.md)"),
    *RUN,
)  # fmt: skip


def _constant(values: ProjectValues) -> dict[str, Any]:
    resumes = any(item.name == "resume" for item in values.settings)
    return {"data.truncation": "right", **({} if resumes else {"trainer.resume_mode": "disable"})}


def _differences(values: ProjectValues) -> list[str]:
    return [
        f"a batch of prime-rl is {values['data.batch_size']} packed sequences of seq_len={values['data.seq_len']} "
        f"tokens; "
        "here it is as many conversations",
        *([] if values["max_steps"] else ["without max_steps a run has no end there; here it ends after 30 epochs"]),
    ]


TUNING = SettingTable(
    "prime-rl", _ROWS, program=lambda _: "sft", constant=_constant, differences=_differences,
    look="prime-rl's uv run sft --help, docs/coming_from.md",
)  # fmt: skip
