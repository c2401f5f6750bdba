"""Programs started by torchrun: rank 0 becomes the controller, and all other ranks end."""

from collections.abc import MutableMapping
from dataclasses import dataclass

from hybridrl.errors import ConfigError

_RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_PREFIX = "TORCHELASTIC_"


@dataclass(frozen=True)
class Launch:
    """The position of this process among those of torchrun.

    Attributes:
        rank: its index among all processes.
        local_rank: its index on its node.
        node: the index of its node.
        nodes: the number of nodes.
        processes_per_node: the number of processes that torchrun started on this node.
        processes: the number of processes that torchrun started on all nodes.
    """

    rank: int
    local_rank: int
    node: int
    nodes: int
    processes_per_node: int
    processes: int

    def settings(self) -> dict[str, int]:
        """The values of torchrun's `--nproc_per_node` and `--nnodes`, by key of the configuration.

        Raises:
            ConfigError: torchrun started unequal numbers of processes on its nodes.
        """
        if self.processes != self.nodes * self.processes_per_node:
            raise ConfigError(
                f"torchrun started {self.processes} processes on {self.nodes} nodes, {self.processes_per_node} of them "
                "on this one: give the same --nproc_per_node on every node"
            )
        return {"trainer.n_gpus_per_node": self.processes_per_node, "trainer.nnodes": self.nodes}

    def notice(self, program: str, has_workers: bool) -> str:
        """The notice that rank 0 prints."""
        work, words = "does the work alone", ""
        if has_workers:
            work = (
                f"starts its own workers: {self.processes_per_node} per node (trainer.n_gpus_per_node) on {self.nodes} "
                f"{'node' if self.nodes == 1 else 'nodes'} (trainer.nnodes), as torchrun was asked for"
            )
            words = f" trainer.n_gpus_per_node={self.processes_per_node} trainer.nnodes={self.nodes}"
        return (
            f"torchrun started this program. Its rank 0 is the controller and {work}; all other ranks end now, with "
            f"exit code 0. Without torchrun: python -m hybridrl.trainer.{program}{words}"
        )

    def farewell(self) -> str | None:
        """The notice that another rank prints: none on the controller's node, one on each other node."""
        if self.node == 0 or self.local_rank > 0:
            return None
        return (
            "torchrun started this program, whose controller is rank 0 on another node: the ranks of this node end "
            "now, with exit code 0. Workers are started here where this node belongs to the controller's Ray cluster "
            "(`ray start`)"
        )


def leave_torchrun(environment: MutableMapping[str, str]) -> Launch | None:
    """Remove torchrun's variables from the environment; return None if torchrun did not start this process.

    Otherwise every worker would inherit them, and its process group would wait for torchrun's store instead of the
    workers' own.
    """
    if f"{_PREFIX}RUN_ID" not in environment:
        return None
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    launch = Launch(*(int(environment[name]) for name in names))
    for name in [name for name in environment if name in _RANK_VARIABLES or name.startswith(_PREFIX)]:
        del environment[name]
    return launch
