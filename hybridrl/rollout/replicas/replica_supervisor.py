"""Replicas of an engine: started, watched, restarted when they are lost, and kept at the trainer's weights.

One thread watches the replicas: it collects completions and asks for their health. Another sends the trainer's weights
to restarted replicas, but only while the trainer keeps the weights of the last `update_weights`, that is until
`release` or `weights_will_change`. After that a restarted replica waits for the next `update_weights`.

Where the number of replicas may change (`PoolSettings.bounds`), one whose node is lost leaves for ever, and others join
wherever Ray has room: they are started like a lost replica is restarted.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from hybridrl.errors import RolloutError, TooFewReplicasError
from hybridrl.hybrid_engine.transports import UpdateTarget
from hybridrl.notify import notify
from hybridrl.rollout.replicas.replica_actor import ReplicaHealth, ReplicaInfo, end_of_log
from hybridrl.rollout.replicas.replica_handle import (
    PoolSettings,
    ReplicaHandle,
    ReplicaPlacement,
    ReplicaProcess,
    ReplicaState,
)
from hybridrl.rollout.replicas.replica_number import ReplicaNumber
from hybridrl.rollout.replicas.replica_places import ReplicaPlaces
from hybridrl.rollout.replicas.scheduler import Scheduler
from hybridrl.rollout.request import MEMORY_TAGS, Request

logger = logging.getLogger(__name__)

_COLLECT_S = 5.0
_POLL_S = 0.5
_HEALTH_EVERY_S = 10.0
_CLOSE_S = 20.0
_ADJUST_EVERY_S = 5.0
_LOOK_AT_NODE_S = 2.0
_NODE_NOTICED_S = 40.0  # Ray notices a lost node within its health checks: 5 of 3 s each, and as much before the first


class Supervisor:
    """Keeps replicas running that generate with the same weights; requests go to its `scheduler`.

    Args:
        settings: engine, model, limits.
        placements: one per replica.
        send_weights: sends the trainer's present weights to these engines, and returns what `stream` reports; None
            where weights never change.
        places: of replicas that join; needed with `settings.bounds`.

    Attributes:
        settings: as given.
        replicas: those of the placements, those that have joined, and those that are gone.
        replicas_joined, replicas_left: number of replicas that have joined, and that are gone, so far.
        scheduler: takes requests, gets completions and the requests of lost replicas.
        version: of the weights of the last update; -1 before the first.
    """

    def __init__(
        self,
        settings: PoolSettings,
        placements: Sequence[ReplicaPlacement],
        send_weights: Callable[[list[UpdateTarget]], Any] | None = None,
        places: ReplicaPlaces | None = None,
    ) -> None:
        if not placements:
            raise ValueError("at least one replica is needed")
        self._number = None if settings.bounds is None else ReplicaNumber(settings.bounds)
        self._places = places
        self._adjusted = 0.0
        self._joining = False  # a place is about to become a replica
        self.replicas_joined = self.replicas_left = 0
        self.version = -1
        self.settings = settings
        self.replicas = [ReplicaHandle(index, placement) for index, placement in enumerate(placements)]
        self._lock = threading.RLock()  # guards the scheduler and the replicas' states
        self.scheduler = Scheduler(settings, self.replicas, self._lock)
        self._send_weights = send_weights
        self._flow_lock = threading.RLock()  # weights, memory and pauses: one change at a time
        self._trainer_has_version = False  # the trainer's weights are still those of `version`
        self.memory: set[str] = set(MEMORY_TAGS)
        self._paused = False
        self._closed = threading.Event()
        self._update_seconds = 0.0
        most = len(placements) if settings.bounds is None else settings.bounds.maximum
        self._restarting = ThreadPoolExecutor(max_workers=most, thread_name_prefix="replica-restart")
        self._watcher = threading.Thread(target=self._watch, name="replica-watcher", daemon=True)
        self._sender = threading.Thread(target=self._send_to_restarted, name="replica-weights", daemon=True)

    # ------------------------------------------------------------------ start and end

    def start(self) -> list[ReplicaInfo]:
        """Start all replicas at once, and wait for them.

        Raises:
            RolloutError: one does not start; the message holds the end of its log.
        """
        starting = [(replica, replica.create(self.settings)) for replica in self.replicas]
        deadline = time.monotonic() + self.settings.start_timeout_s
        for replica, ref in starting:
            replica.wait_started(ref, deadline - time.monotonic())
            replica.state = ReplicaState.EMPTY
        if self.settings.spec.load_weights:
            self.version = 0
            for replica in self.replicas:
                replica.state = ReplicaState.READY
        self._watcher.start()
        if self._send_weights is not None:
            self._sender.start()
        return [replica.info for replica in self.replicas if replica.info is not None]

    def close(self) -> None:
        """End all replicas; requests in flight fail."""
        with self._lock:
            self._closed.set()
        for thread in (self._watcher, self._sender):
            if thread.is_alive():
                thread.join(_CLOSE_S)
        closing = [replica.actor.close.remote() for replica in self.replicas if replica.is_running]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for replica in self.replicas:
            if replica.actor is not None:
                ray.kill(replica.actor)
        self.scheduler.fail(RolloutError("the rollout was closed"))
        self._restarting.shutdown(wait=False, cancel_futures=True)
        if self._places is not None:
            self._places.close()

    def _fail(self, problem: str, error: Exception) -> None:
        """End all requests for an error in a thread of this class; the log has its traceback."""
        logger.error(problem, exc_info=error)
        notify(f"{problem}: {error!r}", "error")
        self.scheduler.fail(RolloutError(f"{problem}: {error!r}"))

    # ------------------------------------------------------------------ the watching thread

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self._adjust_number()
                self._poll()
            except Exception as error:
                self._fail("watching the replicas failed", error)
                return

    def _poll(self) -> None:
        """Wait for the next answers of the replicas, and handle them."""
        refs: dict[Any, tuple[str, ReplicaProcess]] = {}
        with self._lock:
            for replica in self.replicas:
                if not replica.is_running:
                    continue
                if replica.collecting is None:
                    replica.collecting = replica.actor.collect.remote(_COLLECT_S)
                refs[replica.collecting] = "collect", replica.process()
                if replica.health is None and time.monotonic() - replica.health_asked > _HEALTH_EVERY_S:
                    replica.health, replica.health_asked = replica.actor.health.remote(), time.monotonic()
                if replica.health is not None:
                    refs[replica.health] = "health", replica.process()
        if not refs:
            self._closed.wait(_POLL_S)
            return
        ready, _ = ray.wait(list(refs), num_returns=1, timeout=_POLL_S)
        more, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        for ref in dict.fromkeys([*ready, *more]):
            method, process = refs[ref]
            try:
                answer = ray.get(ref)
            except RayError as error:
                self.handle_loss(process, _ended(error))
                continue
            if method == "collect":
                process.replica.collecting = None
                self.scheduler.collect(process.replica, answer)
            else:
                process.replica.health = None
                self._check_health(process, answer)
        for replica in self.replicas:
            waited = time.monotonic() - replica.health_asked
            if replica.is_running and replica.health is not None and waited > self.settings.stuck_timeout_s:
                self.handle_loss(replica.process(), f"it has not answered for {waited:.0f} s")

    def _check_health(self, process: ReplicaProcess, health: ReplicaHealth) -> None:
        if health.silent_s > self.settings.stuck_timeout_s:
            self.handle_loss(
                process,
                f"its engine has computed nothing for {health.silent_s:.0f} s with {health.in_flight} requests in "
                "flight (actor_rollout_ref.rollout.stuck_timeout_s)",
            )

    # ------------------------------------------------------------------ loss and restart

    def handle_loss(self, process: ReplicaProcess, why: str) -> None:
        """Run a lost replica's requests elsewhere and restart it, unless it was lost too often.

        Args:
            process: later failures of a process that was reported already are ignored.
            why: for messages.
        """
        replica = process.replica
        has_node = self._has_node(replica)
        with self._lock:
            if self._closed.is_set() or replica.incarnation != process.incarnation:
                return
            replica.state, replica.collecting, replica.health = ReplicaState.DOWN, None, None
            replica.incarnation = ""
            ray.kill(process.actor)  # it may be alive, hang, and hold what others wait for
            requests = self.scheduler.remove_from(replica)
            if not has_node or replica.is_new:
                self._leave(replica, requests, why, has_node)
                return
            replica.failures += 1
            replica.restarts += 1
            limit = self.settings.max_restarts
            if replica.failures > limit:
                self.scheduler.fail(
                    RolloutError(
                        f"replica {replica.index} failed {replica.failures} times without finishing a request "
                        f"(actor_rollout_ref.rollout.max_restarts={limit}); the last time {why}"
                        f"{end_of_log(replica.log_file)}"
                    )
                )
                return
            self.scheduler.run_again(replica, requests, why)
        notify(f"replica {replica.index}: {why}; {len(requests)} requests run again", "warning")
        self._restart_if_down(replica)

    def _has_node(self, replica: ReplicaHandle) -> bool:
        """Return whether the node of a lost replica lives.

        A process ends before Ray notices that its node is lost. Where a failure of the replica would end the run, that
        is waited for.
        """
        if self._places is None:
            return True
        ends_the_run = replica.failures >= self.settings.max_restarts and not replica.is_new
        deadline = time.monotonic() + (_NODE_NOTICED_S if ends_the_run else 0)
        while is_alive := self._places.is_alive(replica.node_id):
            if time.monotonic() >= deadline or self._closed.wait(_POLL_S):
                break
        return is_alive

    def _leave(self, replica: ReplicaHandle, requests: Sequence[Request], why: str, has_node: bool) -> None:
        """Go on without a replica whose node is lost, or that could not join. The lock is held."""
        assert self._places is not None and self._number is not None
        replica.state = ReplicaState.GONE
        self.replicas_left += not replica.is_new
        if replica.is_new and has_node:
            self._number.has_failed(time.monotonic())
        self.scheduler.run_again(replica, requests, why, blameless=True)
        remaining = [other for other in self.replicas if other.state is not ReplicaState.GONE]
        group = replica.placement.placement_group
        if not any(other.placement.placement_group == group for other in remaining):
            self._places.remove(group)
        cause = f"its node {replica.node_ip} is lost" if not has_node else f"it could not join: {why}"
        notify(
            f"replica {replica.index} has left, {len(requests)} requests run again, {len(remaining)} replicas remain "
            f"(actor_rollout_ref.rollout.replicas.min={self._number.bounds.minimum}): {cause}",
            "warning",
        )

    def _restart_if_down(self, replica: ReplicaHandle) -> None:
        """Restart a replica that is down, unless training has the memory of its devices: then `resume` does."""
        with self._lock:
            if replica.state is ReplicaState.DOWN and not self._closed.is_set() and self._may_take_memory():
                replica.state = ReplicaState.STARTING
                self._restarting.submit(self._restart, replica)

    def _may_take_memory(self) -> bool:
        """Whether engines may take their devices' memory; without devices they always may."""
        return self.memory.issuperset(MEMORY_TAGS) or not self.replicas[0].placement.devices

    def _restart(self, replica: ReplicaHandle) -> None:
        process = replica.process()
        try:
            with self._lock:
                if self._closed.is_set():
                    return
                ref = replica.create(self.settings)
                process = replica.process()
            self._wait_started(replica, ref)
            with self._lock:
                replica.health_asked = time.monotonic()
                replica.state = ReplicaState.EMPTY
            if self._send_weights is None:
                if not self._may_generate():
                    self._call([process], "pause")
                    if self._may_generate():  # since then
                        self._call([process], "unpause")
                self._mark_ready([process])
        except (RolloutError, RayError) as error:
            self.handle_loss(process, f"it did not restart: {error}")
        except Exception as error:
            self._fail(f"replica {replica.index} could not be restarted", error)

    def _wait_started(self, replica: ReplicaHandle, ref: Any) -> None:
        """Wait until a replica runs again; no longer than its node lives, if the run can go on without it."""
        deadline = time.monotonic() + self.settings.start_timeout_s
        while self._places is not None and time.monotonic() < deadline:
            if ray.wait([ref], timeout=_LOOK_AT_NODE_S)[0]:
                break
            if not self._places.is_alive(replica.node_id):
                raise RolloutError("its node was lost")
        replica.wait_started(ref, deadline - time.monotonic())

    def _mark_ready(self, processes: Sequence[ReplicaProcess]) -> None:
        with self._lock:
            for process in processes:
                replica = process.replica
                if replica.incarnation == process.incarnation and replica.is_running:
                    replica.state = ReplicaState.READY
                    if replica.is_new:
                        self._welcome(replica)
            self.scheduler.dispatch()

    # ------------------------------------------------------------------ replicas that join

    def _adjust_number(self) -> None:
        """Have a replica join if there is room for it, and end the requests if there are too few for too long."""
        now = time.monotonic()
        if self._number is None or self._places is None or now - self._adjusted < _ADJUST_EVERY_S:
            return
        self._adjusted = now
        with self._lock:
            present = [replica for replica in self.replicas if replica.state is not ReplicaState.GONE]
            starting = sum(replica.is_new and not replica.is_running for replica in present) + self._joining
        bounds, serving = self._number.bounds, len(present) + self._joining - starting
        if self._number.is_too_low(serving, starting, now):
            error = TooFewReplicasError(
                f"{serving} replicas are left, fewer than actor_rollout_ref.rollout.replicas.min={bounds.minimum} for "
                f"more than {bounds.wait_s:g} s (replicas.wait_s), and no node with room for another has joined"
            )
            self.scheduler.fail(error)
        # Before the first weights there is nothing to generate.
        wants_more = self._number.wants_more(serving + starting, now) and self.version >= 0 and self._may_take_memory()
        if not wants_more or self.scheduler.error is not None:
            self._places.withdraw()
        elif not self._places.is_requested:
            self._places.request()
        elif (group := self._places.take()) is not None:
            self._joining = True
            self._restarting.submit(self._join, group)

    def _join(self, group: Any) -> None:
        """Start a replica in a new place."""
        assert self._places is not None and self._number is not None
        try:
            placement = self._places.placement_of(group)
        except (RolloutError, RayError) as error:
            notify(f"no replica joins, because the devices of its place were not found: {error}", "warning")
            with self._lock:
                self._number.has_failed(time.monotonic())
                self._joining = False
            self._places.remove(group)
            return
        except Exception as error:
            self._fail("a replica could not join", error)
            return
        with self._lock:
            if self._closed.is_set():
                return
            replica = next((replica for replica in self.replicas if replica.state is ReplicaState.GONE), None)
            if replica is None:
                replica = ReplicaHandle(len(self.replicas), placement)
                self.replicas.append(replica)
            replica.placement, replica.info, replica.failures = placement, None, 0
            replica.is_new, replica.state = True, ReplicaState.DOWN
            self._joining = False
        self._restart_if_down(replica)

    def _welcome(self, replica: ReplicaHandle) -> None:
        """Note that a replica that has joined generates. The lock is held."""
        assert self._number is not None
        replica.is_new = False
        self.replicas_joined += 1
        self._number.has_joined()
        present = sum(other.state is not ReplicaState.GONE for other in self.replicas)
        notify(
            f"replica {replica.index} has joined on node {replica.node_ip} with the weights of step {self.version}; "
            f"there are {present} replicas (actor_rollout_ref.rollout.replicas.max={self._number.bounds.maximum})"
        )

    # ------------------------------------------------------------------ calls

    def _running(self) -> list[ReplicaProcess]:
        with self._lock:
            return [replica.process() for replica in self.replicas if replica.is_running]

    def _without_weights(self) -> list[ReplicaProcess]:
        return [process for process in self._running() if process.replica.state is ReplicaState.EMPTY]

    def _call(self, processes: Sequence[ReplicaProcess], method: str, *args: Any) -> list[ReplicaProcess]:
        """Call a method of these replicas at once; returns those that answered. The others are lost.

        Raises:
            RolloutError: the method raised.
        """
        refs = [(process, getattr(process.actor, method).remote(*args)) for process in processes]
        limit = self.settings.stuck_timeout_s
        deadline = time.monotonic() + limit
        answered = []
        for process, ref in refs:
            try:
                ray.get(ref, timeout=max(deadline - time.monotonic(), 0.1))
                answered.append(process)
            except GetTimeoutError:
                self.handle_loss(process, f"{method} took more than {limit:.0f} s (stuck_timeout_s)")
            except RayTaskError as error:
                replica = process.replica
                raise RolloutError(
                    f"replica {replica.index}: {method} failed: {error.cause}{end_of_log(replica.log_file)}"
                ) from error
            except RayError as error:
                self.handle_loss(process, f"{_ended(error)} in {method}")
        return answered

    # ------------------------------------------------------------------ weights

    def update_weights(self, version: int) -> Any:
        """Send every replica the trainer's present weights; requests in flight wait and continue under the new ones.

        Returns:
            What `send_weights` returned; None where no replica is running.

        Raises:
            RolloutError: replicas cannot be kept alive.
        """
        with self._flow_lock:
            error = self.scheduler.error
            # With too few replicas the step that ends now is kept: it has been trained. The next one has no responses.
            if error is not None and not isinstance(error, TooFewReplicasError):
                raise error
            self.version = version
            self._trainer_has_version = True
            return self._update(self._running())

    def weights_will_change(self) -> None:
        """Send no weights until the next `update_weights`, because the trainer is about to change them.

        Returns when a transfer that has begun is complete.
        """
        with self._flow_lock:
            self._trainer_has_version = False

    def _update(self, processes: Sequence[ReplicaProcess]) -> Any:
        """Send weights to these; one that is lost meanwhile is restarted, and gets them later."""
        assert self._send_weights is not None, "these weights never change"
        processes = self._call(self._call(processes, "pause"), "begin_update")
        if not processes:
            return None
        started = time.perf_counter()
        report = self._send_weights([process.target(self.settings.processes) for process in processes])
        self._update_seconds = time.perf_counter() - started
        processes = self._call(processes, "end_update", self.version)
        if self._may_generate():
            processes = self._call(processes, "unpause")
        self._mark_ready(processes)
        return report

    def _send_to_restarted(self) -> None:
        """The thread that sends weights to restarted replicas."""
        while not self._closed.wait(_POLL_S):
            try:
                if self._without_weights():
                    with self._flow_lock:
                        self._update_restarted()
            except Exception as error:
                self._fail("weights could not be sent to restarted replicas", error)
                return

    def _update_restarted(self) -> None:
        """Send `version` to restarted replicas.

        On devices that training shares this waits for the next update, as long as other replicas generate.
        """
        restarted = self._without_weights()
        if not restarted or not self._trainer_has_version or "weights" not in self.memory or self._closed.is_set():
            return
        if not self._shares_memory() or "kv_cache" not in self.memory:
            self._update(restarted)
        elif not any(replica.state is ReplicaState.READY for replica in self.replicas):
            self.release(["kv_cache"])
            self._update(self._without_weights())
            self.resume(["kv_cache"])

    def _shares_memory(self) -> bool:
        """Whether the trainer, which sends weights, has no room next to the caches of engines."""
        frees = self.settings.spec.config.free_cache_engine
        return frees and any(replica.placement.ranks and replica.placement.devices for replica in self.replicas)

    # ------------------------------------------------------------------ memory and pauses

    def release(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Return device memory. Requests wait, and keep their tokens, until `resume` has taken all of it back.

        A trainer that is about to change the weights calls `weights_will_change` before.
        """
        with self._flow_lock:
            released = [tag for tag in tags if tag in self.memory]
            if not released:
                return
            # A replica that is just starting takes its memory in any case, so it has to be asked to release it, too.
            while True:
                with self._lock:
                    starting = any(replica.state is ReplicaState.STARTING for replica in self.replicas)
                    if not (starting and self.replicas[0].placement.devices) or self.scheduler.error is not None:
                        self.memory -= set(released)  # from here on none is started
                        break
                time.sleep(_POLL_S)
            self._call(self._call(self._running(), "pause"), "release", released)

    def resume(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take device memory again."""
        with self._flow_lock:
            resumed = [tag for tag in tags if tag not in self.memory]
            if not resumed:
                return
            self._call(self._running(), "resume", resumed)
            self.memory |= set(resumed)
            for replica in self.replicas:
                self._restart_if_down(replica)
            if self._may_generate():
                self._call(self._running(), "unpause")

    def pause(self) -> None:
        """Stop generating until `unpause`; requests keep their tokens."""
        with self._flow_lock:
            self._paused = True
            self._call(self._running(), "pause")

    def unpause(self) -> None:
        """Continue generating."""
        with self._flow_lock:
            self._paused = False
            if self._may_generate():
                self._call(self._running(), "unpause")

    def _may_generate(self) -> bool:
        return not self._paused and self.memory.issuperset(MEMORY_TAGS)

    # ------------------------------------------------------------------ state

    def health(self) -> list[str]:
        """The `ReplicaState` of each replica."""
        return [replica.state.value for replica in self.replicas]

    @property
    def restarts(self) -> int:
        """Number of restarts of replicas so far."""
        return sum(replica.restarts for replica in self.replicas)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Statistics of each replica by its number.

        `restarts` and `in_flight` always; while it is running also `InferenceEngine.stats`, the version of its weights
        and the seconds of their last update.
        """
        with self._lock:
            statistics = {
                str(replica.index): {"restarts": float(replica.restarts), "in_flight": float(len(replica.in_flight))}
                for replica in self.replicas
                if replica.state is not ReplicaState.GONE
            }
        refs = [(process.replica, process.actor.stats.remote()) for process in self._running()]
        deadline = time.monotonic() + _CLOSE_S
        for replica, ref in refs:
            values = statistics.setdefault(str(replica.index), {})
            try:
                values |= ray.get(ref, timeout=max(deadline - time.monotonic(), 0.1))
            except RayError:  # just lost, or stuck; the watcher handles it
                continue
            values["weight_update_seconds"] = self._update_seconds
            if replica.state is ReplicaState.READY:
                values["weights_version"] = float(self.version)
        return statistics


def _ended(error: Exception) -> str:
    return f"its process ended ({type(error).__name__})"
