"""The requests of one HTTP call: started together, and aborted together when the client disconnects."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from starlette.requests import Request as HttpRequest

from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.request import Completion, Request

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has disconnected."""


class PendingRequests:
    """Async context manager; requests that are pending when it is left are aborted in the background.

    Args:
        client: generates.
        requests: one per choice.
        connection: of the HTTP client; watched for its end.
        around: entered once the client has the requests, and left with it.
    """

    _aborting: set["asyncio.Task[None]"] = set()  # noqa: RUF012 (kept alive until they are done, whoever started them)

    def __init__(
        self,
        client: GenerationClient,
        requests: Sequence[Request],
        connection: HttpRequest,
        around: AbstractContextManager[None],
    ) -> None:
        self.client = client
        self.requests = requests
        self.connection = connection
        self._around = around

    async def __aenter__(self) -> "PendingRequests":
        self._index: dict[asyncio.Task[Completion], int] = {
            asyncio.ensure_future(self.client.generate(request)): index for index, request in enumerate(self.requests)
        }
        self._waiting = set(self._index)
        self._gone = asyncio.ensure_future(self._until_gone())
        try:
            await asyncio.sleep(0)  # each of them begins: who knows their names next can abort them
        except asyncio.CancelledError:
            self._leave()
            raise
        self._around.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._around.__exit__(kind, error, trace)
        self._leave()

    def _leave(self) -> None:
        """Have what is pending aborted by name: the end of a task here does not end what another process generates."""
        self._gone.cancel()
        unfinished = {task for task in self._index if not task.done()}
        if unfinished:
            task = asyncio.ensure_future(self._abort(unfinished))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def completed(self, timeout_s: float | None = None) -> list[tuple[int, Completion]]:
        """The next completions, with the requests' numbers; none where `timeout_s` passed before.

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
    def pending(self) -> bool:
        """Whether some have not completed."""
        return bool(self._waiting)

    async def _until_gone(self) -> None:
        # A task that ended with an exception holds this frame, and with it the requests and their images.
        with contextlib.suppress(asyncio.CancelledError):
            while (await self.connection.receive())["type"] != "http.disconnect":
                pass

    async def _abort(self, tasks: "set[asyncio.Task[Completion]]") -> None:
        try:
            await self.client.abort([self.requests[self._index[task]].id for task in tasks])
        except Exception:
            logger.exception("requests of a disconnected client could not be aborted")
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
