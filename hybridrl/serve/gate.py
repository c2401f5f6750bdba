"""Holds the requests of the server's clients. Those of training do not pass here, and go on."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.parts import add_part, rest_of
from hybridrl.rollout.request import Completion, Request

#: vLLM's: what becomes of requests that are being generated
PauseMode = Literal["abort", "wait", "keep"]


class Gate(Protocol):
    """A `GenerationClient` whose requests can be held."""

    async def generate(self, request: Request) -> Completion: ...
    async def abort(self, ids: Sequence[str]) -> None: ...
    async def stats(self) -> Mapping[str, Mapping[str, float]]: ...
    async def health(self) -> str | None: ...

    async def pause(self, mode: PauseMode) -> None:
        """Generate nothing until `resume`; returns when nothing is generated any more. New requests wait.

        Args:
            mode: `abort` ends the requests in flight, `wait` lets those complete that are being generated, `keep` stops
                them, and they go on after their tokens at `resume`.
        """

    async def resume(self) -> None:
        """Generate again."""

    async def is_paused(self) -> bool:
        """Whether requests are held."""


class GuestGate:
    """The gate in front of a client, for one event loop.

    Args:
        client: generates.
        tokenizer: called once it is needed, to find stop strings that `keep` divided.
    """

    def __init__(self, client: GenerationClient, tokenizer: Callable[[], Any]) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._paused = False
        self._here: set[str] = set()  # all requests that are not answered
        self._inside: set[str] = set()  # those that the client generates
        self._aborted: set[str] = set()
        self._suspended: set[str] = set()  # aborted to go on later
        self._changed = asyncio.Condition()

    async def generate(self, request: Request) -> Completion:
        answer, id = Completion(request.id, [], [], "abort"), request.id
        self._here.add(id)
        try:
            while await self._may_generate(id):
                self._inside.add(id)
                try:
                    part = await self._client.generate(rest_of(request, answer))
                finally:
                    self._inside.discard(id)
                    await self._notify_waiting()
                add_part(answer, part, request, self._tokenizer)
                if answer.finish_reason != "abort" or id not in self._suspended:
                    break
                self._suspended.discard(id)
        finally:
            for ids in (self._here, self._aborted, self._suspended):
                ids.discard(id)
        return answer

    async def _may_generate(self, id: str) -> bool:
        """Wait while requests are held; False where this one was aborted."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._paused or id in self._aborted)
        return id not in self._aborted

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests; ids of requests that did not pass here go on to the client."""
        here = self._here.intersection(ids)
        self._aborted |= here
        self._suspended -= here
        await self._notify_waiting()
        await self._client.abort(sorted(set(ids) - (here - self._inside)))

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        return await self._client.stats()

    async def health(self) -> str | None:
        return await self._client.health()

    async def pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode == "abort":
            await self.abort(sorted(self._here))
        elif mode == "keep":
            self._suspended |= self._inside - self._aborted
            await self._client.abort(sorted(self._inside))
        async with self._changed:
            await self._changed.wait_for(lambda: not self._inside or not self._paused)

    async def resume(self) -> None:
        self._paused = False
        await self._notify_waiting()

    async def is_paused(self) -> bool:
        return self._paused

    async def _notify_waiting(self) -> None:
        async with self._changed:
            self._changed.notify_all()
