"""Megatron-core's parallelism on real gloo processes against one process of `FSDPEngine`, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distillation_helpers import TOP, distilled, taught
from engine_helpers import (
    TEMPERATURE,
    full_kl_loss,
    make_batch,
    make_engine,
    make_fields,
    policy_loss,
    value_loss,
    weights,
)
from megatron_helpers import make_megatron, save_model
from ranks import spawn

from hybridrl.algorithms import linear_statistics
from hybridrl.engine import MicroBatching
from hybridrl.engine.logits_functions import TopTokens
from hybridrl.utils import distributed
from hybridrl.utils.metrics import merge_metrics
from hybridrl.workers.distillation import computing

FIELDS = make_fields()
OPTIM = {"lr_warmup_steps": 0, "override_optimizer_config": {"eps": 1e-5}}
OUTPUTS = {"language_model": ("log_probs", "entropy", "sum_pi_squared"), "value_model": ("values",)}
OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 4000}
FUSED = {"use_fused_kernels": True}
STEPS = 2


def run(engine: Any, model_type: str, rows: slice = slice(None)) -> dict[str, Any]:
    """What the steps compute and change, as plain tensors and numbers."""
    batch, micro = make_batch(FIELDS, rows), MicroBatching(size=4)
    loss = policy_loss if model_type == "language_model" else value_loss
    before = weights(engine)
    metrics = []
    for _ in range(STEPS):
        own = engine.train_batch(batch, micro, loss, TEMPERATURE, entropy=model_type == "language_model")
        parts = distributed.all_gather_object((engine.geometry.collects, own))
        merged = merge_metrics([part for collects, part in parts if collects])
        metrics.append({name: float(metric.value) for name, metric in merged.items()})
    return {
        "before": before,
        "metrics": metrics,
        "outputs": engine.infer(batch, micro, TEMPERATURE, OUTPUTS[model_type]),
        "after": weights(engine),
    }


def check(
    rank: int, work: Path, expected: str, model_type: str, shards: tuple[slice, ...] = (), **settings: Any
) -> Any:
    """Compare an engine with what one process computed; each data-parallel rank has its shard of the rows."""
    wanted = torch.load(work / f"{expected}.pt", weights_only=True)
    engine = make_megatron(work / expected.split(".")[0], model_type, optim=OPTIM, **settings)
    place = engine.geometry
    rows = shards[place.dp_rank] if shards else slice(place.dp_rank, None, place.dp_size)
    got = run(engine, model_type, rows)
    what = f"{expected} {settings} rank {rank}"
    for name, tensor in wanted["before"].items():
        assert torch.equal(got["before"][name], tensor), f"{what} {name}"
    for step, values in zip(got["metrics"], wanted["metrics"], strict=True):
        assert step == pytest.approx(values, rel=2e-5, abs=1e-6), what
    assert bool(got["outputs"]) == (engine.state.pp_rank == engine.sizes.pp - 1), what
    for name, tensor in got["outputs"].items():
        torch.testing.assert_close(tensor, wanted["outputs"][name][rows], atol=1e-5, rtol=1e-5, msg=f"{what} {name}")
    for name, tensor in wanted["after"].items():
        moved = (tensor - wanted["before"][name]).abs().max() > 1e-3  # far beyond the tolerance
        assert moved or "correction_bias" in name, name
        difference = (got["after"][name] - tensor).abs().max()
        assert difference < 1e-5, f"{what} {name}: {difference}"
    assert got["after"].keys() == wanted["after"].keys()
    return engine


def expect(work: Path, *kinds: str) -> None:
    """Save models, and what one process of `FSDPEngine` computes with them."""
    for kind in kinds:
        name, model_type = kind.split(".")
        save_model(work / name, name)
        torch.save(run(make_engine(work / name, model_type, optim=OPTIM), model_type), work / f"{kind}.pt")


def compared(make: Any, work: Path, **settings: Any) -> dict[str, Any]:
    """What updates with the KL to a reference and with a teacher's distributions change, and what the teacher says."""
    teacher = make(work / "tied", forward_only=True, **settings)
    engine = make(work / "untied", optim=OPTIM, **settings)
    place, micro, fields = engine.geometry, MicroBatching(size=6), torch.load(work / "taught.pt", weights_only=True)
    rows = slice(place.dp_rank, None, place.dp_size)
    batch = make_batch(fields, rows)
    engine.compare_with(make(work / "untied", forward_only=True, **settings))
    updates = [engine.train_batch(batch, micro, full_kl_loss, TEMPERATURE, ref_kl=True) for _ in range(2)]
    for mode in ("reverse_kl", "forward_kl_topk"):
        updates.append(distilled(engine, teacher, fields, micro, own=rows, loss_mode=mode))
    parts = distributed.all_gather_object((place.collects, updates[:2]))
    kls = [
        float(merge_metrics([own[step] for collects, own in parts if collects])["ref_kl"].value) for step in range(2)
    ]
    top = TopTokens(TOP)
    with computing(teacher, top):
        said = teacher.infer(batch, micro, TEMPERATURE, top.outputs)
    norms = [float(getattr(update["grad_norm"], "value", update["grad_norm"])) for update in updates]
    return {"kls": kls, "norms": norms, "said": said, "after": weights(engine), "rows": rows}


