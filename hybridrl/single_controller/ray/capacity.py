"""Checks whether a placement fits on the nodes, before Ray would wait for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import psutil
import ray

from hybridrl.errors import PlacementError

if TYPE_CHECKING:
    from hybridrl.single_controller.ray.resource_pool import RayResourcePool

# Resources of killed workers are free again after the node's next report, which is late on a busy machine.
_SETTLE_S = 30.0
_PREFIXES = ("memory", "object_store_memory", "node:")


def cluster_has_gpus() -> bool:
    """Return whether any node of the cluster offers a GPU to Ray."""
    return ray.cluster_resources().get("GPU", 0) > 0


def check_placement(pools: Mapping[str, RayResourcePool], strategy: str = "STRICT_PACK") -> None:
    """Refuse pools that the nodes cannot host together. Pools that already have placement groups are skipped.

    Raises:
        PlacementError: they do not fit; the error says what each pool asks for, what each node offers, and what to
            change.
    """
    requests = [(name, pool, count) for name, pool in pools.items() if pool.pgs is None for count in pool.store]
    if not requests:
        return
    whole_nodes = strategy.startswith("STRICT_PACK")
    deadline = time.monotonic() + _SETTLE_S
    while True:
        free = _free_by_node()
        if _fits(requests, free, whole_nodes):
            return
        could_ever = _fits(requests, _total_by_node(), whole_nodes)
        if not could_ever or time.monotonic() > deadline:
            raise PlacementError(_explain(pools, requests, busy=could_ever))
        time.sleep(0.1)


def _fits(
    requests: list[tuple[str, RayResourcePool, int]], nodes: dict[str, dict[str, float]], whole_nodes: bool
) -> bool:
    """Try first fit, largest first. Exact for equal slots, as placement groups of a job nearly always have."""
    free = {node: dict(resources) for node, resources in nodes.items()}
    parts = [(pool.bundle_resources(), count) for _, pool, count in requests]
    if not whole_nodes:
        parts = [(bundle, 1) for bundle, count in parts for _ in range(count)]
    for bundle, count in sorted(parts, key=lambda part: -part[1]):
        for resources in free.values():
            if all(resources.get(name, 0) + 1e-9 >= amount * count for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    resources[name] -= amount * count
                break
        else:
            return False
    return True


def _total_by_node() -> dict[str, dict[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _free_by_node() -> dict[str, dict[str, float]]:
    import ray._private.state as state

    return dict(state.available_resources_per_node())


def processes_on_this_node(actors: Iterable[Any]) -> list[psutil.Process]:
    """The processes of those actors that have started on this node."""
    import ray._private.state as state

    node, processes = ray.get_runtime_context().get_node_id(), []
    for actor in actors:
        info = state.actors(actor._actor_id.hex())
        if info and info["Pid"] and info["Address"]["NodeID"] == node:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(info["Pid"]))
    return processes


def _explain(pools: Mapping[str, RayResourcePool], requests: list[tuple[str, RayResourcePool, int]], busy: bool) -> str:
    requested = [
        f"  pool {name!r} asks for {' + '.join(map(str, pool.store))} slots of {_text(pool.bundle_resources())}"
        for name, pool in pools.items()
    ]
    totals, free = _total_by_node(), _free_by_node()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    offered = [
        f"  node {addresses.get(node, node[:8])} has {_text(total)}, free {_text(free.get(node, {}))}"
        for node, total in totals.items()
    ]
    slots = sum(count for _, _, count in requests)
    kind = "GPU" if any(pool.use_gpu for _, pool, _ in requests) else "CPU"
    available = int(sum(resources.get(kind, 0) for resources in totals.values()))
    if busy:
        remedy = (
            "Other jobs or worker groups hold the rest: end them (`ray status` names them), or ask for fewer slots."
        )
    elif kind == "GPU" and available == 0:
        remedy = (
            "No node offers a GPU: use the CPU (use_gpu=False, trainer.device=cpu), or start Ray on machines with GPUs."
        )
    elif slots <= available:
        remedy = (
            "There are enough slots, but not on one node: spread the pool over more nodes with fewer slots on each."
        )
    else:
        remedy = (
            f"Ask for at most {available} slots (trainer.n_gpus_per_node x trainer.nnodes, or the pools of "
            "placement.pools), or "
            + ("add machines." if kind == "GPU" else "start Ray with more CPUs (`ray start --num-cpus=N`).")
        )
    return "\n".join(["the placement does not fit:", *requested, "while", *offered, remedy])


def _text(resources: Mapping[str, Any]) -> str:
    amounts = {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith(_PREFIXES) and "_group_" not in name and amount
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"
