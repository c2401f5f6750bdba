"""All replicas of a run, as the controller sees them: requests in, completions out, whatever happens to a replica.

A thread of its own talks to the replicas. It hands out requests as replicas have room, gathers completions, and starts
a lost replica again: its requests run again elsewhere, or there once it has the current weights.
"""

import itertools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.hybrid_engine.transfer import Target
from hybridrl.rollout.balancer import Balancer
from hybridrl.rollout.engine import MEMORY_TAGS, Completion, EngineSpec, Request, RolloutError
from hybridrl.rollout.replica import Replica, ReplicaHealth, ReplicaInfo

logger = logging.getLogger(__name__)

_COLLECT_S = 5.0
_TICK_S = 0.5
_HEALTH_EVERY_S = 10.0
_LOG_LINES = 30
_numbers = itertools.count()


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
    stuck_timeout_s: float = 600.0
    max_restarts: int = 3
    log_folder: Path | None = None


@dataclass
class _Member:
    """What the pool knows of a replica."""

    index: int
    place: ReplicaPlace
    state: Literal["starting", "ready"] = "starting"
    handle: Any = None
    incarnation: str = ""
    info: ReplicaInfo | None = None
    in_flight: dict[str, Request] = field(default_factory=dict)
    failures: int = 0  # in a row, without a completion between
    restarts: int = 0
    log_file: Path | None = None
    collecting: Any = None
    health: Any = None
    health_asked: float = 0.0
    port: int = 0  # of its HTTP server


