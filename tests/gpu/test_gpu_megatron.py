"""Megatron-core on one GPU: it trains like FSDP2, with all of its state offloaded between uses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_helpers import batch_of, lognormal

from hybridrl.engine import MicroBatching

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]
MICRO = MicroBatching(size=4)
OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
OPTIM = {"override_optimizer_config": {"eps": 1e-5}}
#: largest difference of log-probabilities, and smallest cosine of what three steps change
TOLERANCES = {"float32": (1e-2, 0.99), "bfloat16": (0.1, 0.9)}


def trained(engine: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities before three steps, and the change of all weights."""
    from engine_helpers import policy_loss

    with engine.loaded():
        log_probs = engine.infer(batch, MICRO)["log_probs"]
        before = {name: tensor.float().cpu().clone() for name, tensor in engine.export_weights()}
    for _ in range(3):
        with engine.loaded(optimizer=True):
            engine.train_batch(batch, MICRO, policy_loss)
    with engine.loaded():
        after = {name: tensor.float().cpu().clone() for name, tensor in engine.export_weights()}
    assert after.keys() == before.keys()
    return log_probs.float().cpu(), torch.cat([(after[name] - before[name]).flatten() for name in sorted(after)])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_it_trains_like_fsdp_with_everything_offloaded(world_of_one, tmp_path: Path, dtype: str) -> None:
    from engine_helpers import make_engine
    from megatron_helpers import make_megatron, save_model

    save_model(tmp_path, "untied")
    batch = batch_of(lognormal(12, 20, 40), 200)
    mask = batch.batch["response_mask"].bool()
    wanted, moved = trained(make_engine(tmp_path, optim=OPTIM, dtype=dtype), batch)
    engine = make_megatron(tmp_path, optim=OPTIM, dtype=dtype, **OFFLOAD)
    got, change = trained(engine, batch)
    furthest, alike = TOLERANCES[dtype]
    assert float((got - wanted)[mask].abs().max()) < furthest
    assert float(moved.abs().max()) > 1e-3
    assert float(torch.nn.functional.cosine_similarity(change, moved, dim=0)) > alike
    parameters = [parameter.detach() for chunk in engine.chunks for parameter in chunk.parameters()]
    resident = [*parameters, *engine.optimizer.state_tensors(), *engine.optimizer.gradient_buffers()]
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in resident)
