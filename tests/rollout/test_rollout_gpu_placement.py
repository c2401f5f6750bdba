"""Which GPU a replica and a worker get, with GPUs that exist for Ray only."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

PROGRAM = """
import json
from pathlib import Path

import ray

from hybridrl.errors import UserError
from hybridrl.rollout.start_replicas import replica_placements
from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker

ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, logging_level="ERROR")
pool = RayResourcePool([2], use_gpu=True, max_colocate_count=2)
found = [place.environment["CUDA_VISIBLE_DEVICES"] for place in replica_placements(pool, 1, shared=True)]
try:
    RayWorkerGroup(pool, RayClassWithInitArgs(Worker)).wait_until_ready()
    refused = ""
except UserError as error:
    refused = str(error)
Path("found.json").write_text(json.dumps([found, refused]))  # the standard output has messages of Ray, too
"""


@pytest.mark.slow
def test_ray_assigns_gpus_that_it_does_not_show(tmp_path: Path, finish, forked: str) -> None:
    """As in many setups for verl. PyTorch finds no GPU here, so workers refuse."""
    environment = {**os.environ, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = finish([forked, "program.py"], env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found, refused = json.loads((tmp_path / "found.json").read_text())
    assert sorted(found) == ["0", "1"]
    assert "no GPU can be used here" in refused
