"""All replicas of a run, as the controller sees them: requests in, completions out, whatever happens to a replica.

One thread talks to the replicas: it dispatches requests as replicas have room, collects completions, and restarts a
lost replica, whose requests run again elsewhere. A second thread sends the trainer's weights to restarted replicas. It
does so only while the trainer keeps the weights of the last `update_weights`, that is until `release` or
`weights_will_change`; after that a restarted replica waits for the next `update_weights`.
"""

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from hybridrl.errors import RolloutError
from hybridrl.notify import notify
from hybridrl.rollout.replicas.actor import ReplicaHealth, ReplicaInfo, end_of_log
from hybridrl.rollout.replicas.balancer import Balancer
from hybridrl.rollout.replicas.handle import Member, PoolSettings, ReplicaPlace, Up
from hybridrl.rollout.request import MEMORY_TAGS, Completion, Request
from hybridrl.weight_sync.send import Target

__all__ = ["PoolSettings", "ReplicaPlace", "ReplicaPool", "request_number"]

logger = logging.getLogger(__name__)

_COLLECT_S = 5.0
_TICK_S = 0.5
_HEALTH_EVERY_S = 10.0
_CLOSE_S = 20.0
_SERVE_S = 60.0
_numbers = itertools.count()


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
        #: most requests at once, with those that wait for a replica
        self.peak = 0
        #: requests that had to run again because their replica was lost
        self.rerun = 0
        self._send_weights = send_weights
        self._members = [Member(index, place) for index, place in enumerate(places)]
        config = settings.spec.config
        room = config.max_num_seqs * config.data_parallel_size
        self._balancer = Balancer(window=room + max(8, room // 4))  # the engine's queue never runs dry
        self._futures: dict[str, Future[Completion]] = {}
        self._aborted: set[str] = set()
        self._losses: Counter[str] = Counter()  # how often a request's replica was lost
        self._lock = threading.RLock()
        self._flow_lock = threading.RLock()  # weights, memory and pauses: one change at a time
        self._trainer_has_version = False  # the trainer's weights are still those of `version`
        self._error: RolloutError | None = None
        self._closed = threading.Event()
        self._memory: set[str] = set(MEMORY_TAGS)
        self._paused = False
        self._update_seconds = 0.0
        self._token: str | None = None
        self._threads = ThreadPoolExecutor(max_workers=len(self._members), thread_name_prefix="replica-restart")
        self._pump = threading.Thread(target=self._run, name="replica-pool", daemon=True)
        self._sender = threading.Thread(target=self._send_to_restarted, name="replica-weights", daemon=True)

    # ------------------------------------------------------------------ start and end

    def start(self) -> list[ReplicaInfo]:
        """Start all replicas side by side, and wait for them.

        Raises:
            RolloutError: one does not start; the message holds the end of its log.
        """
        starting = [(member, member.create(self.settings)) for member in self._members]
        deadline = time.monotonic() + self.settings.start_timeout_s
        for member, ref in starting:
            member.wait_started(ref, deadline - time.monotonic())
            member.state = "empty"
        if self.settings.spec.load_weights:
            self.version = 0
            for member in self._members:
                member.state = "ready"
        self._pump.start()
        if self._send_weights is not None:
            self._sender.start()
        return [member.info for member in self._members if member.info is not None]

    def close(self) -> None:
        """End all replicas; what is in flight fails."""
        with self._lock:
            self._closed.set()
        for thread in (self._pump, self._sender):
            if thread.is_alive():
                thread.join(_CLOSE_S)
        closing = [member.handle.close.remote() for member in self._members if member.is_up]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
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
        return [self._serve(up.member) for up in self._up()]

    def _serve(self, member: Member) -> str:
        address: str = ray.get(member.handle.serve.remote(self._token, member.port), timeout=_SERVE_S)
        member.port = int(address.rpartition(":")[2])
        return address

    def _serve_again(self, member: Member) -> None:
        """Give a replica its address again; without it, the router still has it."""
        try:
            self._serve(member)
        except (RayTaskError, GetTimeoutError) as error:
            notify(f"replica {member.index} has no address of its own any more: {error}", "warning")

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
            self.peak = max(self.peak, len(self._futures))
            self._hand_out()
        return futures

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """A completion of each request, in their order.

        Raises:
            RolloutError: the engine refuses a request, one has brought down its replica again and again, or replicas
                cannot be kept alive.
        """
        completions = [future.result() for future in self.submit(requests)]
        for completion in completions:
            if completion.finish_reason == "error":
                raise RolloutError(f"request {completion.id} failed: {completion.error}")
        return completions

    def _hand_out(self) -> None:
        room = {member.index: len(member.in_flight) for member in self._members if member.state == "ready"}
        for index, requests in self._balancer.take(room).items() if room else ():
            member = self._members[index]
            member.in_flight |= {request.id: request for request in requests}
            member.submitted = member.handle.submit.remote(requests)

    def _take(self, member: Member, completions: Sequence[Completion]) -> None:
        with self._lock:
            if completions:
                member.failures = 0
            for completion in completions:
                if member.in_flight.pop(completion.id, None) is not None:
                    self._answer(completion)
            self._hand_out()

    def _answer(self, completion: Completion) -> None:
        self._aborted.discard(completion.id)
        del self._losses[completion.id]
        future = self._futures.pop(completion.id, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(completion)

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests (all, where None); they return the tokens there are."""
        with self._lock:
            chosen = set(self._futures) if ids is None else set(ids) & self._futures.keys()
            self._aborted |= chosen
            waiting = self._balancer.clear()
            self._balancer.add(request for request in waiting if request.id not in chosen)
            for request in waiting:
                if request.id in chosen:
                    self._answer(Completion(request.id, [], [], "abort"))
            for member in self._members:
                here = sorted(member.in_flight.keys() & chosen)
                if here:
                    member.handle.abort.remote(here, member.submitted)

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
        refs: dict[Any, tuple[str, Up]] = {}
        with self._lock:
            for member in self._members:
                if not member.is_up:
                    continue
                if member.collecting is None:
                    member.collecting = member.handle.collect.remote(_COLLECT_S)
                refs[member.collecting] = "collect", member.up()
                if member.health is None and time.monotonic() - member.health_asked > _HEALTH_EVERY_S:
                    member.health, member.health_asked = member.handle.health.remote(), time.monotonic()
                if member.health is not None:
                    refs[member.health] = "health", member.up()
        if not refs:
            self._closed.wait(_TICK_S)
            return
        ready, _ = ray.wait(list(refs), num_returns=1, timeout=_TICK_S)
        more, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        for ref in dict.fromkeys([*ready, *more]):
            what, up = refs[ref]
            try:
                answer = ray.get(ref)
            except RayError as error:
                self._lose(up, _ended(error))
                continue
            if what == "collect":
                up.member.collecting = None
                self._take(up.member, answer)
            else:
                up.member.health = None
                self._look_at(up, answer)
        for member in self._members:
            waited = time.monotonic() - member.health_asked
            if member.is_up and member.health is not None and waited > self.settings.stuck_timeout_s:
                self._lose(member.up(), f"it has not answered for {waited:.0f} s")

    def _look_at(self, up: Up, health: ReplicaHealth) -> None:
        if health.silent_s > self.settings.stuck_timeout_s:
            self._lose(
                up,
                f"its engine has computed nothing for {health.silent_s:.0f} s with {health.in_flight} requests in "
                "flight (actor_rollout_ref.rollout.stuck_timeout_s)",
            )

    def _lose(self, up: Up, why: str) -> None:
        """Put a replica's requests back and start it again, unless it was lost too often."""
        member = up.member
        with self._lock:
            if self._closed.is_set() or member.incarnation != up.incarnation:
                return
            member.state, member.collecting, member.health = "down", None, None
            member.incarnation = ""  # what else fails of this process is no news
            ray.kill(up.handle)  # it may live, hang, and hold what others wait for
            lost, member.in_flight = list(member.in_flight.values()), {}
            member.failures += 1
            member.restarts += 1
            self.rerun += len(lost)
            self._balancer.forget(member.index)
            if member.failures > self.settings.max_restarts:
                self._fail(
                    RolloutError(
                        f"replica {member.index} failed {member.failures} times without finishing a request "
                        f"(actor_rollout_ref.rollout.max_restarts={self.settings.max_restarts}); now {why}"
                        f"{end_of_log(member.log_file)}"
                    )
                )
                return
            self._losses.update(request.id for request in lost)
            for request in lost:
                if request.id in self._aborted:
                    self._answer(Completion(request.id, [], [], "abort"))
                elif self._losses[request.id] > self.settings.max_restarts:  # it may well be what kills them
                    fault = f"its replica was lost {self._losses[request.id]} times (rollout.max_restarts); now {why}"
                    fault += end_of_log(member.log_file)
                    self._answer(Completion(request.id, [], [], "error", error=fault))
            self._balancer.add([request for request in lost if request.id in self._futures], first=True)
            self._hand_out()  # to the others
        notify(f"replica {member.index}: {why}; {len(lost)} requests run again", "warning")
        self._start_again(member)

    def _start_again(self, member: Member) -> None:
        """Start a replica that is down, unless the memory of its devices is lent to training: then `resume` does."""
        with self._lock:
            if member.state == "down" and not self._closed.is_set() and self._is_awake():
                member.state = "starting"
                self._threads.submit(self._restart, member)

    def _is_awake(self) -> bool:
        """Whether engines may take their devices' memory; without devices they always may."""
        return self._memory.issuperset(MEMORY_TAGS) or not self._members[0].place.devices

    def _restart(self, member: Member) -> None:
        up = member.up()
        try:
            with self._lock:
                if self._closed.is_set():
                    return
                ref = member.create(self.settings)
                up = member.up()
            member.wait_started(ref, self.settings.start_timeout_s)
            if self._token is not None:
                self._serve_again(member)
            with self._lock:
                member.health_asked = time.monotonic()
                member.state = "empty"
            if self._send_weights is None:
                if not self._may_run():
                    self._ask([up], "pause")
                    if self._may_run():  # since then
                        self._ask([up], "unpause")
                self._make_ready([up])
        except (RolloutError, RayError) as error:
            self._lose(up, f"it did not start again: {error}")
        except Exception as error:
            logger.exception("replica %d could not be started again", member.index)
            self._fail(RolloutError(f"replica {member.index} could not be started again: {error!r}"))

    def _make_ready(self, ups: Sequence[Up]) -> None:
        with self._lock:
            for up in ups:
                if up.member.incarnation == up.incarnation and up.member.is_up:
                    up.member.state = "ready"
            self._hand_out()

    def _fail(self, error: RolloutError) -> None:
        with self._lock:
            self._error = self._error or error
            self._balancer.clear()
            futures, self._futures = list(self._futures.values()), {}
            for member in self._members:
                member.in_flight = {}
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ weights, memory, flow

    def update_weights(self, version: int) -> Any:
        """Give every replica the trainer's present weights; requests in flight wait and go on under the new ones.

        Returns:
            What `send_weights` returned; None where no replica is up.
        """
        with self._flow_lock:
            self._raise_if_failed()
            self.version = version
            self._trainer_has_version = True
            return self._update(self._up())

    def weights_will_change(self) -> None:
        """Send no weights from here to the next `update_weights`: the trainer is about to change them.

        Returns when a transfer that has begun is over.
        """
        with self._flow_lock:
            self._trainer_has_version = False

    def _send_to_restarted(self) -> None:
        """The second thread: weights for replicas that were restarted."""
        while not self._closed.wait(_TICK_S):
            try:
                if self._empty():
                    with self._flow_lock:
                        self._update_restarted()
            except Exception as error:
                logger.exception("weights could not be sent to restarted replicas")
                self._fail(RolloutError(f"weights could not be sent to restarted replicas: {error!r}"))
                return

    def _update_restarted(self) -> None:
        """Send `version` to replicas that were restarted.

        On devices that training shares this waits for the next update, as long as others generate.
        """
        empty = self._empty()
        if not empty or not self._trainer_has_version or "weights" not in self._memory or self._closed.is_set():
            return
        if not self._shares_memory() or "kv_cache" not in self._memory:
            self._update(empty)
        elif not any(member.state == "ready" for member in self._members):
            self._release(["kv_cache"])
            self._update(self._empty())
            self.resume(["kv_cache"])

    def _empty(self) -> list[Up]:
        return [up for up in self._up() if up.member.state == "empty"]

    def _shares_memory(self) -> bool:
        """Whether the trainer, which sends weights, has no room beside the caches of engines."""
        frees = self.settings.spec.config.free_cache_engine
        return frees and any(member.place.ranks and member.place.devices for member in self._members)

    def _update(self, ups: Sequence[Up]) -> Any:
        """Send weights to these; one that is lost meanwhile is started again, and gets them later."""
        assert self._send_weights is not None, "these weights never change"
        ups = self._ask(self._ask(ups, "pause"), "begin_update")
        if not ups:
            return None
        started = time.perf_counter()
        report = self._send_weights([up.target(self.settings.processes) for up in ups])
        self._update_seconds = time.perf_counter() - started
        ups = self._ask(ups, "end_update", self.version)
        if self._may_run():
            ups = self._ask(ups, "unpause")
        self._make_ready(ups)
        return report

    def _may_run(self) -> bool:
        return not self._paused and self._memory.issuperset(MEMORY_TAGS)

    def _up(self) -> list[Up]:
        with self._lock:
            return [member.up() for member in self._members if member.is_up]

    def _ask(self, ups: Sequence[Up], method: str, *args: Any) -> list[Up]:
        """Call a method of these replicas side by side; those that answered. The others are lost."""
        refs = [(up, getattr(up.handle, method).remote(*args)) for up in ups]
        deadline = time.monotonic() + self.settings.stuck_timeout_s
        answered = []
        for up, ref in refs:
            try:
                ray.get(ref, timeout=max(deadline - time.monotonic(), 0.1))
                answered.append(up)
            except GetTimeoutError:
                self._lose(up, f"{method} took more than {self.settings.stuck_timeout_s:.0f} s (stuck_timeout_s)")
            except RayTaskError as error:
                raise RolloutError(
                    f"replica {up.member.index}: {method} failed: {error.cause}{end_of_log(up.member.log_file)}"
                ) from error
            except RayError as error:
                self._lose(up, f"{_ended(error)} in {method}")
        return answered

    def release(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Return device memory to training, which changes the weights; requests wait, with their tokens, until `resume`
        has taken all of it back."""
        with self._flow_lock:
            self.weights_will_change()
            self._release(tags)

    def _release(self, tags: Sequence[str]) -> None:
        gone = [tag for tag in tags if tag in self._memory]
        if not gone:
            return
        # One that is just starting takes its memory in any case: it has to be asked to give it back, too.
        while True:
            with self._lock:
                starting = any(member.state == "starting" for member in self._members)
                if not (starting and self._members[0].place.devices) or self._error is not None:
                    self._memory -= set(gone)  # from here on none is started
                    break
            time.sleep(_TICK_S)
        self._ask(self._ask(self._up(), "pause"), "release", gone)

    def resume(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take device memory again."""
        with self._flow_lock:
            back = [tag for tag in tags if tag not in self._memory]
            if not back:
                return
            self._ask(self._up(), "resume", back)
            self._memory |= set(back)
            for member in self._members:
                self._start_again(member)
            if self._may_run():
                self._ask(self._up(), "unpause")

    def pause(self) -> None:
        """Stop generating, until `unpause`; requests keep their tokens."""
        with self._flow_lock:
            self._paused = True
            self._ask(self._up(), "pause")

    def unpause(self) -> None:
        """Go on."""
        with self._flow_lock:
            self._paused = False
            if self._may_run():
                self._ask(self._up(), "unpause")

    # ------------------------------------------------------------------ state

    def health(self) -> list[str]:
        """The state of each replica in a word."""
        return [member.state for member in self._members]

    @property
    def error(self) -> RolloutError | None:
        """Why every request fails from now on."""
        return self._error

    @property
    def restarts(self) -> int:
        """Replicas that were started again, so far."""
        return sum(member.restarts for member in self._members)

    @property
    def queued(self) -> int:
        """Requests that no replica has room for yet."""
        return len(self._balancer)

    def statistics(self) -> dict[str, dict[str, float]]:
        """What is known of each replica by its number: `InferenceEngine.stats` while it is up, `restarts` and
        `in_flight` always, and the version of its weights and the seconds of their last update."""
        with self._lock:
            found = {
                str(member.index): {"restarts": float(member.restarts), "in_flight": float(len(member.in_flight))}
                for member in self._members
            }
        asked = [(up.member.index, up.handle.stats.remote()) for up in self._up()]
        deadline = time.monotonic() + _CLOSE_S
        for index, ref in asked:
            try:
                found[str(index)] |= ray.get(ref, timeout=max(deadline - time.monotonic(), 0.1))
            except RayError:  # lost just now, or stuck; the thread sees to it
                continue
            found[str(index)]["weight_update_seconds"] = self._update_seconds
            if self._members[int(index)].state == "ready":
                found[str(index)]["weights_version"] = float(self.version)
        return found


def request_number() -> int:
    """A number that no other request of this process has."""
    return next(_numbers)


def _ended(error: Exception) -> str:
    return f"its process ended ({type(error).__name__})"
