"""vLLM as a server of fixed models: scores of a classifier, and log-probabilities of given tokens."""

from typing import Any

import numpy as np

from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.request import Completion, PrefillRequest, PromptLogprobs, Request


def arguments(spec: EngineSpec) -> dict[str, Any]:
    """vLLM's further arguments for the task of an engine."""
    if spec.task == "score":
        from vllm.config import PoolerConfig

        pooler = PoolerConfig(seq_pooling_type="LAST", use_activation=False)
        return {"runner": "pooling", "convert": "classify", "pooler_config": pooler}
    return {"max_logprobs": max(spec.top, 1)} if spec.task == "read" else {}


async def score(engine: Any, request: Request) -> Completion:
    """Return the classifier's output at the last token of the prompt, without an activation."""
    from vllm import PoolingParams

    last = None
    params = PoolingParams(task="classify", use_activation=False)
    async for output in engine.encode(
        {"prompt_token_ids": request.prompt_ids}, params, request.id, priority=request.priority
    ):
        last = output
    values = None if last is None else last.outputs.data
    if values is None or not values.numel():
        return Completion(request.id, [], [], "abort")
    return Completion(request.id, [], [], "stop", prompt_logprobs=PromptLogprobs(score=float(values.flatten()[0])))


async def read(engine: Any, request: Request) -> Completion:
    """Return log-probabilities of the prompt; vLLM generates one more token, which is dropped."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    assert request.prefill is not None
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=request.prefill.top,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    last = None
    async for output in engine.generate(
        {"prompt_token_ids": request.prompt_ids}, params, request.id, priority=request.priority
    ):
        last = output
    if last is None or last.prompt_logprobs is None or last.outputs[0].finish_reason == "abort":
        return Completion(request.id, [], [], "abort")
    return Completion(
        request.id, [], [], "stop", prompt_logprobs=_prompt_logprobs(last.prompt_logprobs, request.prefill)
    )


def _prompt_logprobs(logprobs: Any, prefill: PrefillRequest) -> PromptLogprobs:
    """Read vLLM's flat lists: for each token but the first its own entry, and then the most likely ones."""
    positions = range(prefill.first, len(logprobs.start_indices))
    width = 1 + prefill.top

    def table(values: list[Any], dtype: type) -> np.ndarray:
        rows = [values[logprobs.start_indices[at] : logprobs.start_indices[at] + width] for at in positions]
        return np.asarray(rows, dtype=dtype).reshape(len(positions), width)

    log_probs = table(logprobs.logprobs, np.float32)
    return PromptLogprobs(
        log_probs=log_probs[:, 0], top_log_probs=log_probs[:, 1:], top_ids=table(logprobs.token_ids, np.int64)[:, 1:]
    )
