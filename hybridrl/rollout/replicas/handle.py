"""One replica as its pool knows it: where it stands, how it is started, and what state it is in."""

import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.errors import RolloutError
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.replicas.actor import Replica, ReplicaInfo, end_of_log
from hybridrl.rollout.request import Request
from hybridrl.weight_sync.send import Target

#: down: not running, and not to be started before its devices' memory is there again. empty: running, without weights.
State = Literal["down", "starting", "empty", "ready"]


@dataclass(frozen=True)
class ReplicaPlace:
    """Where a replica runs, and with what.

    Attributes:
        placement_group, bundle: Ray's; the actor takes `resources` of it.
        node_id: Ray's name of the node.
        ranks: training ranks on the same devices; none where the replica has its own.
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
    """How the pool treats its replicas; see `RolloutConfig` for the values' meaning.

    Attributes:
        processes: of a replica's engine that hold weights.
        log_folder: where replicas' output goes; None leaves it to Ray.
    """

    engine_name: str
    spec: EngineSpec
    processes: int = 1
    start_timeout_s: float = 600.0
    stuck_timeout_s: float = 300.0
    max_restarts: int = 3
    log_folder: Path | None = None


class Up(NamedTuple):
    """A replica's process, as it was when someone looked: the member may have got another since."""

    member: "Member"
    handle: Any
    incarnation: str

    def target(self, processes: int) -> Target:
        """Where weights are sent to."""
        place = self.member.place
        return Target(self.handle, self.incarnation, place.node_id, place.ranks, processes)


@dataclass
class Member:
    """What the pool knows of a replica."""

    index: int
    place: ReplicaPlace
    state: State = "down"
    handle: Any = None
    incarnation: str = ""
    info: ReplicaInfo | None = None
    in_flight: dict[str, Request] = field(default_factory=dict)
    failures: int = 0  # in a row, without a completion between
    restarts: int = 0
    log_file: Path | None = None
    submitted: Any = None  # the call that brought it requests last
    collecting: Any = None
    health: Any = None
    health_asked: float = 0.0
    port: int = 0  # of its HTTP server

    @property
    def is_up(self) -> bool:
        """Whether its engine runs."""
        return self.state in ("empty", "ready")

    def up(self) -> Up:
        """Its present process."""
        return Up(self, self.handle, self.incarnation)

    def create(self, settings: PoolSettings) -> Any:
        """Ask for a process, and in it for the engine; returns what `wait_started` waits for."""
        place = self.place
        self.state = "starting"
        self.incarnation = f"{self.index}-{uuid.uuid4().hex[:8]}"
        if settings.log_folder is not None:
            self.log_file = settings.log_folder / f"replica_{self.incarnation}.log"
        spec = replace(settings.spec, index=self.index, devices=place.devices)
        options = {
            "num_cpus": place.resources.get("CPU", 0),
            "num_gpus": place.resources.get("GPU", 0),
            "max_concurrency": 100_000,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place.placement_group, place.bundle),
            "runtime_env": {"env_vars": place.environment} if place.environment else None,
        }
        actor = ray.remote(Replica).options(**{name: value for name, value in options.items() if value is not None})
        log_file = None if self.log_file is None else str(self.log_file)
        self.handle = actor.remote(settings.engine_name, spec, place.environment, log_file)
        return self.handle.start.remote()

    def wait_started(self, ref: Any, timeout_s: float) -> None:
        """Wait until the engine runs.

        Raises:
            RolloutError: it does not; the message holds the end of its log.
        """
        try:
            self.info = ray.get(ref, timeout=max(timeout_s, 0.1))
            return
        except GetTimeoutError as error:
            why = "did not start in time (trainer.ray_wait_register_center_timeout)" + end_of_log(self.log_file)
            cause: Exception = error
        except RayTaskError as error:  # the replica has put the end of its log into the message
            known = isinstance(error.cause, RolloutError)
            why = "did not start: " + (str(error.cause) if known else repr(error.cause) + end_of_log(self.log_file))
            cause = error
        except RayError as error:
            why, cause = f"died while it started: {error}{end_of_log(self.log_file)}", error
        raise RolloutError(f"replica {self.index} {why}") from cause
