"""A small real engine for tests of what stands around engines: one forward pass for each token of each request."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.hybrid_engine.buckets import Bucket
from hybridrl.hybrid_engine.receive import WeightReceiver
from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.rollout.inference_engine import EngineSpec, InferenceEngine
from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.sampling import draw

#: a prompt that begins with this token raises in the engine; with the next it takes its time, ends the process, hangs
BROKEN, SLOW, DEADLY, HANGING = 118, 119, 120, 121
#: names a file; where it holds "NAME INDEX" the engine of that replica removes it and hangs in that method
HANGS_VARIABLE = "PLAIN_ENGINE_HANGS"
#: names a file; a prompt that begins with `WAITING` is answered once the file is there
WAITING, WAITS_VARIABLE = 117, "PLAIN_ENGINE_WAITS"
_SLOW_TOKEN_S = 0.03


class PlainEngine(InferenceEngine):
    """Generates with a Hugging Face model; `name` is `plain_engine:PlainEngine`."""

    name = "plain"

    @classmethod
    def of(cls, model: Path, **rollout: Any) -> "PlainEngine":
        """One by itself, with the model's own weights."""
        config = ModelConfig(path=str(model))
        tokenizer = tokenizer_of(config)
        eos = tuple(eos_token_ids(model, config_of(config), tokenizer))
        return cls(EngineSpec(RolloutConfig(**rollout), config, eos, tokenizer.pad_token_id))

    @classmethod
    def check(cls, config, model, on_gpu) -> None:
        """Takes everything."""

    async def start(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.spec.model.path, dtype=torch.float32).eval()
        self.receiver = WeightReceiver(torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(self.spec.config.seed + self.spec.index)
        self.progress = time.monotonic()
        self.ended: set[str] = set()
        self.released: set[str] = set()
        self.running: dict[str, list[int]] = {}  # tokens of what is in flight, by request
        self.most_running = 0
        self.aborted: list[str] = []
        self.counted = {"generated_tokens": 0.0, "prompt_tokens": 0.0, "loads_beside_cache": 0.0}
        self.tokenizer = tokenizer_of(self.spec.model)

    async def generate(self, request: Request) -> Completion:
        if len(request.prompt_ids) >= self.spec.max_model_len:
            return Completion(request.id, [], [], "error", error="the prompt is too long")
        if request.prompt_ids[0] == BROKEN:
            raise RuntimeError("the engine is broken")
        if request.prompt_ids[0] == DEADLY:
            os._exit(1)
        if request.prompt_ids[0] == HANGING:
            await asyncio.sleep(3600)
        while request.prompt_ids[0] == WAITING and not Path(os.environ[WAITS_VARIABLE]).exists():
            await asyncio.sleep(0.01)
        self.counted["prompt_tokens"] += len(request.prompt_ids)
        tokens = self.running[request.id] = []
        self.most_running = max(self.most_running, len(self.running))
        try:
            return await self._decode(request, tokens)
        finally:
            del self.running[request.id]

    async def _decode(self, request: Request, tokens: list[int]) -> Completion:
        log_probs: list[float] = []
        sampling, generator = request.sampling, self.generator
        if sampling.seed is not None:
            generator = torch.Generator().manual_seed(sampling.seed)
        limit = min(request.sampling.max_new_tokens, self.spec.max_model_len - len(request.prompt_ids))
        for _ in range(limit):
            await asyncio.sleep(_SLOW_TOKEN_S if request.prompt_ids[0] == SLOW else 0.001)
            if request.id in self.ended:
                self.ended.discard(request.id)
                return Completion(request.id, tokens, log_probs, "abort")
            assert not self.released, "generates without its memory"
            with torch.no_grad():
                ids = torch.tensor([request.prompt_ids + tokens], device=self.model.device)
                logits = self.model(ids).logits[:, -1]
            uniform = torch.rand(1, dtype=torch.float64, generator=generator)
            token, log_prob = draw(logits, request.sampling, uniform)
            tokens.append(int(token))
            log_probs.append(float(log_prob))
            self.counted["generated_tokens"] += 1
            self.progress = time.monotonic()
            ended = tokens[-1] in self.spec.eos_token_ids and not sampling.ignore_eos
            if ended or any(stop in self.tokenizer.decode(tokens) for stop in sampling.stop):
                return Completion(request.id, tokens, log_probs, "stop")
        return Completion(request.id, tokens, log_probs, "length")

    async def abort(self, ids: Sequence[str]) -> None:
        known = [name for name in ids if name in self.running]
        self.aborted += known
        self.ended.update(known)

    async def begin_update(self) -> None:
        self.loaded: set[str] = set()

    async def _may_hang(self, method: str) -> None:
        file = Path(os.environ.get(HANGS_VARIABLE, "/nowhere"))
        if file.is_file() and file.read_text() == f"{method} {self.spec.index}":
            file.unlink()
            await asyncio.sleep(3600)

    async def load_bucket(self, bucket: Bucket) -> None:
        await self._may_hang("load_bucket")
        self.counted["loads_beside_cache"] += "kv_cache" not in self.released
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
        await self._may_hang("release")
        self.released |= set(tags)

    async def resume(self, tags: Sequence[str]) -> None:
        self.released -= set(tags)

    def last_progress(self) -> float:
        return self.progress

    def stats(self) -> dict[str, float]:
        queries = {"prefix_cache_queries": self.counted["prompt_tokens"], "prefix_cache_hits": 0.0}
        return self.counted | queries | {"running": float(len(self.running)), "waiting": 0.0, "kv_cache_usage": 0.0}

    async def close(self) -> None:
        """Nothing was started."""
