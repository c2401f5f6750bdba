"""Devices (or, without GPUs, logical slots) reserved in Ray placement groups."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from hybridrl.errors import PlacementError
from hybridrl.single_controller.base.worker_group import ResourcePool
from hybridrl.single_controller.ray.capacity import check_placement, cluster_has_gpus, processes_on_this_node

# A placement group that fits is ready within milliseconds. This limit is for a cluster in trouble.
_PLACEMENT_TIMEOUT_S = 60.0
# A killed process is gone within milliseconds.
_END_S = 5.0
_counter = itertools.count()


class RayResourcePool(ResourcePool):
    """Slots on Ray nodes: one placement group per node, one bundle per slot.

    A bundle holds one CPU and, with `use_gpu`, one GPU, shared by up to `max_colocate_count` groups in the slot.
    Nothing is requested from Ray before the first call of `get_placement_groups`.

    Args:
        process_on_nodes: number of slots on each node, e.g. `[8, 8]`.
        use_gpu: whether a slot is a GPU.
        name_prefix: prefix of the placement groups' names.
        max_colocate_count: number of worker groups, each with its own processes, that may share a slot.
        detached: whether the placement groups outlive the driver.
        accelerator_type: use only nodes with this accelerator, by Ray's name for it.
    """

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or f"pool_{next(_counter)}"
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.pgs: list[PlacementGroup] | None = None
        #: handles of the workers that were started in the slots, as long as somebody else holds them
        self.workers: weakref.WeakSet[Any] = weakref.WeakSet()

    def bundle_resources(self) -> dict[str, float]:
        """Return the Ray resources of one slot."""
        resources = {"CPU": 1.0}
        if self.use_gpu:
            resources["GPU"] = 1.0
        if self.accelerator_type is not None:
            resources[self.accelerator_type] = 1e-4
        return resources

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """Return the pool's placement groups in a stable order of nodes. They are created at the first call.

        Args:
            strategy: Ray's placement strategy; STRICT_PACK keeps each node's slots on one node.
            name: prefix of the placement groups' names in place of `name_prefix`.
            device_name: accepted for callers that name the kind of device; `use_gpu` decides.

        Raises:
            PlacementError: the nodes do not offer what the pool asks for; checked before Ray would wait for it.
        """
        if self.pgs is not None:
            return self.pgs
        if not self._store:
            raise PlacementError("the resource pool has no nodes; give process_on_nodes, e.g. [4], or call add_node")
        check_placement({self.name_prefix: self}, strategy)
        start = name or self.name_prefix
        groups = [
            placement_group(
                bundles=[self.bundle_resources() for _ in range(count)],
                strategy=strategy,
                name=f"{start}_{index}",
                lifetime="detached" if self.detached else None,
            )
            for index, count in enumerate(self._store)
        ]
        for index, group in enumerate(groups):
            if not group.wait(_PLACEMENT_TIMEOUT_S):
                for created in groups:
                    ray.util.remove_placement_group(created)
                raise PlacementError(
                    f"{self.name_prefix}: Ray did not place {self._store[index]} slots of {self.bundle_resources()} "
                    f"within {_PLACEMENT_TIMEOUT_S:.0f} s, although the nodes seemed to have them; `ray status` shows "
                    "who holds them"
                )
        self.pgs = _sorted_by_node(groups) if len(groups) > 1 else groups
        return self.pgs

    def slots(self) -> list[tuple[PlacementGroup, int]]:
        """Return (placement group, bundle) of each rank."""
        return [(group, index) for group in self.get_placement_groups() for index in range(group.bundle_count)][
            : self.world_size
        ]

    def release(self) -> None:
        """End the workers in the placement groups, and release these.

        Ray sends SIGTERM to the workers of a group that it removes, which Python turns into an exception wherever the
        worker is: one that still imports would write a traceback to the terminal. So the workers end first.
        """
        workers = list(self.workers)
        processes = processes_on_this_node(workers)
        for worker in workers:
            ray.kill(worker, no_restart=True)
        psutil.wait_procs(processes, timeout=_END_S)  # `ray.kill` returns before a worker has ended
        for group in self.pgs or []:
            ray.util.remove_placement_group(group)
        self.pgs = None


@dataclass
class ResourcePoolManager:
    """Maps roles to pools.

    Attributes:
        resource_pool_spec: number of slots on each node, by pool name, e.g. `{"global_pool": [8, 8]}`.
        mapping: pool name by role.
        max_colocate_count: number of worker groups that may share a slot, each with its own process.
        resource_pool_dict: the pools, once `create_resource_pool` has created them.
        use_gpu: whether slots are GPUs; None asks Ray whether the cluster has any.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Any, str]
    max_colocate_count: int = 3
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    use_gpu: bool | None = None

    def __post_init__(self) -> None:
        check_mapping(self.resource_pool_spec, self.mapping)

    def create_resource_pool(self) -> None:
        """Create all pools at once.

        Raises:
            PlacementError: together they ask for more than the nodes offer.
        """
        use_gpu = cluster_has_gpus() if self.use_gpu is None else self.use_gpu
        pools = {
            name: RayResourcePool(
                list(process_on_nodes),
                use_gpu=use_gpu,
                name_prefix=name,
                max_colocate_count=self.max_colocate_count,
            )
            for name, process_on_nodes in self.resource_pool_spec.items()
        }
        check_placement(pools)
        for pool in pools.values():
            pool.get_placement_groups()
        self.resource_pool_dict.update(pools)

    def get_resource_pool(self, role: Any) -> RayResourcePool:
        """Return the pool of a role."""
        if role not in self.mapping:
            raise PlacementError(f"role {role} is mapped to no pool; mapped are {', '.join(map(str, self.mapping))}")
        name = self.mapping[role]
        if name not in self.resource_pool_dict:
            raise PlacementError(f"pool {name!r} does not exist yet; call create_resource_pool() first")
        return self.resource_pool_dict[name]

    def get_n_gpus(self) -> int:
        """Return the number of slots in all pools."""
        return sum(itertools.chain.from_iterable(self.resource_pool_spec.values()))


def check_mapping(pools: Mapping[str, Sequence[int]], mapping: Mapping[Hashable, str]) -> None:
    """Refuse a role that is mapped to a missing pool, and a pool without slots, before anything starts.

    Raises:
        PlacementError: there is one; the error names every such role and pool.
    """
    faults = [
        f"role {role} is mapped to pool {name!r}, which does not exist; the pools are {', '.join(pools) or 'none'}"
        for role, name in mapping.items()
        if name not in pools
    ]
    faults += [
        f"pool {name!r} is {list(counts)}; give the slots on each node as whole numbers of at least 1, e.g. [4]"
        for name, counts in pools.items()
        if not counts or any(not isinstance(count, int) or count < 1 for count in counts)
    ]
    if faults:
        raise PlacementError("\n".join(faults))


def _sorted_by_node(groups: list[PlacementGroup]) -> list[PlacementGroup]:
    """Order placement groups by their node's address, so that ranks are on nodes in the same order in every run."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def key(group: PlacementGroup) -> tuple[tuple[int, ...] | str, str]:
        node_id = placement_group_table(group)["bundles_to_node_id"][0]
        return addresses.get(node_id, ""), node_id

    return sorted(groups, key=key)
