"""Places for further replicas: Ray is asked for one at a time, and has it as soon as a node with room joins."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from hybridrl.rollout.replicas.replica_handle import ReplicaPlacement

_numbers = itertools.count()


class ReplicaPlaces:
    """Placement groups of one replica each, in addition to those that a run starts with.

    A request that Ray cannot place yet waits in Ray: an autoscaler sees it, and nothing has to look for nodes.

    Args:
        slots: the resources of each of a replica's slots, all on one node.
        placement_of: returns the placement of a replica in these slots. It may take some seconds.
    """

    def __init__(
        self,
        slots: Sequence[Mapping[str, float]],
        placement_of: Callable[[Sequence[tuple[PlacementGroup, int]]], ReplicaPlacement],
    ) -> None:
        self._slots = [dict(slot) for slot in slots]
        self._placement_of = placement_of
        self._requested: PlacementGroup | None = None
        self._groups: list[PlacementGroup] = []  # of replicas that have joined

    def is_alive(self, node_id: str) -> bool:
        """Return whether Ray counts a node among the living. One that ended never returns under its id."""
        return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())

    @property
    def is_requested(self) -> bool:
        """Whether a place is requested that nobody has taken."""
        return self._requested is not None

    def request(self) -> None:
        """Ask Ray for a place; returns at once."""
        assert self._requested is None, "one request at a time"
        self._requested = placement_group(self._slots, strategy="STRICT_PACK", name=f"replica_place_{next(_numbers)}")

    def take(self) -> PlacementGroup | None:
        """Return the requested place if Ray has it; the request is fulfilled then."""
        group = self._requested
        if group is None or placement_group_table(group)["state"] != "CREATED":
            return None
        self._requested = None
        self._groups.append(group)
        return group

    def withdraw(self) -> None:
        """Ask for no place any more."""
        if self._requested is not None:
            remove_placement_group(self._requested)
            self._requested = None

    def placement_of(self, group: PlacementGroup) -> ReplicaPlacement:
        """Return the placement of a replica in a place."""
        return self._placement_of([(group, bundle) for bundle in range(len(self._slots))])

    def remove(self, group: Any) -> None:
        """Return a place to Ray, also one that the run started with: Ray would move it to the next node that joins."""
        remove_placement_group(group)
        self._groups = [other for other in self._groups if other.id != group.id]

    def close(self) -> None:
        """Return all places that were requested here."""
        self.withdraw()
        for group in list(self._groups):
            self.remove(group)
