"""One replica without its process: where a request that was interrupted ends, and which memory vLLM gives back."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_engine import PlainEngine
from raising import raises_with

from hybridrl.errors import RolloutError
from hybridrl.models.info import tokenizer_of
from hybridrl.rollout.replicas.replica_actor import Replica
from hybridrl.rollout.request import MEMORY_TAGS, Completion, Request
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.trajectory import Trajectory
from hybridrl.trainer.phases import PhaseTimer

SAMPLED = SamplingParams(True, 1.0, 1.0, -1, 8)


class Interrupted(PlainEngine):
    """Answers with given parts, all but the last cut off; the experts of token n are the number of the part, and n."""

    parts: list[list[int]]
    calls = 0

    async def generate(self, request: Request) -> Completion:
        tokens, self.calls = self.parts.pop(0), self.calls + 1
        answer = Completion(request.id, tokens, [-1.0] * len(tokens), "abort" if self.parts else "length")
        if request.routing and tokens:
            computed = range(len(request.prompt_ids) + len(tokens) - 1)
            answer.routed_experts = np.array([[[self.calls, n]] for n in computed], dtype=np.uint8)
        return answer


def completion_of(model: Path, parts: list[list[int]], routing: bool = False, **sampling: Any) -> Completion:
    """What a replica makes of these parts of one request."""

    async def run() -> Completion:
        engine = Interrupted.of(model)
        engine.parts = parts
        replica = Replica("plain", replace(engine.spec, load_weights=True), {})
        replica._engine = engine
        return await replica.generate(Request("a", [6, 7], replace(SAMPLED, **sampling), routing=routing))

    return asyncio.run(run())


def test_experts_are_those_with_which_each_token_was_sampled(tiny_model: Path) -> None:
    """Later parts compute all tokens before them again, maybe with other weights."""
    parts = [[10, 11], [], [12], [13, 14]]
    answer = completion_of(tiny_model, parts, routing=True)
    made = Trajectory.single_turn([6, 7], answer, "p", 0)
    assert made.routed_experts is not None
    assert made.routed_experts[:, 0].tolist() == [[1, 0], [1, 1], [1, 2], [3, 3], [4, 4], [4, 5], [4, 5]]
    assert completion_of(tiny_model, [[10], [11]]).routed_experts is None
    with raises_with(RolloutError, "3 tokens", "computed 6", "router_replay"):
        Trajectory.single_turn([6, 7], replace(answer, routed_experts=answer.routed_experts[:3]), "p", 0)


def test_a_replica_sees_how_the_programs_end_that_it_starts(tiny_model: Path) -> None:
    """Ray may have set its process to ignore SIGCHLD, which makes every exit code 0."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        Replica("plain", PlainEngine.of(tiny_model).spec, {})
        assert subprocess.run(["sh", "-c", "exit 3"]).returncode == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_silence_is_counted_from_the_oldest_call_that_has_not_ended(tiny_model: Path) -> None:
    """Two buckets are loaded side by side: one that ends says nothing of the other."""

    class Loads(PlainEngine):
        async def load_bucket(self, bucket: asyncio.Event) -> None:  # type: ignore[override]
            await bucket.wait()

    async def run() -> None:
        engine = Loads.of(tiny_model)
        replica = Replica("plain", engine.spec, {})
        replica._engine = engine
        buckets = asyncio.Event(), asyncio.Event()
        loads = []
        for bucket in buckets:
            loads.append(asyncio.create_task(replica.load_bucket(bucket)))
            await asyncio.sleep(0.1)
        assert (await replica.health()).silent_s >= 0.15
        buckets[0].set()
        await loads[0]
        assert (await replica.health()).silent_s >= 0.05
        buckets[1].set()
        await loads[1]
        assert (await replica.health()).silent_s == 0

    asyncio.run(run())


def test_memory_that_is_not_free_is_an_error_and_not_a_dead_process(tiny_model: Path) -> None:
    """A restarted replica would not find it free either, so the run ends with the cause."""

    class Full(PlainEngine):
        async def resume(self, tags: Any) -> None:
            raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62")

    engine = Full.of(tiny_model)
    replica = Replica("plain", engine.spec, {})
    replica._engine = engine
    with pytest.raises(RolloutError, match=r"(?s)weights and kv_cache.*cumem_allocator") as raised:
        asyncio.run(replica.resume(MEMORY_TAGS))
    timer = PhaseTimer({"gen": "lower gpu_memory_utilization"})
    with pytest.raises(RolloutError) as noted, timer.phase("gen"):
        raise raised.value
    assert any("gpu_memory_utilization" in note for note in noted.value.__notes__)


class WithoutCompiler(PlainEngine):
    """Its kernels are C++, as PyTorch compiles them, where there is no compiler."""

    async def start(self) -> None:
        from torch._inductor.exc import InvalidCxxCompiler

        raise InvalidCxxCompiler


