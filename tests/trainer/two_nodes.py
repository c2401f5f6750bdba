"""Runs of the PPO program on a Ray cluster of two nodes of this machine, and where their processes were.

Arguments: settings of all runs, one per word. Writes found.json, because the standard output has messages of Ray, too.
The driver is on a node without GPU; Ray is told that the other one has a GPU, which no process can use.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray.cluster_utils import Cluster

from hybridrl.config import load_config
from hybridrl.errors import UserError
from hybridrl.trainer.ppo.run_ppo import started_trainer
from hybridrl.trainer.ppo.trainer import RayPPOTrainer

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "rollout")]

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
CPU = ["trainer.device=cpu", "actor_rollout_ref.rollout.name=plain_engine:PlainEngine"]
LAYOUTS = {
    "colocated": [
        *CPU,
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ],
    "split": [
        *CPU,
        "placement=split",
        "placement.roles.ref=value",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=2",
    ],
    "standalone": [
        *CPU,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
    ],
}
AUTO = """
from hybridrl.rollout.inference_engine import register_inference_engine
from plain_engine import PlainEngine

register_inference_engine("first_on_gpu", auto=-1)(PlainEngine)
"""


def place() -> tuple[str, list[str]]:
    """The node and the variables of the process that this runs in."""
    return ray.get_runtime_context().get_node_id(), [os.environ[name] for name in VARIABLES]


def places(trainer: RayPPOTrainer) -> dict[str, Any]:
    """Return node and variables of each rank, by role, and node and training ranks of each replica."""
    found: dict[str, Any] = {
        role: group.execute_all_sync("execute_func_rank_zero", place) for role, group in trainer.groups.items()
    }
    pool: Any = trainer.rollout.supervisor  # type: ignore[attr-defined]
    found["replicas"] = [(replica.info.node_id, replica.placement.ranks) for replica in pool.replicas]
    return found


def started_cluster() -> Cluster:
    """Start the two nodes, a second time if the machine was too busy for Ray's limit of 30 s."""
    for last in (False, True):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=2, include_dashboard=False, object_store_memory=128 * 1024**2)
            with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="0"):
                cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=128 * 1024**2)
            return cluster
        except Exception as error:
            cluster.shutdown()
            if last or "timed out during startup" not in str(error):
                raise
    raise AssertionError("not reached")


def main(words: list[str]) -> None:
    found: dict[str, Any] = {}
    cluster = started_cluster()
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        for name, layout in LAYOUTS.items():
            config = load_config("ppo_trainer", [*words, *layout, f"trainer.default_local_dir={name}"])
            with started_trainer(config) as trainer:
                trainer.fit()
                found[name] = places(trainer) | {"step": trainer.run.step}
        Path("auto.py").write_text(AUTO)
        try:
            config = load_config("ppo_trainer", [*words, "actor_rollout_ref.model.external_lib=auto.py"])
            with started_trainer(config):
                pass
        except UserError as error:
            found["auto"] = str(error)
        Path("found.json").write_text(json.dumps(found))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
