"""`hybridrl plan --from RUN`: seconds of a run next to predictions, and factors that one run calibrates.

The runs here are folders whose seconds are those of the cost model with other factors, which calibration has to find.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import PPOTrainerConfig, load_config
from hybridrl.errors import PlacementError, UserError
from hybridrl.observe.report import REPORT, write_report
from hybridrl.observe.run_folder import write_run_info
from hybridrl.plan.calibration import calibrated, compare, read_run
from hybridrl.plan.configured import configured_plan
from hybridrl.plan.devices import device_called, read_devices
from hybridrl.plan.factors import FITTED
from hybridrl.plan.plan_command import main, read_request
from hybridrl.plan.planned_run import planned
from hybridrl.plan.run_plan import described_run, plans
from hybridrl.plan.seconds import TEXTBOOK, CostFactors

FACTS = json.loads(Path(__file__).with_name("public_models.json").read_text(encoding="utf-8"))
SLOW = replace(TEXTBOOK, sigma=1.27, mfu=0.2, decode_memory=0.3, fixed_s=20.0, refit_bytes_s=5e9)
MEANS = {"response": 1500.0, "prompt": 300.0}


#: differs from the fitted factors by what one run can tell: a ratio of generation, one of training, one of passes
SCALED = replace(
    FITTED,
    **{name: getattr(FITTED, name) / 1.5 for name in ("decode_flops", "decode_memory")},
    **{name: getattr(FITTED, name) * 1.5 for name in ("decode_layer_s", "decode_expert_layer_s", "sequence_s")},
    **{name: getattr(FITTED, name) * 1.5 for name in ("reduce_s", "network_reduce_s")},
    **{name: getattr(FITTED, name) / 2 for name in ("mfu", "all_to_all", "tensor")},
    **{name: getattr(FITTED, name) * 2 for name in ("layer_s", "expert_layer_s")},
    pass_factor=FITTED.pass_factor * 1.25,
    refit_bytes_s=FITTED.refit_bytes_s / 3,
    fixed_s=12.0,
)


def write_run(
    folder: Path,
    model: str = "qwen2.5-7b",
    *more: str,
    name: str = "NVIDIA H100 80GB HBM3",
    factors: CostFactors = SLOW,
) -> Path:
    """A run on 8 H100 with the seconds that `factors` give."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(FACTS[model]), encoding="utf-8")
    words = [f"actor_rollout_ref.model.path={folder / 'model'}", "algorithm.adv_estimator=grpo", "devices=8xH100",
             "actor_rollout_ref.rollout.n=8", "data.train_batch_size=256", "placement=auto",
             "data.train_files=a.parquet", "actor_rollout_ref.actor.ppo_mini_batch_size=64",
             "data.max_prompt_length=1024", "data.max_response_length=4096", *more]  # fmt: skip
    config: PPOTrainerConfig = planned(load_config("ppo_trainer", words))
    run = folder / "run"
    write_run_info(run, config)
    versions = json.loads((run / "versions.json").read_text())
    versions["device"] = {"kind": "cuda", "count": 8, "names": [name] * 8}
    (run / "versions.json").write_text(json.dumps(versions))
    request = described_run(config, read_devices("8xH100"))
    request = replace(request, step=replace(request.step, **MEANS))
    seconds = dict(configured_plan(request, factors).seconds)
    names = {"weights": "update_weights"}
    metrics = {f"timing_s/{names.get(phase, phase)}": value for phase, value in seconds.items() if phase != "rest"}
    metrics |= {f"{name}_length/mean": value for name, value in MEANS.items()}
    rows = [{"step": 1, **metrics, "timing_s/gen": 1e4}, *({"step": step, **metrics} for step in range(2, 6))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path)


def test_measured_seconds_are_those_of_the_run(run: Path) -> None:
    measured = read_run(run)
    assert measured.steps == 4, "the first step is left out"
    assert (measured.request.step.response, measured.request.step.prompt) == (1500, 300)
    assert (measured.request.cluster.count, measured.request.cluster.device.name) == (8, "H100")
    expected = configured_plan(measured.request, SLOW).seconds
    assert dict(measured.seconds) == pytest.approx(dict(expected), rel=1e-6)
    assert any(abs(predicted - seconds) > 0.2 * seconds for _, seconds, predicted in measured.rows())


