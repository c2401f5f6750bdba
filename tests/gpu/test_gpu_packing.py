"""Packed rows against padded ones on the GPU: the same numbers, and what they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HALF_BILLION
from gpu_helpers import batch_of, bf16_flops, check_errors, lognormal, peak_gib, seconds

from hybridrl.engine import MicroBatching
from hybridrl.utils import device

pytestmark = pytest.mark.timeout(300)
VOCABULARY = HALF_BILLION["vocab_size"]
MICRO = MicroBatching(max_tokens=16384)
PLAIN_SGD = {"optimizer": "SGD", "lr": 1.0, "clip_grad": 0.0, "weight_decay": 0.0, "lr_warmup_steps": 0}


def engine_of(model: Path, packed: bool, **optim: Any) -> Any:
    from engine_helpers import make_engine

    settings = {"use_remove_padding": packed, "enable_gradient_checkpointing": True}
    engine: Any = make_engine(model, optim={**PLAIN_SGD, "lr_scheduler_type": "constant", **optim}, model=settings)
    assert engine.packed == packed
    return engine


def step(engine: Any, batch: Any) -> None:
    from engine_helpers import policy_loss

    engine.train_batch(batch, MICRO, policy_loss)


def test_log_probs_and_gradients_are_those_of_aligned_rows(half_billion: Path, figures) -> None:
    from engine_helpers import make_engine

    batch = batch_of(lognormal(24, 300, 1500), VOCABULARY)
    mask = batch.batch["response_mask"].bool()
    log_probs, gradients = {}, {}
    for packed in (True, False):
        engine = engine_of(half_billion, packed)
        before = {name: tensor.clone() for name, tensor in engine.export_weights()}
        log_probs[packed] = engine.infer(batch, MICRO)["log_probs"][mask]
        step(engine, batch)
        gradients[packed] = torch.cat([(before[n] - t).flatten() for n, t in engine.export_weights()])
        del engine, before
        device.empty_cache()
    exact = make_engine(half_billion, dtype="float32").infer(batch, MICRO)["log_probs"][mask]
    figures(**check_errors(log_probs[True], log_probs[False], exact))
    alike = float(torch.nn.functional.cosine_similarity(gradients[True], gradients[False], dim=0))
    figures(gradient_cosine=alike)
    assert alike > 0.99
    assert float(gradients[True].norm()) == pytest.approx(float(gradients[False].norm()), rel=0.02)


def test_training_speed(half_billion: Path, figures) -> None:
    batch = batch_of(lognormal(96, 500, 2048), VOCABULARY)
    tokens = int(batch.batch["attention_mask"].sum())
    flops = bf16_flops()
    for packed in (True, False):
        engine = engine_of(half_billion, packed, optimizer="AdamW", lr=1e-6)
        torch.cuda.reset_peak_memory_stats()  # the other engine has its own
        per_second = tokens / seconds(lambda engine=engine: step(engine, batch))
        parameters = sum(parameter.numel() for parameter in engine.module.parameters())
        name = "packed" if packed else "aligned"
        figures(
            **{
                f"{name}_tokens_per_s": per_second,
                f"{name}_mfu": 6 * parameters * per_second / flops,
                f"{name}_peak_gib": peak_gib(),
            },
            matmul_tflops=flops / 1e12,
        )
        del engine
        device.empty_cache()


def test_logits_exist_once(half_billion: Path, figures) -> None:
    """`[N, V]` in bfloat16, and statistics of a part of it at a time."""
    batch = batch_of([(64, 2000)] * 8, VOCABULARY)
    engine = engine_of(half_billion, True)
    held = torch.cuda.memory_allocated() / device.GIB
    torch.cuda.reset_peak_memory_stats()
    engine.infer(batch, MicroBatching(), outputs=("log_probs", "entropy"))
    taken = peak_gib() - held
    logits = 16000 * VOCABULARY * 2 / device.GIB
    figures(logits_gib=logits, infer_peak_gib=taken)
    assert taken < 1.3 * logits + 1.5
