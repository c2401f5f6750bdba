"""A pool of replicas under a virtual clock."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from hybridrl.errors import TooFewReplicasError
from hybridrl.rollout.replicas.replica_number import ReplicaBounds, ReplicaNumber

_ADJUST_EVERY_S = 5.0


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
    is_new: bool = False  # joins the others, and does not run yet


class SimulatedPool:
    """Replicas with places. Requests wait in one queue; the replica with the fewest takes the next.

    While the pool is paused, requests in flight keep their tokens. The requests of a lost replica run again from their
    beginning, on another one or on its successor. A successor gets the trainer's weights as long as these are the
    published ones, that is until an update begins; then it waits for the next publish.

    With `bounds` replicas also leave for ever, with their node, and others join on nodes that are added, by the same
    rules as in training. One that joins is started like a successor. If there are too few, all requests fail.

    Args:
        replicas: number of replicas.
        places: requests that a replica generates at a time.
        restart_s: seconds until a lost replica has a successor, and until one that joins runs.
        bounds: of the number of replicas; None: it does not change.

    Attributes:
        replicas_joined, replicas_left: number of replicas that have joined, and left.
        busy_s: seconds that places generated, those whose tokens were lost included.
        lost_s: seconds of generation that were lost with replicas, and with requests that were aborted.
    """

    def __init__(self, replicas: int, places: int, restart_s: float = 1.0, bounds: ReplicaBounds | None = None) -> None:
        self.replicas_joined = self.replicas_left = self.free_nodes = 0
        self._number = None if bounds is None else ReplicaNumber(bounds)
        self._error: TooFewReplicasError | None = None
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
        if self._error is not None:
            raise self._error
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
        self._run_again(replica)

    def _run_again(self, replica: _SimulatedReplica) -> None:
        """Queue the requests of a lost replica before the others."""
        for request in replica.running:
            self._stop(request)
            self.lost_s += request.seconds - request.remaining
            request.remaining, request.replica = request.seconds, None
        self._queue.extendleft(reversed(replica.running))
        replica.running = []
        self._dispatch()

    # ------------------------------------------------------------------ replicas that leave and join

    @property
    def number(self) -> int:
        """Number of replicas that have not left."""
        return len(self._replicas)

    def leave(self, number: int) -> None:
        """Lose a replica for ever, with its node and its requests."""
        replica = self._replicas.pop(number)
        replica.alive = False
        self.replicas_left += 1
        self._run_again(replica)

    async def adjust(self) -> None:
        """Have replicas join while there is room for them, and fail if there are too few. Cancelled, it ends."""
        loop = asyncio.get_running_loop()
        while self._number is not None:
            starting = sum(replica.is_new for replica in self._replicas)
            if self._number.is_too_low(self.number - starting, starting, loop.time()):
                self._fail(TooFewReplicasError(f"{self.number} replicas are left"))
            if self.free_nodes and self._number.wants_more(self.number, loop.time()):
                self.free_nodes -= 1
                replica = _SimulatedReplica(alive=False, is_new=True)
                self._replicas.append(replica)
                loop.call_later(self.restart_s, self._restart, replica)
            await asyncio.sleep(_ADJUST_EVERY_S)

    def _fail(self, error: TooFewReplicasError) -> None:
        self._error = self._error or error
        requests = [*self._queue, *(request for replica in self._replicas for request in replica.running)]
        self._queue.clear()
        for request in requests:
            if not request.done.done():
                request.done.set_exception(self._error)

    def _restart(self, replica: _SimulatedReplica) -> None:
        replica.restarted = True
        self.replicas_joined += replica.is_new
        replica.is_new = False
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
