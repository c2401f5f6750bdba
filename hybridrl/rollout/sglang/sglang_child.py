"""The process in which SGLang runs alone: `main` in a process of its own, started by `engine.py`.

SGLang needs a main thread. It installs signal handlers and an event loop policy, ends its process when one of its
children dies, and kills every child of its process when it ends. All of that would affect the replica's process.

The replica sends the `EngineSpec`, and then calls the methods of `HostedEngine`. It is told `started` once, with the
files that SGLang leaves behind, and `status` periodically. When it ends, this process and everything it started end.
"""

import asyncio
import contextlib
import functools
import pickle
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.processes.child import end_with_run
from hybridrl.processes.frame_stream import FrameStream
from hybridrl.processes.frames import FrameConnection
from hybridrl.processes.peer import PICKLE, Peer
from hybridrl.rollout.sglang import process_status

if TYPE_CHECKING:
    from hybridrl.hybrid_engine.buckets import Bucket, Checkpoint, RequiredSlices, ShardBucket
    from hybridrl.rollout.inference_engine import EngineSpec
    from hybridrl.rollout.request import Completion, Request
    from hybridrl.rollout.returned_experts import RecordedLayers
    from hybridrl.rollout.sglang.compat import PartialOutput, Server
    from hybridrl.rollout.sglang.images import NamedImages
    from hybridrl.rollout.sglang.weights import Content
    from hybridrl.rollout.stop_strings import StopStrings

_STATUS_S = 0.25
#: of `HostedEngine`, which the replica calls
_METHODS = (
    *("generate", "read", "abort", "divide_logits", "drop_head_bias"),
    *("begin_update", "required_slices", "load_bucket", "end_update", "release", "resume"),
)
_ABORT_AGAIN_S = 0.05
#: tokens between two searches for stop strings; tokens after one are cut off
_STOP_INTERVAL = 8


@dataclass(slots=True)
class _Running:
    """A request of SGLang: its name there, and, once it has ended, whether `abort` was called for it."""

    name: str
    aborted: bool = False


