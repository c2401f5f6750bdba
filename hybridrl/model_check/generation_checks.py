"""Checks of inference engines against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import torch

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.model_check.check_rows import ModelCheckRow, checked
from hybridrl.model_check.training_checks import PROMPT, RESPONSE, ROWS, TOLERANCE, random_rows
from hybridrl.models import loading
from hybridrl.models.model_config import config_of
from hybridrl.registry import INFERENCE_ENGINES
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.sampling import SamplingParams


def check_generation(model: ModelConfig, engines: Sequence[str], started: Sequence[str]) -> Iterator[ModelCheckRow]:
    """Yield a row for each inference engine.

    Args:
        model: to generate with.
        engines: names of engines whose settings are checked.
        started: those that are started and compared, too.
    """
    for name in engines:
        yield checked(f"{name}: settings", lambda name=name: _accepted(model, name), refused="no")  # type: ignore[misc]
    for name in started:
        yield checked(f"{name}: greedy tokens", lambda name=name: _generated(model, name), refused="no")  # type: ignore[misc]


def _rollout_config(name: str) -> RolloutConfig:
    return RolloutConfig(name=name, prompt_length=PROMPT, response_length=RESPONSE, max_num_seqs=ROWS, dtype="float32")


def _accepted(model: ModelConfig, name: str) -> str:
    engine_class = INFERENCE_ENGINES.get(name)
    if hasattr(engine_class, "check"):
        engine_class.check(_rollout_config(name), model, False)
    return "nothing is refused"


def _generated(model: ModelConfig, name: str) -> str:
    """Compare the log-probabilities of greedy tokens with those of transformers for the same tokens."""
    config = config_of(model)
    tensors = random_rows(int(config.get_text_config().vocab_size), seed=1).batch
    real = tensors["attention_mask"][:, :PROMPT].bool()
    prompts = [tensors["prompts"][row][real[row]].tolist() for row in range(ROWS)]
    completions = asyncio.run(_completed(model, name, prompts))
    module = loading.load_language_model(model.path, config, torch.float32, model.trust_remote_code).eval()
    largest = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        if completion.error is not None:
            raise RuntimeError(completion.error)
        tokens = [int(token) for token in completion.token_ids]
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([prompt + tokens])).logits[0].float()
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        largest = max(largest, float((expected - torch.tensor(list(completion.log_probs))).abs().max()))
    text = f"log-probabilities of {sum(len(c.token_ids) for c in completions)} tokens differ by {largest:.1e}"
    if not largest <= TOLERANCE:
        raise RuntimeError(f"{text}, more than {TOLERANCE:.0e}")
    return text


async def _completed(model: ModelConfig, name: str, prompts: Sequence[list[int]]) -> list[Completion]:
    engine_class = INFERENCE_ENGINES.get(name)
    engine_class.check(_rollout_config(name), model, False)
    engine = engine_class(EngineSpec(_rollout_config(name), model, (), pad_token_id=0, load_weights=True))
    sampling = SamplingParams(do_sample=False, temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=RESPONSE)
    await engine.start()
    try:
        requests = [Request(str(number), prompt, sampling) for number, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))
    finally:
        await engine.close()
