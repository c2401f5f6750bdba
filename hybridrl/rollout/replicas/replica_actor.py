"""One engine and its process: a Ray actor that takes requests, returns completions, and loads new weights."""

import asyncio
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import ray
import torch

from hybridrl.errors import RolloutError, is_out_of_memory
from hybridrl.hybrid_engine.buckets import Bucket, Checkpoint, RequiredSlices, ShardBucket
from hybridrl.models.info import tokenizer_of
from hybridrl.notify import notify
from hybridrl.processes.inherited import keep_exit_codes
from hybridrl.rollout.inference_engine import EngineBrokenError, EngineSpec, InferenceEngine, create_inference_engine
from hybridrl.rollout.parts import add_part, rest_of
from hybridrl.rollout.request import Completion, CompletionArrays, PrefillRequest, Request
from hybridrl.rollout.request_images import ReceivedImages
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.utils import work_folder

#: completions are returned together, because a Ray call costs milliseconds: this part of the requests in flight, or
#: whatever has completed after this time
_GATHER_PART, _GATHER_S = 8, 0.05
_DRAIN_POLL_S = 0.01
_WARM_UP_TOKENS = 2
_LOG_LINES = 60
_BROKEN = 70  # exit status of a replica whose engine is broken
#: what Triton, PyTorch and FlashInfer say if they cannot compile a kernel, and what is missing then
_COMPILERS = {
    "Failed to find C compiler": "a C compiler (Debian, Ubuntu: apt-get install gcc)",
    "No working C++ compiler": "a C++ compiler (Debian, Ubuntu: apt-get install g++)",
    "Python.h: No such file": "the headers of Python (Debian, Ubuntu: apt-get install python3-dev)",
    "Could not find nvcc": "the CUDA toolkit (its folder in CUDA_HOME)",
    "No such file or directory: 'ninja'": "ninja (pip install ninja)",
}
T = TypeVar("T")


@dataclass(frozen=True)
class ReplicaInfo:
    """The place at which a replica runs."""

    pid: int
    node_id: str
    node_ip: str
    start_seconds: float


@dataclass(frozen=True)
class ReplicaHealth:
    """Health of a replica.

    Attributes:
        in_flight: number of requests that were submitted and not collected.
        silent_s: seconds without progress of the engine while it has something to do; else 0.
        version: of the weights.
    """

    in_flight: int
    silent_s: float
    version: int


