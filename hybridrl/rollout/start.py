"""Starts the rollout of a policy: which engine, where its replicas run, and how they get the policy's weights."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.config import ActorRolloutRefConfig
from hybridrl.models.info import config_of, eos_token_ids, tokenizer_of
from hybridrl.notify import notify
from hybridrl.rollout import InPlaceRollout, Rollout, RolloutError, resolve_rollout
from hybridrl.rollout.inference_engine import EngineSpec, InferenceEngines
from hybridrl.rollout.replicas.pool import PoolSettings, ReplicaPlacement, ReplicaPool
from hybridrl.rollout.rollout import ReplicatedRollout
from hybridrl.rollout.select import is_served
from hybridrl.single_controller.ray import RayResourcePool, RayWorkerGroup
from hybridrl.utils.cores import available_cores

if TYPE_CHECKING:
    from hybridrl.rollout.server import Access, OpenAIServer

_KEY = "actor_rollout_ref.rollout"
_FIND_GPU_S = 120.0


def devices_per_replica(config: ActorRolloutRefConfig) -> int:
    """Devices that one engine spans."""
    rollout = config.rollout
    return rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size * rollout.data_parallel_size


def start_rollout(
    config: ActorRolloutRefConfig,
    policy: RayWorkerGroup | None,
    own_pool: RayResourcePool | None = None,
    *,
    start_timeout_s: float = 600.0,
    threads: int | None = None,
    log_folder: Path | None = None,
) -> Rollout:
    """Start the rollout for `policy`; it has no weights before `update_weights`.

    With `rollout.server.enable` or `rollout.prometheus.enable` it is served over HTTP as long as it lives.

    Args:
        config: `actor_rollout_ref`.
        policy: the workers that train, or at least hold the weights; None: engines read the checkpoint, in `own_pool`.
        own_pool: devices for the replicas alone; None: they take turns with the policy on its devices.
        start_timeout_s: how long an engine may take to start.
        threads: compute threads of each engine process on a CPU; None divides a node's cores.
        log_folder: where replicas' output goes; None leaves it to Ray.

    Raises:
        RolloutError: the engine is not available, or does not start.
    """
    pool = own_pool or (policy.resource_pool if policy is not None else None)
    name = resolve_rollout(config, pool.use_gpu if isinstance(pool, RayResourcePool) else None)
    if InferenceEngines.facts(name).in_place:
        return InPlaceRollout(policy, config.rollout)
    assert isinstance(pool, RayResourcePool), "a policy that was attached to has no pool: give own_pool"
    placements = replica_placements(pool, devices_per_replica(config), shared=own_pool is None)

    settings = _settings(config, name, placements, start_timeout_s, threads, log_folder)
    if policy is None:
        settings.spec = replace(settings.spec, load_weights=True)
    replicas = ReplicaPool(settings, placements, None if policy is None else policy.send_weights)
    rollout = ReplicatedRollout(replicas)
    try:
        server = _make_server(config, rollout) if is_served(config.rollout) else None  # fails now if the port is taken
        replicas.start()
        if server is not None:
            _serve(config, rollout, *server, log_folder)
    except BaseException:
        rollout.close()
        raise
    return rollout


def _make_server(config: ActorRolloutRefConfig, rollout: ReplicatedRollout) -> tuple["OpenAIServer", "Access"]:
    """A server over all replicas that has its port and does not answer yet."""
    from hybridrl.rollout.server import make_server

    seeded = InferenceEngines.get(rollout.pool.settings.engine_name).heeds_seeds(config.rollout)
    server, access = make_server(config.rollout, config.model, rollout.client(), heeds_seeds=seeded)
    rollout.on_close.append(server.stop_thread)
    return server, access


def _serve(
    config: ActorRolloutRefConfig,
    rollout: ReplicatedRollout,
    server: "OpenAIServer",
    access: "Access",
    log_folder: Path | None,
) -> None:
    """Serve in a thread of this process, and write address and key into the run's folder."""
    from hybridrl.rollout.server import write_scrape_config

    server.start_thread()
    replicas = rollout.pool.serve(access.token) if config.rollout.server.enable else []
    where = "" if log_folder is None else f"; address and key in {access.write(log_folder.parent, replicas)}"
    notify(f"{access.model} is served at {access.url}{where}")
    write_scrape_config(config.rollout.prometheus, [server.address])


