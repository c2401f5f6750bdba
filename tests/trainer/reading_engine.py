"""The plain engine as a server of fixed models: scores and log-probabilities by transformers, one text at a time."""

import asyncio
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from hybridrl.rollout.inference_engine import register_inference_engine
from hybridrl.rollout.request import Completion, PromptLogprobs, Request

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from plain_engine import PlainEngine

#: the first replica that finds this file in its model's folder removes it and ends in the middle of a text
DIES = "dies"


@register_inference_engine("reading", scores=True, reads=True)
class ReadingEngine(PlainEngine):
    """Reads with a Hugging Face model."""

    async def start(self) -> None:
        await super().start()
        if self.spec.task == "score":
            self.model = AutoModelForSequenceClassification.from_pretrained(
                self.spec.model.path, dtype=torch.float32
            ).eval()

    async def read(self, request: Request) -> Completion:
        assert not self.released, "reads without its memory"
        if len(request.prompt_ids) > self.spec.max_model_len:
            return Completion(request.id, [], [], "error", error="too long")
        self.running[request.id] = []
        try:
            await asyncio.sleep(0.001)
            dies = Path(self.spec.model.path) / DIES
            if request.id != "warm-up" and dies.is_file():
                dies.unlink()
                os._exit(1)
            return self._found(request)
        finally:
            del self.running[request.id]

    def _found(self, request: Request) -> Completion:
        ids = torch.tensor(request.prompt_ids)
        with torch.no_grad():
            if self.spec.task == "score":
                hidden = self.model.model(ids[None]).last_hidden_state[0, -1]
                return Completion(
                    request.id, [], [], "stop", prompt_logprobs=PromptLogprobs(score=float(self.model.score(hidden)))
                )
            logits = self.model(ids[None]).logits[0, :-1] / self.spec.logits_temperature
        assert request.prefill is not None
        every, first = logits.log_softmax(-1), request.prefill.first - 1
        tops = every[first:].topk(request.prefill.top)
        found = PromptLogprobs(
            log_probs=every.gather(1, ids[1:, None])[first:, 0].numpy(),
            top_log_probs=tops.values.numpy(),
            top_ids=tops.indices.numpy(),
        )
        return Completion(request.id, [], [], "stop", prompt_logprobs=found)
