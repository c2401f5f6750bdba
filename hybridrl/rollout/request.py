"""Requests to an inference engine, and its completions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

import numpy as np

from hybridrl.rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from hybridrl.rollout.request_images import PromptImages

FinishReason = Literal["stop", "length", "abort", "error"]
#: the parts of an engine's memory that can be released and resumed
MEMORY_TAGS = ("weights", "kv_cache")
#: training comes before the clients of the HTTP server
TRAINING_PRIORITY, CLIENT_PRIORITY = 0, 1
_numbers = itertools.count()


#: what an engine is started for: responses, one score per prompt, or log-probabilities of given tokens
Task = Literal["generate", "score", "read"]
GREEDY_TOKEN = SamplingParams(do_sample=False, temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=1)


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """The values that an engine computes from a prompt in place of a response.

    Attributes:
        first: with the task `read`, the first token whose log-probability is returned; at least 1.
        top: with the task `read`, the number of likeliest tokens returned at each of these positions.
    """

    first: int = 1
    top: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The results of a `PrefillRequest`; t tokens from `PrefillRequest.first` on, K likeliest tokens.

    Attributes:
        score: of a classifier with one label, before any activation.
        log_probs: float32 [t], of the prompt's own tokens.
        top_log_probs, top_ids: float32 and int64 [t, K], the likeliest first.
    """

    score: float | None = None
    log_probs: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None
    top_ids: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one response, or for what is to be read of a prompt.

    Attributes:
        id: unique among the requests of a run.
        prompt_ids: the prompt's tokens, without padding.
        sampling: with this request's `max_new_tokens`. A response that reaches the engine's length ends with "length".
        session: requests of one session share a prefix and go to the same replica.
        priority: requests that wait for a replica are served in this order, the lowest first. Those that wait inside an
            engine are served so with `rollout.scheduling_policy=priority`, and else in the order of their arrival.
        prefill: the values to compute in place of a response; None: a response is generated.
        images: of the prompt, for a vision-language model.
        routing: whether to return the experts of its tokens; needs an engine with `EngineSpec.records_routing`.
    """

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    session: str = ""
    priority: int = TRAINING_PRIORITY
    prefill: PrefillRequest | None = None
    images: PromptImages | None = None
    routing: bool = False


@dataclass(slots=True)
class Completion:
    """The result of a request.

    Attributes:
        id: the request's.
        token_ids: generated tokens, the EOS included.
        log_probs: of each token, under the distribution that it was drawn from (temperature, top-k and top-p applied);
            of a greedy token, under the untruncated distribution at temperature 1.
        finish_reason: "stop" (EOS or a stop string), "length", "abort" (the tokens so far), "error".
        versions: (version of the weights, tokens that they generated), in order; they add up to all tokens.
        error: the engine's message where `finish_reason` is "error".
        cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        prompt_logprobs: the result of a request with a `PrefillRequest`; it has no tokens.
        image_digest: fingerprint of the images that the engine was given; "" for none.
        routed_experts: integers [t, L, K], the K experts that the first t tokens of prompt and response used in the L
            layers with experts: all but the last, which is sampled and not computed. Of a request that was aborted
            t may be smaller. None if they were not requested.
    """

    id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    versions: list[tuple[int, int]] = field(default_factory=list)
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    image_digest: str = ""
    routed_experts: np.ndarray | None = None


@dataclass(slots=True)
class CompletionArrays:
    """A completion as it leaves a replica: the same fields as `Completion`, with tokens in arrays.

    Attributes:
        token_ids: int32 [t].
        log_probs: float32 [t].
    """

    id: str
    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason
    versions: list[tuple[int, int]] = field(default_factory=list)
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    image_digest: str = ""
    routed_experts: np.ndarray | None = None

    @classmethod
    def of(cls, completion: Completion) -> CompletionArrays:
        """Convert what an engine has returned."""
        values = {each.name: getattr(completion, each.name) for each in fields(completion)}
        values["token_ids"] = np.asarray(completion.token_ids, dtype=np.int32)
        values["log_probs"] = np.asarray(completion.log_probs, dtype=np.float32)
        return cls(**values)

    @classmethod
    def empty(cls, id: str, finish_reason: FinishReason, error: str | None = None) -> CompletionArrays:
        """A completion without tokens."""
        return cls(id, np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32), finish_reason, error=error)

    def lists(self) -> Completion:
        """Convert to lists of Python numbers, which agents, servers and judges read."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["token_ids"], values["log_probs"] = self.token_ids.tolist(), self.log_probs.tolist()
        return Completion(**values)


def request_number() -> int:
    """A number that no other request of this process has."""
    return next(_numbers)
