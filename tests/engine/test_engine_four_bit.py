"""Adapters on a base in 4 bits: against the model whose base was rounded first, ranks, checkpoints, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import (
    TEMPERATURE,
    make_batch,
    make_engine,
    make_fields,
    policy_loss,
    value_loss,
    weights,
)
from four_bit_tools import LAYERS, rounded_copy
from raising import raises_with
from ranks import spawn
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.merge import merge
from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.adapted import ROUNDING_FILE
from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.errors import ModelError
from hybridrl.models import four_bit, lora
from hybridrl.models.tiny import build_tiny_model
from hybridrl.utils import distributed
from hybridrl.utils.metrics import merge_metrics

FIELDS = make_fields()
MODEL = {"lora_rank": 4, "lora_alpha": 8, "load_in_4bit": True}
PLAIN = {**MODEL, "load_in_4bit": False}
EPS = {"override_optimizer_config": {"eps": 1e-5}}
PARTS = ("model", "optimizer", "extra")


@pytest.fixture(scope="module")
def rounded_model(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The micro model with the weights that its 4-bit layers stand for."""
    return rounded_copy(micro_model, tmp_path_factory.mktemp("rounded_model"))


def train(engine: Any, steps: int = 3, rows: slice = slice(None), loss: Any = policy_loss) -> list[dict[str, float]]:
    results = []
    for _ in range(steps):
        with engine.loaded(optimizer=True):
            own = engine.train_batch(make_batch(FIELDS, rows), MicroBatching(size=4), loss, TEMPERATURE)
        merged = merge_metrics(distributed.all_gather_object(own))
        results.append({name: float(metric.value) for name, metric in merged.items()})
    return results


def log_probs(engine: Any, rows: slice = slice(None)) -> torch.Tensor:
    with engine.loaded():
        return engine.infer(make_batch(FIELDS, rows), MicroBatching(size=5), TEMPERATURE)["log_probs"]


def adapter(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_adapter()}


def close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=atol, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("model", "engine", "tolerance"),
    [
        ({}, {}, 1e-5),
        ({"enable_gradient_checkpointing": False, "use_remove_padding": False}, {}, 1e-5),
        ({"recompute_granularity": "selective", "use_fused_kernels": True}, {}, 1e-5),
        ({"enable_activation_offload": True, "target_modules": ["q_proj", "up_proj"]}, {}, 1e-5),
        ({"share_prefixes": True}, {"param_offload": True, "optimizer_offload": True}, 1e-5),
        ({}, {"dtype": "bfloat16"}, 1e-2),
    ],
)
def test_it_is_the_model_whose_base_was_rounded(
    micro_model: Path, rounded_model: Path, model: dict[str, Any], engine: dict[str, Any], tolerance: float
) -> None:
    """Log-probabilities, losses, gradients and what they make of the adapter, with all layers of the base in 4 bits."""
    packed = make_engine(micro_model, optim=EPS, model={**MODEL, **model}, **engine)
    plain = make_engine(rounded_model, optim=EPS, model={**PLAIN, **model}, **engine)
    first = log_probs(packed)
    torch.testing.assert_close(first, log_probs(plain), atol=tolerance, rtol=tolerance)
    assert (first - log_probs(make_engine(micro_model, model=PLAIN, **engine))).abs().max() > 1e-3
    found, expected = train(packed), train(plain)
    for name in ("loss", "grad_norm"):
        values = [step[name] for step in found]
        assert values == pytest.approx([step[name] for step in expected], rel=10 * tolerance, abs=tolerance)
    if tolerance < 1e-3:
        close(adapter(packed), adapter(plain))
        close(weights(packed), weights(plain))
        torch.testing.assert_close(log_probs(packed), log_probs(plain), atol=1e-5, rtol=1e-5)
    with packed.without_adapter():
        assert torch.equal(log_probs(packed), first)
    assert four_bit.layers_of(packed.module).keys() == _frozen(packed).keys()


def _frozen(engine: Any) -> dict[str, torch.nn.Parameter]:
    """The weights of linear layers without the output layer."""
    return {name: p for name, p in engine.module.named_parameters() if lora.base_name(name).endswith(LAYERS)}


