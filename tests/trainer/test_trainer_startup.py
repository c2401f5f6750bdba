"""The start and the end of a run's processes, next to a Ray that the calling program has started itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

_PROGRAM = """
import ray
from hybridrl.config import RayConfig
from hybridrl.single_controller import init_ray, shutdown_ray
from hybridrl.single_controller.ray import ResourcePoolManager
from hybridrl.trainer.startup import workers_starting

def run():
    manager = ResourcePoolManager({}, {})
    with workers_starting(RayConfig(), manager, "cpu", dict) as started:
        started()
        assert ray.is_initialized()

init_ray({"include_dashboard": False}, {}, use_gpu=False)

@ray.remote
class Counter:
    def __init__(self): self.count = 0
    def add(self):
        self.count += 1
        return self.count

counter = Counter.remote()
for expected in (1, 2):  # a run, and another one
    run()
    assert ray.get(counter.add.remote()) == expected
shutdown_ray()
assert not ray.is_initialized()
run()
assert not ray.is_initialized()
print("both as they should be")
"""


@pytest.mark.slow(25)
def test_a_run_leaves_the_ray_that_the_program_started(tmp_path: Path, forked: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    done = subprocess.run([forked, program], cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert "both as they should be" in done.stdout, done.stderr[-3000:]
