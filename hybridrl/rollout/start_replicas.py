"""Starts the rollout of a policy: which engine, where its replicas run, and how they get the policy's weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.config import ActorRolloutRefConfig
from hybridrl.hybrid_engine.plan import engine_order
from hybridrl.layouts.model_tensors import model_tensors
from hybridrl.layouts.topology import GenerationLayout
from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.notify import notify
from hybridrl.registry import INFERENCE_ENGINES
from hybridrl.rollout import InPlaceRollout, Rollout, RolloutError, resolve_rollout
from hybridrl.rollout.inference_engine import EngineSpec, inference_engine_class
from hybridrl.rollout.replicas.replica_handle import PoolSettings, ReplicaPlacement
from hybridrl.rollout.replicas.replica_number import ReplicaBounds
from hybridrl.rollout.replicas.replica_places import ReplicaPlaces
from hybridrl.rollout.replicas.replica_supervisor import Supervisor
from hybridrl.rollout.rollout import ReplicatedRollout
from hybridrl.rollout.select import is_served
from hybridrl.single_controller.ray import RayResourcePool, RayWorkerGroup
from hybridrl.single_controller.ray.worker_host import assigned_gpus
from hybridrl.utils.cores import available_cores

#: Starts a server for a rollout whose engines start at the same time: gets the rollout, and whether its engines sample
#: with the seeds of requests. What it returns is called once the engines serve: it waits for the server.
Serve = Callable[[InPlaceRollout | ReplicatedRollout, bool], Callable[[], None]]

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
    threads: int | None = None,
    log_folder: Path | None = None,
    before_start: Callable[[str], None] | None = None,
    serve: Serve | None = None,
) -> Rollout:
    """Start the rollout for `policy`; it has no weights before `update_weights`.

    Args:
        config: `actor_rollout_ref`.
        policy: the workers that train, or at least hold the weights; None: engines read the checkpoint, in `own_pool`.
        own_pool: devices for the replicas alone; None: they take turns with the policy on its devices.
        threads: compute threads of each engine process on a CPU; None divides a node's cores.
        log_folder: where replicas' output goes; None leaves it to Ray.
        before_start: called with the engine's name before its replicas start.
        serve: starts the server of `rollout.server.enable` and `rollout.prometheus.enable`, which
            `hybridrl.serve.start_rollout` brings.

    Raises:
        RolloutError: the engine is not available, or does not start; a setting cannot take effect.
    """
    if is_served(config.rollout) and serve is None:
        raise RolloutError(
            f"{_KEY}.server.enable or {_KEY}.prometheus.enable, and this rollout is started without a server: call "
            "hybridrl.serve.start_rollout, or turn them off"
        )
    if config.rollout.checkpoint_engine.delta and (own_pool is None or policy is None):
        raise RolloutError(
            f"{_KEY}.checkpoint_engine.delta=True without a policy that sends its weights to replicas on devices of "
            "their own, where it saves bytes: give own_pool (rollout.nnodes in a configuration), or set delta=false"
        )
    pool = own_pool or (policy.resource_pool if policy is not None else None)
    name = resolve_rollout(config, pool.use_gpu if isinstance(pool, RayResourcePool) else None)
    if INFERENCE_ENGINES.metadata(name).in_place:
        return _in_place(config, policy, serve)
    assert isinstance(pool, RayResourcePool), "a policy that was attached to has no pool: give own_pool"
    shared = own_pool is None
    order = replica_order(config, policy, pool) if shared and policy is not None else None
    placements = replica_placements(pool, devices_per_replica(config), shared, order)

    if before_start is not None:
        before_start(name)
    settings = _settings(config, name, placements, threads, log_folder)
    if policy is None:
        settings.spec = replace(settings.spec, load_weights=True)
    places = None
    if settings.bounds is not None:
        slots = [pool.bundle_resources()] * settings.processes
        places = ReplicaPlaces(slots, lambda slots: placements_in(slots, len(slots), pool.use_gpu, shared=False)[0])
    supervisor = Supervisor(settings, placements, None if policy is None else policy.send_weights, places)
    rollout = ReplicatedRollout(supervisor)
    try:
        # fails now if the port is taken
        seeded = inference_engine_class(name).heeds_seeds(config.rollout)
        announce = None if serve is None else serve(rollout, seeded)
        supervisor.start()
        if announce is not None:
            announce()
    except BaseException:
        rollout.close()
        raise
    return rollout


def _in_place(config: ActorRolloutRefConfig, policy: RayWorkerGroup | None, serve: Serve | None) -> Rollout:
    """The training workers as the rollout."""
    rollout = InPlaceRollout(policy, config.rollout)
    if serve is not None:
        try:
            serve(rollout, True)()
        except BaseException:
            rollout.close()
            raise
    return rollout


def _settings(
    config: ActorRolloutRefConfig,
    name: str,
    placements: Sequence[ReplicaPlacement],
    threads: int | None,
    log_folder: Path | None,
) -> PoolSettings:
    model, rollout = config.model, config.rollout
    tokenizer = tokenizer_of(model)
    processes = devices_per_replica(config)
    together, bounds = processes * len(placements), rollout.replicas.bounds(len(placements))
    spec = EngineSpec(
        config=rollout,
        model=model,
        eos_token_ids=tuple(eos_token_ids(model.path, config_of(model), tokenizer)),
        pad_token_id=tokenizer.pad_token_id,
        threads=threads or max(1, available_cores() // together),
        records_routing=config.actor.router_replay.records_in_generation,
    )
    return PoolSettings(
        engine_name=name,
        spec=spec,
        processes=processes,
        start_timeout_s=rollout.start_timeout_s,
        stuck_timeout_s=rollout.stuck_timeout_s,
        max_restarts=rollout.max_restarts,
        log_folder=log_folder,
        bounds=None if bounds is None else ReplicaBounds(*bounds, rollout.replicas.wait_s),
    )


def check_layout(size: int, slots_on_nodes: Sequence[int]) -> None:
    """Refuse replicas whose `size` in devices does not divide the nodes' numbers of slots.

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


