"""Devices (or, without GPUs, logical slots) set aside in Ray placement groups."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from hybridrl.errors import PlacementError
from hybridrl.single_controller.base.worker_group import ResourcePool
from hybridrl.single_controller.ray.capacity import check_placement, cluster_has_gpus

# A placement group that fits is ready within milliseconds; this bounds a cluster in trouble.
_PLACEMENT_TIMEOUT_S = 60.0
_counter = itertools.count()


class RayResourcePool(ResourcePool):
    """Slots on Ray nodes: one placement group a node, one bundle a slot.

    A bundle holds one CPU and, with ``use_gpu``, one GPU, shared by the up to ``max_colocate_count`` groups that live
    in the slot. Nothing is asked of Ray before `get_placement_groups` is first called.

    Args:
        process_on_nodes: slots on each node, e.g. ``[8, 8]``.
        use_gpu: whether a slot is a GPU.
        name_prefix: start of the placement groups' names.
        max_colocate_count: worker groups (process groups of their own) that may share a slot.
        detached: the placement groups outlive the driver.
        accelerator_type: only nodes with this accelerator, by Ray's name for it.
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

    def bundle_resources(self) -> dict[str, float]:
        """What one slot takes from Ray."""
        resources = {"CPU": 1.0}
        if self.use_gpu:
            resources["GPU"] = 1.0
        if self.accelerator_type is not None:
            resources[self.accelerator_type] = 1e-4
        return resources

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """The pool's placement groups, made at the first call, in a stable order of nodes.

        Args:
            strategy: Ray's placement strategy; STRICT_PACK keeps each node's slots on one node.
            name: start of the placement groups' names in place of ``name_prefix``.
            device_name: kept for callers that name the kind of device; ``use_gpu`` decides.

        Raises:
            PlacementError: the nodes do not offer what the pool asks for; found before Ray would wait for it.
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
                for made in groups:
                    ray.util.remove_placement_group(made)
                raise PlacementError(
                    f"{self.name_prefix}: Ray did not place {self._store[index]} slots of "
                    f"{self.bundle_resources()} within "
                    f"{_PLACEMENT_TIMEOUT_S:.0f} s, although the nodes seemed to have them; `ray status` "
                    "shows who holds them"
                )
        self.pgs = _sorted_by_node(groups) if len(groups) > 1 else groups
        return self.pgs

    def slots(self) -> list[tuple[PlacementGroup, int]]:
        """(placement group, bundle) of each rank."""
        return [(group, index) for group in self.get_placement_groups() for index in range(group.bundle_count)][
            : self.world_size
        ]

    def release(self) -> None:
        """Give the placement groups back; workers in them are killed by Ray."""
        for group in self.pgs or []:
            ray.util.remove_placement_group(group)
        self.pgs = None


class SubRayResourcePool(RayResourcePool):
    """A run of consecutive slots of another pool's placement groups; see `split_resource_pool`.

    Args:
        placement_groups: those of the whole pool.
        start_bundle_index: the first slot, counted through all placement groups.
        subgroup_world_size: number of slots.
    """

    def __init__(
        self,
        placement_groups: list[PlacementGroup],
        start_bundle_index: int,
        subgroup_world_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pgs = placement_groups
        self.start_bundle_index = start_bundle_index
        self.subgroup_world_size = subgroup_world_size
        counts = [0] * len(placement_groups)
        for group_index, _ in self._indices():
            counts[group_index] += 1
        if sum(counts) != subgroup_world_size or subgroup_world_size < 1:
            total = sum(group.bundle_count for group in placement_groups)
            raise PlacementError(
                f"slots {start_bundle_index} to {start_bundle_index + subgroup_world_size - 1} were asked "
                f"for; the pool has {total}"
            )
        self._store = [count for count in counts if count]

    def _indices(self) -> list[tuple[int, int]]:
        assert self.pgs is not None
        every = [(which, index) for which, group in enumerate(self.pgs) for index in range(group.bundle_count)]
        return every[self.start_bundle_index : self.start_bundle_index + self.subgroup_world_size]

    @property
    def world_size(self) -> int:
        """Slots of this part."""
        return self.subgroup_world_size

    def slots(self) -> list[tuple[PlacementGroup, int]]:
        """(placement group, bundle) of each rank."""
        groups = self.get_placement_groups()
        return [(groups[which], index) for which, index in self._indices()]

    def release(self) -> None:
        """Does nothing: the placement groups belong to the whole pool."""


def split_resource_pool(
    resource_pool: RayResourcePool | SubRayResourcePool, split_size: int | list[int]
) -> list[SubRayResourcePool]:
    """Cut a pool into consecutive parts.

    Args:
        split_size: slots of every part, or a list with the slots of each.

    Raises:
        PlacementError: the parts do not add up to the pool.
    """
    total = resource_pool.world_size
    if isinstance(split_size, int):
        if split_size < 1 or total % split_size:
            raise PlacementError(
                f"a pool of {total} slots cannot be cut into parts of {split_size}; choose a divisor of {total}"
            )
        sizes = [split_size] * (total // split_size)
    else:
        sizes = list(split_size)
        if sum(sizes) != total or min(sizes, default=0) < 1:
            raise PlacementError(f"parts of {sizes} slots add up to {sum(sizes)}, but the pool has {total}")
    first = resource_pool.start_bundle_index if isinstance(resource_pool, SubRayResourcePool) else 0
    starts = [first + sum(sizes[:index]) for index in range(len(sizes))]
    return [
        SubRayResourcePool(
            placement_groups=resource_pool.get_placement_groups(),
            start_bundle_index=start,
            subgroup_world_size=size,
            use_gpu=resource_pool.use_gpu,
            name_prefix=f"{resource_pool.name_prefix}_split_{index}",
            max_colocate_count=resource_pool.max_colocate_count,
            detached=resource_pool.detached,
            accelerator_type=resource_pool.accelerator_type,
        )
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """One pool of the slots of two, those of ``rp1`` first.

    Raises:
        PlacementError: the pools differ in kind, or one is a part of a pool.
    """
    for name in ("use_gpu", "max_colocate_count", "detached", "accelerator_type"):
        if getattr(rp1, name) != getattr(rp2, name):
            raise PlacementError(
                f"pools with {name} {getattr(rp1, name)!r} and {getattr(rp2, name)!r} cannot be merged"
            )
    if isinstance(rp1, SubRayResourcePool) or isinstance(rp2, SubRayResourcePool):
        raise PlacementError("a part of a pool cannot be merged; merge whole pools")
    merged = RayResourcePool(
        [*rp1.store, *rp2.store],
        use_gpu=rp1.use_gpu,
        name_prefix=f"{rp1.name_prefix}_{rp2.name_prefix}",
        max_colocate_count=rp1.max_colocate_count,
        detached=rp1.detached,
        accelerator_type=rp1.accelerator_type,
    )
    merged.pgs = [*rp1.get_placement_groups(), *rp2.get_placement_groups()]
    merged._store = [group.bundle_count for group in merged.pgs]
    return merged


def extract_pg_from_exist(
    resource_pools: dict[str, RayResourcePool], src_role_names: list[str], resource_pool: RayResourcePool
) -> list[PlacementGroup]:
    """Placement groups of existing pools that can host another pool, one for each of its nodes.

    Args:
        resource_pools: existing pools by name.
        src_role_names: which of them may be used.
        resource_pool: the pool to host; its largest node gets the largest placement group.

    Raises:
        PlacementError: there are too few placement groups, or they are too small.
    """
    groups = [
        group
        for name, pool in resource_pools.items()
        if name in src_role_names
        for group in pool.get_placement_groups()
    ]
    groups.sort(key=lambda group: group.bundle_count, reverse=True)
    wanted = sorted(range(len(resource_pool.store)), key=lambda index: resource_pool.store[index], reverse=True)
    found: dict[int, PlacementGroup] = {}
    for position, index in enumerate(wanted):
        if position >= len(groups) or groups[position].bundle_count < resource_pool.store[index]:
            raise PlacementError(
                f"nodes of {resource_pool.store} slots do not fit into the placement groups of "
                f"{src_role_names}, which have "
                f"{[group.bundle_count for group in groups]} slots"
            )
        found[index] = groups[position]
    return [found[index] for index in range(len(wanted))]


@dataclass
class ResourcePoolManager:
    """Which role lives in which pool.

    Attributes:
        resource_pool_spec: slots on each node, by pool name, e.g. ``{"global_pool": [8, 8]}``.
        mapping: pool name by role.
        max_colocate_count: worker groups that may share a slot as processes of their own.
        resource_pool_dict: the pools, once `create_resource_pool` made them.
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
        """Make all pools at once.

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
        """The pool a role lives in."""
        if role not in self.mapping:
            raise PlacementError(f"role {role} is mapped to no pool; mapped are {', '.join(map(str, self.mapping))}")
        name = self.mapping[role]
        if name not in self.resource_pool_dict:
            raise PlacementError(f"pool {name!r} does not exist yet; call create_resource_pool() first")
        return self.resource_pool_dict[name]

    def roles_by_pool(self) -> dict[str, list[Any]]:
        """The roles that share each pool, in the order of the mapping."""
        roles: dict[str, list[Any]] = {name: [] for name in self.resource_pool_spec}
        for role, name in self.mapping.items():
            roles[name].append(role)
        return roles

    def get_n_gpus(self) -> int:
        """Slots in all pools."""
        return sum(itertools.chain.from_iterable(self.resource_pool_spec.values()))


def check_mapping(pools: Mapping[str, Sequence[int]], mapping: Mapping[Hashable, str]) -> None:
    """Refuse a role that is mapped to a pool which is not there, and a pool without slots, before anything starts.

    Raises:
        PlacementError: names every such role and pool.
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
    """Order placement groups by their node's address, so that ranks lie on nodes in the same order in every run."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def key(group: PlacementGroup) -> tuple[tuple[int, ...] | str, str]:
        node_id = placement_group_table(group)["bundles_to_node_id"][0]
        return addresses.get(node_id, ""), node_id

    return sorted(groups, key=key)