def _settings(
    config: ActorRolloutRefConfig,
    name: str,
    placements: Sequence[ReplicaPlacement],
    start_timeout_s: float,
    threads: int | None,
    log_folder: Path | None,
) -> PoolSettings:
    model, rollout = config.model, config.rollout
    tokenizer = tokenizer_of(model)
    processes = devices_per_replica(config)
    together = processes * len(placements)
    spec = EngineSpec(
        config=rollout,
        model=model,
        eos_token_ids=tuple(eos_token_ids(model.path, config_of(model), tokenizer)),
        pad_token_id=tokenizer.pad_token_id,
        threads=threads or max(1, available_cores() // together),
    )
    return PoolSettings(
        engine_name=name,
        spec=spec,
        processes=processes,
        start_timeout_s=start_timeout_s,
        stuck_timeout_s=rollout.stuck_timeout_s,
        max_restarts=rollout.max_restarts,
        log_folder=log_folder,
    )


def check_layout(size: int, slots_on_nodes: Sequence[int]) -> None:
    """Refuse replicas of `size` devices that do not divide nodes with so many slots.

    Raises:
        RolloutError: names the sizes that fit.
    """
    if all(slots % size == 0 for slots in slots_on_nodes):
        return
    fitting = [n for n in range(1, max(slots_on_nodes) + 1) if all(slots % n == 0 for slots in slots_on_nodes)]
    raise RolloutError(
        f"{_KEY}: tensor, pipeline and data parallel sizes make {size} devices per replica. A replica has to fit "
        f"on one node, and the nodes have {', '.join(map(str, slots_on_nodes))} slots: choose sizes with a product of "
        f"{', '.join(map(str, fitting))}"
    )


def replica_placements(pool: RayResourcePool, size: int, shared: bool) -> list[ReplicaPlacement]:
    """Placements of replicas of `size` devices in a pool, slot after slot.

    Args:
        shared: the slots belong to training ranks, in the same order.

    Raises:
        RolloutError: the slots cannot be divided, or a replica would span nodes.
    """
    slots = pool.slots()
    nodes = _nodes_of(slots)
    check_layout(size, [nodes.count(node) for node in dict.fromkeys(nodes)])
    gpus = _gpus_of(slots) if pool.use_gpu else [""] * len(slots)
    placements = []
    for first in range(0, len(slots), size):
        ranks = range(first, first + size)
        group, bundle = slots[ranks[0]]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank] for rank in ranks) if pool.use_gpu else ""}
        devices = tuple(range(size)) if pool.use_gpu else ()
        placements.append(
            ReplicaPlacement(
                placement_group=group,
                bundle=bundle,
                node_id=nodes[ranks[0]],
                ranks=tuple(ranks) if shared else (),
                environment=environment,
                devices=devices,
            )
        )
    return placements


def _nodes_of(slots: Sequence[tuple[Any, int]]) -> list[str]:
    """Ray's id of each slot's node."""
    table = ray.util.placement_group_table()
    return [table[group.id.hex()]["bundles_to_node_id"][bundle] for group, bundle in slots]


def _gpus_of(slots: Sequence[tuple[Any, int]]) -> list[str]:
    """CUDA's index of each slot's GPU on its node."""

    @ray.remote(num_cpus=0, num_gpus=0.01)
    def visible() -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    asked = [
        visible.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
        for group, bundle in slots
    ]
    try:
        found: list[str] = ray.get(asked, timeout=_FIND_GPU_S)
    except ray.exceptions.GetTimeoutError as error:
        raise RolloutError(
            f"no task could be placed next to the training workers within {_FIND_GPU_S:.0f} s to see which GPUs they "
            "have: give the pool max_colocate_count=2 or more, so that workers leave a share of each GPU"
        ) from error
    return found
