"""A real engine of one process, for tests of what stands around engines: Hugging Face's module, a token at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.hybrid_engine.messages import Bucket
from hybridrl.models.facts import config_of, eos_token_ids, tokenizer_of
from hybridrl.rollout.engine import Completion, EngineSpec, InferenceEngine, Request
from hybridrl.rollout.sampling import draw


@dataclass
class _Row:
    request: Request
    random: np.random.Generator
    future: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class TinyEngine(InferenceEngine):
    """Computes every row anew for each token; weights are the checkpoint's, as version 3."""

    name = "tiny"

    @classmethod
    def of(cls, model: Path, **rollout: object) -> TinyEngine:
        config, settings = ModelConfig(path=str(model)), RolloutConfig(**rollout)  # type: ignore[arg-type]
        tokenizer = tokenizer_of(config)
        eos = tuple(eos_token_ids(model, config_of(config), tokenizer))
        return cls(EngineSpec(settings, config, eos, tokenizer.pad_token_id, load_weights=True))

    @classmethod
    def check(cls, config: RolloutConfig, model: ModelConfig) -> None:
        pass

    async def start(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.spec.model.path, dtype=torch.float32).eval()
        self.tokenizer = tokenizer_of(self.spec.model)
        self.random = np.random.default_rng(self.spec.config.seed)
        self.rows: dict[str, _Row] = {}
        self.aborted: list[str] = []
        self.most_running = 0
        self.counted = {"generated_tokens": 0.0, "prompt_tokens": 0.0}
        self._progress = time.monotonic()
        self._loop = asyncio.ensure_future(self._decode())

    async def generate(self, request: Request) -> Completion:
        if len(request.prompt_ids) >= self.spec.max_model_len:
            return Completion(request.id, [], [], "error", error="prompt is too long")
        seed = request.sampling.seed
        random = self.random if seed is None else np.random.default_rng(seed)
        row = _Row(request, random, asyncio.get_running_loop().create_future())
        self.rows[request.id] = row
        self.counted["prompt_tokens"] += len(request.prompt_ids)
        return await row.future

    async def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            if id in self.rows:
                self.aborted.append(id)
                self._end(self.rows[id], "abort")

    async def _decode(self) -> None:
        while True:
            await asyncio.sleep(0 if self.rows else 0.005)
            self.most_running = max(self.most_running, len(self.rows))
            for row in list(self.rows.values()):
                if row.request.id in self.rows:
                    self._step(row)
                    await asyncio.sleep(0)

    @torch.no_grad()
    def _step(self, row: _Row) -> None:
        sampling = row.request.sampling
        logits = self.model(torch.tensor([row.request.prompt_ids + row.tokens]), logits_to_keep=1).logits[:, -1]
        token, log_prob = draw(logits, sampling, torch.tensor([row.random.random()], dtype=torch.float64))
        row.tokens.append(int(token))
        row.log_probs.append(float(log_prob))
        self.counted["generated_tokens"] += 1
        self._progress = time.monotonic()
        text = self.tokenizer.decode(row.tokens)
        room = self.spec.max_model_len - len(row.request.prompt_ids)
        ended = int(token) in self.spec.eos_token_ids and not sampling.ignore_eos
        if ended or any(stop in text for stop in sampling.stop):
            self._end(row, "stop")
        elif len(row.tokens) >= min(sampling.max_new_tokens, room):
            self._end(row, "length")

    def _end(self, row: _Row, reason: str) -> None:
        del self.rows[row.request.id]
        if not row.future.done():
            completion = Completion(row.request.id, row.tokens, row.log_probs, reason)  # type: ignore[arg-type]
            completion.versions = [(3, len(row.tokens))]
            row.future.set_result(completion)

    def last_progress(self) -> float:
        return self._progress

    def stats(self) -> dict[str, float]:
        queries = {"prefix_cache_queries": self.counted["prompt_tokens"], "prefix_cache_hits": 0.0}
        return self.counted | queries | {"running": float(len(self.rows)), "waiting": 0.0, "kv_cache_usage": 0.0}

    async def begin_update(self) -> None:
        raise NotImplementedError

    async def load_bucket(self, bucket: Bucket) -> None:
        raise NotImplementedError

    async def end_update(self) -> None:
        raise NotImplementedError

    async def release(self, tags: Sequence[str]) -> None:
        raise NotImplementedError

    async def resume(self, tags: Sequence[str]) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self._loop.cancel()
