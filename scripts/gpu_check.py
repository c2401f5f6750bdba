"""Run the tests that need a GPU, one step after the other, and write what they measured into one JSON file:

    python scripts/gpu_check.py [--out gpu_check.json] [--minutes 9] [--only STEP ...]

It installs nothing and needs no network: it uses the Python that it is started with, and the packages of this Python.
Each step is a part of tests/gpu in a process of its own. Steps that do not fit into the time are named and left out.
The file holds the device, the versions, how each step ended, and the figures: GB/s of offloading and of weight updates,
tokens per second, MFU against a measured matrix product, peak memory. It is written after each step. Exit status: 0 if
every step that ran passed, 1 if one failed, 2 without a usable GPU or without the packages that the tests need
(`bash scripts/install.sh cuda dev vllm` installs them).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
#: what each step runs, in order, and the seconds that it may take
STEPS: dict[str, tuple[list[str], float]] = {
    "ipc": (["tests/gpu/test_gpu_ipc.py"], 120),
    "engine": (["tests/gpu/test_gpu_engine.py"], 150),
    "overlap": (["tests/gpu/test_gpu_overlap.py"], 150),
    "attention": (["tests/gpu/test_gpu_attention.py"], 120),
    "packing": (["tests/gpu/test_gpu_packing.py", "tests/gpu/test_gpu_prefixes.py"], 120),
    "kernels": (["tests/gpu/test_gpu_kernels.py"], 120),
    "megatron": (["tests/gpu/test_gpu_megatron.py"], 150),
    "replica": (["tests/gpu/test_gpu_rollout.py", "-k", "plain"], 180),
    "program": (["tests/gpu/test_gpu_training.py"], 150),
    "vllm": (["tests/gpu/test_gpu_rollout.py", "-k", "vllm"], 240),
    "sglang": (["tests/gpu/test_gpu_rollout.py", "-k", "sglang"], 240),
}
NEEDS = {"megatron": "megatron", "vllm": "vllm", "sglang": "sglang"}
LEAST_S = 20.0
#: time to show failures after an interrupt
INTERRUPT_S = 15.0
#: modules that the tests themselves import, and their packages
TEST_PACKAGES = {
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "xdist": "pytest-xdist",
    "hypothesis": "hypothesis",
}
PACKAGES = (
    "torch",
    "transformers",
    "ray",
    "vllm",
    "sglang",
    "flash-attn",
    "flash-attn-4",
    "megatron-core",
    "transformer-engine",
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all steps together")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="these steps")
    settings = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * settings.minutes
    sys.path.insert(0, str(REPOSITORY))
    from hybridrl.errors import UserError
    from hybridrl.utils import device

    try:
        device.require_gpu()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if missing := [package for module, package in TEST_PACKAGES.items() if importlib.util.find_spec(module) is None]:
        print(
            f"error: {sys.executable} has no {', '.join(missing)}, which the tests need; install everything with: "
            "bash scripts/install.sh cuda dev vllm",
            file=sys.stderr,
        )
        return 2
    report: dict[str, Any] = {"machine": machine(), "steps": {}, "figures": {}}
    for name in settings.only:
        needed, left = NEEDS.get(name), deadline - time.monotonic()
        if needed and importlib.util.find_spec(needed) is None:
            outcome: dict[str, Any] = {"result": "left out", "why": f"{needed} is not installed"}
        elif left < LEAST_S:
            outcome = {"result": "left out", "why": f"the {settings.minutes:g} minutes are over"}
        else:
            outcome = run(name, min(STEPS[name][1], left), report["figures"])
        report["steps"][name] = outcome
        print(f"{name}: {outcome}", flush=True)
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report["figures"], indent=2))
    return int(any(step["result"] in ("failed", "no tests") for step in report["steps"].values()))


def machine() -> dict[str, Any]:
    """The device and the versions."""
    import torch

    from hybridrl.utils import device

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "devices": device.device_names(),
        "memory_gib": round(device.memory_stats()["total_gb"], 1) if device.is_gpu() else 0,
        "driver": device.driver_version(),
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "versions": versions,
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """End pytest, which shows the failures so far if it is interrupted, and everything that it started."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=INTERRUPT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(name: str, limit: float, figures: dict[str, Any]) -> dict[str, Any]:
    """Run a step; add what its tests measured to `figures`."""
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "figures.jsonl"
        environment = {**os.environ, "HYBRIDRL_GPU_TESTS": "1", "HYBRIDRL_GPU_FIGURES": str(measured)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *STEPS[name][0]]
        started = time.monotonic()
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True)
        try:
            status: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
            end(process)
        lines = measured.read_text(encoding="utf-8").splitlines() if measured.exists() else []
    for line in map(json.loads, lines):
        figures.setdefault(line.pop("test"), {}).update(line)
    result = {0: "passed", 5: "no tests"}.get(-1 if status is None else status, "failed")
    outcome: dict[str, Any] = {"result": result, "seconds": round(time.monotonic() - started, 1)}
    return outcome if status is not None else {**outcome, "why": f"it took more than {limit:.0f} s"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
