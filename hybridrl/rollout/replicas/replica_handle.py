"""One replica as its pool sees it: where it runs, how it is started, and its state."""

import uuid
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.errors import RolloutError
from hybridrl.hybrid_engine.transports import UpdateTarget
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.replicas.replica_actor import Replica, ReplicaInfo, end_of_log
from hybridrl.rollout.replicas.replica_number import ReplicaBounds
from hybridrl.rollout.request import Request
from hybridrl.utils import work_folder


class ReplicaState(Enum):
    """State of a replica.

    A replica goes from `DOWN` to `STARTING` when its devices' memory is available, to `EMPTY` when its engine runs, to
    `READY` when it has weights, and back to `DOWN` when its process is lost. It is `GONE` once its node is lost and the
    number of replicas may change; a replica that joins takes its number.
    """

    DOWN = "down"
    STARTING = "starting"
    EMPTY = "empty"
    READY = "ready"
    GONE = "gone"


@dataclass(frozen=True)
class ReplicaPlacement:
    """The place at which a replica runs, and its resources.

    Attributes:
        placement_group, bundle: Ray's; the actor takes `resources` of it.
        node_id: Ray's id of the node.
        ranks: training ranks on the same devices; none where the replica has devices of its own.
        environment: variables of its process, such as which GPUs it sees.
        devices: their number as the engine sees them; none on a CPU.
    """

    placement_group: Any
    bundle: int
    node_id: str
    ranks: tuple[int, ...] = ()
    resources: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    devices: tuple[int, ...] = ()


@dataclass
class PoolSettings:
    """Settings of the start and supervision of replicas; `RolloutConfig` describes the values.

    Attributes:
        processes: number of processes of a replica's engine that hold weights.
        log_folder: where replicas' output goes; None leaves it to Ray.
        bounds: of the number of replicas; None: it does not change.
    """

    engine_name: str
    spec: EngineSpec
    processes: int = 1
    start_timeout_s: float = 600.0
    stuck_timeout_s: float = 300.0
    max_restarts: int = 3
    log_folder: Path | None = None
    bounds: ReplicaBounds | None = None


class ReplicaProcess(NamedTuple):
    """One process of a replica; the replica may have been restarted in another since."""

    replica: "ReplicaHandle"
    actor: Any
    incarnation: str

    def target(self, processes: int) -> UpdateTarget:
        """The target of weight updates."""
        replica = self.replica
        return UpdateTarget(self.actor, self.incarnation, replica.node_id, replica.placement.ranks, processes)


@dataclass
class ReplicaHandle:
    """A replica as the pool sees it: placement, state and current process."""

    index: int
    placement: ReplicaPlacement
    state: ReplicaState = ReplicaState.DOWN
    actor: Any = None
    incarnation: str = ""
    info: ReplicaInfo | None = None
    in_flight: dict[str, Request] = field(default_factory=dict)
    failures: int = 0  # in a row, without a completion in between
    restarts: int = 0
    log_file: Path | None = None
    submitted: Any = None  # the last call that submitted requests
    collecting: Any = None
    health: Any = None
    health_asked: float = 0.0
    is_new: bool = False  # joins the others, and has not generated yet

    @property
    def is_running(self) -> bool:
        """Whether its engine runs."""
        return self.state in (ReplicaState.EMPTY, ReplicaState.READY)

    @property
    def node_id(self) -> str:
        """Ray's id of the node of its present process, or of the last one."""
        return self.placement.node_id if self.info is None else self.info.node_id

    @property
    def node_ip(self) -> str:
        """Address of that node, for messages."""
        return self.node_id[:8] if self.info is None else self.info.node_ip

    def process(self) -> ReplicaProcess:
        """The current process."""
        return ReplicaProcess(self, self.actor, self.incarnation)

    def create(self, settings: PoolSettings) -> Any:
        """Start a process, and the engine in it; returns the reference that `wait_started` waits for."""
        placement = self.placement
        self.state = ReplicaState.STARTING
        self.incarnation = f"{self.index}-{uuid.uuid4().hex[:8]}"
        if settings.log_folder is not None:
            self.log_file = settings.log_folder / f"replica_{self.incarnation}.log"
        spec = replace(settings.spec, index=self.index, devices=placement.devices)
        options = {
            "num_cpus": placement.resources.get("CPU", 0),
            "num_gpus": placement.resources.get("GPU", 0),
            "max_concurrency": 100_000,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement.placement_group, placement.bundle),
            "runtime_env": {"env_vars": placement.environment} if placement.environment else None,
        }
        actor = ray.remote(Replica).options(**{name: value for name, value in options.items() if value is not None})
        log_file = None if self.log_file is None else str(self.log_file)
        folder = work_folder.of_program()
        self.actor = actor.remote(settings.engine_name, spec, placement.environment, log_file, folder)
        return self.actor.start.remote()

    def wait_started(self, ref: Any, timeout_s: float) -> None:
        """Wait until the engine runs.

        Raises:
            RolloutError: it does not start; the message holds the end of its log.
        """
        try:
            self.info = ray.get(ref, timeout=max(timeout_s, 0.1))
            return
        except GetTimeoutError as error:
            why = "did not start in time (actor_rollout_ref.rollout.start_timeout_s)" + end_of_log(self.log_file)
            cause: Exception = error
        except RayTaskError as error:  # the replica has put the end of its log into the message
            has_log = isinstance(error.cause, RolloutError)
            why = "did not start: " + (str(error.cause) if has_log else repr(error.cause) + end_of_log(self.log_file))
            cause = error
        except RayError as error:
            why, cause = f"died while it started: {error}{end_of_log(self.log_file)}", error
        raise RolloutError(f"replica {self.index} {why}") from cause