def test_the_base_takes_a_quarter_of_bfloat16(micro_model: Path) -> None:
    packed, plain = (make_engine(micro_model, model=model, dtype="bfloat16") for model in (MODEL, PLAIN))
    held, half = (sum(p.untyped_storage().nbytes() for p in _frozen(one).values()) for one in (packed, plain))
    assert half == 2 * sum(p.numel() for p in _frozen(plain).values())
    assert held / half < 0.32  # rows of 32 and 64 in the micro model; rows of 128 and more take 0.266
    others = [
        {name: (p.dtype, p.shape) for name, p in one.module.named_parameters() if name not in _frozen(one)}
        for one in (packed, plain)
    ]
    assert others[0] == others[1]
    sent = dict(packed.export_weights(torch.bfloat16))
    assert packed.weight_bytes(torch.bfloat16) == sum(tensor.nbytes for tensor in sent.values())
    assert packed.weight_bytes() == sum(tensor.nbytes for _, tensor in packed.export_weights())
    original = {name: tensor for name, tensor in make_engine(micro_model).export_weights() if name.endswith(LAYERS)}
    for name, tensor in original.items():  # of the file, and not of what has been rounded to bfloat16 before
        assert torch.equal(sent[name], four_bit.unpack(four_bit.pack(tensor), tensor.shape[1], torch.bfloat16))


def test_a_critic_and_a_frozen_model(micro_model: Path, rounded_model: Path) -> None:
    packed = make_engine(micro_model, "value_model", optim=EPS, model=MODEL)
    plain = make_engine(rounded_model, "value_model", optim=EPS, model=PLAIN)
    assert {name for name in packed.model_state.trainable if not lora.is_own(name)} == {"score.weight", "score.bias"}
    found, expected = train(packed, loss=value_loss), train(plain, loss=value_loss)
    assert [step["loss"] for step in found] == pytest.approx([step["loss"] for step in expected], abs=1e-5)
    close(adapter(packed), adapter(plain))
    frozen = make_engine(micro_model, model={"load_in_4bit": True}, forward_only=True)
    assert torch.equal(log_probs(frozen), log_probs(make_engine(micro_model, model=MODEL)))
    close(weights(frozen), weights(make_engine(rounded_model)), atol=0)


@pytest.mark.parametrize("how", [{}, {"dtype": "bfloat16", "param_offload": True, "optimizer_offload": True}])
def test_resuming_is_bitwise_and_the_merged_model_has_the_rounded_base(
    micro_model: Path, rounded_model: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    engine, resumed = (make_engine(micro_model, optim=EPS, model=MODEL, **how) for _ in range(2))
    train(engine)
    engine.save(tmp_path / "saved", [*PARTS, "hf_model"])
    assert all("lora_" in path for path in _names(tmp_path / "saved" / "model"))
    resumed.load(tmp_path / "saved", PARTS)
    assert train(engine, 2) == train(resumed, 2)
    close(adapter(resumed), adapter(engine), atol=0)
    merge(tmp_path / "saved", tmp_path / "merged", model=str(micro_model))
    saved, merged = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (tmp_path / "saved" / "hf_model", tmp_path / "merged")
    )
    base = AutoModelForCausalLM.from_pretrained(rounded_model, dtype=torch.float32).state_dict()
    packed = {name for name in base if name.endswith(LAYERS)}
    close({name: merged[name] for name in packed}, {name: saved[name] for name in packed}, atol=1e-6)
    folder = tmp_path / "merged" / lora.FOLDER
    again = make_engine(rounded_model, model={"lora_adapter_path": str(folder)})
    close(weights(again), {name: merged[name] for name in weights(again)}, atol=1e-5 if not how else 2e-3)
    unchanged = {name for name, tensor in base.items() if torch.equal(tensor, merged[name])}
    assert unchanged and not any(name.endswith(LAYERS) for name in unchanged)
    other = make_engine(micro_model, optim=EPS, model=PLAIN, **how)
    with raises_with(ModelError, "4 bits", "model.load_in_4bit=True"):
        other.load(tmp_path / "saved", PARTS)
    other.save(tmp_path / "other", PARTS)
    with raises_with(ModelError, "4 bits", "model.load_in_4bit=False"):
        resumed.load(tmp_path / "other", PARTS)
    told = json.loads((tmp_path / "saved" / "model" / ROUNDING_FILE).read_text())
    assert (told["format"], told["dtype"]) == ("nf4", how.get("dtype", "float32"))