@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen3-4b"])
@pytest.mark.parametrize("more", [(), ("actor_rollout_ref.actor.use_kl_loss=True",)])
def test_calibrated_factors_predict_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    measured = read_run(write_run(tmp_path, model, *more))
    rows = {phase: row for phase, *row in measured.rows(calibrated(measured))}
    for phase in ("gen", "weights", "update_actor", "rest"):
        assert rows[phase][1] == pytest.approx(rows[phase][0], rel=0.02), phase
    passes = [rows[phase] for phase in ("old_log_prob", "ref") if phase in rows]  # one factor for both
    assert len(passes) == 1 + len(more)
    assert sum(row[1] for row in passes) == pytest.approx(sum(row[0] for row in passes), rel=0.02)


@pytest.mark.parametrize("devices", ["8xH100", "32xH100"])
def test_plans_are_true_where_the_run_differs_by_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str
) -> None:
    monkeypatch.chdir(tmp_path)
    measured = read_run(write_run(tmp_path, factors=SCALED))
    request = read_request("ppo", [f"devices={devices}"], measured)
    truth, after = (plans(request, factors) for factors in (SCALED, calibrated(measured)))
    assert [plan.sets for plan in after] == [plan.sets for plan in truth]
    assert [plan.step_s for plan in after] == pytest.approx([plan.step_s for plan in truth], rel=0.01)


def test_plans_for_other_devices_come_nearer_to_the_truth(run: Path) -> None:
    """Here the parts of generation differ by different ratios, which one run does not tell."""
    measured = read_run(run)
    request = read_request("ppo", ["devices=32xH100"], measured)
    assert request.step.samples == measured.request.step.samples and request.step.response == 1500
    truth = min(plan.step_s for plan in plans(request, SLOW))
    before, after = (min(plan.step_s for plan in plans(request, *f)) for f in ((), (calibrated(measured),)))
    assert abs(after - truth) < 0.5 * abs(before - truth)


def test_the_command_and_the_report_show_both(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", str(run), "--json"], "hybridrl plan") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    shown = {phase: (row["measured"], row["predicted"]) for phase, row in data["run"]["seconds"].items()}
    assert shown == {phase: (seconds, predicted) for phase, seconds, predicted in compare(run)}
    assert data["devices"] == {"name": "H100", "count": 8}
    assert main(["grpo", "--from", str(run), "devices=16xH100"], "hybridrl plan") == 0
    printed = capsys.readouterr().out
    assert f"gen: {shown['gen'][0]:.1f} ({shown['gen'][1]:.1f})" in printed and "16 x H100" in printed
    write_report(run)
    page = (run / REPORT).read_text(encoding="utf-8")
    assert "Seconds measured and predicted" in page and f"<td>{shown['gen'][0]:.1f}</td>" in page


def test_a_run_that_lacks_something_is_refused_by_what_it_lacks(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace("response_length/mean", "other"))
    with pytest.raises(UserError) as refused:
        read_run(run)
    assert "response_length/mean" in str(refused.value) and str(run) in str(refused.value)
    (run / "metrics.jsonl").write_text(lines)
    versions = json.loads((run / "versions.json").read_text())
    for device, named in (({"kind": "cpu", "names": []}, "cpu"), ({"kind": "cuda", "names": ["RTX 4090"]}, "RTX 4090")):
        (run / "versions.json").write_text(json.dumps({**versions, "device": device}))
        with pytest.raises(PlacementError) as unknown:
            read_run(run)
        assert named in str(unknown.value) and "H100" in str(unknown.value)
        assert compare(run) == []
    (run / "config.yaml").unlink()
    assert main(["--from", str(run)], "hybridrl plan") == 2
    assert "config.yaml" in capsys.readouterr().err
    assert main(["--from", str(tmp_path / "none")], "hybridrl plan") == 2
    assert "metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_names_of_drivers(name: str, sheet: str | None) -> None:
    found = device_called(name)
    assert (None if found is None else found.name) == sheet
