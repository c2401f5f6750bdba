"""Code written for verl in Ray's workers: a dataflow by hand, with Ray started as verl's programs start it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Finish = Callable[..., "subprocess.CompletedProcess[str]"]

WORKERS = '''
"""A module that workers import by its name."""
import os

import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu


class Policy(Worker):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self._register_dispatch_collect_info("policy", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts: DataProto) -> DataProto:
        from verl.utils.torch_functional import get_response_mask

        mask = get_response_mask(prompts.batch["ids"], eos_token=9)
        ranks = torch.full((len(prompts),), self.rank)
        return DataProto.from_dict({"mask": mask * self.scale, "rank": ranks})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="policy"), blocking=False)
    def double(self, data):
        data = tu.contiguous(data)
        data["ids"] = data["ids"] * 2
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self):
        return [os.environ[name] for name in ("RAY_LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE")]
'''

DATAFLOW = """
import ray
import torch

from verl import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from workers import Policy

ray.init(address="local", num_cpus=4, include_dashboard=False)
group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(cls=Policy, scale=3))
ids = torch.tensor([[1, 9, 9], [1, 1, 9], [9, 1, 1], [1, 1, 1]])
out = group.generate(DataProto.from_dict({"ids": ids}))
assert out.batch["mask"].tolist() == [[3, 3, 0], [3, 3, 3], [3, 0, 0], [3, 3, 3]], out.batch["mask"]
assert out.batch["rank"].tolist() == [0, 0, 1, 1]

jagged = tu.nested_tensor_from_tensor_list([torch.ones(2), torch.ones(1), torch.ones(4), torch.ones(3)])
batch = tu.get_tensordict({"ids": ids, "jagged": jagged, "name": ["a", "b", "c", "d"]}, {"step": 7})
doubled = group.double(batch).get()
assert doubled["ids"].tolist() == (2 * ids).tolist() and tu.get(doubled, "name") == ["a", "b", "c", "d"]
assert [len(row) for row in doubled["jagged"].unbind()] == [2, 1, 4, 3] and doubled["step"] == 7
assert group.place() == [["0", "2"], ["1", "2"]], group.place()
print("dataflow done")
"""

FUSED = """
import ray

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_raw_cls,
)


@ray.remote
class Adder(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x + self.rank


@ray.remote
class Scaler(Worker):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def scale(self, x):
        return x * self.factor


roles = {"adder": RayClassWithInitArgs(cls=Adder), "scaler": RayClassWithInitArgs(cls=Scaler, factor=10)}


@ray.remote
class Both(create_colocated_worker_raw_cls(roles)):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add_and_scale(self, x):
        return self.scaler.scale(self.adder.add(x))


ray.init(address="local", num_cpus=4, include_dashboard=False)
group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(cls=Both))
group.fuse(roles.keys())
assert group.adder.add(1) == [1, 2] and group.scaler.scale([1, 2]) == [10, 20]
assert group.add_and_scale(1) == [10, 20]
print("fused done")
"""


def run(finish: Finish, folder: Path, text: str, python: str = sys.executable) -> str:
    (folder / "program.py").write_text(text)
    command = [python, "-m", "hybridrl.verl_compat", "run", str(folder / "program.py")]
    done = finish(command, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_workers_import_verl_before_the_one_in_their_folder(tmp_path: Path, finish: Finish) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    (tmp_path / "verl").mkdir()  # Ray puts the program's folder before everything else on a worker's path
    (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError('the other verl')")
    assert "dataflow done" in run(finish, tmp_path, DATAFLOW)


def test_roles_in_one_process_of_a_class_to_derive_from(tmp_path: Path, finish: Finish, forked: str) -> None:
    assert "fused done" in run(finish, tmp_path, FUSED, forked)
