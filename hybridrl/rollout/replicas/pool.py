"""All replicas of a run, as the controller sees them: requests in, completions out, whatever happens to a replica."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from hybridrl.errors import RolloutError
from hybridrl.hybrid_engine.transports import UpdateTarget
from hybridrl.rollout.replicas.actor import ReplicaInfo
from hybridrl.rollout.replicas.handle import PoolSettings, ReplicaHandle, ReplicaPlacement
from hybridrl.rollout.replicas.scheduler import Scheduler
from hybridrl.rollout.replicas.supervisor import Supervisor
from hybridrl.rollout.request import MEMORY_TAGS, Completion, Request

__all__ = ["PoolSettings", "ReplicaPlacement", "ReplicaPool", "request_number"]

_numbers = itertools.count()


class ReplicaPool:
    """Replicas that generate with the same weights: a `Scheduler` for requests, a `Supervisor` for processes.

    Args:
        settings: engine, model, limits.
        placements: one per replica.
        send_weights: sends the trainer's present weights to these engines, and returns what `stream` reports; None
            where weights never change.
    """

    def __init__(
        self,
        settings: PoolSettings,
        placements: Sequence[ReplicaPlacement],
        send_weights: Callable[[list[UpdateTarget]], Any] | None = None,
    ) -> None:
        if not placements:
            raise ValueError("a pool needs at least one replica")
        self.settings = settings
        self.replicas = [ReplicaHandle(index, placement) for index, placement in enumerate(placements)]
        lock = threading.RLock()
        self.scheduler = Scheduler(settings, self.replicas, lock)
        self.supervisor = Supervisor(settings, self.replicas, self.scheduler, lock, send_weights)

    def start(self) -> list[ReplicaInfo]:
        """Start all replicas at once, and wait for them.

        Raises:
            RolloutError: one does not start; the message holds the end of its log.
        """
        return self.supervisor.start()

    def close(self) -> None:
        """End all replicas; requests in flight fail."""
        self.supervisor.close()

    # ------------------------------------------------------------------ requests

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Ask for completions; replicas get the requests as they have room."""
        return self.scheduler.submit(requests)

    def generate(
        self, requests: Sequence[Request], done: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        """A completion of each request, in their order.

        Args:
            done: is called with the number of a request and its completion as soon as that is there, in any thread.

        Raises:
            RolloutError: the engine refuses a request, a request ended its replica again and again, or replicas cannot
                be kept alive.
        """
        futures = self.submit(requests)
        if done is not None:
            for number, future in enumerate(futures):
                future.add_done_callback(partial(_tell, done, number))
        completions = [future.result() for future in futures]
        for completion in completions:
            if completion.finish_reason == "error":
                raise RolloutError(f"request {completion.id} failed: {completion.error}")
        return completions

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests (all, where None); they return the tokens generated so far."""
        self.scheduler.abort(ids)

    # ------------------------------------------------------------------ weights, memory, pauses

    def update_weights(self, version: int) -> Any:
        """Send every replica the trainer's present weights; requests in flight wait and continue under the new ones.

        Returns:
            What `send_weights` returned; None where no replica is running.
        """
        return self.supervisor.update_weights(version)

    def weights_will_change(self) -> None:
        """Send no weights until the next `update_weights`, because the trainer is about to change them.

        Returns when a transfer that has begun is complete.
        """
        self.supervisor.weights_will_change()

    def release(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Return device memory to training, which changes the weights.

        Requests wait, and keep their tokens, until `resume` has taken all of it back.
        """
        self.supervisor.release(tags)

    def lend(self, tags: Sequence[str]) -> None:
        """Return device memory as `release` does, while the weights stay as they are."""
        self.supervisor.lend(tags)

    def resume(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take device memory again."""
        self.supervisor.resume(tags)

    def pause(self) -> None:
        """Stop generating until `unpause`; requests keep their tokens."""
        self.supervisor.pause()

    def unpause(self) -> None:
        """Continue generating."""
        self.supervisor.unpause()

    # ------------------------------------------------------------------ state

    @property
    def version(self) -> int:
        """Version of the weights of the last update; -1 before the first."""
        return self.supervisor.version

    @property
    def placements(self) -> list[ReplicaPlacement]:
        """The placements of the replicas."""
        return [replica.placement for replica in self.replicas]

    def health(self) -> list[str]:
        """The `ReplicaState` of each replica."""
        return [replica.state.value for replica in self.replicas]

    @property
    def error(self) -> RolloutError | None:
        """The error with which every request fails from now on."""
        return self.scheduler.error

    @property
    def restarts(self) -> int:
        """Number of restarts of replicas so far."""
        return sum(replica.restarts for replica in self.replicas)

    @property
    def rerun(self) -> int:
        """Number of requests that ran again because their replica was lost."""
        return self.scheduler.rerun

    @property
    def queued(self) -> int:
        """Number of requests that no replica has room for yet."""
        return self.scheduler.queued

    def take_peak(self) -> int:
        """Most requests at once since the last call, including those that wait for a replica."""
        peak, self.scheduler.peak = self.scheduler.peak, 0
        return peak

    def statistics(self) -> dict[str, dict[str, float]]:
        """Statistics of each replica by its number.

        `restarts` and `in_flight` always; while it is running also `InferenceEngine.stats`, the version of its weights
        and the seconds of their last update.
        """
        return self.supervisor.statistics()


def _tell(done: Callable[[int, Completion], None], number: int, future: Future[Completion]) -> None:
    """Tell that a request has its completion, where it has one."""
    if not future.cancelled() and future.exception() is None and future.result().finish_reason != "error":
        done(number, future.result())


def request_number() -> int:
    """A number that no other request of this process has."""
    return next(_numbers)
