"""Cross-checks of supervised training: its data, and the objective with the settings that it reads."""

import dataclasses
from collections.abc import Iterator

from hybridrl.config.checks.check_mixture import check_mixture
from hybridrl.config.checks.paths import check_class, check_files
from hybridrl.config.data_names import KINDS
from hybridrl.config.entry_settings import ranks_per_sequence
from hybridrl.config.schema.data import LabelledDataConfig, PairsDataConfig, SFTDataConfig
from hybridrl.config.schema.node import default_of
from hybridrl.config.schema.root import SupervisedConfig
from hybridrl.registry import OBJECTIVES, TRAIN_ENGINES
from hybridrl.utils.entry_metadata import OBJECTIVE_KINDS

_PROGRAMS = {"sft_trainer": "main_sft", "dpo_trainer": "main_dpo", "kto_trainer": "main_kto", "rm_trainer": "main_rm"}

_ROWS = {PairsDataConfig: "pairs", LabelledDataConfig: "labelled answers"}


def check_supervised(config: SupervisedConfig) -> Iterator[str]:
    """Check the settings of the data and of the objective."""
    yield from _check_data(config)
    yield from check_mixture(config.data)
    if isinstance(config.data, SFTDataConfig):
        yield from _check_conversations(config.data)
    yield from _check_sizes(config)
    if config.engine.forward_only:
        yield "engine.forward_only=True: the model is trained; remove it"
    if OBJECTIVES.knows(config.objective.loss_type):
        yield from _check_objective(config)


def _check_data(config: SupervisedConfig) -> Iterator[str]:
    data, rows = config.data, _ROWS.get(type(config.data), "conversations")
    yield from check_class("data.custom_cls", data.custom_cls.path, data.custom_cls.name, "path", "name")
    if data.custom_cls.path is None:
        yield from check_files("data.train_files", data.train_files)
        yield from check_files("data.val_files", data.val_files)
    if not data.train_files:
        yield f"data.train_files is not set; give files with {rows} ({KINDS})"
    if not data.val_files and config.trainer.test_freq not in (-1, 0):
        yield f"trainer.test_freq={config.trainer.test_freq} without data.val_files; set them, or trainer.test_freq=-1"
    answers_per_row = 2 if isinstance(data, LabelledDataConfig) else 1  # a row may be a pair, which is split
    if 0 <= data.train_max_samples * answers_per_row < data.train_batch_size:
        yield (
            f"data.train_max_samples={data.train_max_samples} is less than data.train_batch_size="
            f"{data.train_batch_size}: there would be no batch"
        )


def _check_conversations(data: SFTDataConfig) -> Iterator[str]:
    if (data.prompt_key is None) != (data.response_key is None):
        name = "prompt_key" if data.prompt_key else "response_key"
        yield f"data.{name}={data[name]} alone: set data.prompt_key and data.response_key, or neither for messages"


def _check_sizes(config: SupervisedConfig) -> Iterator[str]:
    """Check that a micro-batch is part of a batch, and that the longest row fits into one."""
    data, pairs = config.data, isinstance(config.data, PairsDataConfig)
    rows, longest = ("pairs", "pair") if pairs else ("sequences", "sequence")
    default_field = next(field for field in dataclasses.fields(data) if field.name == "micro_batch_size_per_gpu")
    micro = data.micro_batch_size_per_gpu
    if micro > data.train_batch_size and micro != default_of(default_field):
        yield (
            f"data.micro_batch_size_per_gpu={micro} is more than data.train_batch_size="
            f"{data.train_batch_size}, the {rows} of one step"
        )
    ranks, needed = ranks_per_sequence(config.engine), data.max_length * (2 if pairs else 1)
    if data.use_dynamic_bsz and data.max_token_len_per_gpu * ranks < needed:
        shared = f" on {ranks} ranks" if ranks > 1 else ""
        length = f"twice data.max_length={data.max_length}" if pairs else f"data.max_length={data.max_length}"
        yield (
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu}{shared} is less than {length}: the longest "
            f"{longest} does not fit into a micro-batch"
        )


def _check_objective(config: SupervisedConfig) -> Iterator[str]:
    """Check that the objective is of this program, and that it reads what is set."""
    group, settings = config.objective_group, config.objective
    name = settings.loss_type
    metadata, setting = OBJECTIVES.metadata(name), f"{group}.loss_type={name}"
    tree = OBJECTIVE_KINDS[metadata.kind]
    if tree != f"{group}_trainer":
        others = [
            other for other in OBJECTIVES.names() if OBJECTIVE_KINDS[OBJECTIVES.metadata(other).kind][:-8] == group
        ]
        yield f"{setting} is an objective of {_PROGRAMS[tree]}; choose from {', '.join(others)}"
        return
    yield from _check_baseline(config, metadata.kl_baseline)
    if metadata.reference and settings.get("reference") == "adapter":
        if not config.model.adapted:
            yield (
                f"{group}.reference=adapter without an adapter (model.lora_rank={config.model.lora_rank}): set "
                f"model.lora_rank, or {group}.reference=cache"
            )
        elif config.model.lora_adapter_path is not None:
            yield (
                f"{group}.reference=adapter with model.lora_adapter_path={config.model.lora_adapter_path}: the model "
                f"before training has that adapter, so without it the model is another one; set {group}.reference=cache"
            )
    kinds = TRAIN_ENGINES.metadata(config.engine.strategy).model_types
    if metadata.kind == "scores" and "reward_model" not in kinds:
        able = [
            strategy
            for strategy in TRAIN_ENGINES.names()
            if "reward_model" in TRAIN_ENGINES.metadata(strategy).model_types
        ]
        yield (
            f"engine.strategy={config.engine.strategy} trains {', '.join(kinds)} and no reward_model; set it to "
            f"{' or '.join(able)}"
        )


def _check_baseline(config: SupervisedConfig, reads_baseline: bool) -> Iterator[str]:
    """Check that prompts of a step can be joined with answers to others, for the estimate of the KL."""
    group, name = config.objective_group, config.objective.loss_type
    if not reads_baseline:
        return
    if config.objective.get("reference") == "cache":
        yield (
            f"{group}.reference=cache with {group}.loss_type={name}: the reference also computes prompts with answers "
            f"of other rows, which differ in each epoch; set {group}.reference=model, or adapter with model.lora_rank"
        )
    if config.data.train_batch_size < 2:
        yield (
            f"data.train_batch_size={config.data.train_batch_size} with {group}.loss_type={name}: each prompt is "
            "compared with the answer of another row of the step; set it to 2 or more"
        )