class ReplicaPool:
    """Replicas that generate with the same weights.

    Args:
        settings: engine, model, limits.
        places: one for each replica.
        send_weights: sends the trainer's present weights to these engines, and returns what `stream` reports; None
            where weights never change.
    """

    def __init__(
        self,
        settings: PoolSettings,
        places: Sequence[ReplicaPlace],
        send_weights: Callable[[list[Target]], Any] | None = None,
    ) -> None:
        if not places:
            raise ValueError("a pool needs at least one replica")
        self.settings = settings
        self.version = -1
        self._send_weights = send_weights
        self._members = [_Member(index, place) for index, place in enumerate(places)]
        config = settings.spec.config
        room = config.max_num_seqs * config.data_parallel_size
        self._balancer = Balancer(window=room + max(8, room // 4))  # the engine's queue never runs dry
        self._futures: dict[str, Future[Completion]] = {}
        self._lock = threading.RLock()
        self._weights_lock = threading.Lock()
        self._events: deque[Any] = deque()
        self._error: RolloutError | None = None
        self._closed = threading.Event()
        self._memory: set[str] = set(MEMORY_TAGS)
        self._update_seconds = 0.0
        self._token: str | None = None
        self._threads = ThreadPoolExecutor(max_workers=len(self._members) + 1, thread_name_prefix="replica-restart")
        self._pump = threading.Thread(target=self._run, name="replica-pool", daemon=True)

    # ------------------------------------------------------------------ start and end

    def start(self) -> list[ReplicaInfo]:
        """Start all replicas side by side, and wait for them.

        Raises:
            RolloutError: one does not start; the message holds the end of its log.
        """
        for member in self._members:
            self._create(member)
        starting = [(member, member.handle.start.remote()) for member in self._members]
        deadline = time.monotonic() + self.settings.start_timeout_s
        for member, ref in starting:
            member.info = self._started(member, ref, deadline - time.monotonic())
            member.state = "ready"
        if self.settings.spec.load_weights:
            self.version = 0
        self._pump.start()
        return [member.info for member in self._members if member.info is not None]

    def _create(self, member: _Member) -> None:
        settings, place = self.settings, member.place
        member.incarnation = f"{member.index}-{uuid.uuid4().hex[:8]}"
        if settings.log_folder is not None:
            member.log_file = settings.log_folder / f"replica_{member.incarnation}.log"
        spec = replace(settings.spec, index=member.index, devices=place.devices)
        options = {
            "num_cpus": place.resources.get("CPU", 0),
            "num_gpus": place.resources.get("GPU", 0),
            "max_concurrency": 100_000,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place.placement_group, place.bundle),
            "runtime_env": {"env_vars": place.environment} if place.environment else None,
        }
        actor = ray.remote(Replica).options(**{name: value for name, value in options.items() if value is not None})
        log_file = None if member.log_file is None else str(member.log_file)
        member.handle = actor.remote(settings.engine_name, spec, place.environment, log_file)

    def _started(self, member: _Member, ref: Any, timeout_s: float) -> ReplicaInfo:
        try:
            info: ReplicaInfo = ray.get(ref, timeout=max(timeout_s, 0.1))
            return info
        except ray.exceptions.GetTimeoutError as error:
            why = (
                f"did not start within {self.settings.start_timeout_s:.0f} s (trainer.ray_wait_register_center_timeout)"
            )
            raise RolloutError(f"replica {member.index} {why}{_end_of(member.log_file)}") from error
        except RayTaskError as error:
            cause = error.cause
            why = str(cause) if isinstance(cause, RolloutError) else repr(cause)
            raise RolloutError(f"replica {member.index} did not start: {why}{_end_of(member.log_file)}") from error
        except RayError as error:
            raise RolloutError(
                f"replica {member.index} died while it started: {error}{_end_of(member.log_file)}"
            ) from error

    def close(self) -> None:
        """End all replicas; what is in flight fails."""
        self._closed.set()
        if self._pump.is_alive():
            self._pump.join()
        closing = [member.handle.close.remote() for member in self._members if member.handle is not None]
        ray.wait(closing, num_returns=len(closing), timeout=20)
        for member in self._members:
            if member.handle is not None:
                ray.kill(member.handle)
        self._fail(RolloutError("the rollout was closed"))
        self._threads.shutdown(wait=False, cancel_futures=True)

    def serve(self, token: str) -> list[str]:
        """Have each replica speak the OpenAI API by itself, beside the router over all; their addresses, `host:port`.

        A replica that is started again has its address again. What is asked of it over HTTP is not run elsewhere when
        it is lost: that is the router's part.
        """
        self._token = token
        return [self._serve(member) for member in self._ready()]

    def _serve(self, member: _Member) -> str:
        address: str = ray.get(member.handle.serve.remote(self._token, member.port))
        member.port = int(address.rpartition(":")[2])
        return address

    @property
    def places(self) -> list[ReplicaPlace]:
        """Where the replicas stand."""
        return [member.place for member in self._members]

    # ------------------------------------------------------------------ requests

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Ask for completions; replicas get the requests as they have room."""
        with self._lock:
            self._raise_if_failed()
            futures: list[Future[Completion]] = []
            for request in requests:
                if request.id in self._futures:
                    raise ValueError(f"a request with id {request.id} is in flight already")
                future: Future[Completion] = Future()
                self._futures[request.id] = future
                futures.append(future)
            self._balancer.add(requests)
            self._hand_out()
        return futures

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """A completion of each request, in their order.

        Raises:
            RolloutError: the engine refuses a request, or replicas cannot be kept alive.
        """
        completions = [future.result() for future in self.submit(requests)]
        for completion in completions:
            if completion.finish_reason == "error":
                raise RolloutError(f"the engine refuses request {completion.id}: {completion.error}")
        return completions

    def _hand_out(self) -> None:
        room = {member.index: len(member.in_flight) for member in self._members if member.state == "ready"}
        for index, requests in self._balancer.take(room).items() if room else ():
            member = self._members[index]
            member.in_flight |= {request.id: request for request in requests}
            member.handle.submit.remote(requests)

    def _take(self, member: _Member, completions: Sequence[Completion]) -> None:
        with self._lock:
            if completions:
                member.failures = 0
            for completion in completions:
                if member.in_flight.pop(completion.id, None) is not None:
                    self._futures.pop(completion.id).set_result(completion)
            self._hand_out()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._tick()
            except Exception as error:
                logger.exception("the replica pool failed")
                self._fail(RolloutError(f"the replica pool failed: {error!r}"))
                return

    def _tick(self) -> None:
        refs: dict[Any, tuple[str, _Member]] = {}
        with self._lock:
            for member in self._members:
                if member.state != "ready":
                    continue
                if member.collecting is None:
                    member.collecting = member.handle.collect.remote(_COLLECT_S)
                refs[member.collecting] = "collect", member
                if member.health is None and time.monotonic() - member.health_asked > _HEALTH_EVERY_S:
                    member.health, member.health_asked = member.handle.health.remote(), time.monotonic()
                if member.health is not None:
                    refs[member.health] = "health", member
        if not refs:
            self._closed.wait(_TICK_S)
            return
        ready, _ = ray.wait(list(refs), num_returns=1, timeout=_TICK_S)
        more, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        for ref in dict.fromkeys([*ready, *more]):
            what, member = refs[ref]
            try:
                answer = ray.get(ref)
            except RayError as error:
                self._lose(member, f"its process ended ({type(error).__name__})")
                continue
            if what == "collect":
                member.collecting = None
                self._take(member, answer)
            else:
                member.health = None
                self._look_at(member, answer)
        for member in self._members:
            waited = time.monotonic() - member.health_asked
            if member.state == "ready" and member.health is not None and waited > self.settings.stuck_timeout_s:
                self._lose(member, f"it has not answered for {waited:.0f} s")

    def _look_at(self, member: _Member, health: ReplicaHealth) -> None:
        if health.silent_s > self.settings.stuck_timeout_s:
            self._lose(
                member,
                f"its engine has computed nothing for {health.silent_s:.0f} s with {health.in_flight} requests in "
                "flight (actor_rollout_ref.rollout.stuck_timeout_s)",
            )

    def _lose(self, member: _Member, why: str) -> None:
        """Put a replica's requests back and start it again, unless it was lost too often."""
        with self._lock:
            if member.state != "ready":
                return
            member.state, member.collecting, member.health = "starting", None, None
            lost, member.in_flight = list(member.in_flight.values()), {}
            member.failures += 1
            member.restarts += 1
            self._balancer.forget(member.index)
            self._balancer.add(lost, first=True)
            if member.failures > self.settings.max_restarts:
                self._fail(
                    RolloutError(
                        f"replica {member.index} failed {member.failures} times without finishing a request "
                        f"(actor_rollout_ref.rollout.max_restarts={self.settings.max_restarts}); now {why}"
                        f"{_end_of(member.log_file)}"
                    )
                )
                return
            self._hand_out()  # to the others
        logger.warning("replica %d is started again: %s; %d requests run again", member.index, why, len(lost))
        self._threads.submit(self._restart, member)

    def _restart(self, member: _Member) -> None:
        try:
            ray.kill(member.handle)
            self._create(member)
            member.info = self._started(member, member.handle.start.remote(), self.settings.start_timeout_s)
            if self._token is not None:
                self._serve(member)
            with self._weights_lock:
                if self._send_weights is not None and self.version >= 0:
                    self._update([member])
                with self._lock:
                    member.health_asked = time.monotonic()
                    member.state = "ready"
                    self._hand_out()
        except (RolloutError, RayError) as error:
            with self._lock:
                member.state = "ready"  # so that it can be lost again
            self._lose(member, f"it did not start again: {error}")
        except Exception as error:
            self._fail(RolloutError(f"replica {member.index} could not be given its weights again: {error}"))

    def _fail(self, error: RolloutError) -> None:
        with self._lock:
            self._error = self._error or error
            self._balancer.clear()
            futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ weights, memory, flow

    def update_weights(self, version: int) -> Any:
        """Give every replica the trainer's present weights; requests in flight wait and go on under the new ones.

        Returns:
            What `send_weights` returned.
        """
        with self._weights_lock:
            self._raise_if_failed()
            self.version = version  # a replica that is lost from now on gets these
            return self._update(self._ready())

    def _update(self, members: Sequence[_Member]) -> Any:
        """Send weights to these; one that is lost meanwhile is started again, and gets them then."""
        assert self._send_weights is not None, "these weights never change"
        members = self._ask(members, "pause")
        members = self._ask(members, "begin_update")
        targets = [
            Target(member.handle, member.incarnation, member.place.node_id, member.place.ranks, self.settings.processes)
            for member in members
        ]
        started = time.perf_counter()
        report = self._send_weights(targets) if targets else None
        self._update_seconds = time.perf_counter() - started
        members = self._ask(members, "end_update", self.version)
        if self._memory.issuperset(MEMORY_TAGS):
            self._ask(members, "unpause")
        return report

    def _ready(self) -> list[_Member]:
        with self._lock:
            return [member for member in self._members if member.state == "ready"]

    def _ask(self, members: Sequence[_Member], method: str, *args: Any) -> list[_Member]:
        """Call a method of these replicas side by side; those that answered."""
        refs = [(member, getattr(member.handle, method).remote(*args)) for member in members]
        answered = []
        for member, ref in refs:
            try:
                ray.get(ref)
                answered.append(member)
            except RayActorError as error:
                self._lose(member, f"its process ended ({type(error).__name__})")
            except RayTaskError as error:
                raise RolloutError(
                    f"replica {member.index}: {method} failed: {error.cause!r}{_end_of(member.log_file)}"
                ) from error
        return answered

    def release(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Give device memory back between generations; requests wait, with their tokens, until all is there again."""
        self._ask(self._ready(), "pause")
        self._ask(self._ready(), "release", [tag for tag in tags if tag in self._memory])
        self._memory -= set(tags)

    def resume(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take device memory again."""
        self._ask(self._ready(), "resume", [tag for tag in tags if tag not in self._memory])
        self._memory |= set(tags)
        if self._memory.issuperset(MEMORY_TAGS):
            self._ask(self._ready(), "unpause")

    def pause(self) -> None:
        """Stop generating; requests keep their tokens."""
        self._ask(self._ready(), "pause")

    def unpause(self) -> None:
        """Go on."""
        self._ask(self._ready(), "unpause")

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests (all, where None); they return the tokens there are."""
        with self._lock:
            chosen = set(self._futures) if ids is None else set(ids) & self._futures.keys()
            waiting = self._balancer.clear()
            self._balancer.add(request for request in waiting if request.id not in chosen)
            for request in waiting:
                if request.id in chosen:
                    self._futures.pop(request.id).set_result(Completion(request.id, [], [], "abort"))
            members = [member for member in self._members if member.in_flight.keys() & chosen]
        for member in members:
            member.handle.abort.remote(sorted(member.in_flight.keys() & chosen))

    # ------------------------------------------------------------------ state

    def health(self) -> list[str]:
        """The state of each replica in a word."""
        return [member.state for member in self._members]

    @property
    def restarts(self) -> int:
        """Replicas that were started again, so far."""
        return sum(member.restarts for member in self._members)

    def stats(self) -> list[dict[str, float]]:
        """Counters of each replica that is up; see `InferenceEngine.stats`."""
        found = []
        for member in self._ready():
            try:
                found.append(ray.get(member.handle.stats.remote()) | {"in_flight": float(len(member.in_flight))})
            except RayError:  # lost just now; the thread sees to it
                continue
        return found

    def statistics(self) -> dict[str, dict[str, float]]:
        """What is known of each replica by its number: `InferenceEngine.stats` while it is up, `restarts` always, and
        the version of its weights and the seconds of their last update."""
        found: dict[str, dict[str, float]] = {}
        asked = {member.index: member.handle.stats.remote() for member in self._ready()}
        for member in self._members:
            found[str(member.index)] = {"restarts": float(member.restarts)}
            if member.index in asked:
                try:
                    found[str(member.index)] |= ray.get(asked[member.index])
                except RayError:  # lost just now; the thread sees to it
                    continue
                found[str(member.index)] |= {"weights_version": float(self.version)}
                found[str(member.index)] |= {"weight_update_seconds": self._update_seconds}
        return found


def request_number() -> int:
    """A number that no other request of this process has."""
    return next(_numbers)


def _end_of(log_file: Path | None) -> str:
    """The last lines of a replica's log, as the end of a message."""
    if log_file is None or not log_file.is_file():
        return ""
    lines = log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return f"\nThe end of {log_file}:\n  " + "\n  ".join(lines)