def check_compared(rank: int, work: Path, **settings: Any) -> None:
    """Compare with what one process computed."""
    expected = torch.load(work / "compared.pt", weights_only=False)
    got = compared(make_megatron, work, **settings)
    what = f"{settings} rank {rank}"
    assert got["kls"] == pytest.approx(expected["kls"], rel=1e-4, abs=1e-7) and got["kls"][1] > 1e-5, what
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-4), what
    for name, tensor in got["said"].items():
        torch.testing.assert_close(tensor, expected["said"][name][got["rows"]], rtol=1e-5, atol=1e-5, msg=what)
    for name, tensor in expected["after"].items():
        assert (got["after"][name] - tensor).abs().max() < 2e-5, f"{what} {name}"


def check_dense(rank: int, work: Path) -> None:
    language, unsplit = "language_model", {"sequence_parallel": False}
    check(rank, work, "untied.language_model", language, tp=2, pp=2, **unsplit)
    check(rank, work, "untied.language_model", language)
    check(rank, work, "untied.language_model", language, tp=2, use_distributed_optimizer=False, **unsplit)
    padded = {"use_remove_padding": False, "enable_gradient_checkpointing": False}
    check(rank, work, "untied.language_model", language, pp=2, model=padded, override_ddp_config=OVERLAPPED)
    unequal = (slice(0, 9), slice(9, None))  # three micro-batches and one
    check(rank, work, "untied.language_model", language, shards=unequal, cp=2, tp=2)
    check(rank, work, "tied.language_model", language, tp=2, pp=2)
    check(rank, work, "critic.value_model", "value_model", tp=2, pp=2)


def check_interleaved_and_context(rank: int, work: Path) -> None:
    language, padded = "language_model", {"use_remove_padding": False}
    linear_statistics.CHUNK_ELEMENTS["cpu"] = 7 * 256
    check(rank, work, "untied.language_model", language, pp=2, vpp=2, model=FUSED, override_ddp_config=OVERLAPPED)
    check(rank, work, "untied.language_model", language, pp=2, vpp=2, tp=2, model=padded)
    check(rank, work, "untied.language_model", language, cp=2, tp=2, model=FUSED)
    check(rank, work, "untied.language_model", language, cp=2, pp=2, model=padded)
    check(rank, work, "critic.value_model", "value_model", cp=4)
    check_compared(rank, work, tp=2, cp=2)
    check_compared(rank, work, pp=2, vpp=2)


def check_experts(rank: int, work: Path) -> None:
    language = "language_model"
    check(rank, work, "experts.language_model", language, ep=2, pp=2)
    check(rank, work, "experts.language_model", language, ep=2, tp=2, etp=1)
    check(rank, work, "experts.language_model", language, ep=2, tp=2, etp=2)
    check(rank, work, "experts.language_model", language, tp=2, pp=2)
    check(rank, work, "latent.language_model", language, tp=2, pp=2)


@pytest.mark.slow
def test_dense_models_train_like_one_process(tmp_path: Path) -> None:
    expect(tmp_path, "untied.language_model", "tied.language_model", "critic.value_model")
    spawn(check_dense, 8, tmp_path, preload="megatron_preload")


@pytest.mark.slow
def test_interleaved_stages_and_split_sequences_train_like_one_process(tmp_path: Path) -> None:
    expect(tmp_path, "untied.language_model", "critic.value_model")
    save_model(tmp_path / "tied", "tied")
    torch.save(taught(make_engine(tmp_path / "tied"), FIELDS), tmp_path / "taught.pt")
    torch.save(compared(make_engine, tmp_path), tmp_path / "compared.pt")
    spawn(check_interleaved_and_context, 4, tmp_path, preload="megatron_preload")


@pytest.mark.slow
def test_mixtures_of_experts_train_like_one_process(tmp_path: Path) -> None:
    expect(tmp_path, "experts.language_model", "latent.language_model")
    spawn(check_experts, 4, tmp_path, preload="megatron_preload")
