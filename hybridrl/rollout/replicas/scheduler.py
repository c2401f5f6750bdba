"""Requests of a pool: submitted, dispatched to replicas, completed; and run again when their replica is lost."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from hybridrl.errors import RolloutError
from hybridrl.rollout.replicas.balancer import Balancer
from hybridrl.rollout.replicas.replica_actor import end_of_log
from hybridrl.rollout.replicas.replica_handle import PoolSettings, ReplicaHandle, ReplicaState
from hybridrl.rollout.request import TRAINING_PRIORITY, CompletionArrays, Request
from hybridrl.utils.background import ended_by


class Scheduler:
    """Keeps each request until it is completed, whatever happens to the replica that it runs on.

    Args:
        settings: `max_restarts` bounds how often a request runs again.
        replicas: whose `in_flight` the scheduler maintains.
        lock: guards the scheduler and the replicas' states.

    Attributes:
        rerun: number of requests that ran again because their replica was lost.
        error: why every request fails from now on.
    """

    def __init__(self, settings: PoolSettings, replicas: Sequence[ReplicaHandle], lock: threading.RLock) -> None:
        self._peak = self.rerun = 0
        self.error: RolloutError | None = None
        self._settings = settings
        self._replicas = replicas
        self._lock = lock
        config = settings.spec.config
        room = config.max_num_seqs * config.data_parallel_size
        # The engine's queue never runs dry, and clients leave half of its places to training.
        self.balancer = Balancer(window=room + max(8, room // 4), client_window=max(1, room // 2))
        self._futures: dict[str, Future[CompletionArrays]] = {}
        self._aborted: set[str] = set()
        self._losses: Counter[str] = Counter()  # how often a request's replica was lost

    @property
    def queued(self) -> int:
        """Number of requests that no replica has room for yet."""
        return len(self.balancer)

    @property
    def in_flight(self) -> int:
        """Number of requests that are not completed."""
        return len(self._futures)

    def submit(self, requests: Sequence[Request]) -> list[Future[CompletionArrays]]:
        """Queue requests; replicas get them as they have room.

        Raises:
            RolloutError: every request fails.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            futures: list[Future[CompletionArrays]] = []
            for request in requests:
                if request.id in self._futures:
                    raise ValueError(f"a request with id {request.id} is in flight already")
                future: Future[CompletionArrays] = Future()
                self._futures[request.id] = future
                futures.append(future)
            self.balancer.add(requests)
            self._peak = max(self._peak, len(self._futures))
            self.dispatch()
        return futures

    def generate(
        self, requests: Sequence[Request], done: Callable[[int, CompletionArrays], None] | None = None
    ) -> list[CompletionArrays]:
        """A completion of each request, in their order. They end early where nobody waits for the calling thread.

        Args:
            done: is called with the number of a request and its completion as soon as that is there, in any thread.

        Raises:
            RolloutError: the engine refuses a request, a request ended its replica again and again, or replicas cannot
                be kept alive.
        """
        futures = self.submit(requests)
        if done is not None:
            for number, future in enumerate(futures):
                future.add_done_callback(partial(_report, done, number))
        with ended_by(partial(self.abort, [request.id for request in requests])):
            completions = [future.result() for future in futures]
        for completion in completions:
            if completion.finish_reason == "error":
                raise RolloutError(f"request {completion.id} failed: {completion.error}")
        return completions

    def dispatch(self) -> None:
        """Send queued requests to the replicas that have room. The lock is held."""
        if not self.balancer:
            return
        ready = [replica for replica in self._replicas if replica.state is ReplicaState.READY]
        room = {replica.index: len(replica.in_flight) for replica in ready}
        clients = {
            replica.index: sum(request.priority > TRAINING_PRIORITY for request in replica.in_flight.values())
            for replica in ready
        }
        for index, requests in self.balancer.take(room, clients).items():
            replica = self._replicas[index]
            replica.in_flight |= {request.id: request for request in requests}
            replica.submitted = replica.actor.submit.remote([_sent(request) for request in requests])

    def collect(self, replica: ReplicaHandle, completions: Sequence[CompletionArrays]) -> None:
        """Complete the requests that a replica has answered."""
        with self._lock:
            if completions:
                replica.failures = 0
            for completion in completions:
                if replica.in_flight.pop(completion.id, None) is not None:
                    self._complete(completion)
            self.dispatch()

    def _complete(self, completion: CompletionArrays) -> None:
        self._aborted.discard(completion.id)
        del self._losses[completion.id]
        future = self._futures.pop(completion.id, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(completion)

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests (all, where None); they return the tokens generated so far."""
        with self._lock:
            request_ids = set(self._futures) if ids is None else set(ids) & self._futures.keys()
            self._aborted |= request_ids
            waiting = self.balancer.clear()
            self.balancer.add(request for request in waiting if request.id not in request_ids)
            for request in waiting:
                if request.id in request_ids:
                    self._complete(CompletionArrays.empty(request.id, "abort"))
            for replica in self._replicas:
                here = sorted(replica.in_flight.keys() & request_ids)
                if here:
                    replica.actor.abort.remote(here, replica.submitted)

    def remove_from(self, replica: ReplicaHandle) -> list[Request]:
        """The requests of a lost replica, which may no longer complete there. The lock is held."""
        requests, replica.in_flight = list(replica.in_flight.values()), {}
        self.rerun += len(requests)
        self.balancer.forget(replica.index)
        return requests

    def run_again(self, replica: ReplicaHandle, requests: Sequence[Request], why: str, blameless: bool = False) -> None:
        """Queue lost requests before the others; one that was lost too often is given up. The lock is held.

        Args:
            blameless: the node was lost, which no request can have caused.
        """
        limit = self._settings.max_restarts
        if not blameless:
            self._losses.update(request.id for request in requests)
        for request in requests:
            if request.id in self._aborted:
                self._complete(CompletionArrays.empty(request.id, "abort"))
            elif self._losses[request.id] > limit:  # it may be what ends the replicas
                times = self._losses[request.id]
                fault = f"its replica was lost {times} times (rollout.max_restarts={limit}); the last time {why}"
                self._complete(CompletionArrays.empty(request.id, "error", fault + end_of_log(replica.log_file)))
        self.balancer.add([request for request in requests if request.id in self._futures], first=True)
        self.dispatch()  # to the other replicas

    def fail(self, error: RolloutError) -> None:
        """Fail every request, and those that are submitted later."""
        with self._lock:
            self.error = self.error or error
            self.balancer.clear()
            futures, self._futures = list(self._futures.values()), {}
            for replica in self._replicas:
                replica.in_flight = {}
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def take_peak(self) -> int:
        """Most requests at once since the last call, including those that wait for a replica."""
        peak, self._peak = self._peak, 0
        return peak


def _report(done: Callable[[int, CompletionArrays], None], number: int, future: Future[CompletionArrays]) -> None:
    """Pass on the completion of a request, if it has one."""
    if not future.cancelled() and future.exception() is None and future.result().finish_reason != "error":
        done(number, future.result())


def _sent(request: Request) -> Request:
    """A request as it travels: its images are in the object store."""
    return request if request.images is None else replace(request, images=request.images.sent())
