"""TRL's trainers with TRL's arguments, which compose a run of hybridrl and train it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.compat.trl.configs import (
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    rloo_settings,
)
from hybridrl.compat.trl.metric_names import with_trl_names
from hybridrl.compat.trl.transformers_callbacks import CALLED, TransformersCallbacks
from hybridrl.errors import ConfigError
from hybridrl.notify import notify
from hybridrl.programs import PROGRAMS
from hybridrl.trainer.api import Trainer, TrainingResult
from hybridrl.trainer.call_arguments import settings_of_args


class TrainOutput(NamedTuple):
    """Result of `train`, as TRL has it."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass
class TrainerState:
    """The parts of a trainer's `state` that exist here.

    Attributes:
        global_step: steps that are done.
        max_steps: steps of the whole run.
        log_history: for each step its metrics, under TRL's names and hybridrl's.
    """

    global_step: int = 0
    max_steps: int = 0
    log_history: list[dict[str, float]] = field(default_factory=list)


class TRLTrainer:
    """Base of the trainers: `train`, `save_model` and `state`.

    Attributes:
        args: the config.
        result: the result of the run, after `train`.
        state: steps and metrics.

    Raises:
        ConfigError: by name, what hybridrl does not have: before anything starts.
    """

    program = ""
    config_class: Any = None
    #: fields of the config that `_more_settings` translates
    own_fields: tuple[str, ...] = ()

    def __init__(self, model: Any, args: Any, **arguments: Any) -> None:
        self.args = args if args is not None else self.config_class()
        self.state = TrainerState()
        self.result: TrainingResult | None = None
        self._arguments = arguments
        self._model = model
        refuse(type(self).__name__, arguments.pop("unsupported"))
        self._callbacks = self._adapted(arguments.pop("callbacks", None) or [])
        self.run = self._compose(getattr(self.args, "resume_from_checkpoint", None))

    def _adapted(self, callbacks: Sequence[Any]) -> list[TransformersCallbacks]:
        missing = [callback for callback in callbacks if not all(hasattr(callback, method) for method in CALLED)]
        if missing:
            kind = getattr(missing[0], "__name__", type(missing[0]).__name__)
            raise ConfigError(f"{type(self).__name__}(callbacks=): {kind} does not derive from TrainerCallback")
        return [TransformersCallbacks(list(callbacks), self.args)] if callbacks else []

    @property
    def folder(self) -> Path:
        """The run's folder: `args.output_dir`, or TRL's default."""
        name = self._model if isinstance(self._model, str) else getattr(self._model, "name_or_path", "model")
        default_name = f"{Path(str(name)).name}-{self.program.upper()}"
        return Path(getattr(self.args, "output_dir", None) or default_name)

    def _compose(self, resume: Any) -> Trainer:
        tree = PROGRAMS[self.program].tree
        settings = settings_of_args(self.args, tree, validates=self._arguments["val_data"] is not None)
        weights = settings.pop("reward_weights", None)
        for name in self.own_fields:
            settings.pop(name, None)
        settings |= {"output_dir": str(self.folder), "resume_from_checkpoint": resume or False}
        config = self._more_settings()
        model, tokenizer = self._stored()
        if tokenizer is not None:
            config["actor_rollout_ref.model.tokenizer_path" if tree == "ppo_trainer" else "model.tokenizer_path"] = (
                tokenizer
            )
        arguments = {name: value for name, value in self._arguments.items() if name != "processing_class"}
        return Trainer(
            self.program,
            model=model,
            reward_weights=weights,
            config=config,
            callbacks=self._callbacks,
            **arguments,
            **settings,
        )

    def _more_settings(self) -> dict[str, Any]:
        return {}

    def _stored(self) -> tuple[str, str | None]:
        """The model and, where it is another than the model's, the tokenizer; objects in memory are saved."""
        tokenizer = self._arguments.get("processing_class")
        folder = self.folder / "initial_model"
        if isinstance(self._model, str | Path):
            name = getattr(tokenizer, "name_or_path", None)
            if tokenizer is None or name == str(self._model):
                return str(self._model), None
            tokenizer.save_pretrained(folder)
            return str(self._model), str(folder)
        if hasattr(self._model, "peft_config"):
            raise ConfigError(
                "model is a PeftModel; give the model without its adapter, and peft_config=LoraConfig(...)"
            )
        if not hasattr(self._model, "save_pretrained"):
            raise ConfigError(f"model is {type(self._model).__name__}; give a folder, a hub id or a PreTrainedModel")
        self._model.save_pretrained(folder)
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self._model.name_or_path)
        tokenizer.save_pretrained(folder)
        return str(folder), None

    def train(self, resume_from_checkpoint: Any = None) -> TrainOutput:
        """Train to the end.

        Args:
            resume_from_checkpoint: true: go on from the newest checkpoint; a folder: from this one; None: start anew.
        """
        if resume_from_checkpoint:
            self.run = self._compose(resume_from_checkpoint)
        for callbacks in self._callbacks:
            callbacks.call("on_train_begin")
        self.result = self.run.train()
        for callbacks in self._callbacks:
            callbacks.call("on_train_end")
        self.state.global_step, self.state.max_steps = self.result.step, self.result.total_steps
        self.state.log_history = [with_trl_names(record) for record in self.result.history]
        losses = [record["loss"] for record in self.state.log_history if "loss" in record]
        mean = sum(losses) / len(losses) if losses else float("nan")
        return TrainOutput(self.result.step, mean, {"train_loss": mean})

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the trained model, with its tokenizer, to a folder; None: that of the run."""
        if self.result is None or self.result.model_path is None:
            raise ConfigError("save_model: there is no trained model yet; call train() first")
        shutil.copytree(self.result.model_path, Path(output_dir or self.folder), dirs_exist_ok=True)

    def push_to_hub(self, commit_message: str = "", repo_id: str | None = None, **_: Any) -> str:
        """Upload the trained model; return the address of the commit.

        Args:
            repo_id: ORG/NAME; None: that of the config's `hub_model_id`.

        Raises:
            ConfigError: nothing is trained yet, or no repository is named.
        """
        repository = repo_id or getattr(self.args, "hub_model_id", None)
        if repository is None:
            raise ConfigError("push_to_hub: where to? Set hub_model_id=ORG/NAME in the config")
        if self.result is None:
            raise ConfigError("push_to_hub: there is no trained model yet; call train() first")
        return self.result.push_to_hub(repository, private=self.args.hub_private_repo, message=commit_message)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return the last metrics of validation.

        Raises:
            ConfigError: there was no validation; it takes place while training, by `eval_strategy`.
        """
        metrics = {} if self.result is None else self.result.metrics
        names = with_trl_names(metrics)
        validated = {name: value for name, value in names.items() if name.startswith(("eval_", "val"))}
        if not validated:
            raise ConfigError("evaluate: there was no validation; set eval_dataset= and eval_strategy, and train first")
        return validated


