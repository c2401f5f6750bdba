"""A small real engine for tests of what stands around engines: one forward pass a token, one request after another."""

import asyncio
import os
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from hybridrl.hybrid_engine.messages import Bucket
from hybridrl.hybrid_engine.receive import WeightReceiver
from hybridrl.rollout.engine import Completion, InferenceEngine, Request
from hybridrl.rollout.sampling import draw

#: a prompt that begins with this token ends the process; one that begins with the next hangs the engine
DEADLY, HANGING = 120, 121


class PlainEngine(InferenceEngine):
    """Generates with a Hugging Face model; `name` is `plain_engine:PlainEngine`."""

    name = "plain"

    @classmethod
    def check(cls, config, model) -> None:
        """Takes everything."""

    async def start(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.spec.model.path, dtype=torch.float32).eval()
        self.receiver = WeightReceiver(torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(self.spec.config.seed + self.spec.index)
        self.progress = time.monotonic()
        self.ended: set[str] = set()
        self.released: set[str] = set()
        self.tokens = 0

    @torch.no_grad()
    async def generate(self, request: Request) -> Completion:
        if len(request.prompt_ids) >= self.spec.max_model_len:
            return Completion(request.id, [], [], "error", error="the prompt is too long")
        if request.prompt_ids[0] == DEADLY:
            os._exit(1)
        if request.prompt_ids[0] == HANGING:
            await asyncio.sleep(3600)
        tokens: list[int] = []
        log_probs: list[float] = []
        limit = min(request.sampling.max_new_tokens, self.spec.max_model_len - len(request.prompt_ids))
        for _ in range(limit):
            await asyncio.sleep(0.001)
            if request.id in self.ended:
                self.ended.discard(request.id)
                return Completion(request.id, tokens, log_probs, "abort")
            logits = self.model(torch.tensor([request.prompt_ids + tokens])).logits[:, -1]
            uniform = torch.rand(1, dtype=torch.float64, generator=self.generator)
            token, log_prob = draw(logits, request.sampling, uniform)
            tokens.append(int(token))
            log_probs.append(float(log_prob))
            self.tokens += 1
            self.progress = time.monotonic()
            if tokens[-1] in self.spec.eos_token_ids and not request.sampling.ignore_eos:
                return Completion(request.id, tokens, log_probs, "stop")
        return Completion(request.id, tokens, log_probs, "length")

    async def abort(self, ids: Sequence[str]) -> None:
        self.ended.update(ids)

    async def begin_update(self) -> None:
        self.loaded: set[str] = set()

    async def load_bucket(self, bucket: Bucket) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in self.receiver.tensors(bucket):
                parameters[name].copy_(value)
                self.loaded.add(name)

    async def end_update(self) -> None:
        missing = {name for name, _ in self.model.named_parameters()} - self.loaded
        assert not missing, missing
        self.receiver.close()

    async def release(self, tags: Sequence[str]) -> None:
        self.released |= set(tags)

    async def resume(self, tags: Sequence[str]) -> None:
        self.released -= set(tags)

    def last_progress(self) -> float:
        return self.progress

    def stats(self) -> dict[str, float]:
        return {"generated_tokens": float(self.tokens)}

    async def close(self) -> None:
        """Nothing was started."""
