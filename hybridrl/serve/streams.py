"""Answers of the engine as they are complete, and the server-sent events that report them."""

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from hybridrl.rollout.request import Completion
from hybridrl.serve.dialects.dialect import CallContext, Dialect, event
from hybridrl.serve.pending import ClientGone, PendingRequests
from hybridrl.serve.replies import ReplyChoice
from hybridrl.serve.response_objects import ResponseBuilder
from hybridrl.serve.schema import ApiError

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 15.0  # proxies end a stream that is silent for longer than a minute


async def answered(pending: PendingRequests, timeout_s: float | None = None) -> list[tuple[int, Completion]]:
    """`pending.completed`, with the engine's errors as HTTP answers.

    Raises:
        ApiError: the engine refused the request, or it failed.
        ClientGone: the client has disconnected.
    """
    try:
        completed = await pending.completed(timeout_s)
    except ClientGone:
        raise
    except Exception as error:
        logger.exception("a request failed")
        raise ApiError(500, f"the engine failed: {type(error).__name__}: {error}", code="engine_error") from error
    for _, completion in completed:
        if completion.finish_reason == "error":
            raise ApiError(400, completion.error or "the engine refused the request", code="engine_refused")
    return completed


async def as_replies(pending: PendingRequests, replied: Callable[[int, Completion], Any]) -> AsyncGenerator[Any, None]:
    """Yield (index, reply) as soon as each is complete, and None after `_KEEP_ALIVE_S` seconds without one."""
    async with pending:
        while pending.pending:
            completed = await answered(pending, _KEEP_ALIVE_S)
            if not completed:
                yield None
            for index, completion in completed:
                yield index, await replied(index, completion)


async def as_stream(replies: Sequence[ReplyChoice]) -> AsyncGenerator[Any, None]:
    """Yield (index, reply) of stored answers."""
    for index, reply in enumerate(replies):
        yield index, reply


async def turn_events(
    dialect: Dialect, exchange: CallContext, stream: AsyncGenerator[Any, None]
) -> AsyncGenerator[str, None]:
    """Yield server-sent events: each choice as a whole, as soon as it is complete."""
    replies: dict[int, ReplyChoice] = {}
    try:
        for text in dialect.opening(exchange):
            yield text
        async with aclosing(stream):  # a stream that is given up ends what it waits for
            async for entry in stream:
                if entry is None:
                    yield dialect.keep_alive()
                    continue
                index, reply = entry
                replies[index] = reply
                for text in dialect.choice(exchange, index, reply):
                    yield text
        for text in dialect.closing(exchange, [replies[index] for index in sorted(replies)]):
            yield text
    except ApiError as error:  # the status has been sent, so that an event has to report the error
        for text in dialect.failed(exchange, error):
            yield text
    except ClientGone:
        return


async def text_events(
    pending: PendingRequests, answer: ResponseBuilder, noted: Callable[[int, Completion], Completion]
) -> AsyncGenerator[str, None]:
    """Server-sent events of `/v1/completions`."""
    completions: dict[int, Completion] = {}
    try:
        async with pending:
            while pending.pending:
                completed = await answered(pending, _KEEP_ALIVE_S)
                if not completed:
                    yield ": generating\n\n"
                for index, completion in completed:
                    completions[index] = noted(index, completion)
                    yield event(answer.chunk(index, completion))
        if answer.request.stream_options.get("include_usage"):
            yield event(answer.usage_chunk([completions[index] for index in sorted(completions)]))
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield event(error.body())
    except ClientGone:
        return