def test_an_engine_that_cannot_compile_says_what_to_install(tiny_model: Path) -> None:
    replica = Replica(f"{__name__}:WithoutCompiler", PlainEngine.of(tiny_model).spec, {})
    with pytest.raises(RolloutError, match=r"apt-get install g\+\+"):
        asyncio.run(replica.start())


def test_nothing_is_generated_before_there_are_weights(tiny_model: Path) -> None:
    async def run() -> None:
        engine = PlainEngine.of(tiny_model)
        await engine.start()
        replica = Replica("plain", replace(engine.spec, load_weights=False), {})
        replica._engine = engine
        await replica.unpause()
        answer = asyncio.create_task(replica.generate(Request("a", [6, 7], replace(SAMPLED, ignore_eos=True))))
        await asyncio.sleep(0.05)
        assert not answer.done() and not engine.running
        engine.end_update = _nothing  # type: ignore[method-assign]
        await replica.end_update(3)
        await replica.unpause()
        assert (await answer).versions == [(3, 8)]

    asyncio.run(run())


async def _nothing() -> None:
    """An update that brings no weights."""


def test_a_request_that_was_cut_off_at_its_eos_has_ended(tiny_model: Path) -> None:
    """Engines that finish the forward pass they are in may be at the last token when they are told to end."""
    (eos, *_) = PlainEngine.of(tiny_model).spec.eos_token_ids
    answer = completion_of(tiny_model, [[10, eos], [11, 12]])
    assert (answer.token_ids, answer.finish_reason) == ([10, eos], "stop")
    answer = completion_of(tiny_model, [[10, eos], [11, 12]], ignore_eos=True)
    assert (answer.token_ids, answer.finish_reason) == ([10, eos, 11, 12], "length")
    answer = completion_of(tiny_model, [[10, 13], [11, 12]])
    assert (answer.token_ids, answer.finish_reason) == ([10, 13, 11, 12], "length")


@pytest.mark.parametrize("parts", [["12", "34", "56"], ["123", "4", "56"], ["1234", "56"], ["12", "345", "6"]])
def test_a_stop_string_over_parts_ends_the_request(tiny_model: Path, parts: list[str]) -> None:
    tokenizer = tokenizer_of(PlainEngine.of(tiny_model).spec.model)
    ids = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
    assert sum(map(len, ids)) == 6
    answer = completion_of(tiny_model, ids, stop=("234",))
    assert tokenizer.decode(answer.token_ids) == "1234" and answer.finish_reason == "stop"
    assert len(answer.log_probs) == 4 == sum(count for _, count in answer.versions)


class Sleeper:
    """vLLM's engine as far as memory goes; refuses what vLLM refuses."""

    def __init__(self, discards: bool) -> None:
        self.asleep: set[str] = set()
        self.paused = False
        if discards:
            self.release_kv_cache_memory = self._release_cache

    async def sleep(self, level: int) -> None:
        assert level == 2 and "weights" not in self.asleep
        self.asleep = set(MEMORY_TAGS)

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert mode == "abort" and clear_cache
        self.paused = True

    async def _release_cache(self) -> None:
        assert "kv_cache" not in self.asleep and self.paused
        self.asleep.add("kv_cache")

    async def wake_up(self, tags: list[str]) -> None:
        assert tags and set(tags) <= self.asleep
        self.asleep -= set(tags)
        self.paused = self.paused and bool(self.asleep)


@pytest.mark.parametrize("discards", [True, False], ids=["0.32", "without release_kv_cache_memory"])
def test_vllm_gives_back_what_is_asked_for_in_any_order(tiny_model: Path, discards: bool) -> None:
    from hybridrl.rollout.vllm.engine import VLLMEngine

    weights, cache, both = ["weights"], ["kv_cache"], list(MEMORY_TAGS)
    spec = replace(PlainEngine.of(tiny_model).spec, devices=(0,))

    async def run(*calls: tuple[str, list[str]]) -> set[str]:
        engine, sleeper = VLLMEngine(spec), Sleeper(discards)
        engine._engine = sleeper  # type: ignore[assignment]
        for method, tags in calls:
            await getattr(engine, method)(tags)
        return sleeper.asleep

    def asleep(*calls: tuple[str, list[str]]) -> set[str]:
        return asyncio.run(run(*calls))

    assert asleep(("release", both)) == set(both)
    assert asleep(("release", cache), ("release", weights)) == set(both)
    assert asleep(("release", weights)) == set(both)  # it sleeps as a whole
    assert asleep(("release", weights), ("resume", weights)) == set()
    assert asleep(("release", both), ("resume", weights)) == set(cache)
    # a step that had nothing to generate: the cache was never taken again
    assert asleep(("release", both), ("resume", weights), ("release", weights)) == set(both)
    assert asleep(("release", both), ("resume", weights), ("resume", cache)) == set()
    assert asleep(("release", cache)) == (set(cache) if discards else set())
    assert asleep(("release", cache), ("resume", cache)) == set()
