"""A pool of replicas as something to serve: the router is the same application as a replica's, with this behind it."""

import asyncio
from collections.abc import Mapping, Sequence

from hybridrl.rollout.replicas.pool import ReplicaPool
from hybridrl.rollout.request import Completion, Request


class Router:
    """Requests go where the pool's balancer sends them: by session, else where least is in flight.

    While the replicas are paused, for new weights or because their memory is lent to training, requests wait and keep
    their tokens.

    Args:
        pool: started.
    """

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool

    async def generate(self, request: Request) -> Completion:
        """The completion of one request."""
        (future,) = self._pool.submit([request])
        # A call that is given up must not cancel what the pool will set: it is aborted, and answered.
        return await asyncio.shield(asyncio.wrap_future(future))

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests; they return the tokens there are."""
        await asyncio.to_thread(self._pool.abort, list(ids))

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Replica -> statistics, as `metrics_text` takes them; under "pool" what no replica has room for yet."""
        queue = {"pool": {"queued": float(self._pool.queued)}}
        return await asyncio.to_thread(self._pool.statistics) | queue

    async def health(self) -> str | None:
        """None while a replica is up."""
        if self._pool.error is not None:
            return str(self._pool.error)
        states = self._pool.health()
        return None if "ready" in states else f"no replica is ready: {', '.join(states)}"
