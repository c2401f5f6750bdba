"""LoRA on a base in 4 bits on a GPU, in bfloat16: memory, forecast, speed, the model whose base was rounded first."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HALF_BILLION
from gpu_helpers import batch_of, seconds
from test_gpu_engine import OPTIM, Sharded, exported, infer
from transformers import AutoModelForCausalLM

from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.forecast.fsdp_rank import forecast
from hybridrl.forecast.sizes import Workload
from hybridrl.models import four_bit, lora
from hybridrl.utils import device

pytestmark = pytest.mark.timeout(300)
LENGTHS = [(256, 768)] * 8
MICRO = MicroBatching(size=4)


def built(kind: type[FSDPEngine], model: Path, four: bool, **engine: Any) -> Any:
    settings = ModelConfig(path=str(model), lora_rank=16, load_in_4bit=four)
    made: Any = kind("language_model", settings, FSDPConfig(**engine), OptimConfig(**{**OPTIM, "lr": 1e-3}))
    made.initialize()
    return made


def step(engine: Any, batch: Any) -> dict[str, float]:
    from engine_helpers import policy_loss

    with engine.loaded(optimizer=True):
        metrics = engine.train_batch(batch, MICRO, policy_loss)
    return {name: float(metric.value) for name, metric in metrics.items()}


def base_bytes(engine: Any) -> tuple[int, int]:
    """Of linear layers without the output layer: bytes of the storages on the device, and the number of weights."""
    module, found = engine.module, [0, 0]
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        if not isinstance(part, torch.nn.Linear | four_bit.FourBitLinear) or lora.is_own(f"{name}.weight"):
            continue
        if part is module.get_output_embeddings():
            continue
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        assert local.is_cuda
        found[0] += local.untyped_storage().nbytes()
        found[1] += part.in_features * part.out_features
    return found[0], found[1]


@pytest.mark.parametrize("kind", [FSDPEngine, Sharded], ids=["one rank", "FSDP2"])
def test_memory_and_speed(world_of_one, half_billion: Path, figures, kind) -> None:
    """Of half a billion weights 358 million are in 4 bits; the peak of an update is within 10 % of the forecast."""
    batch = batch_of(LENGTHS, HALF_BILLION["vocab_size"])
    measured: dict[str, float] = {}
    for four in (False, True):
        gc.collect()
        device.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine = built(kind, half_billion, four)
        resident = torch.cuda.memory_allocated() - before
        loading_peak = torch.cuda.max_memory_allocated() - before
        held, count = base_bytes(engine)
        step(engine, batch)
        torch.cuda.reset_peak_memory_stats()
        outcome = step(engine, batch)
        peak = torch.cuda.max_memory_allocated() - before
        rows = len(LENGTHS)
        work = Workload(*LENGTHS[0], rows, MICRO, MICRO, entropy=False)
        told = forecast("language_model", engine.model_config, engine.engine_config, engine.optim_config, 1, work)
        name = "nf4" if four else "bf16"
        measured |= {
            f"{name}_base_bytes_per_weight": held / count,
            f"{name}_resident_gib": resident / 2**30,
            f"{name}_loading_peak_gib": loading_peak / 2**30,
            f"{name}_update_peak_gib": peak / 2**30,
            f"{name}_forecast_gib": told.update / 2**30,
            f"{name}_step_s": seconds(lambda engine=engine: step(engine, batch)),
        }
        assert all(value == value for value in outcome.values()) and outcome["grad_norm"] > 0
        assert held == pytest.approx(count * (17 / 32 if four else 2), rel=1e-3)
        if kind is FSDPEngine:
            assert told.update == pytest.approx(peak, rel=0.1)
        del engine
    figures(**measured)
    saved = measured["bf16_resident_gib"] - measured["nf4_resident_gib"]
    assert saved * 2**30 == pytest.approx(count * (2 - 17 / 32), rel=0.05)


@pytest.mark.parametrize("kind", [FSDPEngine, Sharded], ids=["one rank", "FSDP2"])
def test_it_is_the_model_whose_base_was_rounded(world_of_one, half_billion: Path, tmp_path: Path, kind) -> None:
    """What an engine for generation is sent is what training computes with, to the last bit while the adapter is 0."""
    batch = batch_of([(64, 64)] * 4, HALF_BILLION["vocab_size"])
    packed = built(kind, half_billion, True)
    layers = {lora.base_name(name): layer for name, layer in four_bit.layers_of(packed.module).items()}
    model = AutoModelForCausalLM.from_pretrained(half_billion, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in layers:  # packed in main memory here, and on the device there
                parameter.copy_(four_bit.unpack(four_bit.pack(parameter), parameter.shape[1], torch.bfloat16))
    model.save_pretrained(tmp_path)
    plain = built(kind, tmp_path, False)
    sent, expected = (exported(engine, torch.bfloat16) for engine in (packed, plain))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sent.items())
    torch.testing.assert_close(infer(packed, batch), infer(plain, batch), atol=2e-2, rtol=0)
    for _ in range(3):
        found, wanted = step(packed, batch), step(plain, batch)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-2, abs=2e-3)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-2)
    torch.testing.assert_close(infer(packed, batch), infer(plain, batch), atol=5e-2, rtol=0)
