"""The interface of a dialect, which translates requests into inner ones, and replies into an answer or events."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hybridrl.serve.replies import ReplyChoice
from hybridrl.serve.schema import ApiError, ChatRequest


@dataclass(frozen=True)
class CallContext:
    """One call, as its answer needs it.

    Attributes:
        id: of the answer.
        model: what the client called the model.
        tokenizer: decodes tokens.
        request: the inner request.
        prompt_ids: the tokens of the conversation.
    """

    id: str
    model: str
    tokenizer: Any
    request: ChatRequest
    prompt_ids: list[int]
    created: int = field(default_factory=lambda: int(time.time()))

    def generated(self, replies: Sequence[ReplyChoice]) -> int:
        """Tokens of all replies."""
        return sum(len(reply.completion.token_ids) for reply in replies)

    def cached(self, replies: Sequence[ReplyChoice]) -> int:
        """Tokens of the prompt that an engine had in its cache."""
        return replies[0].completion.cached_tokens if replies else 0


class Dialect(ABC):
    """One API for conversations.

    Attributes:
        id_prefix: ids of answers begin with it.
    """

    id_prefix: ClassVar[str]

    @abstractmethod
    def whole(self, exchange: CallContext, replies: Sequence[ReplyChoice]) -> dict[str, Any]:
        """The answer to a request without `stream`."""

    @abstractmethod
    def opening(self, exchange: CallContext) -> list[str]:
        """The first server-sent events."""

    @abstractmethod
    def choice(self, exchange: CallContext, index: int, reply: ReplyChoice) -> list[str]:
        """The events of a choice."""

    @abstractmethod
    def closing(self, exchange: CallContext, replies: Sequence[ReplyChoice]) -> list[str]:
        """The last events."""

    @abstractmethod
    def failed(self, exchange: CallContext, error: ApiError) -> list[str]:
        """The event of an error after the first event."""

    def keep_alive(self) -> str:
        """The event that is sent while the model generates: a comment, which clients skip."""
        return ": generating\n\n"


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """A server-sent event."""
    text = f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
    return text if name is None else f"event: {name}\n{text}"
