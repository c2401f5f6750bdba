"""Six families of models: the settings of an engine, its ranks and its checkpoints change no result in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_helpers import (
    FAMILIES,
    SIZES,
    TEMPERATURE,
    make_batch,
    make_engine,
    make_fields,
    policy_loss,
    save_model,
    weights,
)
from ranks import spawn

from hybridrl.algorithms import linear_statistics
from hybridrl.engine import MicroBatching
from hybridrl.utils import distributed
from hybridrl.utils.metrics import merge_metrics

FIELDS = make_fields()
OUTPUTS = ("log_probs", "entropy", "sum_pi_squared")
OPTIM = {"lr_warmup_steps": 0, "override_optimizer_config": {"eps": 1e-4}}  # less would magnify rounding errors
SAVED = ["model", "optimizer", "extra"]
CHOSEN = MicroBatching()  # two of them, by their lengths


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: save_model(name, folder, settings) for name, settings in FAMILIES.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    return models[request.param]


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    """An engine with the defaults; nothing changes its weights."""
    return make_engine(model)


@pytest.fixture(scope="module")
def expected(plain: Any) -> dict[str, torch.Tensor]:
    return computed(plain)


def computed(engine: Any, micro: MicroBatching = CHOSEN) -> dict[str, torch.Tensor]:
    """The outputs of tokens, and the gradients of a step before they are clipped; the step is not taken."""
    found: dict[str, torch.Tensor] = engine.infer(make_batch(FIELDS), micro, TEMPERATURE, OUTPUTS)
    engine.apply_gradients = lambda norm: found.update(
        {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    )
    engine.train_batch(make_batch(FIELDS), micro, policy_loss, TEMPERATURE, entropy=True)
    del engine.apply_gradients
    return found


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Outputs to 1e-5, gradients to 1e-5 of their size."""
    assert found.keys() == expected.keys() and len(expected) > len(OUTPUTS)
    for name, tensor in expected.items():
        if name in OUTPUTS:
            torch.testing.assert_close(
                found[name], tensor, atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
        else:
            assert float((found[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()) + 1e-7, name


@pytest.mark.parametrize("micro", [MicroBatching(size=1), MicroBatching(max_tokens=60)], ids=["rows", "tokens"])
def test_micro_batches(micro: MicroBatching, plain: Any, expected: dict[str, torch.Tensor]) -> None:
    """Of one row each, and of as many rows as fit, against those that the engine chooses."""
    assert_alike(computed(plain, micro), expected)


def test_checkpointed_layers(model: Path, plain: Any, expected: dict[str, torch.Tensor]) -> None:
    """They are computed once more in the backward pass, with the same result."""
    kept: Any = make_engine(model, model={"enable_gradient_checkpointing": False})
    calls = []
    for engine in (plain, kept):
        seen: list[bool] = []
        hooks = [
            layer.self_attn.register_forward_hook(lambda *_, seen=seen: seen.append(torch.is_grad_enabled()))
            for layer in engine.module.model.layers
        ]
        assert_alike(computed(engine), expected)
        calls.append(sum(seen))
        for hook in hooks:
            hook.remove()
    assert calls[0] == 2 * calls[1] > 0


def test_logits_in_chunks(model: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear_statistics.CHUNK_ELEMENTS, "cpu", 7 * SIZES["vocab_size"])
    engine: Any = make_engine(model, model={"use_fused_kernels": True})
    assert engine.forward_pass.fusing.supported
    assert_alike(computed(engine), expected)


# ------------------------------------------------------------------ two ranks

#: the second rank has one micro-batch less than the first
ROWS = {0: slice(0, 9), 1: slice(9, None)}
#: where an engine keeps its state between uses, and where FSDP2 keeps it and updates it
OFFLOAD: dict[str, Any] = {"param_offload": True, "optimizer_offload": True}
POLICY: dict[str, Any] = {"offload_policy": True}


def step(engine: Any, rows: slice) -> dict[str, float]:
    """Metrics of one step, merged over the ranks."""
    with engine.loaded(optimizer=True):
        own = engine.train_batch(
            make_batch(FIELDS, rows), MicroBatching(size=5), policy_loss, TEMPERATURE, entropy=True
        )
    merged = merge_metrics(distributed.all_gather_object(own))
    return {name: float(metric.value) for name, metric in merged.items()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=5e-5, rtol=1e-3, msg=lambda text, n=name: f"{where}, {n}: {text}"
        )


def check_family(name: str, model: Path, rows: slice, work: Path) -> None:
    expected = torch.load(work / f"{name}.pt", weights_only=True)
    engine, offloaded = make_engine(model, optim=OPTIM), make_engine(model, optim=OPTIM, **OFFLOAD)
    outputs = engine.infer(make_batch(FIELDS, rows), MicroBatching(size=5), TEMPERATURE, OUTPUTS)
    for output, tensor in outputs.items():
        torch.testing.assert_close(tensor, expected["outputs"][output][rows], atol=1e-5, rtol=1e-5)
    for number, metrics in enumerate(expected["metrics"]):
        found = step(engine, rows)
        assert found == pytest.approx(metrics, rel=1e-4, abs=2e-6), f"{name}, step {number}"
        assert step(offloaded, rows) == found, f"{name}, offloaded, step {number}"
        if number == 0:
            engine.save(work / f"two_{name}", SAVED)
    after = weights(engine)
    assert_close(after, expected["after"], name)
    with offloaded.loaded():
        assert all(torch.equal(tensor, after[key]) for key, tensor in weights(offloaded).items()), name
    resumed = make_engine(model, optim=OPTIM, **POLICY)
    resumed.load(work / f"one_{name}", SAVED)
    step(resumed, rows)
    assert_close(weights(resumed), expected["after"], f"{name}, resumed")


def on_two_ranks(rank: int, models: dict[str, Path], work: Path) -> None:
    for name, model in models.items():
        check_family(name, model, ROWS[rank], work)
    dist.barrier()


@pytest.mark.slow(20)
def test_two_ranks_offloading_and_checkpoints(models: dict[str, Path], tmp_path: Path) -> None:
    """Two ranks do what one does, with the state in main memory too, and each goes on from the other's checkpoint."""
    finals = {}
    for name, model in models.items():
        engine = make_engine(model, optim=OPTIM)
        outputs = engine.infer(make_batch(FIELDS), CHOSEN, TEMPERATURE, OUTPUTS)
        metrics = [step(engine, slice(None))]
        engine.save(tmp_path / f"one_{name}", SAVED)
        metrics.append(step(engine, slice(None)))
        finals[name] = weights(engine)
        torch.save({"outputs": outputs, "metrics": metrics, "after": finals[name]}, tmp_path / f"{name}.pt")
    spawn(on_two_ranks, 2, models, tmp_path)
    for name, model in models.items():
        engine = make_engine(model, optim=OPTIM)
        engine.load(tmp_path / f"two_{name}", SAVED)
        step(engine, slice(None))
        assert_close(weights(engine), finals[name], f"{name}, from two ranks")
