"""Single requests with token ids in and out, for agent loops and for the HTTP server.

A client may be used from several event loops. `PoolClient` sends requests to replicas; `TurnClient` collects them for
weights that generate in place.
"""

import asyncio
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

import torch

from hybridrl.config import RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.notify import notify
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.names import IMAGE_DIGEST, IMAGE_MASK, MULTI_MODAL_INPUTS, ROUTED_EXPERTS
from hybridrl.rollout.replicas.replica_supervisor import Supervisor
from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.trajectory import NO_VERSION

logger = logging.getLogger(__name__)

_GATHER_S = 0.02  # a turn begins when no request has arrived for this long
_CLOSE_S = 20.0


class GenerationClient(Protocol):
    """Generates single requests: what `Rollout.client` returns, and what the HTTP server serves."""

    async def generate(self, request: Request) -> Completion:
        """The completion of one request; its `id` must not be in use.

        A request that is refused is a completion with `finish_reason` "error".

        Raises:
            RolloutError: generation as a whole failed, or was closed.
        """

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests; their `generate` returns the tokens generated so far. Unknown ids are ignored."""

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Replica -> statistics, as `hybridrl.serve.prometheus` takes them."""

    async def health(self) -> str | None:
        """Return an error message, or None if the client is healthy."""


class PoolClient:
    """Requests to replicas: to the session's replica, else to the one with the fewest requests in flight.

    While the replicas are paused, for new weights or because training uses their memory, requests wait and keep their
    tokens. A request whose replica dies runs again on another.

    Args:
        supervisor: of the replicas, started.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor, self._scheduler = supervisor, supervisor.scheduler

    async def generate(self, request: Request) -> Completion:
        (future,) = self._scheduler.submit([request])
        # Cancelling this call must not cancel the scheduler's future: the request is aborted, and completes.
        return (await asyncio.shield(asyncio.wrap_future(future))).lists()

    async def abort(self, ids: Sequence[str]) -> None:
        await asyncio.to_thread(self._scheduler.abort, list(ids))

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Statistics by replica; the entry "pool" has what waits for a replica."""
        queue = {"pool": {"queued": float(self._scheduler.queued)}}
        return await asyncio.to_thread(self._supervisor.statistics) | queue

    async def health(self) -> str | None:
        if self._scheduler.error is not None:
            return str(self._scheduler.error)
        states = self._supervisor.health()
        return None if "ready" in states else f"no replica is ready: {', '.join(states)}"


class TurnClient:
    """Requests turn by turn: those that wait become one batch call, and the next turn begins when it has returned.

    A turn takes requests in the order of their priority, then of their arrival. Tokens are drawn by the request's own
    seed, or by its id where it has none.

    Args:
        generate: generates a batch, as `Rollout.generate` does.
        config: `max_model_len` and `max_num_seqs` hold for requests as for an engine's.
        processes: generate side by side; a turn takes up to `max_num_seqs` requests for each.
        version: of the weights.
    """

    def __init__(
        self,
        generate: Callable[[DataProto], DataProto],
        config: RolloutConfig,
        processes: int,
        version: Callable[[], int] = lambda: NO_VERSION,
    ) -> None:
        self._generate = generate
        self._version = version
        self._max_len = config.max_model_len or config.prompt_length + config.response_length
        self._rows = config.max_num_seqs * processes
        self._changed = threading.Condition()
        self._open = self._closed = False
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, Request]] = []  # a heap
        self._futures: dict[str, Future[Completion]] = {}
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="generation-turns", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> Completion:
        future: Future[Completion] = Future()
        with self._changed:
            if self._closed:
                raise RolloutError("the rollout was closed")
            if request.id in self._futures:
                raise ValueError(f"a request with id {request.id} is in flight already")
            if request.sampling.json_schema is not None:
                error = "generating in place keeps no response to a JSON schema; use an engine that does, such as vllm"
                return Completion(request.id, [], [], "error", error=error)
            if len(request.prompt_ids) >= self._max_len:
                error = f"the prompt has {len(request.prompt_ids)} tokens; prompt and response may have {self._max_len}"
                return Completion(request.id, [], [], "error", error=error)
            self._futures[request.id] = future
            heapq.heappush(self._waiting, (request.priority, next(self._arrivals), request))
            self._changed.notify_all()
        return await asyncio.shield(asyncio.wrap_future(future))

    async def abort(self, ids: Sequence[str]) -> None:
        """Complete those that wait for a turn; those of the present turn end with it."""
        self.abort_waiting(set(ids))

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        with self._changed:
            waiting = len(self._waiting)
            running = len(self._futures) - waiting
        state = {"running": float(running), "waiting": float(waiting)}
        version = self._version()
        return {"0": state if version < 0 else state | {"weights_version": float(version)}}

    async def health(self) -> str | None:
        return "the rollout was closed" if self._closed else None

    def abort_waiting(self, ids: set[str] | None = None) -> None:
        """Complete the requests that wait for a turn (these, or all where None) with no tokens."""
        with self._changed:
            entries, self._waiting = self._waiting, []
            for entry in entries:
                if ids is None or entry[2].id in ids:
                    self._complete(Completion(entry[2].id, [], [], "abort"))
                else:
                    heapq.heappush(self._waiting, entry)

    def open(self) -> None:
        """Turns may begin."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def hold(self) -> None:
        """No turn begins until `open`; returns when the present one is over."""
        with self._changed:
            self._open = False
        with self._turn:
            pass

    def close(self) -> None:
        """Requests that wait fail."""
        with self._changed:
            self._closed = True
            self._waiting = []
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        with self._changed:
            for future in self._futures.values():
                if future.set_running_or_notify_cancel():
                    future.set_exception(RolloutError("the rollout was closed"))
            self._futures = {}

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._open and self._waiting))
                previous_count = -1
                # Sessions ask for their next turns together.
                while len(self._waiting) > previous_count and not self._closed:
                    previous_count = len(self._waiting)
                    self._changed.wait(_GATHER_S)
            with self._turn:
                with self._changed:
                    if self._closed:
                        return
                    count = min(len(self._waiting), self._rows) if self._open else 0
                    requests = [heapq.heappop(self._waiting)[2] for _ in range(count)]
                for alike in _grouped(requests):
                    self._serve(alike)

    def _serve(self, requests: Sequence[Request]) -> None:
        """Generate for requests with equal sampling parameters, in one call."""
        try:
            completions = _completions_of(requests, self._generate(_batch_of(requests, self._max_len)), self._max_len)
        except Exception as error:
            logger.exception("generating in place failed")
            notify(f"generating in place failed: {error!r}", "error")
            with self._changed:
                for request in requests:
                    future = self._futures.pop(request.id)
                    if future.set_running_or_notify_cancel():
                        future.set_exception(error)
            return
        with self._changed:
            for completion in completions:
                self._complete(completion)

    def _complete(self, completion: Completion) -> None:
        future = self._futures.pop(completion.id)
        if future.set_running_or_notify_cancel():
            future.set_result(completion)


def _grouped(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests whose settings differ in seed and length limit at most can share a call."""
    groups: dict[tuple[SamplingParams, bool], list[Request]] = {}
    for request in requests:
        alike = replace(request.sampling, seed=None, max_new_tokens=1), request.routing
        groups.setdefault(alike, []).append(request)
    return list(groups.values())