class HostedEngine:
    """Answers the replica's calls."""

    def __init__(self, spec: "EngineSpec", server: "Server") -> None:
        self.spec = spec
        self.server = server
        self._names: dict[str, str] = {}  # the replica's id of a request -> SGLang's
        self._aborted: set[str] = set()
        self._released: set[str] = set()
        self._count = 0
        self._tokenizer: Any = None

    async def serve(self, stream: FrameStream) -> None:
        """Serve until the replica sends `close` or ends."""
        closing = asyncio.Event()
        methods = {name: getattr(self, name) for name in _METHODS}
        replica = Peer(stream, PICKLE, methods | {"close": closing.set}, RuntimeError)
        replica.tell("started", self.server.leftovers)
        tasks = [asyncio.ensure_future(work) for work in (replica.serve(), closing.wait(), self._report(replica))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await replica.finish()

    async def _report(self, replica: Peer) -> None:
        mark, last_output = self.server.output_mark(), time.monotonic()
        while True:
            if self.server.output_mark() != mark:
                mark, last_output = self.server.output_mark(), time.monotonic()
            replica.tell("status", process_status.Status(last_output, await self.server.gauges()))
            await asyncio.sleep(_STATUS_S)

    # ------------------------------------------------------------------ requests

    async def generate(self, request: "Request", images: "NamedImages | None" = None) -> "Completion":
        """See `InferenceEngine.generate`; `images` are those of the request."""
        from hybridrl.rollout.request import Completion
        from hybridrl.rollout.sglang import compat

        if why := self._unfit(request.prompt_ids, self.spec.max_model_len - 1):
            return Completion(request.id, [], [], "error", error=why)
        room = self.spec.max_model_len - len(request.prompt_ids)
        params = request.sampling
        seeded = self.spec.config.full_determinism
        sampling = compat.sampling(params, self.spec.eos_token_ids, min(params.max_new_tokens, room), seeded)
        stop = self._stop_strings(params.stop) if params.stop else None
        end, output = None, None
        try:
            with self._running(request.id) as running:
                interval, checked = (_STOP_INTERVAL if stop else None), 0
                outputs = self.server.generate(
                    running.name, request.prompt_ids, sampling, interval, request.priority, request.routing, images
                )
                async for output in outputs:
                    if stop is None or end is not None:
                        continue
                    end = stop.first_end(output.token_ids, checked)
                    checked = len(output.token_ids)
                    if end is not None and output.finish is None:
                        self.server.abort(running.name)
        except ValueError as error:
            return Completion(request.id, [], [], "error", error=str(error))
        if output is None:
            return Completion(request.id, [], [], "abort")
        answer = _completion(request.id, output, end, running.aborted)
        if output.experts is not None:
            answer.routed_experts = self._routing.chosen(output.experts)
        return answer

    @functools.cached_property
    def _routing(self) -> "RecordedLayers":
        from hybridrl.rollout.returned_experts import RecordedLayers

        return RecordedLayers(self.spec.model)

    async def read(self, request: "Request") -> "Completion":
        """See `InferenceEngine.read`."""
        from hybridrl.rollout.request import Completion

        assert request.prefill is not None
        scored = self.spec.task == "score"
        if why := self._unfit(request.prompt_ids, self.spec.max_model_len - (not scored)):
            return Completion(request.id, [], [], "error", error=why)
        try:
            with self._running(request.id) as running:
                name, ids, priority = running.name, request.prompt_ids, request.priority
                if scored:
                    output = await self.server.score(name, ids, priority)
                else:
                    output = await self.server.read(name, ids, request.prefill, priority)
        except ValueError as error:
            return Completion(request.id, [], [], "error", error=str(error))
        if output.prompt_logprobs is not None:
            return Completion(request.id, [], [], "stop", prompt_logprobs=output.prompt_logprobs)
        why = output.message or "it was aborted"
        return Completion(request.id, [], [], "abort" if running.aborted else "error", error=why)

    @contextlib.contextmanager
    def _running(self, request_id: str) -> Iterator["_Running"]:
        """Give a request a name within the context, by which `abort` ends it."""
        # Of one width: SGLang aborts every request whose name begins with the one that it is given.
        self._count += 1
        running = _Running(f"{self._count:020d}")
        self._names[request_id] = running.name
        try:
            yield running
        finally:
            self._names.pop(request_id, None)
            running.aborted = request_id in self._aborted
            self._aborted.discard(request_id)

    async def divide_logits(self, temperature: float) -> None:
        from hybridrl.rollout.sglang.weights import LogitsTemperature

        await self._change(LogitsTemperature(temperature))

    async def drop_head_bias(self) -> None:
        from hybridrl.rollout.sglang.weights import NoHeadBias

        await self._change(NoHeadBias())

    async def _change(self, content: "Content") -> None:
        """Have every process change the model that it has loaded."""
        await self.server.begin_update()
        await self.server.load(content)
        await self.server.end_update()
        await self.server.drop_prefixes()

    def _unfit(self, prompt_ids: Sequence[int], most: int) -> str | None:
        """Return why a prompt is refused, or None. SGLang's processes die of tokens that the model does not have."""
        if not 0 < len(prompt_ids) <= most:
            return f"a prompt of {len(prompt_ids)} tokens; it has to be 1 to {most}"
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.server.vocabulary:
            return f"a prompt with tokens beyond the model's {self.server.vocabulary}"
        return None

    def _stop_strings(self, strings: Sequence[str]) -> "StopStrings":
        """Found here, because SGLang would load a tokenizer by the model's type, which rebuilds some wrongly."""
        from hybridrl.models.info import tokenizer_of
        from hybridrl.rollout.stop_strings import StopStrings

        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self.spec.model)
        return StopStrings(self._tokenizer, strings)

    async def abort(self, ids: Sequence[str]) -> None:
        """See `InferenceEngine.abort`. Returns when they have ended."""
        names = {self._names[name] for name in ids if name in self._names}
        self._aborted.update(name for name in ids if name in self._names)
        while names := {name for name in names if self.server.abort(name)}:
            await asyncio.sleep(_ABORT_AGAIN_S)

    # ------------------------------------------------------------------ weights and memory

    async def begin_update(self) -> None:
        await self.server.begin_update()

    async def required_slices(self, checkpoint: "Checkpoint") -> "list[RequiredSlices]":
        """See `InferenceEngine.required_slices`."""
        from hybridrl.rollout.sglang.weights import Question

        with tempfile.TemporaryDirectory() as folder:
            await self.server.load(Question(checkpoint, folder))
            files = sorted(Path(folder).iterdir(), key=lambda file: int(file.name))
            return [pickle.loads(file.read_bytes()) for file in files]

    async def load_bucket(self, bucket: "Bucket | ShardBucket") -> None:
        await self.server.load(bucket)

    async def end_update(self) -> None:
        await self.server.load(None)
        await self.server.end_update()
        await self.server.drop_prefixes()

    async def release(self, tags: Sequence[str]) -> None:
        """Release memory once, and only while idle; otherwise SGLang's processes die."""
        if self._names:
            raise RuntimeError(f"memory is released while {len(self._names)} requests are in flight")
        if to_release := [tag for tag in tags if tag not in self._released]:
            await self.server.drop_prefixes()  # returns when the last batch has left SGLang's books, too
            await self.server.release(to_release)
            self._released.update(to_release)

    async def resume(self, tags: Sequence[str]) -> None:
        if to_resume := [tag for tag in tags if tag in self._released]:
            await self.server.resume(to_resume)
            self._released.difference_update(to_resume)


def _completion(request_id: str, output: "PartialOutput", end: int | None, aborted: bool) -> "Completion":
    from hybridrl.rollout.request import Completion

    answer = Completion(request_id, output.token_ids, output.log_probs, "stop", cached_tokens=output.cached_tokens)
    if end is not None:
        answer.token_ids, answer.log_probs = output.token_ids[:end], output.log_probs[:end]
    elif output.finish == "length":
        answer.finish_reason = "length"
    elif output.finish == "abort" and aborted:
        answer.finish_reason = "abort"
    elif output.finish != "stop":
        answer.finish_reason, answer.error = "error", output.message or f"SGLang ended the request: {output.finish}"
    return answer


def main(connection_fd: int, life_fd: int) -> None:
    """Run SGLang until the replica ends."""
    leftovers: list[str] = []
    end_with_run(life_fd, lambda: process_status.remove(leftovers))
    connection = FrameConnection(connection_fd)
    spec: EngineSpec = pickle.loads(connection.receive())
    from hybridrl.rollout.sglang.compat import Server

    async def serve() -> None:
        await HostedEngine(spec, server).serve(await FrameStream.open(connection.socket))

    server = Server(spec)
    leftovers += server.leftovers
    try:
        server.loop.run_until_complete(serve())
    finally:
        server.close()
