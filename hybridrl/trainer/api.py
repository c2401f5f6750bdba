"""Training from a program or a notebook: `hybridrl.grpo(model=..., reward=f, data=rows)`."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from hybridrl.config import PPOTrainerConfig, SupervisedConfig
from hybridrl.config.convert import nearest, put
from hybridrl.config.data_names import FORMATS, dataset_name, format_of, local_files, suite_name
from hybridrl.config.short_names import ShortSettings
from hybridrl.errors import ConfigError
from hybridrl.notify import forget
from hybridrl.programs import PROGRAMS
from hybridrl.trainer.call_arguments import adapter_settings, renamed, settings_of_args
from hybridrl.trainer.call_objects import put_objects
from hybridrl.trainer.callbacks import Callback, EventKind, EventStream, RunEvent, calling

_PROGRAMS = ("grpo", "ppo", "sft", "dpo", "kto", "rm")

Reward = Callable[..., Any] | str | Path
Rewards = Reward | Sequence[Reward] | Mapping[str, Reward]
Rows = Any  # a file or several, a `datasets.Dataset`, a `pandas.DataFrame`, a `pyarrow.Table` or a list of dicts
_MISSING = {
    "model": "give a folder in Hugging Face format, or a hub id",
    "data": "give a file, rows, or a data set of the hub",
}


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run.

    Attributes:
        folder: the run's folder, with `config.yaml`, `metrics.jsonl`, `report.html` and checkpoints.
        step: the last step that was completed.
        total_steps: the step after which the run is complete.
        checkpoint: the last checkpoint; None if there is none.
        model_path: the trained model in Hugging Face format, in the last checkpoint; None if there is none.
        history: for each step, its number as `step` and its metrics.
        ended_early: it ended before the last step because its validations did not improve any more.
        best_checkpoint: the best checkpoint by `best_metric`; None if there is none.
        best_model_path: the model in it, in Hugging Face format; None if there is none.
    """

    folder: Path
    step: int
    total_steps: int
    checkpoint: Path | None
    model_path: Path | None
    history: list[dict[str, float]] = field(repr=False)
    ended_early: bool = False
    best_checkpoint: Path | None = None
    best_model_path: Path | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train; if not, the run was asked to stop (Ctrl-C, SIGTERM), and can be resumed."""
        return self.step >= self.total_steps or self.ended_early

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: value for record in self.history for name, value in record.items() if name != "step"}

    def push_to_hub(
        self, repository: str, *, private: bool | None = None, revision: str | None = None, message: str = ""
    ) -> str:
        """Upload the trained model to the Hugging Face Hub, and return the address of the commit.

        Arguments and errors are those of `hybridrl.trainer.hub_upload.upload_model`.
        """
        from hybridrl.trainer.hub_upload import upload_model

        if self.model_path is None:
            raise ConfigError("push_to_hub: there is no trained model; train with save_last=true")
        return upload_model(self.model_path, repository, private=private, revision=revision, message=message)

    def curve(self, name: str) -> list[float]:
        """Return the values of one metric, step by step.

        Raises:
            KeyError: no step has such a metric; names similar ones.
        """
        values = [record[name] for record in self.history if name in record]
        if not values:
            raise KeyError(f"unknown metric {name}{nearest(name, list(self.metrics))}")
        return values


class Trainer:
    """One run, with its settings composed and checked as the command line does it. `train()` runs it.

    Args:
        program: `grpo`, `ppo`, `sft`, `dpo` or `rm`: the programs of the command `hybridrl`, with their defaults.
        model: a folder in Hugging Face format, or a hub id.
        data: the training data: a file or several, a `datasets.Dataset`, a `pandas.DataFrame`, a list or
            an iterator of dicts, or a list of texts, which are prompts.
        reward: a function, the path of a Python file (`FILE.py` or `FILE.py:NAME`), a list of them, or a dict of names
            to them; None uses the built-in scorers.
        reward_weights: a number per reward function, in the same order or by name; None: 1 each.
        val_data: the validation data, in the same forms as `data`.
        config: settings by dotted key, or nested.
        peft_config: a `peft.LoraConfig`, in place of `lora_rank` and its relatives.
        args: a config of TRL, or of `hybridrl.compat.trl`, whose fields count as settings; settings replace them.
        callbacks: functions that are called with a `hybridrl.RunEvent` after each step, validation and checkpoint;
            `event.stop()` ends the run.
        tools: functions that the model may call, with type hints and a docstring (`hybridrl.agents.function_tool`).
        settings: settings by their short names (`hybridrl grpo --help` lists them), or by the last part of a key that
            no other key has, e.g. `total_epochs=3`. TRL's names mean what they mean in TRL.

    Attributes:
        config: the typed configuration.
        folder: the run's folder. It is a new one unless `default_local_dir` or `experiment_name` is set; a run in a
            folder that was named resumes from its checkpoints.
        result: that of the last run; None before.

    Raises:
        ConfigError: lists every unknown name with the nearest valid ones, every wrong value and every contradiction.
        DataError, RewardError: rows or functions cannot be used.
    """

    def __init__(
        self,
        program: str,
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
        **settings: Any,
    ) -> None:
        forget()  # an earlier trainer of this process may have been refused
        if program not in _PROGRAMS:
            raise ConfigError(f"program={program!r}: must be one of {', '.join(_PROGRAMS)}")
        self.program = program
        if not_callable := [item for item in callbacks if not callable(item)]:
            raise ConfigError(f"callbacks: {type(not_callable[0]).__name__} cannot be called; give functions")
        self.callbacks = list(callbacks)
        self.result: TrainingResult | None = None
        arguments = renamed(settings, {"model": model, "reward": reward, "data": data, "val_data": val_data})
        model, reward, data, val_data = (arguments[name] for name in ("model", "reward", "data", "val_data"))
        if missing := [name for name in ("model", "data") if arguments[name] is None]:
            raise ConfigError([f"{name}= is missing: {_MISSING[name]}" for name in missing])
        if args is not None:
            of_args = settings_of_args(args, PROGRAMS[program].tree, validates=val_data is not None)
            reward_weights = of_args.pop("reward_weights", None) if reward_weights is None else reward_weights
            settings = {**of_args, **settings}
        if peft_config is not None:
            settings = {**settings, **adapter_settings(peft_config)}
        is_policy = PROGRAMS[program].tree == "ppo_trainer"
        model_key = "actor_rollout_ref.model.path" if is_policy else "model.path"
        keywords = {model_key: ("model", _model_path(model)), "data.train_files": ("data", data)}
        if val_data is not None:
            keywords["data.val_files"] = ("val_data", val_data)
        if reward is not None:
            keywords["reward.custom_reward_function.path"] = ("reward", reward)
        tree, self._names = _settings(PROGRAMS[program].tree, settings, config or {}, keywords)
        put(tree, model_key, _model_path(model))
        is_named = bool({"default_local_dir", "experiment_name"} & set(tree.get("trainer", {})))
        folder = Path(self._compose(tree).trainer.default_local_dir)
        with contextlib.ExitStack() as undo:
            if not is_named:
                folder = undo.enter_context(_new_folder(folder.parent, program))
                put(tree, "trainer.experiment_name", folder.name)
            self.folder = folder
            undo.enter_context(_removing_new_files(folder / "data", folder / "reward", folder / "registered"))
            put_objects(tree, folder / "registered", model_key.removesuffix(".path"), tools)
            put(tree, "data.train_files", self._files(data, "train"))
            if val_data is not None:
                put(tree, "data.val_files", self._files(val_data, "val"))
            if reward is not None:
                self._put_reward(tree, reward, reward_weights)
            self.config = self._compose(tree, notices=True)
            from hybridrl.config import validate

            validate(self.config)

    def _compose(self, settings: Mapping[str, Any], notices: bool = False) -> PPOTrainerConfig | SupervisedConfig:
        from hybridrl.config.compose import compose_config, print_notices  # takes a moment (Hydra)

        program = PROGRAMS[self.program]
        derived = self._names.derived
        composed = compose_config(program.tree, defaults=program.defaults, settings=settings, derived=derived)
        if notices:
            print_notices([*self._names.notices, *composed.notices])
        assert isinstance(composed.config, PPOTrainerConfig | SupervisedConfig)
        return composed.config

    def _files(self, data: Rows, name: str) -> list[str]:
        """Return data files: those that are named, or one with the rows, in the run's folder."""
        from hybridrl.data import save_rows

        several = isinstance(data, list | tuple) and bool(data) and all(isinstance(item, str | Path) for item in data)
        if several and not any(map(_is_file, data)):
            if PROGRAMS[self.program].tree != "ppo_trainer":
                raise ConfigError(f"data: a list of texts is prompts, and {self.program} needs answers: rows or files")
            several = False
        if isinstance(data, str | Path) or several:
            return [str(file) for file in (data if several else [data])]
        return [str(save_rows(data, self.folder / "data", name))]

    def _put_reward(self, tree: dict[str, Any], reward: Any, weights: Any) -> None:
        from hybridrl.reward import reward_settings

        if PROGRAMS[self.program].tree != "ppo_trainer":
            raise ConfigError(f"reward: {self.program} has no reward; leave it out, or use grpo or ppo")
        for name, value in reward_settings(reward, self.folder / "reward", weights).items():
            put(tree, f"reward.{name}", value)

    def train(self) -> TrainingResult:
        """Run the training to its end, or until it is asked to stop (Ctrl-C, SIGTERM). Ray is started if need be.

        Raises:
            UserError: something that the user can fix.
            WorkerError: a worker failed or died.
        """
        return self._train(self.callbacks)

    def steps(self, *kinds: EventKind) -> Iterator[RunEvent]:
        """Train, and yield an event for each completed step. The run waits while the body of the loop runs.

        A loop that is left (`break`, an error, Ctrl-C) ends the run with a checkpoint. Afterwards `result` is set.

        Args:
            kinds: of events; steps by default, also `validation` and `checkpoint`.

        Raises:
            ConfigError: there is no such kind.
            UserError, WorkerError: as `train`.
        """
        kinds = kinds or ("step",)
        if unknown := [kind for kind in kinds if kind not in get_args(EventKind)]:
            raise ConfigError(f"steps({unknown[0]!r}): must be one of {', '.join(get_args(EventKind))}")
        return iter(self._stream(kinds))

    def _stream(self, kinds: Sequence[EventKind]) -> EventStream:
        stream = EventStream(lambda: self._train([*self.callbacks, stream.emit]), kinds)
        return stream

    def _train(self, callbacks: Sequence[Callback]) -> TrainingResult:
        from hybridrl.observe import jsonl
        from hybridrl.observe.tracking import METRICS

        with calling(callbacks):
            outcome = PROGRAMS[self.program].load()(self.config)
        steps: dict[int, dict[str, float]] = {}
        for record in jsonl.read(outcome.folder / METRICS):
            numbers = {name: jsonl.number(value) for name, value in record.items()}
            steps.setdefault(record["step"], {}).update({k: v for k, v in numbers.items() if v is not None})
        self.result = TrainingResult(
            folder=outcome.folder,
            step=outcome.step,
            total_steps=outcome.total_steps,
            checkpoint=outcome.checkpoint,
            model_path=self._model_in(outcome.checkpoint),
            history=[steps[step] for step in sorted(steps)],
            ended_early=outcome.ended_early,
            best_checkpoint=outcome.best_checkpoint,
            best_model_path=self._model_in(outcome.best_checkpoint),
        )
        return self.result

    def _model_in(self, checkpoint: Path | None) -> Path | None:
        """Return the folder of the trained model in a checkpoint; None if there is none."""
        model = None if checkpoint is None else checkpoint / trained_part(self.program) / "hf_model"
        return model if model is not None and model.is_dir() else None


