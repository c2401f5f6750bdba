"""OpenAI's Chat Completions."""

from collections.abc import Sequence
from typing import Any

from hybridrl.serve.dialects.dialect import CallContext, Dialect, event
from hybridrl.serve.replies import ReplyChoice
from hybridrl.serve.response_objects import ResponseBuilder
from hybridrl.serve.schema import ApiError


class ChatDialect(Dialect):
    """`/v1/chat/completions`; a choice of a stream is sent as a whole, as soon as it is complete."""

    id_prefix = "chatcmpl"

    def whole(self, exchange: CallContext, replies: Sequence[ReplyChoice]) -> dict[str, Any]:
        return _answer(exchange, dict(enumerate(replies))).whole([reply.completion for reply in replies])

    def opening(self, exchange: CallContext) -> list[str]:
        return [event(chunk) for chunk in _answer(exchange, {}).opening()]

    def choice(self, exchange: CallContext, index: int, reply: ReplyChoice) -> list[str]:
        return [event(_answer(exchange, {index: reply}).chunk(index, reply.completion))]

    def closing(self, exchange: CallContext, replies: Sequence[ReplyChoice]) -> list[str]:
        last = []
        if exchange.request.stream_options.get("include_usage"):
            completions = [reply.completion for reply in replies]
            last.append(event(_answer(exchange, {}).usage_chunk(completions)))
        return [*last, "data: [DONE]\n\n"]

    def failed(self, exchange: CallContext, error: ApiError) -> list[str]:
        return [event(error.body())]


def _answer(exchange: CallContext, replies: dict[int, ReplyChoice]) -> ResponseBuilder:
    return ResponseBuilder(
        exchange.id,
        exchange.model,
        exchange.tokenizer,
        exchange.request,
        [exchange.prompt_ids],
        replies,
        exchange.created,
    )
