"""The requests of one HTTP call: started together, and ended together when the client is gone."""

import asyncio
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from starlette.requests import Request as HttpRequest

from hybridrl.rollout.request import Completion, Request

logger = logging.getLogger(__name__)


class Generates(Protocol):
    """What can be served: an `InferenceEngine`, or a pool of replicas that spreads requests over them."""

    async def generate(self, request: Request) -> Completion: ...

    async def abort(self, ids: Sequence[str]) -> None: ...


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Flight:
    """Async context manager; what has not ended when it is left is aborted, without being waited for.

    Args:
        engine: generates.
        requests: one a choice.
        connection: where the call came from; watched for its end.
    """

    _aborting: set["asyncio.Task[None]"] = set()  # noqa: RUF012 (kept alive until they are done, whoever started them)

    def __init__(self, engine: Generates, requests: Sequence[Request], connection: HttpRequest) -> None:
        self.engine = engine
        self.requests = requests
        self.connection = connection

    async def __aenter__(self) -> "Flight":
        self._index: dict[asyncio.Task[Completion], int] = {
            asyncio.ensure_future(self.engine.generate(request)): index for index, request in enumerate(self.requests)
        }
        self._waiting = set(self._index)
        self._gone = asyncio.ensure_future(self._until_gone())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gone.cancel()
        left = {task for task in self._index if not task.done()}
        if left:
            task = asyncio.ensure_future(self._abort(left))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def landed(self, timeout_s: float | None = None) -> list[tuple[int, Completion]]:
        """The next that have ended, with their numbers; none where `timeout_s` passed before.

        Raises:
            ClientGone: the connection has ended.
        """
        done, _ = await asyncio.wait(
            {*self._waiting, self._gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        ended = [task for task in self._waiting if task in done]
        self._waiting.difference_update(ended)
        if not ended and self._gone in done:
            raise ClientGone
        return [(self._index[task], task.result()) for task in ended]

    @property
    def in_the_air(self) -> bool:
        return bool(self._waiting)

    async def _until_gone(self) -> None:
        while (await self.connection.receive())["type"] != "http.disconnect":
            pass

    async def _abort(self, tasks: "set[asyncio.Task[Completion]]") -> None:
        try:
            await self.engine.abort([self.requests[self._index[task]].id for task in tasks])
        except Exception:
            logger.exception("requests of a client that is gone could not be aborted")
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
