"""A pool of replicas under a virtual clock."""

import asyncio
from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Request:
    """A request that is queued or generated; `remaining` seconds of generation are left."""

    seconds: float
    remaining: float
    done: "asyncio.Future[None]"
    began: float = 0.0
    timer: asyncio.TimerHandle | None = None
    replica: "_SimulatedReplica | None" = None


@dataclass(eq=False)
class _SimulatedReplica:
    running: list[_Request] = field(default_factory=list)
    alive: bool = True
    restarted: bool = False


class SimulatedPool:
    """Replicas with places. Requests wait in one queue; the replica with the fewest takes the next.

    While the pool is paused, requests in flight keep their tokens. The requests of a lost replica run again from their
    beginning, on another one or on its successor. A successor gets the trainer's weights as long as these are the
    published ones, that is until an update begins; then it waits for the next publish.

    Args:
        replicas: number of replicas.
        places: requests that a replica generates at a time.
        restart_s: seconds until a lost replica has a successor.

    Attributes:
        busy_s: seconds that places generated, those whose tokens were lost included.
        lost_s: seconds of generation that were lost with replicas, and with requests that were aborted.
    """

    def __init__(self, replicas: int, places: int, restart_s: float = 1.0) -> None:
        self.places = places
        self.restart_s = restart_s
        self.busy_s = self.lost_s = 0.0
        self._replicas = [_SimulatedReplica() for _ in range(replicas)]
        self._queue: deque[_Request] = deque()
        self._paused = False
        self._trainer_has_weights = True

    @property
    def awaits_weights(self) -> bool:
        """Whether nothing can be generated until the next publish: every replica was lost, and training has begun."""
        return not self._trainer_has_weights and not any(replica.alive for replica in self._replicas)

    async def generate(self, seconds: float) -> None:
        """Generate for some seconds on a place."""
        loop = asyncio.get_running_loop()
        request = _Request(seconds, seconds, loop.create_future())
        self._queue.append(request)
        self._dispatch()
        try:
            await request.done
        except asyncio.CancelledError:  # aborted
            self._stop(request)
            self.lost_s += request.seconds - request.remaining
            raise
        finally:
            self._remove(request)

    def weights_will_change(self) -> None:
        """Training begins: successors of lost replicas wait for the next publish."""
        self._trainer_has_weights = False

    def pause(self) -> None:
        """Stop generating."""
        self._paused = True
        for replica in self._replicas:
            for request in replica.running:
                self._stop(request)

    def publish(self) -> None:
        """Continue with new weights, and with successors of the replicas that were lost."""
        self._trainer_has_weights = True
        for replica in self._replicas:
            replica.alive = replica.alive or replica.restarted
        self.resume()

    def resume(self) -> None:
        """Continue with the same weights."""
        self._paused = False
        for replica in self._replicas:
            for request in replica.running:
                self._run(request)
        self._dispatch()

    def lose(self, number: int) -> None:
        """Lose a replica with its requests."""
        replica = self._replicas[number]
        if not replica.alive:
            return
        replica.alive = replica.restarted = False
        asyncio.get_running_loop().call_later(self.restart_s, self._restart, replica)
        for request in replica.running:
            self._stop(request)
            self.lost_s += request.seconds - request.remaining
            request.remaining, request.replica = request.seconds, None
        self._queue.extendleft(reversed(replica.running))
        replica.running = []
        self._dispatch()

    def _restart(self, replica: _SimulatedReplica) -> None:
        replica.restarted = True
        if self._trainer_has_weights:
            replica.alive = True
            self._dispatch()

    def _dispatch(self) -> None:
        while self._queue and not self._paused:
            free = [replica for replica in self._replicas if replica.alive and len(replica.running) < self.places]
            if not free:
                return
            request = self._queue.popleft()
            request.replica = min(free, key=lambda replica: len(replica.running))
            request.replica.running.append(request)
            self._run(request)

    def _run(self, request: _Request) -> None:
        if request.timer is None:
            loop = asyncio.get_running_loop()
            request.began = loop.time()
            request.timer = loop.call_later(request.remaining, self._finish, request)

    def _stop(self, request: _Request) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
            elapsed = min(asyncio.get_running_loop().time() - request.began, request.remaining)
            request.remaining -= elapsed
            self.busy_s += elapsed

    def _finish(self, request: _Request) -> None:
        self._stop(request)
        if not request.done.done():
            request.done.set_result(None)
        self._remove(request)

    def _remove(self, request: _Request) -> None:
        self._stop(request)
        if request.replica is not None:
            request.replica.running.remove(request)
            request.replica = None
            self._dispatch()
        elif not request.done.done() or request.done.cancelled():
            self._queue.remove(request)