def refuse(trainer: str, unsupported: Mapping[str, Any]) -> None:
    """Refuse arguments that were given and that nothing here reads.

    Args:
        trainer: the name of the class, for the message.
        unsupported: arguments by name, with the reason: `(value, reason)`.
    """
    faults = []
    for name, (value, reason) in unsupported.items():
        is_given = any(item is not None for item in value) if isinstance(value, tuple) else value not in (None, [], {})
        if is_given:
            faults.append(f"{trainer}({name}=): {reason}")
    if faults:
        raise ConfigError(faults)


_OPTIMIZERS = "the optimizer is chosen by args (optim, learning_rate, ...)"
_QUANTIZATION = "load_in_4bit=True in hybridrl.grpo and its relatives keeps a frozen base in 4 bits (docs/lora.md)"
_COLLATOR = "rows become batches by columns (docs/data.md)"
_METRICS = "validation computes the metrics of docs/observe.md"


def _functions(reward_funcs: Any) -> Any:
    """Reward functions; in TRL text names a reward model."""
    several = list(reward_funcs) if isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str) else None
    for function in [reward_funcs] if several is None else several:
        if isinstance(function, str) or hasattr(function, "forward"):
            raise ConfigError(
                "reward_funcs: a reward model is reward.reward_model.enable=True with "
                "reward.reward_model.model.path (docs/reward_models.md); give functions here"
            )
    return reward_funcs if several is None or len(several) > 1 else several[0]


