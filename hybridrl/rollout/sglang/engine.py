"""SGLang behind `InferenceEngine`, on a GPU and on a CPU. Its engine runs in its own process (`sglang_child.py`)."""

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.hybrid_engine.buckets import Bucket, Checkpoint, RequiredSlices, ShardBucket
from hybridrl.models.model_config import config_of
from hybridrl.models.routers import layers_with_routers
from hybridrl.notify import notify
from hybridrl.processes.child import Child
from hybridrl.processes.frame_stream import FrameStream
from hybridrl.processes.peer import PICKLE, Peer
from hybridrl.rollout.inference_engine import (
    EngineBrokenError,
    EngineSpec,
    InferenceEngine,
    check_tensor_parallel,
    family_of,
    register_inference_engine,
)
from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.sglang import compat, process_status
from hybridrl.rollout.sglang.images import NamedImages, check_images

_COUNTERS = ("generated_tokens", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")
_LOG_LINES = 30
_CLOSE_S = 60
_SWEEP_S = 10
_LAST_LINES_S = 1


@register_inference_engine(
    "sglang",
    packages=("sglang",),
    auto=2,
    records_routing=True,
    install="bash scripts/install.sh cuda sglang (on a machine without a GPU: cpu sglang)",
    scores=True,
    reads=True,
    sees_images=True,
)
class SGLangEngine(InferenceEngine):
    """SGLang's engine in a separate process, and the calls to it."""

    always_seeded = False

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._host = _HostProcess(spec)
        self._totals = dict.fromkeys(_COUNTERS, 0.0)
        self._updates = 0  # of weights so far

    @classmethod
    def check(cls, config: RolloutConfig, model: ModelConfig, on_gpu: bool) -> None:
        warning = compat.check_version()
        if warning:
            notify(warning, "warning")
        check_tensor_parallel(config, model)
        check_images(config, model)
        key = "actor_rollout_ref.rollout"
        if config.data_parallel_size > 1:
            raise RolloutError(
                f"{key}.data_parallel_size={config.data_parallel_size}: SGLang's own copies of a model cannot load "
                "weights while they run. Leave it at 1: further devices hold further replicas"
            )
        if config.full_determinism and not on_gpu:
            raise RolloutError(
                f"{key}.full_determinism=True: SGLang samples reproducibly on a GPU only; set it to False, or "
                f"{key}.name to hf or vllm"
            )

    @classmethod
    def check_routing(cls, config: RolloutConfig, model: ModelConfig, on_gpu: bool) -> None:
        key, feature = "actor_rollout_ref.rollout", "recording the experts of tokens (router_replay.mode=R3)"
        if not config.enable_chunked_prefill:
            raise RolloutError(
                f"{key}.enable_chunked_prefill=False with {feature}: SGLang has room for the experts of a chunk's "
                f"tokens alone; set it to True, with chunks of {key}.max_num_batched_tokens"
            )
        if config.pipeline_model_parallel_size > 1:
            raise RolloutError(
                f"{key}.pipeline_model_parallel_size={config.pipeline_model_parallel_size} with {feature}: SGLang "
                "returns those of one stage's layers; set it to 1"
            )
        layers_with_routers(config_of(model))

    @classmethod
    def check_scoring(cls, model: ModelConfig) -> None:
        families = [family_of(name) for name in config_of(model).architectures or ()]
        if not set(families) & set(compat.CLASSIFIERS):
            raise RolloutError(
                f"{model.path} is a classifier of {' or '.join(families) or 'no family'}, and SGLang serves those of "
                f"{', '.join(compat.CLASSIFIERS)}; serve it by vllm, or leave the engine out"
            )

    async def start(self) -> None:
        await self._host.start()
        if self.spec.logits_temperature != 1:
            await self._host.call("divide_logits", self.spec.logits_temperature)
        if self.spec.task == "score":
            await self._host.call("drop_head_bias")

    async def generate(self, request: Request) -> Completion:
        named = None
        if request.images is not None:
            named = NamedImages.of(request.images, getattr(torch, compat.dtype_of(self.spec)), self._updates)
            request = replace(request, images=None)
        completion: Completion = await self._host.call("generate", request, named)
        if completion.finish_reason != "error":
            counts = (len(completion.token_ids), *[len(request.prompt_ids)] * 2, completion.cached_tokens)
            for name, count in zip(_COUNTERS, counts, strict=True):
                self._totals[name] += count
        return completion

    async def read(self, request: Request) -> Completion:
        completion: Completion = await self._host.call("read", request)
        return completion

    async def abort(self, ids: Sequence[str]) -> None:
        await self._host.call("abort", list(ids))

    async def begin_update(self) -> None:
        await self._host.call("begin_update")

    async def required_slices(self, checkpoint: Checkpoint) -> list[RequiredSlices] | None:
        required: list[RequiredSlices] = await self._host.call("required_slices", checkpoint)
        return required

    async def load_bucket(self, bucket: Bucket | ShardBucket) -> None:
        await self._host.call("load_bucket", bucket)

    async def end_update(self) -> None:
        await self._host.call("end_update")
        self._updates += 1

    async def release(self, tags: Sequence[str]) -> None:
        if self._has_memory_saver():
            await self._host.call("release", list(tags))

    async def resume(self, tags: Sequence[str]) -> None:
        if self._has_memory_saver():
            await self._host.call("resume", list(tags))

    def _has_memory_saver(self) -> bool:
        return bool(self.spec.devices) and self.spec.config.free_cache_engine

    def last_progress(self) -> float:
        return self._host.status.last_output

    def stats(self) -> dict[str, float]:
        return self._totals | self._host.status.gauges

    async def wait_until_dead(self) -> str:
        await self._host.dead.wait()
        return str(self._host.failure)

    async def close(self) -> None:
        await self._host.close()


class _HostProcess:
    """The process, the calls to it, and its output, which is copied to our standard error."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.status = process_status.Status(time.monotonic())
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._tasks: list[asyncio.Task[None]] = []
        self._leftovers: list[str] = []
        self.failure: EngineBrokenError | None = None
        self._has_started = False
        self.dead = asyncio.Event()  # after it has started
        self._child: Child | None = None
        self._peer: Peer

    async def start(self) -> None:
        """Start the process; returns when SGLang is ready.

        Raises:
            RolloutError: with the end of SGLang's output.
        """
        package_root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))  # of what it starts
        variables = compat.environment(self.spec) | {"PYTHONPATH": path}
        self._child = Child("hybridrl.rollout.sglang.sglang_child", variables=variables, output=subprocess.PIPE)
        stream = await FrameStream.open(self._child.connection)
        stream.send(pickle.dumps(self.spec))
        started: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        methods: dict[str, Callable[..., Any]] = {"started": started.set_result, "status": self._take_status}
        self._peer = Peer(stream, PICKLE, methods, lambda text: EngineBrokenError(f"SGLang: {text}"))
        self._tasks = [asyncio.create_task(self._pass_on_output()), asyncio.create_task(self._listen())]
        ends: list[asyncio.Future[Any]] = [started, self._tasks[1]]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await self.close()
            raise RolloutError(f"SGLang did not start: {self.failure}. {_memory_hint(self.spec)}")
        self._leftovers = started.result()
        self._has_started = True
        if self.failure is not None:
            self.dead.set()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host; returns its value.

        Raises:
            EngineBrokenError: the method failed there, or SGLang's process has ended.
        """
        return await self._peer.call(method, *arguments)

    async def close(self) -> None:
        """End SGLang and every process it started."""
        child, self._child = self._child, None
        if child is None:
            return
        if not child.has_ended and self.failure is None:
            self._peer.tell("close")
            await asyncio.to_thread(child.wait, _CLOSE_S)
        await _end_group(child.pid)
        self._peer.close()
        await asyncio.to_thread(child.end)
        for task in self._tasks:
            task.cancel()
        self._fail(EngineBrokenError("SGLang was closed"))
        process_status.remove(self._leftovers)

    async def _listen(self) -> None:
        try:
            await self._peer.serve()
        except EOFError:
            await asyncio.wait(self._tasks[:1], timeout=_LAST_LINES_S)
            self._fail(
                EngineBrokenError("SGLang's process ended. The end of its output:\n  " + "\n  ".join(self._lines))
            )
        except Exception as error:
            self._fail(EngineBrokenError(f"a message of SGLang's process cannot be read: {error!r}"))

    def _take_status(self, status: process_status.Status) -> None:
        self.status = status

    def _fail(self, error: EngineBrokenError) -> None:
        self.failure = self.failure or error
        if self._has_started:
            self.dead.set()
        self._peer.fail(self.failure)

    async def _pass_on_output(self) -> None:
        assert self._child is not None
        lines = asyncio.StreamReader(limit=2**20)
        protocol = asyncio.StreamReaderProtocol(lines)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._child.process.stdout)
        async for line in lines:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            print(text, file=sys.stderr, flush=True)


async def _end_group(leader: int) -> None:
    """Kill the process group of `leader` and wait until its members have ended."""
    deadline = time.monotonic() + _SWEEP_S
    while True:
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            return
        if not _alive_in_group(leader) or time.monotonic() > deadline:
            return
        await asyncio.sleep(0.05)


def _alive_in_group(leader: int) -> bool:
    """Whether a member still runs; those that ended and were not waited for do not count."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _memory_hint(spec: EngineSpec) -> str:
    key = "actor_rollout_ref.rollout"
    if not spec.devices:
        return f"If memory is short: {key}.engine_kwargs.sglang.max_total_tokens bounds the KV cache"
    return (
        f"If memory is short: lower {key}.gpu_memory_utilization ({spec.config.gpu_memory_utilization}), max_num_seqs "
        "or max_model_len, or offload training state with param_offload and optimizer_offload in "
        "actor_rollout_ref.actor.fsdp_config (or .megatron)"
    )
