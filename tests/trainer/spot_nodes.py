"""An asynchronous run whose replicas are on nodes that are lost and added, on a Ray cluster of this machine.

Arguments: settings, one per word. Writes found.json, because the standard output has messages of Ray, too.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from hybridrl.config import load_config
from hybridrl.errors import TooFewReplicasError
from hybridrl.rollout.replicas.replica_handle import ReplicaHandle, ReplicaState
from hybridrl.rollout.replicas.replica_supervisor import Supervisor
from hybridrl.rollout.request import Request
from hybridrl.rollout.rollout import ReplicatedRollout
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.trainer.ppo import prepare_ppo
from hybridrl.trainer.ppo.run_ppo import started_trainer
from hybridrl.trainer.ppo.trainer import RayPPOTrainer

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "rollout")]

LIMIT_S = 200
#: Ray notices within seconds that a node is lost, and not within half a minute
SOON_NOTICED = {"health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_initial_delay_ms": 1000}
LOST, ADDED, LOST_AGAIN = 2, 3, 5  # after the weights of these steps were sent
SAMPLING = SamplingParams(True, 1.0, 1.0, -1, 8, ignore_eos=True, seed=7)
found: dict[str, Any] = {}


def until(holds: Callable[[], bool], what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


def answer_of(replica: ReplicaHandle, name: str) -> tuple[list[int], list[float], list[tuple[int, int]]]:
    """Tokens, log-probabilities and versions of one response, always with the same random numbers."""
    answer = ray.get(replica.actor.generate.remote(Request(f"{name}-{replica.index}", [6, 7, 8], SAMPLING)))
    return answer.token_ids, answer.log_probs, answer.versions


class SpotTrainer(RayPPOTrainer):
    """Loses the node of a replica, has another one join, and loses that of a replica again."""

    cluster: Cluster
    training: str  # node of the policy

    @property
    def supervisor(self) -> Supervisor:
        assert isinstance(self.rollout, ReplicatedRollout)
        return self.rollout.supervisor

    def lose_node(self) -> None:
        """Kill the node of a replica, with requests in flight."""
        nodes = {replica.node_id for replica in self.supervisor.replicas} - {self.training}
        node = next(node for node in self.cluster.worker_nodes if node.node_id in nodes)
        self.rollout.pause()  # the prompts that are drawn now stay in flight
        until(lambda: all(replica.in_flight for replica in self.supervisor.replicas), self.supervisor.statistics)
        self.cluster.remove_node(node, allow_graceful=False)
        until(lambda: ReplicaState.GONE.value in self.rollout.health(), self.rollout.health)
        self.rollout.unpause()

    def reshard(self) -> dict[str, float]:
        metrics = super().reshard()
        supervisor, step = self.supervisor, self.run.step
        if step == ADDED:
            self.cluster.add_node(num_cpus=1, object_store_memory=128 * 1024**2)
            until(lambda: self.rollout.health() == ["ready"] * 2, self.rollout.health)
            one, other = (answer_of(replica, "joined") for replica in supervisor.replicas)
            found["joined"] = [one, other]
        if step == ADDED + 1:  # these weights were sent to both at once
            found["later"] = [answer_of(replica, "later") for replica in supervisor.replicas]
        return metrics

    def watch(self, metrics: Any) -> None:
        super().watch(metrics)
        if self.run.step == LOST:
            self.lose_node()
        if self.run.step == LOST_AGAIN:
            # A lost node is no failure of its replica, also where the first failure would end the run.
            self.supervisor.settings = replace(self.supervisor.settings, max_restarts=0)
            self.lose_node()
            until(lambda: self.supervisor.scheduler.error is not None, self.rollout.health)


def main(words: list[str]) -> None:
    cluster = Cluster()
    try:
        cluster.add_node(
            num_cpus=1, include_dashboard=False, object_store_memory=128 * 1024**2, _system_config=SOON_NOTICED
        )
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=128 * 1024**2)
        os.environ["RAY_ADDRESS"] = cluster.address
        SpotTrainer.cluster = cluster
        prepare_ppo.RayPPOTrainer = SpotTrainer  # type: ignore[misc]
        with started_trainer(load_config("ppo_trainer", words)) as trainer:
            assert isinstance(trainer, SpotTrainer)
            group = trainer.groups["actor_rollout"]
            (SpotTrainer.training,) = group.execute_all_sync(
                "execute_func_rank_zero", lambda: ray.get_runtime_context().get_node_id()
            )
            try:
                trainer.fit()
            except TooFewReplicasError as error:
                found["error"], found["notes"] = str(error), error.__notes__
        Path("found.json").write_text(json.dumps(found))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