class GRPOTrainer(TRLTrainer):
    """TRL's `GRPOTrainer`, run by `hybridrl.grpo`."""

    program = "grpo"
    config_class = GRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        """Take TRL's arguments."""
        super().__init__(
            model,
            args,
            reward=None if reward_funcs is None else _functions(reward_funcs),
            tools=tools,
            data=train_dataset,
            val_data=eval_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            callbacks=callbacks,
            unsupported={
                "reward_processing_classes": (reward_processing_classes, "reward models have their own tokenizers"),
                "optimizers": (optimizers, _OPTIMIZERS),
                "quantization_config": (quantization_config, _QUANTIZATION),
                "rollout_func": (rollout_func, "sessions of your own are agent loops (docs/agents.md)"),
                "environment_factory": (environment_factory, "environments are registered (docs/environments.md)"),
            },
        )


class RLOOTrainer(GRPOTrainer):
    """TRL's `RLOOTrainer`, run by `hybridrl.grpo` with `adv_estimator=rloo`.

    Ratios are of tokens, and TRL's of sequences, which differ from the second update on a batch.
    """

    config_class = RLOOConfig
    own_fields = ("beta",)

    def _more_settings(self) -> dict[str, Any]:
        return rloo_settings(float(getattr(self.args, "beta", 0.0)))


class _SupervisedTrainer(TRLTrainer):
    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        peft_config: Any = None,
        quantization_config: Any = None,
        **further: Any,
    ) -> None:
        """Take TRL's arguments."""
        unsupported = {name: (value, "it has no counterpart here") for name, value in further.items()}
        super().__init__(
            model,
            args,
            data=train_dataset,
            val_data=eval_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            callbacks=callbacks,
            unsupported={
                "data_collator": (data_collator, _COLLATOR),
                "compute_metrics": (compute_metrics, _METRICS),
                "optimizers": (optimizers, _OPTIMIZERS),
                "quantization_config": (quantization_config, _QUANTIZATION),
                **unsupported,
            },
        )


class SFTTrainer(_SupervisedTrainer):
    """TRL's `SFTTrainer`, run by `hybridrl.sft`: conversations, or prompts with completions."""

    program = "sft"
    config_class = SFTConfig

    def _more_settings(self) -> dict[str, Any]:
        columns = columns_of(self._arguments["data"])
        if "messages" in columns or not columns:
            notify("SFT learns from the assistant's answers only, as TRL does with assistant_only_loss=True", once=True)
            return {}
        if {"prompt", "completion"} <= set(columns):
            return {"data.prompt_key": "prompt", "data.response_key": "completion"}
        raise ConfigError(
            f"train_dataset has the columns {', '.join(columns)}; give messages, or prompt and completion. Plain text "
            "without a prompt is not learned here"
        )


class DPOTrainer(_SupervisedTrainer):
    """TRL's `DPOTrainer`, run by `hybridrl.dpo`: the columns prompt, chosen and rejected."""

    program = "dpo"
    config_class = DPOConfig

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **arguments: Any) -> None:
        """Take TRL's arguments."""
        reason = "the reference is the model before training; leave it out"
        refuse(type(self).__name__, {"ref_model": (ref_model, reason)})
        super().__init__(model, args, **arguments)


class KTOTrainer(DPOTrainer):
    """TRL's `KTOTrainer`, run by `hybridrl.kto`: the columns prompt, completion and label, or pairs as in DPO.

    The KL is estimated over all rows of a step, where TRL averages over the rows of a process and a micro-batch.
    """

    program = "kto"
    config_class = KTOConfig

    def _more_settings(self) -> dict[str, Any]:
        return {"data.truncation": "right"}  # what TRL does with rows over max_length


class RewardTrainer(_SupervisedTrainer):
    """TRL's `RewardTrainer`, run by `hybridrl.rm`: the columns chosen and rejected."""

    program = "rm"
    config_class = RewardConfig


def columns_of(rows: Any) -> list[str]:
    """The names of the columns of rows in memory; none of what is a file."""
    if hasattr(rows, "column_names"):
        return [str(name) for name in rows.column_names]
    if hasattr(rows, "columns"):
        return [str(name) for name in rows.columns]
    if isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
        return [str(name) for name in rows[0]]
    return []