def _limit(request: Request, max_len: int) -> int:
    return min(request.sampling.max_new_tokens, max_len - len(request.prompt_ids))


def _batch_of(requests: Sequence[Request], max_len: int) -> DataProto:
    """The batch that generates for these requests; its noise is keyed by each request."""
    width = max(len(request.prompt_ids) for request in requests)
    ids = torch.zeros((len(requests), width), dtype=torch.int64)
    mask, of_images = torch.zeros_like(ids), torch.zeros(ids.shape, dtype=torch.bool)
    for row, request in enumerate(requests):
        ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids, dtype=torch.int64)
        mask[row, width - len(request.prompt_ids) :] = 1
        if request.images is not None:
            of_images[row, width - len(request.prompt_ids) :] = request.images.mask(len(request.prompt_ids))
    seeds = [request.sampling.seed for request in requests]
    keys = [
        f"request {request.id}" if seed is None else f"seed {seed}"
        for request, seed in zip(requests, seeds, strict=True)
    ]
    sampling = requests[0].sampling
    meta: dict[str, Any] = {
        "do_sample": sampling.do_sample,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "ignore_eos": sampling.ignore_eos,
        "stop": sampling.stop,
        "max_new_tokens": max(_limit(request, max_len) for request in requests),
        "finish_reasons": True,
        ROUTED_EXPERTS: requests[0].routing,
    }
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        IMAGE_MASK: of_images,
    }
    non_tensors = {"uid": object_array(keys), "sample": object_array([0] * len(keys))}
    if any(request.images is not None for request in requests):
        images = [{} if request.images is None else request.images.tensors for request in requests]
        non_tensors[MULTI_MODAL_INPUTS] = object_array(images)
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors, meta_info=meta)


def _completions_of(requests: Sequence[Request], batch: DataProto, max_len: int) -> list[Completion]:
    """Completions out of the rows of a batch, each cut at its own limit."""
    completions = []
    fields, reasons = batch.batch, batch.non_tensor_batch["finish_reason"]
    digests, experts = batch.non_tensor_batch.get(IMAGE_DIGEST), fields.get(ROUTED_EXPERTS)
    for row, request in enumerate(requests):
        generated, limit = int(fields["response_mask"][row].sum()), _limit(request, max_len)
        count = min(generated, limit)
        version = int(fields["weight_versions"][row, 0]) if count else NO_VERSION
        used = None
        if experts is not None:
            computed = len(request.prompt_ids) + max(count - 1, 0)
            used = experts[row][fields["attention_mask"][row].bool()][:computed].numpy()
        completions.append(
            Completion(
                request.id,
                fields["responses"][row, :count].tolist(),
                fields["rollout_log_probs"][row, :count].tolist(),
                "length" if generated > limit else reasons[row],
                [(version, count)] if count else [],
                image_digest="" if digests is None else digests[row],
                routed_experts=used,
            )
        )
    return completions
