"""Completions that come in several parts, because generating was interrupted and went on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.stop_strings import StopStrings


def rest_of(request: Request, so_far: Completion) -> Request:
    """The rest of a request that has some tokens already.

    With a JSON schema it is the whole request: a grammar begins with its first token.
    """
    done = len(so_far.token_ids)
    if not done or request.sampling.json_schema is not None:
        return request
    sampling = request.sampling
    seed = None if sampling.seed is None else (sampling.seed + done) % 2**63
    sampling = replace(sampling, max_new_tokens=sampling.max_new_tokens - done, seed=seed)
    return replace(request, prompt_ids=request.prompt_ids + so_far.token_ids, sampling=sampling)


def add_part(answer: Completion, part: Completion, request: Request, tokenizer: Callable[[], Any]) -> None:
    """Add what an engine generated for `rest_of(request, answer)` to an answer.

    Args:
        answer: what there is so far; changed.
        part: with its `versions`.
        tokenizer: finds stop strings that an interruption divided.
    """
    if request.sampling.json_schema is not None:
        answer.token_ids, answer.log_probs, answer.versions, answer.routed_experts = [], [], [], None
    answer.token_ids += part.token_ids
    answer.log_probs += part.log_probs
    answer.cached_tokens += part.cached_tokens
    answer.versions += part.versions
    answer.routed_experts = extended(answer.routed_experts, part.routed_experts)
    answer.finish_reason, answer.error = part.finish_reason, part.error
    answer.image_digest = answer.image_digest or part.image_digest
    _cut_at_stop(answer, request.sampling.stop, len(part.token_ids), tokenizer)


def _cut_at_stop(answer: Completion, stop: tuple[str, ...], new: int, tokenizer: Callable[[], Any]) -> None:
    """End a completion at a stop string that the engine missed, because an interruption divided it."""
    whole = new == len(answer.token_ids) and answer.finish_reason != "abort"
    if not stop or not new or whole:
        return
    end = StopStrings(tokenizer(), stop).first_end(answer.token_ids, len(answer.token_ids) - new)
    if end is None:
        return
    surplus = len(answer.token_ids) - end
    del answer.token_ids[end:], answer.log_probs[end:]
    while surplus:
        version, count = answer.versions.pop()
        if count > surplus:
            answer.versions.append((version, count - surplus))
        surplus -= min(count, surplus)
    answer.finish_reason = "stop"


def extended(previous: np.ndarray | None, experts: np.ndarray | None) -> np.ndarray | None:
    """Return the experts of tokens computed in parts: for each token those with which the next token was sampled.

    Args:
        previous: of the parts so far, [t, L, K]: of an interrupted request, or of a session's turns.
        experts: of the next part, whose prompt is these parts; the engine may have computed them with other weights.
    """
    if previous is None or experts is None:
        return experts if previous is None else previous
    return np.concatenate([previous, experts[len(previous) :]])
