"""Checkpoints of the Megatron engine: saved in one layout, loaded in others, bit for bit."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_helpers import make_batch, make_engine, make_fields, policy_loss, value_loss
from megatron_helpers import make_megatron
from megatron_models import checkpoint_tensors, tiny_config, tiny_model
from raising import raises_with
from ranks import spawn
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from hybridrl.checkpoint.merge import main as merge_command
from hybridrl.engine import MicroBatching
from hybridrl.engine.saved_slices import SavedSlice, SavedSlices, slices_of_range, write_slices
from hybridrl.errors import ModelError
from hybridrl.layouts.slices import TensorSlice, whole
from hybridrl.models.tiny import build_tokenizer

ALL = ["model", "optimizer", "extra"]


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 2, 4), (1, 6)])
def test_a_range_of_a_flattened_tensor_is_slices(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(prod(shape)).view(shape)
    for start in range(prod(shape) + 1):
        for stop in range(start, prod(shape) + 1):
            found = torch.full((stop - start,), -1)
            for tensor_slice, at in slices_of_range(shape, start, stop):
                values = tensor[tensor_slice.within(whole(shape))].reshape(-1)
                assert (found[at : at + len(values)] == -1).all()
                found[at : at + len(values)] = values
            assert torch.equal(found, torch.arange(start, stop))


def test_slices_read_back_as_any_other_slices(tmp_path: Path) -> None:
    tensor = torch.arange(60, dtype=torch.float64).view(6, 10)
    parts = {
        0: [TensorSlice((0, 0), (4, 5)), TensorSlice((4, 0), (6, 10))],
        1: [TensorSlice((0, 5), (4, 10)), TensorSlice((0, 0), (4, 5))],
    }
    for rank, slices in parts.items():
        saved = [
            SavedSlice("w", (6, 10), tensor_slice, tensor[tensor_slice.within(whole((6, 10)))])
            for tensor_slice in slices
        ]
        write_slices(tmp_path, rank, [*saved, SavedSlice("w/step", (), TensorSlice((), ()), torch.tensor(3.0))])
    with SavedSlices(tmp_path) as read:
        assert torch.equal(read.read("w", whole((6, 10))), tensor)
        assert torch.equal(read.read("w", TensorSlice((1, 3), (5, 7))), tensor[1:5, 3:7])
        assert read.read("w/step", TensorSlice((), ())) == 3
        assert {name: read.shape(name) for name in read.names} == {"w": (6, 10), "w/step": ()}
        assert {name: read.dtype(name) for name in read.names} == {"w": torch.float64, "w/step": torch.float32}
    (tmp_path / "slices_00001.safetensors").unlink()
    with SavedSlices(tmp_path) as read, pytest.raises(ModelError, match=r"40 of the 60 elements of w"):
        read.read("w", whole((6, 10)))
    (tmp_path / "slices_00000.safetensors").write_bytes(b"broken")
    with raises_with(ModelError, "slices_00000"):
        SavedSlices(tmp_path)
    with raises_with(ModelError, "slices_"):
        SavedSlices(tmp_path / "absent")


def _train(engine: Any, steps: int = 1, loss: Any = policy_loss) -> None:
    rows = 12 // engine.geometry.dp_size
    mine = slice(engine.geometry.dp_rank * rows, (engine.geometry.dp_rank + 1) * rows)
    for _ in range(steps):
        with engine.loaded(optimizer=True):
            engine.train_batch(make_batch(make_fields(), mine), MicroBatching(size=6), loss)


def _whole(folder: Path) -> dict[str, torch.Tensor]:
    """Master weights and optimizer state of the whole model in a checkpoint, by name."""
    found = {}
    for part in ("model", "optimizer"):
        with SavedSlices(folder / part) as saved:
            found |= dict(saved.whole_tensors())
    return found


def _same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not different, different


def _close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=2e-5, msg=name)


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    with engine.loaded():
        return {name: tensor.clone() for name, tensor in engine.export_weights()}


def _loaded(path: Path, folder: Path, **settings: Any) -> Any:
    engine = make_megatron(path, **settings)
    engine.load(folder, ALL)
    return engine


def _experts(folder: Path) -> None:
    """A mixture of experts: every layout reads what another one wrote, and training goes on as if nothing happened."""
    first = {"tp": 2, "ep": 2, "etp": 1}
    path, saved = folder / "experts", folder / "saved"
    engine = make_megatron(path, **first)
    _train(engine, 2)
    engine.save(saved, [*ALL, "hf_model"])
    wanted, weights = _whole(saved), _weights(engine)
    assert {name.rpartition("/")[2] for name in wanted if "/" in name} == {"exp_avg", "exp_avg_sq", "step"}
    _train(engine)
    after = _weights(engine)
    again = _loaded(path, saved, **first)
    _same(_weights(again), weights)
    _train(again)
    _same(_weights(again), after)  # bit for bit
    others = [{"pp": 2, "ep": 2, "etp": 1}, {"pp": 4, "use_distributed_optimizer": False}, {"tp": 2, "ep": 2}]
    others += [{"pp": 2, "vpp": 2}, {"pp": 2, "param_offload": True, "optimizer_offload": True, "grad_offload": True}]
    for number, sizes in enumerate(others):
        other = _loaded(path, saved, **sizes)
        _same(_weights(other), weights)
        other.save(folder / f"other_{number}", ["model", "optimizer"])
        _same(_whole(folder / f"other_{number}"), wanted)
        _train(other)
        _close(_weights(other), after)
    _hf_model(folder, path, saved, weights)
    with raises_with(ModelError, "optimizer/"):
        engine.load(folder / "saved" / "hf_model", ["optimizer"])
    with raises_with(ModelError, "another model", "21 are missing", "mlp.down_proj", "48 are unexpected", "k_proj"):
        make_megatron(folder / "tied", tp=4).load(saved, ["model"])


def _hf_model(folder: Path, path: Path, saved: Path, weights: dict[str, torch.Tensor]) -> None:
    """What is saved for Hugging Face, and what the command makes of the slices, are the exported weights."""
    if dist.get_rank() == 0:
        assert merge_command([str(saved), "--model", str(path), "--out", str(folder / "merged")]) == 0
        for hf in (saved / "hf_model", folder / "merged"):
            _same(load_file(hf / "model.safetensors"), weights)
            model = AutoModelForCausalLM.from_pretrained(hf)
            _same(checkpoint_tensors(model), weights)
            assert json.loads((hf / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
            assert (hf / "tokenizer_config.json").is_file()
    dist.barrier()


def _half_precision(folder: Path) -> None:
    """Masters in float32 of weights in bfloat16, and tied embeddings on two stages."""
    path, saved = folder / "tied", folder / "halves"
    engine = make_megatron(path, tp=2, pp=2, dtype="bfloat16")
    _train(engine, 2)
    engine.save(saved, ALL)
    wanted, weights = _whole(saved), _weights(engine)
    assert wanted["model.norm.weight"].dtype == torch.float32
    assert all(torch.equal(wanted[name].bfloat16(), tensor) for name, tensor in weights.items())
    for number, sizes in enumerate([{"pp": 4}, {"tp": 2, "optimizer_offload": True}]):
        other = _loaded(path, saved, dtype="bfloat16", **sizes)
        other.save(folder / f"halves_{number}", ["model", "optimizer"])
        _same(_whole(folder / f"halves_{number}"), wanted)
        _same(_weights(other), weights)


def _value_model(folder: Path) -> None:
    path, saved = folder / "tied", folder / "critic"
    engine = make_megatron(path, "value_model", tp=2, pp=2)
    _train(engine, 2, value_loss)
    engine.save(saved, [*ALL, "hf_model"])
    weights = _weights(engine)
    assert weights["score.weight"].any()
    other = make_megatron(path, "value_model", tp=4)
    other.load(saved, ALL)
    _same(_weights(other), weights)
    if dist.get_rank() == 0:
        model = AutoModelForTokenClassification.from_pretrained(saved / "hf_model")
        state = {name: tensor for name, tensor in model.state_dict().items() if name in weights}
        _same(state, weights)
    again = make_megatron(saved / "hf_model", "value_model", pp=4)
    _same(_weights(again), weights)


def _across_engines(folder: Path) -> None:
    """What one engine saved the other continues, weights and optimizer state bit for bit, and gives back the same."""
    for name, first, second in (
        ("experts", {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}),
        ("tied", {"tp": 2, "pp": 2}, {"tp": 4}),
    ):
        path, saved = folder / name, folder / f"across_{name}"
        megatron = make_megatron(path, **first)
        _train(megatron, 2)
        megatron.save(saved / "megatron", ALL)
        fsdp: Any = make_engine(path)
        fsdp.load(saved / "megatron", ALL)
        _same(_weights(fsdp), _weights(megatron))
        fsdp.save(saved / "same", ["model", "optimizer"])
        _same(_whole(saved / "same"), _whole(saved / "megatron"))
        assert fsdp.model_state.schedule.last_epoch == 2
        _train(megatron)
        _train(fsdp)
        _close(_weights(fsdp), _weights(megatron))
        fsdp.save(saved / "fsdp", ALL)
        back = _loaded(path, saved / "fsdp", **second)
        _same(_weights(back), _weights(fsdp))
        back.save(saved / "back", ["model", "optimizer"])
        _same(_whole(saved / "back"), _whole(saved / "fsdp"))
        _merged(path, saved / "fsdp", _weights(fsdp))


def _merged(path: Path, saved: Path, weights: dict[str, torch.Tensor]) -> None:
    """Transformers computes with a merged checkpoint what it computes with the engine's weights."""
    if dist.get_rank() == 0:
        out = saved.with_name("merged")
        assert merge_command([str(saved), "--model", str(path), "--out", str(out)]) == 0
        _same(load_file(out / "model.safetensors"), weights)
        expected = AutoModelForCausalLM.from_pretrained(path)
        trained = {name: tensor.clone() for name, tensor in weights.items()}
        expected = type(expected).from_pretrained(None, config=expected.config, state_dict=trained)
        ids = torch.arange(10, 40).view(2, 15)
        with torch.no_grad():
            found = AutoModelForCausalLM.from_pretrained(out).eval()(input_ids=ids).logits
            torch.testing.assert_close(found, expected.eval()(input_ids=ids).logits, rtol=0, atol=0)
            before = AutoModelForCausalLM.from_pretrained(path).eval()(input_ids=ids).logits
            assert (found - before).abs().max() > 0.01  # it is not the model that training started from
    dist.barrier()


def _eight_bits(folder: Path) -> None:
    """Moments of 8 bits go on with fsdp2 alone; Megatron refuses them by name."""
    saved = folder / "eight_bits"
    engine: Any = make_engine(folder / "tied", optim={"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"})
    _train(engine)
    engine.save(saved, ["model", "optimizer"])
    with raises_with(ModelError, "codes", "8 bits", "strategy=fsdp2"):
        make_megatron(folder / "tied", tp=4).load(saved, ["model", "optimizer"])
    with raises_with(ModelError, "8 bits", "optim.optimizer"):
        make_engine(folder / "tied").load(saved, ["model", "optimizer"])


def _every_check(rank: int, folder: Path) -> None:
    _across_engines(folder)
    _eight_bits(folder)
    _experts(folder)
    _half_precision(folder)
    _value_model(folder)


@pytest.mark.slow
def test_checkpoints_of_one_layout_load_in_every_other(tmp_path: Path) -> None:
    for name, case in (("experts", "qwen3-moe"), ("tied", "qwen2-tied")):
        tiny_model(tiny_config(case)).save_pretrained(tmp_path / name)
        build_tokenizer().save_pretrained(tmp_path / name)
    spawn(_every_check, 4, tmp_path, preload="megatron_preload")
