"""`hybridrl.grpo` and its relatives.

Generated from the schema and the table of short names by tests/trainer/call_signatures.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from hybridrl.config.short_names import table_text
from hybridrl.programs import PROGRAMS
from hybridrl.trainer.api import Rewards, Rows, Trainer, TrainingResult
from hybridrl.trainer.call_settings import DPOSettings, KTOSettings, PolicySettings, RMSettings, SFTSettings
from hybridrl.trainer.callbacks import Callback


def grpo(
    model: str | Path | None = None,
    reward: Rewards | None = None,
    data: Rows = None,
    *,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    val_data: Rows = None,
    config: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    args: Any = None,
    callbacks: Sequence[Callback] = (),
    tools: Sequence[Callable[..., Any]] | None = None,
    **settings: Unpack[PolicySettings],
) -> TrainingResult:
    """Train with GRPO, or another method without a critic (`adv_estimator=...`): `hybridrl grpo` from Python.

    Args:
        model: directory in Hugging Face format, or a hub id `org/name`; must be set (also model_name_or_path).
        data: training data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            train_dataset, train_data).
        val_data: validation data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            eval_data, eval_dataset).
        reward: FILE.py, FILE.py:NAME, or a list of them; in Python also functions; default: scorers by data source
            (also reward_funcs, reward_function).
        max_prompt_length: maximum tokens per prompt, those of images included. Default: 512.
        max_completion_length: maximum tokens per response (also max_response_length, max_new_tokens). Default: 512.
        lora_rank: fsdp2: rank of a LoRA adapter (PEFT), which is trained while the model's weights are frozen; 0: none
            (also lora_r). Default: 0.
        lora_alpha: scale of the adapter: its product is multiplied by lora_alpha / lora_rank. Default: 16.
        lr: peak learning rate (also learning_rate). Default: 1e-06.
        max_steps: end after this many steps (with per_device_train_batch_size, in updates); -1: epochs decide (also
            total_training_steps).
        num_train_epochs: passes over the training data (also total_epochs). Default: 30.
        lr_scheduler_type: shape of the schedule after warm-up. Default: constant.
        weight_decay: decoupled weight decay. Default: 0.01.
        max_grad_norm: maximum global gradient norm (also clip_grad). Default: 1.0.
        seed: one seed for data, sampling and training: every seed that acts.
        train_batch_size: prompts per step. Default: 1024.
        ppo_mini_batch_size: prompts per optimizer step, counted over all processes; 256, or the whole batch where it
            has fewer.
        per_device_train_batch_size: sequences that a process computes at once, and a factor of the batch in TRL's way.
        gradient_accumulation_steps: micro-batches per update, a factor of the batch in TRL's way.
        num_generations: samples per prompt (also n). Default: 8.
        temperature: softmax temperature, of the sampler and of the trained distribution; above 0. Default: 1.0.
        beta: weight of the KL to the reference in the loss; 0: no reference. Default: 0.
        num_iterations: passes over a batch (also ppo_epochs). Default: 1.
        loss_type: how token losses are aggregated: dapo, grpo or dr_grpo; or another loss: cispo or sapo. Default:
            dapo.
        use_vllm: true: generate with vLLM; else by what is installed. Default: false.
        output_dir: folder of the run: configuration, metrics, report, checkpoints (also default_local_dir).
        run_name: name of the run (also experiment_name). Default: 'default'.
        project: name of the project in tracking and in default_local_dir (also project_name). Default: 'hybridrl'.
        report_to: where metrics go besides metrics.jsonl (also logger). Default: console.
        save_steps: steps between checkpoints; -1: none (also save_freq). Default: -1.
        eval_steps: steps between validations; -1: none (also test_freq). Default: -1.
        nnodes: machines. Default: 1.
        n_gpus_per_node: processes per machine: one per GPU, or this many on a CPU. Default: 1.
        reward_weights: a number per reward function, in the same order or by name; None: 1 each.
        tools: functions that the model may call, with type hints and a docstring each.
        config: further settings by dotted key, or nested.
        peft_config: a `peft.LoraConfig`, in place of `lora_rank` and its relatives.
        args: a config of TRL, or of `hybridrl.compat.trl`, whose fields count as settings.
        callbacks: functions that are called with a `hybridrl.RunEvent` after each step, validation and checkpoint.
        settings: these and further settings; `hybridrl grpo --help` lists them, and `--cfg job` every key.
    """
    trainer = Trainer(
        "grpo",
        model=model,
        reward=reward,
        reward_weights=reward_weights,
        tools=tools,
        data=data,
        val_data=val_data,
        config=config,
        peft_config=peft_config,
        args=args,
        callbacks=callbacks,
        **settings,
    )
    return trainer.train()


def ppo(
    model: str | Path | None = None,
    reward: Rewards | None = None,
    data: Rows = None,
    *,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    val_data: Rows = None,
    config: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    args: Any = None,
    callbacks: Sequence[Callback] = (),
    tools: Sequence[Callable[..., Any]] | None = None,
    **settings: Unpack[PolicySettings],
) -> TrainingResult:
    """Train with PPO and a critic: `hybridrl ppo` from Python.

    Args:
        model: directory in Hugging Face format, or a hub id `org/name`; must be set (also model_name_or_path).
        data: training data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            train_dataset, train_data).
        val_data: validation data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            eval_data, eval_dataset).
        reward: FILE.py, FILE.py:NAME, or a list of them; in Python also functions; default: scorers by data source
            (also reward_funcs, reward_function).
        max_prompt_length: maximum tokens per prompt, those of images included. Default: 512.
        max_completion_length: maximum tokens per response (also max_response_length, max_new_tokens). Default: 512.
        lora_rank: fsdp2: rank of a LoRA adapter (PEFT), which is trained while the model's weights are frozen; 0: none
            (also lora_r). Default: 0.
        lora_alpha: scale of the adapter: its product is multiplied by lora_alpha / lora_rank. Default: 16.
        lr: peak learning rate (also learning_rate). Default: 1e-06.
        max_steps: end after this many steps (with per_device_train_batch_size, in updates); -1: epochs decide (also
            total_training_steps).
        num_train_epochs: passes over the training data (also total_epochs). Default: 30.
        lr_scheduler_type: shape of the schedule after warm-up. Default: constant.
        weight_decay: decoupled weight decay. Default: 0.01.
        max_grad_norm: maximum global gradient norm (also clip_grad). Default: 1.0.
        seed: one seed for data, sampling and training: every seed that acts.
        train_batch_size: prompts per step. Default: 1024.
        ppo_mini_batch_size: prompts per optimizer step, counted over all processes; 256, or the whole batch where it
            has fewer.
        per_device_train_batch_size: sequences that a process computes at once, and a factor of the batch in TRL's way.
        gradient_accumulation_steps: micro-batches per update, a factor of the batch in TRL's way.
        num_generations: samples per prompt (also n). Default: 1.
        temperature: softmax temperature, of the sampler and of the trained distribution; above 0. Default: 1.0.
        beta: weight of the KL to the reference in the loss; 0: no reference. Default: 0.
        num_iterations: passes over a batch (also ppo_epochs). Default: 1.
        loss_type: how token losses are aggregated: dapo, grpo or dr_grpo; or another loss: cispo or sapo. Default:
            dapo.
        use_vllm: true: generate with vLLM; else by what is installed. Default: false.
        output_dir: folder of the run: configuration, metrics, report, checkpoints (also default_local_dir).
        run_name: name of the run (also experiment_name). Default: 'default'.
        project: name of the project in tracking and in default_local_dir (also project_name). Default: 'hybridrl'.
        report_to: where metrics go besides metrics.jsonl (also logger). Default: console.
        save_steps: steps between checkpoints; -1: none (also save_freq). Default: -1.
        eval_steps: steps between validations; -1: none (also test_freq). Default: -1.
        nnodes: machines. Default: 1.
        n_gpus_per_node: processes per machine: one per GPU, or this many on a CPU. Default: 1.
        reward_weights: a number per reward function, in the same order or by name; None: 1 each.
        tools: functions that the model may call, with type hints and a docstring each.
        config: further settings by dotted key, or nested.
        peft_config: a `peft.LoraConfig`, in place of `lora_rank` and its relatives.
        args: a config of TRL, or of `hybridrl.compat.trl`, whose fields count as settings.
        callbacks: functions that are called with a `hybridrl.RunEvent` after each step, validation and checkpoint.
        settings: these and further settings; `hybridrl ppo --help` lists them, and `--cfg job` every key.
    """
    trainer = Trainer(
        "ppo",
        model=model,
        reward=reward,
        reward_weights=reward_weights,
        tools=tools,
        data=data,
        val_data=val_data,
        config=config,
        peft_config=peft_config,
        args=args,
        callbacks=callbacks,
        **settings,
    )
    return trainer.train()


def sft(
    model: str | Path | None = None,
    data: Rows = None,
    *,
    val_data: Rows = None,
    config: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    args: Any = None,
    callbacks: Sequence[Callback] = (),
    **settings: Unpack[SFTSettings],
) -> TrainingResult:
    """Fine-tune on conversations: `hybridrl sft` from Python.

    Args:
        model: directory in Hugging Face format, or a hub id `org/name`; must be set (also model_name_or_path).
        data: training data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            train_dataset, train_data).
        val_data: validation data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            eval_data, eval_dataset).
        max_length: maximum tokens per sequence, those of images included (also max_seq_length). Default: 1024.
        lora_rank: fsdp2: rank of a LoRA adapter (PEFT), which is trained while the model's weights are frozen; 0: none
            (also lora_r). Default: 0.
        lora_alpha: scale of the adapter: its product is multiplied by lora_alpha / lora_rank. Default: 16.
        lr: peak learning rate (also learning_rate). Default: 1e-05.
        max_steps: end after this many steps (with per_device_train_batch_size, in updates); -1: epochs decide (also
            total_training_steps).
        num_train_epochs: passes over the training data (also total_epochs). Default: 30.
        lr_scheduler_type: shape of the schedule after warm-up. Default: constant.
        weight_decay: decoupled weight decay. Default: 0.01.
        max_grad_norm: maximum global gradient norm (also clip_grad). Default: 1.0.
        seed: one seed for data, sampling and training: every seed that acts.
        train_batch_size: rows per optimizer step, counted over all processes. Default: 256.
        per_device_train_batch_size: sequences that a process computes at once, and a factor of the batch in TRL's way.
        gradient_accumulation_steps: micro-batches per update, a factor of the batch in TRL's way.
        output_dir: folder of the run: configuration, metrics, report, checkpoints (also default_local_dir).
        run_name: name of the run (also experiment_name). Default: 'default'.
        project: name of the project in tracking and in default_local_dir (also project_name). Default: 'hybridrl'.
        report_to: where metrics go besides metrics.jsonl (also logger). Default: console.
        save_steps: steps between checkpoints; -1: none (also save_freq). Default: -1.
        eval_steps: steps between validations; -1: none (also test_freq). Default: -1.
        nnodes: machines. Default: 1.
        n_gpus_per_node: processes per machine: one per GPU, or this many on a CPU. Default: 1.
        config: further settings by dotted key, or nested.
        peft_config: a `peft.LoraConfig`, in place of `lora_rank` and its relatives.
        args: a config of TRL, or of `hybridrl.compat.trl`, whose fields count as settings.
        callbacks: functions that are called with a `hybridrl.RunEvent` after each step, validation and checkpoint.
        settings: these and further settings; `hybridrl sft --help` lists them, and `--cfg job` every key.
    """
    trainer = Trainer(
        "sft",
        model=model,
        data=data,
        val_data=val_data,
        config=config,
        peft_config=peft_config,
        args=args,
        callbacks=callbacks,
        **settings,
    )
    return trainer.train()


def dpo(
    model: str | Path | None = None,
    data: Rows = None,
    *,
    val_data: Rows = None,
    config: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    args: Any = None,
    callbacks: Sequence[Callback] = (),
    **settings: Unpack[DPOSettings],
) -> TrainingResult:
    """Train on pairs of answers, of which one is preferred: `hybridrl dpo` from Python.

    Args:
        model: directory in Hugging Face format, or a hub id `org/name`; must be set (also model_name_or_path).
        data: training data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            train_dataset, train_data).
        val_data: validation data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            eval_data, eval_dataset).
        max_length: maximum tokens per sequence, those of images included (also max_seq_length). Default: 1024.
        lora_rank: fsdp2: rank of a LoRA adapter (PEFT), which is trained while the model's weights are frozen; 0: none
            (also lora_r). Default: 0.
        lora_alpha: scale of the adapter: its product is multiplied by lora_alpha / lora_rank. Default: 16.
        lr: peak learning rate (also learning_rate). Default: 1e-06.
        max_steps: end after this many steps (with per_device_train_batch_size, in updates); -1: epochs decide (also
            total_training_steps).
        num_train_epochs: passes over the training data (also total_epochs). Default: 30.
        lr_scheduler_type: shape of the schedule after warm-up. Default: constant.
        weight_decay: decoupled weight decay. Default: 0.01.
        max_grad_norm: maximum global gradient norm (also clip_grad). Default: 1.0.
        seed: one seed for data, sampling and training: every seed that acts.
        train_batch_size: rows per optimizer step, counted over all processes. Default: 256.
        per_device_train_batch_size: sequences that a process computes at once, and a factor of the batch in TRL's way.
        gradient_accumulation_steps: micro-batches per update, a factor of the batch in TRL's way.
        beta: scale of the implied rewards: larger values keep nearer to the reference. Default: 0.1.
        output_dir: folder of the run: configuration, metrics, report, checkpoints (also default_local_dir).
        run_name: name of the run (also experiment_name). Default: 'default'.
        project: name of the project in tracking and in default_local_dir (also project_name). Default: 'hybridrl'.
        report_to: where metrics go besides metrics.jsonl (also logger). Default: console.
        save_steps: steps between checkpoints; -1: none (also save_freq). Default: -1.
        eval_steps: steps between validations; -1: none (also test_freq). Default: -1.
        nnodes: machines. Default: 1.
        n_gpus_per_node: processes per machine: one per GPU, or this many on a CPU. Default: 1.
        config: further settings by dotted key, or nested.
        peft_config: a `peft.LoraConfig`, in place of `lora_rank` and its relatives.
        args: a config of TRL, or of `hybridrl.compat.trl`, whose fields count as settings.
        callbacks: functions that are called with a `hybridrl.RunEvent` after each step, validation and checkpoint.
        settings: these and further settings; `hybridrl dpo --help` lists them, and `--cfg job` every key.
    """
    trainer = Trainer(
        "dpo",
        model=model,
        data=data,
        val_data=val_data,
        config=config,
        peft_config=peft_config,
        args=args,
        callbacks=callbacks,
        **settings,
    )
    return trainer.train()


def kto(
    model: str | Path | None = None,
    data: Rows = None,
    *,
    val_data: Rows = None,
    config: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    args: Any = None,
    callbacks: Sequence[Callback] = (),
    **settings: Unpack[KTOSettings],
) -> TrainingResult:
    """Train on answers with a label, desirable or not: `hybridrl kto` from Python.

    Args:
        model: directory in Hugging Face format, or a hub id `org/name`; must be set (also model_name_or_path).
        data: training data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            train_dataset, train_data).
        val_data: validation data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            eval_data, eval_dataset).
        max_length: maximum tokens per sequence, those of images included (also max_seq_length). Default: 1024.
        lora_rank: fsdp2: rank of a LoRA adapter (PEFT), which is trained while the model's weights are frozen; 0: none
            (also lora_r). Default: 0.
        lora_alpha: scale of the adapter: its product is multiplied by lora_alpha / lora_rank. Default: 16.
        lr: peak learning rate (also learning_rate). Default: 1e-06.
        max_steps: end after this many steps (with per_device_train_batch_size, in updates); -1: epochs decide (also
            total_training_steps).
        num_train_epochs: passes over the training data (also total_epochs). Default: 30.
        lr_scheduler_type: shape of the schedule after warm-up. Default: constant.
        weight_decay: decoupled weight decay. Default: 0.01.
        max_grad_norm: maximum global gradient norm (also clip_grad). Default: 1.0.
        seed: one seed for data, sampling and training: every seed that acts.
        train_batch_size: rows per optimizer step, counted over all processes. Default: 256.
        per_device_train_batch_size: sequences that a process computes at once, and a factor of the batch in TRL's way.
        gradient_accumulation_steps: micro-batches per update, a factor of the batch in TRL's way.
        beta: scale of the implied rewards: larger values keep nearer to the reference. Default: 0.1.
        output_dir: folder of the run: configuration, metrics, report, checkpoints (also default_local_dir).
        run_name: name of the run (also experiment_name). Default: 'default'.
        project: name of the project in tracking and in default_local_dir (also project_name). Default: 'hybridrl'.
        report_to: where metrics go besides metrics.jsonl (also logger). Default: console.
        save_steps: steps between checkpoints; -1: none (also save_freq). Default: -1.
        eval_steps: steps between validations; -1: none (also test_freq). Default: -1.
        nnodes: machines. Default: 1.
        n_gpus_per_node: processes per machine: one per GPU, or this many on a CPU. Default: 1.
        config: further settings by dotted key, or nested.
        peft_config: a `peft.LoraConfig`, in place of `lora_rank` and its relatives.
        args: a config of TRL, or of `hybridrl.compat.trl`, whose fields count as settings.
        callbacks: functions that are called with a `hybridrl.RunEvent` after each step, validation and checkpoint.
        settings: these and further settings; `hybridrl kto --help` lists them, and `--cfg job` every key.
    """
    trainer = Trainer(
        "kto",
        model=model,
        data=data,
        val_data=val_data,
        config=config,
        peft_config=peft_config,
        args=args,
        callbacks=callbacks,
        **settings,
    )
    return trainer.train()


def rm(
    model: str | Path | None = None,
    data: Rows = None,
    *,
    val_data: Rows = None,
    config: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    args: Any = None,
    callbacks: Sequence[Callback] = (),
    **settings: Unpack[RMSettings],
) -> TrainingResult:
    """Train a reward model on pairs of answers: `hybridrl rm` from Python.

    Args:
        model: directory in Hugging Face format, or a hub id `org/name`; must be set (also model_name_or_path).
        data: training data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            train_dataset, train_data).
        val_data: validation data: a file, a glob, or ORG/NAME@CONFIG:SPLIT of the hub; in Python also rows (also
            eval_data, eval_dataset).
        max_length: maximum tokens per sequence, those of images included (also max_seq_length). Default: 1024.
        lora_rank: fsdp2: rank of a LoRA adapter (PEFT), which is trained while the model's weights are frozen; 0: none
            (also lora_r). Default: 0.
        lora_alpha: scale of the adapter: its product is multiplied by lora_alpha / lora_rank. Default: 16.
        lr: peak learning rate (also learning_rate). Default: 1e-05.
        max_steps: end after this many steps (with per_device_train_batch_size, in updates); -1: epochs decide (also
            total_training_steps).
        num_train_epochs: passes over the training data (also total_epochs). Default: 30.
        lr_scheduler_type: shape of the schedule after warm-up. Default: constant.
        weight_decay: decoupled weight decay. Default: 0.01.
        max_grad_norm: maximum global gradient norm (also clip_grad). Default: 1.0.
        seed: one seed for data, sampling and training: every seed that acts.
        train_batch_size: rows per optimizer step, counted over all processes. Default: 256.
        per_device_train_batch_size: sequences that a process computes at once, and a factor of the batch in TRL's way.
        gradient_accumulation_steps: micro-batches per update, a factor of the batch in TRL's way.
        output_dir: folder of the run: configuration, metrics, report, checkpoints (also default_local_dir).
        run_name: name of the run (also experiment_name). Default: 'default'.
        project: name of the project in tracking and in default_local_dir (also project_name). Default: 'hybridrl'.
        report_to: where metrics go besides metrics.jsonl (also logger). Default: console.
        save_steps: steps between checkpoints; -1: none (also save_freq). Default: -1.
        eval_steps: steps between validations; -1: none (also test_freq). Default: -1.
        nnodes: machines. Default: 1.
        n_gpus_per_node: processes per machine: one per GPU, or this many on a CPU. Default: 1.
        config: further settings by dotted key, or nested.
        peft_config: a `peft.LoraConfig`, in place of `lora_rank` and its relatives.
        args: a config of TRL, or of `hybridrl.compat.trl`, whose fields count as settings.
        callbacks: functions that are called with a `hybridrl.RunEvent` after each step, validation and checkpoint.
        settings: these and further settings; `hybridrl rm --help` lists them, and `--cfg job` every key.
    """
    trainer = Trainer(
        "rm",
        model=model,
        data=data,
        val_data=val_data,
        config=config,
        peft_config=peft_config,
        args=args,
        callbacks=callbacks,
        **settings,
    )
    return trainer.train()


def _show_settings(function: Any, tree: str) -> None:
    """Have editors and notebooks complete the common settings of a call."""
    signature = inspect.signature(function)
    *first, rest = signature.parameters.values()
    listed = {parameter.name for parameter in first}
    names = [name for names, _, _ in table_text(tree, {}, common=True) for name in names.split(", ")]
    kind = inspect.Parameter.KEYWORD_ONLY
    new = [name for name in names if name not in listed]
    named = [inspect.Parameter(name, kind, default=None, annotation="Any") for name in new]
    function.__signature__ = signature.replace(parameters=[*first, *named, rest])


for _function in (grpo, ppo, sft, dpo, kto, rm):
    _show_settings(_function, PROGRAMS[_function.__name__].tree)
