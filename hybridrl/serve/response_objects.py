"""Completions as OpenAI's objects, with token ids, log-probabilities and the weights' version added to them."""

import base64
import io
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridrl.rollout.request import Completion
from hybridrl.rollout.trace import spans
from hybridrl.serve.replies import ReplyChoice, text_of
from hybridrl.serve.schema import ChatRequest, CompletionRequest, GenerateRequest

_LOWEST = -9999.0  # JSON has no infinity


@dataclass
class ResponseBuilder:
    """Builds the response of one call.

    Attributes:
        id, model: as the client sees them.
        tokenizer: decodes tokens.
        request: its body.
        prompts: token ids of each prompt; choice i belongs to prompt `i // n`.
        replies: of a chat, the choices as they are shown; set before they are used.
    """

    id: str
    model: str
    tokenizer: Any
    request: ChatRequest | CompletionRequest
    prompts: Sequence[list[int]]
    replies: dict[int, ReplyChoice] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer of a call that is not streamed."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        head = self._head("chat.completion" if self.chat else "text_completion", completions)
        if self.chat and self.request.return_token_ids:
            head["prompt_token_ids"] = self.prompts[0]
        return head | {"choices": choices, "usage": self.usage(completions)}

    def opening(self) -> list[dict[str, Any]]:
        """The first chunks of a stream: the role of each choice (chat only)."""
        if not self.chat:
            return []
        head = self._head("chat.completion.chunk", ())
        if self.request.return_token_ids:
            head["prompt_token_ids"] = self.prompts[0]
        delta = {"role": "assistant", "content": ""}
        return [
            head | {"choices": [{"index": index, "delta": delta, "finish_reason": None}]}
            for index in range(self.request.n)
        ]

    def chunk(self, index: int, completion: Completion) -> dict[str, Any]:
        """A whole choice as one chunk of a stream."""
        choice = self._choice(index, completion)
        if self.chat:
            delta = {name: value for name, value in choice.pop("message").items() if name != "role"}
            for number, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = number
            choice["delta"] = delta
        return self._head("chat.completion.chunk" if self.chat else "text_completion", [completion]) | {
            "choices": [choice]
        }

    def usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The last chunk of a stream with `stream_options.include_usage`."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._head(kind, completions) | {"choices": [], "usage": self.usage(completions)}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        prompt = sum(map(len, self.prompts))
        generated = sum(len(completion.token_ids) for completion in completions)
        cached = [completion.cached_tokens for completion in completions]
        first_of_prompt = cached[:: self.request.n]  # a prompt is counted once, and so is what of it was cached
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(first_of_prompt)},
        }

    def _head(self, kind: str, completions: Sequence[Completion]) -> dict[str, Any]:
        versions = [version for completion in completions for version, _ in completion.versions]
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "weights_version": max(versions, default=None),
        }

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        request = self.request
        ids = completion.token_ids
        choice: dict[str, Any] = {"index": index, "finish_reason": completion.finish_reason, "stop_reason": None}
        if isinstance(request, ChatRequest):
            reply = self.replies[index]
            choice["finish_reason"] = reply.finish_reason
            choice["message"] = reply.message()
            choice["logprobs"] = {"content": self._chat_logprobs(completion)} if request.logprobs else None
            if reply.malformed:
                choice["malformed_tool_calls"] = [
                    {"text": call.text, "reason": call.reason} for call in reply.malformed
                ]
        else:
            choice["text"] = text_of(self.tokenizer, completion, request)
            choice["logprobs"] = None if request.logprobs is None else self._text_logprobs(completion)
            if request.return_token_ids:
                choice["prompt_token_ids"] = self.prompts[index // request.n]
        if request.return_token_ids:
            choice["token_ids"] = ids
            choice["token_logprobs"] = [_finite(value) for value in completion.log_probs]
        choice["weights_versions"] = [list(pair) for pair in completion.versions]
        return choice

    def _chat_logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        entries = []
        for token, value in zip(self._tokens(completion), completion.log_probs, strict=True):
            entry = {"token": token, "logprob": _finite(value), "bytes": list(token.encode())}
            entries.append(entry | {"top_logprobs": [entry] if self.request.top_logprobs else []})  # type: ignore[union-attr]
        return entries

    def _text_logprobs(self, completion: Completion) -> dict[str, Any]:
        tokens = self._tokens(completion)
        values = [_finite(value) for value in completion.log_probs]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        top = [{token: value} for token, value in zip(tokens, values, strict=True)] if self.request.logprobs else None
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets[:-1]}

    def _tokens(self, completion: Completion) -> list[str]:
        return [self.tokenizer.decode([token]) for token in completion.token_ids]


def answer_in_tokens(
    request: GenerateRequest, id: str, model: str, prompt: list[int], completions: Sequence[Completion]
) -> dict[str, Any]:
    """The answer of `/inference/v1/generate`: token ids, their log-probabilities, and the weights that made them.

    `routed_experts` is null unless the run records them.
    """
    generated = sum(len(completion.token_ids) for completion in completions)
    choices = []
    for index, completion in enumerate(completions):
        pairs = zip(completion.token_ids, map(_finite, completion.log_probs), strict=True)
        entries: list[dict[str, Any]] = [{"token_id": token, "logprob": value, "rank": None} for token, value in pairs]
        content = [entry | {"top_logprobs": [entry] if request.logprobs else []} for entry in entries]
        choices.append(
            {
                "index": index,
                "token_ids": completion.token_ids,
                "logprobs": None if request.logprobs is None else {"content": content},
                "finish_reason": completion.finish_reason,
                "stop_reason": None,
                "weight_versions": spans(completion.versions),
                "routed_experts": _as_npy(completion.routed_experts),
            }
        )
    return {
        "request_id": id,
        "output_mode": "tokens",
        "model": model,
        "created": int(time.time()),
        "choices": choices,
        "prompt_token_ids": prompt if request.return_token_ids else None,
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": generated,
            "total_tokens": len(prompt) + generated,
            "prompt_tokens_details": {"cached_tokens": completions[0].cached_tokens},
        },
    }


def _as_npy(experts: np.ndarray | None) -> str | None:
    """The experts of tokens as vLLM's servers return them: a `.npy` file in base64."""
    if experts is None:
        return None
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST
