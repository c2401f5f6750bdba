"""SPIN: its gradient, two processes as one, a resumed run, and a Ray that gets everything back."""

import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from hybridrl.errors import DataError


@pytest.fixture
def spin(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe's module, as its workers import it, too."""
    monkeypatch.syspath_prepend(repository / "recipes" / "spin")
    module = importlib.import_module("spin")
    ray.cloudpickle.register_pickle_by_value(module)
    return module


@pytest.fixture
def run(spin: Any, ray_session: None, micro_model: Path, sort_data: Path) -> Callable[..., list[dict[str, float]]]:
    """Runs it on the session's Ray, for its metrics."""
    size = ["--batch", "16", "--lam", "1.0", "actor_rollout_ref.actor.optim.lr=3e-3"]
    # Adam divides by the gradient's size: without this, rounding errors of tiny gradients become whole steps
    size += ["actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3", "trainer.device=cpu"]
    size += ["data.max_prompt_length=24", "data.max_response_length=10"]

    def call(out: Path, *words: str) -> list[dict[str, float]]:
        data = ["--model", str(micro_model), "--data", str(sort_data / "sft_train.parquet"), "--out", str(out)]
        spin.main([*data, *size, *words])
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    return call


def all_are_free() -> bool:
    """Whether no CPU of Ray is in use; Ray learns of ended workers a moment later."""
    for _ in range(100):
        if ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]:
            return True
        time.sleep(0.1)
    return False


def test_the_weights_of_both_answers_are_the_gradient_of_the_loss(spin: Any) -> None:
    ratios = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    margins = ratios[:, 0] - ratios[:, 1]
    loss = torch.log(1 + torch.exp(-0.3 * margins)).mean()
    (gradient,) = torch.autograd.grad(loss, ratios)
    weights = spin.spin_weights(margins.detach(), 0.3)
    torch.testing.assert_close(-weights.view(5, 2), gradient)
    log_probs = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    batch = type("Batch", (), {"batch": {"weights": weights}})
    share, _ = spin.weighted_likelihood({"log_probs": log_probs}, batch)
    share.backward()
    torch.testing.assert_close(log_probs.grad, gradient.flatten()[:, None].expand(10, 4))


@pytest.mark.slow
def test_it_learns_and_goes_on_where_it_ended_and_releases_its_processes(run, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "--iterations", "2")
    assert [line["iteration"] for line in whole] == [1] * 4 + [2] * 4
    for start in (0, 4):  # the reference is the policy at the start of the iteration
        assert whole[start]["loss"] == pytest.approx(0.6931, abs=1e-4) and whole[start]["grad_norm"] > 0
        assert whole[start + 3]["margin"] > 0.2 and whole[start + 3]["loss"] < 0.65
    run(tmp_path / "parts", "--iterations", "1", "--workers", "2")
    parts = run(tmp_path / "parts", "--iterations", "2", "--workers", "2")
    for found, expected in zip(parts, whole, strict=True):
        assert found == pytest.approx(expected, rel=2e-2, abs=2e-3)
    folders = [tmp_path / name / "iteration_2" / "hf_model" for name in ("whole", "parts")]
    one, two = (load_file(next(folder.glob("*.safetensors"))) for folder in folders)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=2e-4, rtol=1e-3, msg=name)
    assert json.loads((tmp_path / "parts" / "iterations.json").read_text()) == {"done": 2}
    again = (tmp_path / "parts" / "metrics.jsonl").stat().st_mtime_ns
    run(tmp_path / "parts", "--iterations", "2")
    assert (tmp_path / "parts" / "metrics.jsonl").stat().st_mtime_ns == again
    assert all_are_free()


def test_an_error_releases_its_processes_too(run, spin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(spin, "train", fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        run(tmp_path)
    assert all_are_free()
    with pytest.raises(DataError, match=r"64 conversations fit, fewer than --batch 65"):
        run(tmp_path, "--batch", "65")
    with pytest.raises(SystemExit):
        run(tmp_path, "--batch", "3", "--workers", "2")