def _names(folder: Path) -> list[str]:
    from hybridrl.engine.saved_slices import SavedSlices

    with SavedSlices(folder) as saved:
        return list(saved.names)


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        ({"lora_rank": 0}, {}, r"weights in 4 bits are not trained; set model\.lora_rank"),
        ({"lora_rank": 0}, {"forward_only": True}, None),
        ({}, {}, None),
        ({}, {"use_torch_compile": True}, r"use_torch_compile=True"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    micro_model: Path, model: dict[str, Any], engine: dict[str, Any], message: str | None
) -> None:
    settings = ModelConfig(path=str(micro_model), **{**MODEL, **model})
    optim = None if engine.get("forward_only") else OptimConfig()
    if message is None:
        FSDPEngine.check(settings, FSDPConfig(**engine), 1, optim)
        return
    with pytest.raises(ModelError, match=message):
        FSDPEngine.check(settings, FSDPConfig(**engine), 1, optim)


def _check_ranks(rank: int, model: Path, folder: Path, expected: Path) -> None:
    """Three ranks hold 11, 11 and 10 of 32 rows of a layer."""
    alone, ranks = torch.load(expected), distributed.get_world_size()
    bounds = [0, 9, 12] if ranks == 2 else [0, 5, 9, 12]
    rows = slice(bounds[rank], bounds[rank + 1])
    engine = make_engine(model, optim=EPS, model=MODEL, offload_policy=ranks == 3)
    torch.testing.assert_close(log_probs(engine, rows), alone["first"][rows], atol=2e-6, rtol=1e-5)
    assert [step["loss"] for step in train(engine, rows=rows)] == pytest.approx(alone["losses"], abs=1e-5)
    close(adapter(engine), alone["adapter"])
    close(weights(engine), alone["weights"])
    half = make_engine(model, optim=EPS, model=MODEL, dtype="bfloat16")
    close(dict(half.export_weights(torch.bfloat16)), alone["half"], atol=0)  # the same base, bit for bit
    if ranks == 3:
        return
    replicas = make_engine(model, optim=EPS, model=MODEL, fsdp_size=1)
    assert [step["loss"] for step in train(replicas, rows=rows)] == pytest.approx(alone["losses"], abs=1e-5)
    close(weights(replicas), alone["weights"])
    with engine.whole_weights() as module, torch.no_grad():  # as generation in place computes
        found = module(input_ids=torch.arange(60, 70)[None]).logits
    torch.testing.assert_close(found, alone["logits"], atol=1e-5, rtol=1e-5)
    engine.save(folder, PARTS)
    shared = make_engine(model, optim=EPS, model=MODEL, ulysses_sequence_parallel_size=2)
    losses = [step["loss"] for step in train(shared)]
    assert losses == pytest.approx([2 * one for one in alone["losses"]], abs=2e-5)  # both tell of all rows
    close(adapter(shared), alone["adapter"], atol=2e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_are_one(micro_model: Path, tmp_path: Path, ranks: int) -> None:
    engine = make_engine(micro_model, optim=EPS, model=MODEL)
    half = make_engine(micro_model, optim=EPS, model=MODEL, dtype="bfloat16")
    alone: dict[str, Any] = {"first": log_probs(engine), "half": dict(half.export_weights(torch.bfloat16))}
    alone |= {"losses": [step["loss"] for step in train(engine)], "adapter": adapter(engine)}
    with engine.whole_weights() as module, torch.no_grad():
        alone["logits"] = module(input_ids=torch.arange(60, 70)[None]).logits
    torch.save({**alone, "weights": weights(engine)}, tmp_path / "alone.pt")
    spawn(_check_ranks, ranks, micro_model, tmp_path / "saved", tmp_path / "alone.pt")
    if ranks == 2:
        one = make_engine(micro_model, optim=EPS, model=MODEL)
        one.load(tmp_path / "saved", PARTS)
        assert train(one, 1)[0]["loss"] == pytest.approx(train(engine, 1)[0]["loss"], abs=1e-5)


def test_layers_of_another_width_stay_as_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1, intermediate=48)
    engine = make_engine(tmp_path, model=MODEL)
    packed = {name.split(".")[-3] for name in four_bit.layers_of(engine.module)}
    assert packed == {name.split(".")[-3] for name in _frozen(engine)} - {"down_proj"}
    told = capfd.readouterr().err
    assert "load_in_4bit leaves" in told and "model.layers.1.mlp.down_proj" in told and "multiple of 32" in told
    assert train(engine, 2)[1]["grad_norm"] > 0
