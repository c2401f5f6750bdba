"""Adapters on one base over two ranks, against one rank: gradients, steps, what is saved, and going on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import make_batch, make_engine, make_fields
from raising import raises_with
from ranks import spawn
from safetensors.torch import load_file

from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.adapter_bank import AdamStep, AdapterBank, AdapterShape, kind_of
from hybridrl.errors import ModelError

FIELDS = make_fields()
STEP = AdamStep(lr=1e-2, betas=(0.9, 0.95), eps=1e-6, clip=1.0)
SPLIT = 9
SHAPES = {"small": AdapterShape(2, head=False, mlp=False), "large": AdapterShape(4, head=False)}


def summed(outputs: dict[str, torch.Tensor], micro: Any) -> Any:
    mask = micro.batch["response_mask"]
    return -(outputs["log_probs"] * micro.batch["advantages"] * mask).sum(), {}


def update(engine: Any, bank: AdapterBank, name: str, rows: slice) -> float:
    with engine.loaded(optimizer=True):
        bank.use(name)
        problem = engine.compute_gradients(make_batch(FIELDS, rows), MicroBatching(size=4), summed, ("log_probs",))
        assert problem is None
        bank.collect_gradients(name)
        norm = bank.step(name, STEP)
    assert norm is not None
    return norm


def trained(path: Path, rows: slice, folder: Path) -> list[float]:
    """Two adapters in turn, of which one goes on from its checkpoint."""
    engine = make_engine(path, model={"lora_rank": 4})
    bank = AdapterBank(engine)  # type: ignore[arg-type]
    for name, shape in SHAPES.items():
        bank.create(name, shape, seed=3)
    norms = [update(engine, bank, name, rows) for name in ("small", "large", "small")]
    for name in SHAPES:
        bank.save(name, folder / name, "base", optimizer=True)
    bank.load("resumed", folder / "small", optimizer=True)
    norms += [update(engine, bank, name, rows) for name in ("large", "resumed", "small")]
    assert norms[-1] == norms[-2]
    for name in ("small", "resumed"):
        bank.save(name, folder / f"{name}-end", "base", optimizer=True)
    return norms


def _two_ranks(rank: int, path: Path, folder: Path) -> None:
    norms = trained(path, slice(0, SPLIT) if rank == 0 else slice(SPLIT, None), folder)
    if rank == 0:
        torch.save(norms, folder / "norms.pt")


@pytest.mark.slow(10)
def test_two_ranks_train_the_adapters_of_one(micro_model: Path, tmp_path: Path) -> None:
    alone = trained(micro_model, slice(None), tmp_path / "one")
    spawn(_two_ranks, 2, micro_model, tmp_path / "two")
    assert torch.load(tmp_path / "two" / "norms.pt") == pytest.approx(alone, rel=1e-3)
    for name in ("small", "large", "small-end"):
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            one, two = (load_file(tmp_path / ranks / name / file) for ranks in ("one", "two"))
            assert one.keys() == two.keys()
            for key, tensor in one.items():
                torch.testing.assert_close(two[key], tensor, rtol=1e-3, atol=3e-4, msg=f"{name} {key}")
    for ranks in ("one", "two"):
        end, again = (
            load_file(tmp_path / ranks / name / "adapter_model.safetensors") for name in ("small-end", "resumed-end")
        )
        assert all(torch.equal(end[key], again[key]) for key in end)
    small = load_file(tmp_path / "one" / "small" / "adapter_model.safetensors")
    assert all("self_attn" in key and 2 in tensor.shape for key, tensor in small.items())


def test_an_adapter_of_another_server_is_refused(micro_model: Path, tmp_path: Path) -> None:
    engine = make_engine(micro_model, model={"lora_rank": 4})
    bank = AdapterBank(engine)  # type: ignore[arg-type]
    bank.create("own", AdapterShape(4, head=False), seed=0)
    bank.save("own", tmp_path / "own", "base", optimizer=False)
    smaller = AdapterBank(make_engine(micro_model, model={"lora_rank": 2}))  # type: ignore[arg-type]
    with raises_with(ModelError, "rank", 4, 2):
        smaller.load("own", tmp_path / "own", optimizer=False)
    assert bank.step("own", STEP) is None  # there are no gradients


def test_kinds_of_layers() -> None:
    names = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head", "transformer.h.0.attn.c_attn")
    assert [kind_of(name, "lm_head") for name in names] == ["attention", "mlp", "head", "attention"]
