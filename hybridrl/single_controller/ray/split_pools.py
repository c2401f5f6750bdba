"""Resource pools that are split, merged or built on existing placement groups."""

from __future__ import annotations

from typing import Any

from ray.util.placement_group import PlacementGroup

from hybridrl.errors import PlacementError
from hybridrl.single_controller.ray.resource_pool import RayResourcePool


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
    """One pool of the slots of two, those of `rp1` first.

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
    nodes_by_size = sorted(range(len(resource_pool.store)), key=lambda index: resource_pool.store[index], reverse=True)
    placement: dict[int, PlacementGroup] = {}
    for position, index in enumerate(nodes_by_size):
        if position >= len(groups) or groups[position].bundle_count < resource_pool.store[index]:
            raise PlacementError(
                f"nodes of {resource_pool.store} slots do not fit into the placement groups of {src_role_names}, which "
                f"have {[group.bundle_count for group in groups]} slots"
            )
        placement[index] = groups[position]
    return [placement[index] for index in range(len(nodes_by_size))]