class Replica:
    """The actor's class; `ReplicaHandle` starts it.

    Args:
        engine_name: `rollout.name`.
        spec: what the engine is started with.
        environment: variables that have to be set before the engine's library is imported.
        log_file: where this process and the engine's write; None leaves it to Ray.
        folder: working folder of the run's program; see `hybridrl.utils.work_folder`.
    """

    def __init__(
        self,
        engine_name: str,
        spec: EngineSpec,
        environment: dict[str, str],
        log_file: str | None = None,
        folder: str | None = None,
    ) -> None:
        work_folder.enter(folder)
        os.environ.update(environment)
        keep_exit_codes()
        self._log_file = None if log_file is None else Path(log_file)
        if self._log_file is not None:
            _write_output_to(self._log_file)
        self.spec = spec
        self.version = 0 if spec.load_weights else -1
        self._engine_name = engine_name
        self._engine: InferenceEngine
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._inside: set[str] = set()  # requests that the engine works on
        self._images = ReceivedImages()
        self._tokenizer: Any = None
        self._aborted: set[str] = set()
        self._done: list[Completion] = []
        self._awaited = 1  # signal `_enough_done` at this many completions
        self._enough_done = asyncio.Event()
        self._generating = spec.load_weights  # else from the end of the first update
        self._changed = asyncio.Condition()  # `_generating` or `_aborted` did
        self._busy_since = 0.0
        self._doing: dict[object, float] = {}  # start times of what it does besides generating
        self._watching: asyncio.Task[None] | None = None  # from the end of `start` on

    async def start(self) -> ReplicaInfo:
        """Start the engine, and generate a few tokens, because the first call compiles.

        Raises:
            RolloutError: with the end of the log, which may be on another node.
        """
        started = time.perf_counter()
        try:
            self._engine = create_inference_engine(self._engine_name, self.spec)
            await self._start_engine()
        except Exception as error:
            message = str(error) if isinstance(error, RolloutError) else repr(error)
            log = end_of_log(self._log_file)
            raise RolloutError(message + compiler_hint(message + log) + log) from error
        context = ray.get_runtime_context()
        seconds = time.perf_counter() - started
        return ReplicaInfo(os.getpid(), context.get_node_id(), ray.util.get_node_ip_address(), seconds)

    async def _start_engine(self) -> None:
        """Start the engine and have it compute something.

        Raises:
            EngineBrokenError: its processes ended meanwhile.
        """
        death = asyncio.ensure_future(self._engine.wait_until_dead())
        starting = asyncio.ensure_future(self._first_tokens())
        await asyncio.wait({death, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            raise EngineBrokenError(f"the engine died while it started: {death.result()}")
        if starting.exception() is not None:
            death.cancel()
        await starting
        self._watching = asyncio.create_task(self._end_with_engine(death))

    async def _first_tokens(self) -> None:
        await self._engine.start()
        warm_up = SamplingParams(True, 1.0, 1.0, -1, _WARM_UP_TOKENS, ignore_eos=True)
        first = Request("warm-up", [self.spec.pad_token_id], warm_up)
        if self.spec.task == "generate":
            await self._engine.generate(first)
        else:
            await self._engine.read(replace(first, prefill=PrefillRequest(top=self.spec.top)))

    async def _end_with_engine(self, death: Awaitable[str]) -> None:
        """End this process as soon as the engine is dead, so that every call to it fails, and the pool restarts it."""
        reason = await death
        notify(f"replica {self.spec.index}: the engine died: {reason}", "error")
        os._exit(_BROKEN)

    # ------------------------------------------------------------------ requests

    async def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; `collect` returns their completions."""
        for request in requests:
            if not self._tasks:
                self._busy_since = time.monotonic()
            self._tasks[request.id] = asyncio.create_task(self._answer(request))

    async def collect(self, wait_s: float) -> list[CompletionArrays]:
        """Completions since the last call; waits up to `wait_s` for the first, and briefly for more."""
        if await self._await_done(1, wait_s):
            await self._await_done(max(1, len(self._tasks) // _GATHER_PART), _GATHER_S)
        completions, self._done = self._done, []
        return [CompletionArrays.of(completion) for completion in completions]

    async def _await_done(self, count: int, wait_s: float) -> bool:
        """Wait for so many completions, or for the last one; False where none came in time."""
        self._awaited = count
        if len(self._done) < count and (self._tasks or not self._done):
            self._enough_done.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._enough_done.wait(), wait_s)
        return bool(self._done)

    async def generate(self, request: Request) -> Completion:
        """The completion of one request; `versions` say which weights generated each token.

        A request in flight during a weight update keeps its tokens and continues under the new weights.
        """
        answer = Completion(request.id, [], [], "abort")
        if request.images is not None:
            answer.image_digest = request.images.digest()
        try:
            while await self._may_generate(request.id):
                if request.prefill is not None:
                    answer = await self._read(request)
                    if answer.finish_reason != "abort":
                        break
                    continue
                version = self.version
                if not self._inside:
                    self._busy_since = time.monotonic()
                self._inside.add(request.id)
                try:
                    part = await self._engine.generate(rest_of(request, answer))
                finally:
                    self._inside.discard(request.id)
                part.versions = [(version, len(part.token_ids))] if part.token_ids else []
                add_part(answer, part, request, self._own_tokenizer)
                if answer.finish_reason != "abort":
                    break
                if not request.sampling.ignore_eos and set(answer.token_ids[-1:]) & set(self.spec.eos_token_ids):
                    answer.finish_reason = "stop"  # the engine was generating it when it was aborted
                    break
                if len(answer.token_ids) >= request.sampling.max_new_tokens:
                    answer.finish_reason = "length"
                    break
        finally:
            self._aborted.discard(request.id)
        return answer

    async def _read(self, request: Request) -> Completion:
        if not self._inside:
            self._busy_since = time.monotonic()
        self._inside.add(request.id)
        try:
            return await self._engine.read(request)
        finally:
            self._inside.discard(request.id)

    def _own_tokenizer(self) -> Any:
        """The model's; only stop strings need it."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self.spec.model)
        return self._tokenizer

    async def _may_generate(self, request_id: str) -> bool:
        """Wait while the replica is paused; False where the request was aborted."""
        if not self._generating and request_id not in self._aborted:
            async with self._changed:
                await self._changed.wait_for(lambda: self._generating or request_id in self._aborted)
        return request_id not in self._aborted

    async def _answer(self, request: Request) -> None:
        sent = request.images
        try:
            if sent is not None:
                request = replace(request, images=await self._images.take(sent))
            completion = await self.generate(request)
        except asyncio.CancelledError:
            raise
        except Exception:
            self._die()
        finally:
            if sent is not None:
                self._images.give_back(sent)
        del self._tasks[request.id]
        self._done.append(completion)
        if len(self._done) >= self._awaited or not self._tasks:
            self._enough_done.set()

    def _die(self) -> NoReturn:
        """End the process, because the engine is broken; the pool restarts the replica and runs its requests again."""
        traceback.print_exc()
        notify(f"replica {self.spec.index}: the engine failed, see above", "error")
        os._exit(_BROKEN)

    async def _engine_does(self, work: Coroutine[Any, Any, T]) -> T:
        self._doing[work] = time.monotonic()
        try:
            return await work
        except RolloutError:
            raise
        except Exception:
            self._die()
        finally:
            del self._doing[work]

    async def abort(self, ids: Sequence[str] | None = None, after: Any = None) -> None:
        """End these requests (all, where None) now; they complete with the tokens generated so far.

        Args:
            after: reference of a call that has to be finished first, such as the one that submitted them.
        """
        request_ids = set(self._tasks) if ids is None else self._tasks.keys() & set(ids)
        self._aborted.update(request_ids)
        await self._wake()
        while inside := request_ids & self._inside:
            await self._engine_does(self._engine.abort(list(inside)))
            await asyncio.sleep(_DRAIN_POLL_S)

    async def pause(self) -> None:
        """Stop generating; requests keep their tokens and continue at `unpause`."""
        self._generating = False
        while self._inside:  # the engine may not know a request yet that was just submitted
            await self._engine_does(self._engine.abort(list(self._inside)))
            await asyncio.sleep(_DRAIN_POLL_S)

    async def unpause(self) -> None:
        """Continue generating; a replica without weights begins with the first `unpause` after an update."""
        self._generating = self.version >= 0
        self._busy_since = time.monotonic()
        await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ weights and memory

    async def begin_update(self) -> None:
        """Get ready for new weights; the replica has to be paused."""
        if self._generating:
            raise RuntimeError("weights are updated while the replica generates: pause it first")
        await self._engine_does(self._engine.begin_update())

    async def required_slices(self, checkpoint: Checkpoint) -> list[RequiredSlices] | None:
        """Return what each of the engine's processes needs; see `InferenceEngine.required_slices`."""
        return await self._engine_does(self._engine.required_slices(checkpoint))

    async def load_bucket(self, bucket: Bucket | ShardBucket) -> None:
        """Load a part of the weights; when this returns the bucket may be overwritten."""
        await self._engine_does(self._engine.load_bucket(bucket))

    async def load_adapter(self, config: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take an adapter in place of weights; see `InferenceEngine.load_adapter`."""
        await self._engine_does(self._engine.load_adapter(config, tensors))

    async def end_update(self, version: int) -> None:
        """All weights of `version` have arrived."""
        await self._engine_does(self._engine.end_update())
        self.version = version

    async def release(self, tags: Sequence[str]) -> None:
        """Release the device memory of `tags`; no request may be in flight."""
        if self._inside:
            raise RuntimeError(
                f"memory of {', '.join(tags)} is released while {len(self._inside)} requests are in flight"
            )
        await self._engine_does(self._engine.release(tags))

    async def resume(self, tags: Sequence[str]) -> None:
        """Take the device memory of `tags` back.

        Raises:
            RolloutError: it is not free; a restarted replica would not find it free either.
        """
        await self._engine_does(self._resume(tags))

    async def _resume(self, tags: Sequence[str]) -> None:
        try:
            await self._engine.resume(tags)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise RolloutError(
                f"the engine is out of memory: the memory of its {' and '.join(tags)} is not free after training: "
                f"{error!r}"
            ) from error

    # ------------------------------------------------------------------ state

    async def health(self) -> ReplicaHealth:
        """Health of this replica."""
        silent = 0.0
        if self._doing:
            silent = time.monotonic() - min(self._doing.values())
        elif self._inside:
            silent = time.monotonic() - max(self._busy_since, self._engine.last_progress())
        return ReplicaHealth(len(self._tasks) + len(self._done), silent, self.version)

    async def stats(self) -> dict[str, float]:
        """The engine's counters; see `InferenceEngine.stats`."""
        return self._engine.stats()

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the engine's worker processes; see `InferenceEngine.call`."""
        return await self._engine.call(method, *args)

    async def close(self) -> None:
        """End the engine."""
        if self._watching is not None:
            self._watching.cancel()
        for task in self._tasks.values():
            task.cancel()
        if hasattr(self, "_engine"):
            await self._engine.close()


def compiler_hint(text: str) -> str:
    """Name the compiler to install if an engine's kernels could not be compiled, as the end of a message; else ""."""
    missing = [package for sign, package in _COMPILERS.items() if sign in text]
    if not missing:
        return ""
    return f". Kernels of the engine are compiled when it starts, and this node lacks {missing[0]}"


def end_of_log(log_file: Path | None) -> str:
    """The last lines of a replica's log, as the end of a message."""
    if log_file is None or not log_file.is_file():
        return ""
    lines = log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return f"\nThe end of {log_file}:\n  " + "\n  ".join(lines)


def _write_output_to(path: Path) -> None:
    """Redirect the output of this process and its children to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