def trained_part(program: str) -> str:
    """Return the folder of the trained model in a checkpoint of a program: the policy's where there is one."""
    from hybridrl.config.roles import POLICY, ROLES
    from hybridrl.trainer.supervised.supervised_trainer import MODEL_FOLDER

    part = ROLES[POLICY].saved if PROGRAMS[program].tree == "ppo_trainer" else MODEL_FOLDER
    assert part is not None, "a policy is saved"
    return part


def _settings(
    tree: str, short: Mapping[str, Any], config: Mapping[str, Any], keywords: Mapping[str, tuple[str, Any]]
) -> tuple[dict[str, Any], ShortSettings]:
    """Return all settings as one nested mapping of plain values, and what else the short names mean.

    Args:
        keywords: for each key that a keyword such as `model` stands for, that keyword and its value.

    Raises:
        ConfigError: lists keywords that no setting, or several settings, are called, and settings with two values.
    """
    from hybridrl.config.verl.keys import Assignment, key_book

    book = key_book(tree)
    written = [
        Assignment(key, value if isinstance(value, str) else _summary(value), f" (keyword {name})")
        for key, (name, value) in keywords.items()
    ]
    nested: dict[str, Any] = {}
    names = ShortSettings()
    for name, value in short.items():
        names.read(tree, name, _plain(value), f" (keyword {name})")
    for item in names.assignments:
        put(nested, item.key, item.value)
        written.append(item)
    faults = names.faults
    for key, value in config.items():
        put(nested, str(key), _plain(value))
        each: dict[str, Any] = {}
        put(each, str(key), _plain(value))
        written += [replace(item, origin=" (config)") for item in book.flatten(each, {})]
    faults += book.conflicts(written)
    if faults:
        raise ConfigError(faults)
    return nested, names


