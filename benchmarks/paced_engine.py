"""An inference engine whose tokens come by the clock, so that generation has a device of its own on any machine."""

import asyncio
import time
from collections.abc import Sequence
from random import Random

import torch

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.hybrid_engine.buckets import Bucket, ShardBucket
from hybridrl.hybrid_engine.receive import WeightReceiver
from hybridrl.rollout.inference_engine import InferenceEngine
from hybridrl.rollout.request import Completion, Request

TOKENS_PER_S = 100.0  # of each response
MEDIAN, SPREAD = 40.0, 0.8  # of the log-normal lengths, in tokens
LONGEST, SHORTEST = 240, 8
_FIRST_ID = 10  # ids below it are special in the tiny tokenizer
_LOG_PROB = -5.58  # of 264 tokens, as the random model has it, too


class PacedEngine(InferenceEngine):
    """Generates random tokens, `TOKENS_PER_S` for each of at most `max_num_seqs` responses at a time.

    The first token of a response is its length, so that a response that was interrupted ends where it would have ended.
    """

    name = "paced"

    @classmethod
    def check(cls, config: RolloutConfig, model: ModelConfig, on_gpu: bool) -> None:
        """Accept everything."""

    async def start(self) -> None:
        """Nothing is loaded."""
        self._receiver = WeightReceiver(torch.device("cpu"))
        self._places = asyncio.Semaphore(self.spec.config.max_num_seqs)
        self._ended: dict[str, asyncio.Event] = {}
        self._tokens = 0

    async def generate(self, request: Request) -> Completion:
        """Wait as long as the tokens take. The first request of a replica that starts is answered at once."""
        if request.sampling.ignore_eos:
            count = request.sampling.max_new_tokens
            return Completion(request.id, [_FIRST_ID] * count, [_LOG_PROB] * count, "length")
        ended = self._ended[request.id] = asyncio.Event()
        random = Random(request.sampling.seed)
        done = self.spec.config.response_length - request.sampling.max_new_tokens
        if done:
            length = request.prompt_ids[-done]
        else:
            length = min(max(round(random.lognormvariate(0.0, SPREAD) * MEDIAN), SHORTEST), LONGEST)
        ids = [length] * (not done) + [random.randrange(_FIRST_ID, LONGEST) for _ in range(length - done - (not done))]
        try:
            count = await self._wait(len(ids), ended)
        finally:
            del self._ended[request.id]
        self._tokens += count
        return Completion(request.id, ids[:count], [_LOG_PROB] * count, "stop" if count == len(ids) else "abort")

    async def _wait(self, tokens: int, ended: asyncio.Event) -> int:
        """Return how many tokens there are when all are generated, or when the request is aborted."""
        async with self._places:
            if ended.is_set():
                return 0
            began = time.monotonic()
            try:
                await asyncio.wait_for(ended.wait(), tokens / TOKENS_PER_S)
            except TimeoutError:
                return tokens
            return min(int((time.monotonic() - began) * TOKENS_PER_S), tokens)

    async def abort(self, ids: Sequence[str]) -> None:
        """End the requests with the tokens that there are."""
        for name in ids:
            if name in self._ended:
                self._ended[name].set()

    async def begin_update(self) -> None:
        """Nothing is cached."""

    async def load_bucket(self, bucket: Bucket | ShardBucket) -> None:
        """Receive the tensors and forget them."""
        for _ in self._receiver.tensors(bucket):
            pass

    async def end_update(self) -> None:
        """Go on."""
        self._receiver.close()

    async def release(self, tags: Sequence[str]) -> None:
        """There is no memory to return."""

    async def resume(self, tags: Sequence[str]) -> None:
        """There is no memory to take."""

    def last_progress(self) -> float:
        """Return now: a clock is never stuck."""
        return time.monotonic()

    def stats(self) -> dict[str, float]:
        """Count tokens and requests."""
        return {"generated_tokens": float(self._tokens), "running": float(len(self._ended))}

    async def close(self) -> None:
        """Nothing was started."""
