"""Requests that the training server has accepted, in order, and their answers until clients fetch them."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

from hybridrl.errors import UserError, WorkerError
from hybridrl.notify import notify
from hybridrl.utils.http_server import HttpRefusal

#: JSON, or a message in protobuf
Answer = Mapping[str, Any] | bytes
_FETCHED_KEPT = 256  # answers that were fetched, for clients that lost them on the way


@dataclass(frozen=True)
class Failure:
    """Why a request failed; `category` says whose fault it is."""

    message: str
    category: Literal["user", "server"]


@dataclass(eq=False)
class PendingRequest:
    """A request that was accepted.

    Attributes:
        id: by which its client asks for the answer.
        owner: the session.
        compute: computes the answer, in the thread of the workers; None: `batch` does.
        batch: computes the answers of requests with the same `batch_key`, from their jobs.
        job: what `batch` gets.
    """

    id: str
    owner: str
    compute: Callable[[], Answer] | None = None
    batch: Callable[[Sequence[Any]], Sequence[Answer]] | None = None
    batch_key: Hashable = None
    job: Any = None
    outcome: Answer | Failure | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, outcome: Answer | Failure) -> None:
        """Set the answer."""
        if self.outcome is None:
            self.outcome = outcome
            self.compute = self.batch = self.job = None
            self.done.set()


class RequestQueue:
    """Computes requests one after the other, in a thread, in the order in which they were submitted.

    Args:
        most: requests that are accepted and whose answer was not fetched.
        most_samples: jobs that are computed together.
    """

    def __init__(self, most: int, most_samples: int) -> None:
        self._most, self._most_samples = most, most_samples
        self._requests: dict[str, PendingRequest] = {}
        self._fetched: OrderedDict[str, PendingRequest] = OrderedDict()
        self._ready: deque[PendingRequest] = deque()
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training-server")
        self.broken = asyncio.Event()
        self._why_broken = ""

    def accept(self, owner: str, **work: Any) -> PendingRequest:
        """Make a request of a session, to be submitted.

        Raises:
            HttpRefusal: there are too many; the client sends it again later.
        """
        if len(self._requests) >= self._most:
            raise HttpRefusal(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{len(self._requests)} requests wait, or their answers do (--max-requests); send it again later",
            )
        request = PendingRequest(f"{owner}:{secrets.token_hex(8)}", owner, **work)
        self._requests[request.id] = request
        return request

    def submit(self, request: PendingRequest) -> None:
        """Have the request computed after those that were submitted before."""
        self._ready.append(request)
        self._changed.set()

    async def answer(self, id: str, wait_s: float) -> Answer | Failure | None:
        """Wait for the answer to a request; None: it is not there yet.

        Raises:
            HttpRefusal: there is no such request, or its answer was fetched a while ago.
        """
        request = self._requests.get(id) or self._fetched.get(id)
        if request is None:
            raise HttpRefusal(HTTPStatus.GONE, f"{id}: there is no such request, or its answer was fetched before")
        try:
            await asyncio.wait_for(request.done.wait(), wait_s)
        except TimeoutError:
            return None
        if self._requests.pop(id, None) is not None:
            self._fetched[id] = request
            if len(self._fetched) > _FETCHED_KEPT:
                self._fetched.popitem(last=False)
        return request.outcome

    def forget(self, owner: str) -> None:
        """Drop the requests of a session, and their answers."""
        for requests in (self._requests, self._fetched):
            for request in [request for request in requests.values() if request.owner == owner]:
                request.finish(Failure(f"the session {owner} is over", "user"))
                del requests[request.id]

    async def work(self) -> None:
        """Compute requests, until the task is cancelled."""
        while True:
            while not self._ready:
                self._changed.clear()
                await self._changed.wait()
            first = self._ready.popleft()
            if first.outcome is not None:
                continue
            together = [first, *self._joining(first)]
            if self._why_broken:
                answers: Sequence[Answer | Failure] = [Failure(self._why_broken, "server")] * len(together)
            else:
                loop = asyncio.get_running_loop()
                answers = await loop.run_in_executor(self._thread, self._computed, together)
                if self._why_broken:
                    self.broken.set()
            for request, answer in zip(together, answers, strict=True):
                request.finish(answer)

    def close(self) -> None:
        """Let no further request begin."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _joining(self, first: PendingRequest) -> list[PendingRequest]:
        """Take the requests from the queue that are computed together with this one."""
        if first.batch is None:
            return []
        alike = [other for other in self._ready if other.batch_key == first.batch_key and other.batch is not None]
        alike = alike[: self._most_samples - 1]
        alike_ids = set(map(id, alike))
        self._ready = deque(request for request in self._ready if id(request) not in alike_ids)
        return alike

    def _computed(self, requests: Sequence[PendingRequest]) -> Sequence[Answer | Failure]:
        """Compute in the thread of the workers. A fault of a client is its own; workers that fail are for all."""
        first = requests[0]
        try:
            if first.batch is not None:
                return first.batch([request.job for request in requests])
            assert first.compute is not None
            return [first.compute()]
        except WorkerError as error:
            self._why_broken = f"the workers have ended, and the server ends: {error}"
            notify(self._why_broken, "error")
            return [Failure(self._why_broken, "server")] * len(requests)
        except UserError as error:
            return [Failure(str(error), "user")] * len(requests)
        except Exception as error:
            notify(f"a request failed: {type(error).__name__}: {error}", "error")
            return [Failure(f"{type(error).__name__}: {error}", "server")] * len(requests)