def _summary(value: Any) -> Any:
    """Describe data or functions in a message: the names of files, or the type."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple) and all(isinstance(item, str | Path) for item in value):
        return [str(item) for item in value]
    return f"<{type(value).__name__}>"


def _plain(value: Any) -> Any:
    """Convert what is common in programs to what a YAML file could hold."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()  # a number of NumPy or torch
    return value


def _is_file(item: str | Path) -> bool:
    """Whether an item of a list is meant as a file or a data set; otherwise it is a prompt."""
    if isinstance(item, Path) or "://" in item or format_of(Path(item)) in FORMATS:
        return True
    try:
        return suite_name(item) is not None or dataset_name(item) is not None or bool(local_files(item))
    except (OSError, ValueError):  # a text that no system takes for a name
        return False


def _model_path(model: Any) -> str:
    if isinstance(model, str | Path):
        return str(model)
    raise ConfigError(
        f"model is {type(model).__name__}; give a folder in Hugging Face format or a hub id. A model in memory is "
        "saved with model.save_pretrained(FOLDER), and its tokenizer with tokenizer.save_pretrained(FOLDER)"
    )


@contextlib.contextmanager
def _new_folder(parent: Path, program: str) -> Iterator[Path]:
    """Create a folder that did not exist, so that no other run takes it; remove it if the block fails."""
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    name = f"{program}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    try:
        yield folder
    except BaseException:
        for path in (folder, *missing):
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


@contextlib.contextmanager
def _removing_new_files(*folders: Path) -> Iterator[None]:
    """If the block fails, remove what it has put into the folders, and those that it created."""
    missing = [path for folder in folders for path in (folder, folder.parent) if not path.exists()]
    before = {path for folder in folders for path in folder.glob("*")}
    try:
        yield
    except BaseException:
        for path in {path for folder in folders for path in folder.glob("*")} - before:
            path.unlink(missing_ok=True)
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
