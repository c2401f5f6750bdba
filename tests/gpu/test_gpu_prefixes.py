"""Shared prefixes on a GPU: the kernel sees the paths, and the numbers are those of separate rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HALF_BILLION
from gpu_helpers import batch_of, check_errors, seconds

from hybridrl.engine import MicroBatching
from hybridrl.models import tree_attention
from hybridrl.utils import device

pytestmark = pytest.mark.timeout(300)
MICRO = MicroBatching(max_tokens=16384)
PLAIN_SGD = {"optimizer": "SGD", "lr": 1.0, "clip_grad": 0.0, "weight_decay": 0.0, "lr_warmup_steps": 0}


def group(samples: int, length: int) -> Any:
    """Samples of one prompt that is as long as their responses."""
    batch = batch_of([(length, length)] * samples, HALF_BILLION["vocab_size"])
    batch.batch["input_ids"][:, :length] = batch.batch["input_ids"][0, :length]
    return batch


def engine_of(model: Path, shares: bool) -> Any:
    from engine_helpers import make_engine

    engine: Any = make_engine(
        model, optim={**PLAIN_SGD, "lr_scheduler_type": "constant"}, model={"share_prefixes": shares}
    )
    assert engine.shares_prefixes == shares
    return engine


def step(engine: Any, batch: Any) -> None:
    from engine_helpers import policy_loss

    engine.train_batch(batch, MICRO, policy_loss)


def test_the_kernel_is_the_one_that_was_tried() -> None:
    assert tree_attention.kernel_sees_paths() == device.supports_varlen_attention()


def test_log_probs_and_gradients_are_those_of_separate_rows(half_billion: Path, figures) -> None:
    from engine_helpers import make_engine

    batch = group(8, 512)
    mask = batch.batch["response_mask"].bool()
    log_probs, gradients, times = {}, {}, {}
    for shares in (True, False):
        engine = engine_of(half_billion, shares)
        before = {name: tensor.clone() for name, tensor in engine.export_weights()}
        log_probs[shares] = engine.infer(batch, MICRO)["log_probs"][mask]
        step(engine, batch)
        gradients[shares] = torch.cat([(before[n] - t).flatten() for n, t in engine.export_weights()])
        times[shares] = seconds(lambda engine=engine: step(engine, batch))
        del engine, before
        device.empty_cache()
    figures(shared_prefix_ratio=times[True] / times[False])
    exact = make_engine(half_billion, dtype="float32").infer(batch, MICRO)["log_probs"][mask]
    figures(**check_errors(log_probs[True], log_probs[False], exact))
    alike = float(torch.nn.functional.cosine_similarity(gradients[True], gradients[False], dim=0))
    figures(gradient_cosine=alike)
    assert alike > 0.99
    assert float(gradients[True].norm()) == pytest.approx(float(gradients[False].norm()), rel=0.02)
