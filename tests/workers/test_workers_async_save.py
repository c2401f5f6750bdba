"""`checkpoint.async_save` of a worker with a real engine, and of a run that it belongs to; no Ray."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from safetensors.torch import load_file

from hybridrl.checkpoint import CheckpointError, RunStore, verify
from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import create_train_engine, saved_parts
from hybridrl.trainer.background_save import BackgroundSave
from hybridrl.workers.model_worker import ModelWorker

CONTENTS = ["model", "optimizer", "extra", "hf_model"]


@pytest.fixture
def worker(micro_model: Path) -> ModelWorker:
    """A rank that is alone, after one step of training."""
    made: Any = object.__new__(ModelWorker)
    made.engine = create_train_engine(
        "language_model", "fsdp2", model=ModelConfig(path=str(micro_model)), engine=FSDPConfig(),
        optim=OptimConfig(lr=1e-2),
    )  # fmt: skip
    made.engine.initialize()
    _train(made.engine)
    return made


def _train(engine: Any) -> None:
    logits = engine.module(input_ids=torch.arange(10, 40)[None]).logits
    logits.float().logsumexp(-1).mean().backward()
    engine.apply_gradients(engine.gradient_norm())


class Group:
    """The ranks of one worker."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker

    def is_saving(self, wait: bool = False) -> list[bool]:
        return [self.worker.is_saving(wait)]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        found |= {f"{file.relative_to(folder)}:{name}": tensor for name, tensor in load_file(file).items()}
    return found


def test_what_is_written_while_training_goes_on_is_the_state_of_its_step(
    worker: ModelWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.save_checkpoint(str(tmp_path / "waits"), CONTENTS)
    go, write = threading.Event(), saved_parts.write_slices
    monkeypatch.setattr(saved_parts, "write_slices", lambda *what: go.wait(300) and write(*what))
    store = RunStore(tmp_path / "run")
    unfinished = store.begin(1)
    worker.save_checkpoint(str(unfinished.folder / "actor"), CONTENTS, in_background=True)
    saving = BackgroundSave(unfinished, [Group(worker)])
    assert worker.is_saving() and not saving.advance()
    _train(worker.engine)  # while the writer waits
    assert store.steps() == []
    go.set()
    assert saving.advance(wait=True) and not worker.is_saving()
    verify(store.folder(1))
    expected, found = _tensors(tmp_path / "waits"), _tensors(store.folder(1) / "actor")
    assert expected.keys() == found.keys() and any("optimizer" in name for name in found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    trained = {name: tensor.clone() for name, tensor in worker.engine.export_weights()}
    worker.engine.load(store.folder(1) / "actor", ["model", "optimizer", "extra"])
    assert any(not torch.equal(tensor, trained[name]) for name, tensor in worker.engine.export_weights())
    _train(worker.engine)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in worker.engine.export_weights())


def test_a_full_disk_is_told_by_the_next_call_and_leaves_nothing(
    worker: ModelWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(tmp_path / "run")
    with store.writing(1) as folder:
        worker.save_checkpoint(str(folder / "actor"), ["model"])

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved_parts, "write_slices", full)
    unfinished = store.begin(2)
    worker.save_checkpoint(str(unfinished.folder / "actor"), ["model"], in_background=True)
    with raises_with(CheckpointError, "step 2", "No space", "global_step_1"):
        BackgroundSave(unfinished, [Group(worker)]).advance(wait=True)
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_1"]
    monkeypatch.undo()
    with store.writing(3) as folder:  # the next save is not disturbed
        worker.save_checkpoint(str(folder / "actor"), ["model"])
    assert store.steps() == [1, 3]
