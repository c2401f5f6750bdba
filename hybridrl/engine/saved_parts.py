"""The parts of a checkpoint, which all training engines write and read in the same way.

The folder of a checkpoint:

    model/      float32 master weights and saved buffers, as slices of Hugging Face tensors (`saved_slices`)
    optimizer/  the optimizer's tensors, in the same way, named `<tensor>/<state>`
    extra/      schedule.json, and rng_<rank>.json of every rank
    hf_model/   the model as Hugging Face loads it: safetensors, config.json, tokenizer

An engine describes its tensors with `Parts`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LambdaLR

from hybridrl.config.schema.choices import CHECKPOINT_CONTENTS
from hybridrl.engine.loss_scale import LossScale
from hybridrl.engine.optim.optimizer import set_rate
from hybridrl.engine.saved_slices import SavedSlice, SavedSlices, copied, write_slices
from hybridrl.errors import ModelError
from hybridrl.models.model_config import config_of
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.models.vision import copy_processor, is_vision_model
from hybridrl.notify import notify
from hybridrl.utils import distributed
from hybridrl.utils.rng import rng_state, seed_rng, set_rng_state

#: between the names of a tensor and of a state of the optimizer
SEPARATOR = "/"


def _check_contents(contents: Sequence[str]) -> None:
    """Raise `ModelError` for contents of a checkpoint that are unknown."""
    unknown = sorted(set(contents) - set(CHECKPOINT_CONTENTS))
    if unknown:
        allowed = ", ".join(CHECKPOINT_CONTENTS)
        raise ModelError(f"checkpoint contents {', '.join(unknown)} are unknown; known are {allowed}")


def _part(folder: Path, name: str) -> Path:
    """Return the folder of one part of a checkpoint.

    Raises:
        ModelError: the checkpoint was saved without it.
    """
    part = folder / name
    if not part.is_dir():
        raise ModelError(
            f"checkpoint {folder} has no {name}/ (it was saved without {name!r} in checkpoint.save_contents); "
            f"remove {name!r} from checkpoint.load_contents, or resume from another checkpoint"
        )
    return part


@dataclass(frozen=True, slots=True)
class HFModel:
    """Names a model, for files that Hugging Face reads.

    Attributes:
        model_type: `language_model`, `value_model`, `reward_model` or `step_model`.
        settings: a `ModelConfig`.
        config: its Hugging Face configuration.
    """

    model_type: str
    settings: Any
    config: Any


@dataclass
class State:
    """State that one rank writes into the folder of a checkpoint.

    Attributes:
        slices: of the parts `model` and `optimizer`; iterated once.
        texts: content of the files of `extra`, by name.
        notes: content of files of the part `model` that say what it is, by name.
        write_hf: writes the part `hf_model` into a folder; None on ranks that write none of it.
        rank: whose state it is.
    """

    slices: dict[str, Iterable[SavedSlice]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    write_hf: Callable[[Path], None] | None = None
    rank: int = field(default_factory=distributed.get_rank)

    def write(self, folder: Path) -> None:
        """Write everything. No rank waits for another."""
        folder.mkdir(parents=True, exist_ok=True)
        for part_name, slices in self.slices.items():
            write_slices(folder / part_name, self.rank, slices)
        for part_name, texts in (("extra", self.texts), ("model", self.notes)):
            for name, text in texts.items():
                (folder / part_name).mkdir(exist_ok=True)
                (folder / part_name / name).write_text(text, encoding="utf-8")
        if self.write_hf is not None:
            self.write_hf(folder / "hf_model")


@dataclass(frozen=True)
class Parts:
    """An engine's own share of its checkpoints.

    Attributes:
        weights: yields what this rank holds of the model's tensors.
        load_weights: reads it.
        optimizer: yields what this rank holds of the optimizer's state; None for an engine that only computes.
        load_optimizer: reads it.
        schedule: of the optimizer.
        seed: that new random states are made from.
        loss_scale: of float16 training.
        hf_writer: called with whether the state is copied; returns what writes the part `hf_model` into a folder, None
            on ranks that write none of it. All ranks call it together.
        notes: files of the part `model` that say what it is, by name.
        check_notes: refuses the part `model` in a folder by what its notes say.
    """

    weights: Callable[[], Iterator[SavedSlice]]
    load_weights: Callable[[SavedSlices], None]
    optimizer: Callable[[], Iterator[SavedSlice]] | None
    load_optimizer: Callable[[SavedSlices], None]
    schedule: LambdaLR | None
    seed: int
    hf_writer: Callable[[bool], Callable[[Path], None] | None]
    notes: Mapping[str, str] = field(default_factory=dict)
    check_notes: Callable[[Path], None] | None = None
    loss_scale: LossScale | None = None

    def state(self, contents: Sequence[str], copy: bool) -> State:
        """Return what this rank writes of the parts in `contents`. All ranks call it with the same arguments.

        Args:
            contents: `model`, `optimizer`, `extra`, `hf_model`.
            copy: copy everything to main memory, so that training may go on before it is written.
        """
        _check_contents(contents)
        state = State()
        for name, slices in (("model", self.weights), ("optimizer", self.optimizer)):
            if name in contents and slices is not None:
                state.slices[name] = copied(slices()) if copy else slices()
        if "model" in contents and distributed.get_rank() == 0:
            state.notes = self.notes
        if "extra" in contents:
            state.texts = _extra(self.schedule, self.loss_scale)
        if "hf_model" in contents:
            state.write_hf = self.hf_writer(copy)
        return state

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """Read the parts named in `contents`. `hf_model` is for other programs and is never read back.

        Raises:
            ModelError: a part is missing, or belongs to another model or optimizer.
        """
        _check_contents(contents)
        if "model" in contents:
            if self.check_notes is not None:
                self.check_notes(_part(folder, "model"))
            with SavedSlices(_part(folder, "model")) as saved:
                self.load_weights(saved)
        if "optimizer" in contents and self.optimizer is not None:
            with SavedSlices(_part(folder, "optimizer")) as saved:
                self.load_optimizer(saved)
        if "extra" in contents:
            _load_extra(self.schedule, self.loss_scale, self.seed, _part(folder, "extra"))


def _extra(schedule: LambdaLR | None, loss_scale: LossScale | None) -> dict[str, str]:
    """Return the files of `extra`: this rank's random states, the step of the schedule, and the scale of the loss."""
    files = {f"rng_{distributed.get_rank()}.json": json.dumps(rng_state())}
    if distributed.get_rank() == 0 and schedule is not None:
        scale = {} if loss_scale is None else {"loss_scale": loss_scale.state()}
        files["schedule.json"] = json.dumps({"step": schedule.last_epoch, **scale})
    return files