def replica_order(config: ActorRolloutRefConfig, policy: RayWorkerGroup, pool: RayResourcePool) -> list[int] | None:
    """The training ranks in the order of the engines' processes, so that these need least of other ranks' shards.

    None: rank after rank.
    """
    rollout = config.rollout
    if rollout.checkpoint_engine.method == "streamed" or devices_per_replica(config) == 1:
        return None
    if not hasattr(policy, "training_layout"):  # a worker class of the user's own
        return None
    training = policy.training_layout()[0]
    nodes = _nodes_of(pool.slots())
    if training is None or training.devices != len(nodes) or len(nodes) % devices_per_replica(config):
        return None
    try:
        generation = GenerationLayout(
            tp=rollout.tensor_model_parallel_size,
            pp=rollout.pipeline_model_parallel_size,
            dp=rollout.data_parallel_size,
            ep=rollout.expert_parallel_size,
            replicas=len(nodes) // devices_per_replica(config),
        )
        specs, layers = model_tensors(config_of(config.model), config.model.trust_remote_code)
        return engine_order(specs, training, generation, layers, nodes)
    except Exception as error:  # the model's own code may raise anything; the transfer itself needs no order
        notify(f"engines are placed rank after rank, not next to the shards that they need most of: {error!r}")
        return None


def replica_placements(
    pool: RayResourcePool, size: int, shared: bool, order: Sequence[int] | None = None
) -> list[ReplicaPlacement]:
    """Placements of replicas of `size` devices in a pool.

    Args:
        shared: the slots belong to training ranks, in the same order.
        order: the slots in the order in which replicas take them; None: slot after slot.

    Raises:
        RolloutError: the slots cannot be divided, or a replica would span nodes.
    """
    slots = pool.slots()
    nodes = _nodes_of(slots)
    check_layout(size, [nodes.count(node) for node in dict.fromkeys(nodes)])
    return placements_in(slots, size, pool.use_gpu, shared, order)


def placements_in(
    slots: Sequence[tuple[Any, int]], size: int, use_gpu: bool, shared: bool, order: Sequence[int] | None = None
) -> list[ReplicaPlacement]:
    """Placements of replicas of `size` devices in slots; see `replica_placements`.

    Args:
        use_gpu: whether a slot is a GPU.
    """
    nodes = _nodes_of(slots)
    gpus = _gpus_of(slots) if use_gpu else [""] * len(slots)
    placements = []
    for first in range(0, len(slots), size):
        ranks = range(first, first + size) if order is None else order[first : first + size]
        group, bundle = slots[ranks[0]]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank] for rank in ranks) if use_gpu else ""}
        devices = tuple(range(size)) if use_gpu else ()
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
        return assigned_gpus()

    tasks = [
        visible.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
        for group, bundle in slots
    ]
    try:
        gpus: list[str] = ray.get(tasks, timeout=_FIND_GPU_S)
    except ray.exceptions.GetTimeoutError as error:
        raise RolloutError(
            f"no task could be placed next to the training workers within {_FIND_GPU_S:.0f} s to see which GPUs they "
            "have: give the pool max_colocate_count=2 or more, so that workers leave a share of each GPU"
        ) from error
    return gpus