def check_same_model(
    ours: Mapping[str, tuple[int, ...]], saved: SavedSlices, may_be_missing: Collection[str] = ()
) -> None:
    """Raise `ModelError` for a checkpoint whose tensors are not those of the model.

    Args:
        ours: shape of each tensor of the model, by its name.
        saved: the checkpoint.
        may_be_missing: names that checkpoints of earlier versions lack.
    """
    theirs = {name: saved.shape(name) for name in saved.names}
    missing = sorted(ours.keys() - theirs.keys() - set(may_be_missing))
    surplus = sorted(theirs.keys() - ours.keys())
    reshaped = [name for name in sorted(ours.keys() & theirs.keys()) if ours[name] != theirs[name]]
    parts = [
        f"{len(names)} {problem} (first: {names[0]})"
        for problem, names in (("are missing", missing), ("are unexpected", surplus))
        if names
    ]
    if reshaped:
        name = reshaped[0]
        parts.append(f"{name} has shape {list(theirs[name])} in the checkpoint and {list(ours[name])} in the model")
    if parts:
        raise ModelError(
            f"checkpoint {saved.where} belongs to another model: of its tensors {'; '.join(parts)}. Set model.path to "
            "the model that this run was started with, or trainer.resume_mode=disable to start from the beginning"
        )


def _load_extra(schedule: LambdaLR | None, loss_scale: LossScale | None, run_seed: int, folder: Path) -> None:
    """Read what `_extra` made. A rank that has no random states there gets new ones.

    Args:
        schedule: of the optimizer; None for an engine that only computes.
        loss_scale: of float16 training. A checkpoint of a run in another dtype has none: it stays as it is.
        run_seed: the seed that new random states are made from.
        folder: the part of the checkpoint.

    Raises:
        ModelError: the step of the schedule cannot be read.
    """
    schedule_file = folder / "schedule.json"
    if schedule is not None:
        try:
            saved_schedule = json.loads(schedule_file.read_text(encoding="utf-8"))
            step = int(saved_schedule["step"])
            if loss_scale is not None and "loss_scale" in saved_schedule:
                loss_scale.load(saved_schedule["loss_scale"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{schedule_file} cannot be read: {error}") from error
        # The rate depends on the step alone, so settings that were changed since then take effect.
        schedule.last_epoch = step
        for group, base, factor in zip(
            schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
        ):
            set_rate(group, base * factor(step))
        schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]
    rng_file = folder / f"rng_{distributed.get_rank()}.json"
    if rng_file.is_file():
        set_rng_state(json.loads(rng_file.read_text(encoding="utf-8")))
        return
    saved, step = len(list(folder.glob("rng_*.json"))), 0 if schedule is None else schedule.last_epoch
    seed = _seed_of(run_seed, distributed.get_rank(), step)
    seed_rng(seed)
    notify(
        f"{folder} was saved by {saved} ranks and holds no random state of rank {distributed.get_rank()}; its "
        f"generators are seeded with {seed}, from the run's seed {run_seed}, the rank and the step "
        f"{step}",
        "warning",
    )


def _seed_of(*numbers: int) -> int:
    """A 32-bit seed that depends on each number, so that new ranks share no stream with each other or with old ones."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def save_tokenizer(model: Any, folder: Path) -> None:
    """Write the tokenizer, the image processor and the generation settings of a `ModelConfig` next to saved weights."""
    generation = Path(model.path).expanduser() / "generation_config.json"
    if generation.is_file():  # it lists all EOS ids, which config.json may not
        shutil.copyfile(generation, folder / generation.name)
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code, model.custom_chat_template)
    tokenizer.save_pretrained(folder)
    if is_vision_model(config_of(model)):
        copy_processor(model.path, folder)
