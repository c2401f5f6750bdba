"""Calls between the run and a child process, in either direction, over one connection."""

import asyncio
import inspect
import itertools
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridrl.processes.frame_stream import FrameStream
from hybridrl.processes.frames import HEADER, LARGEST, MalformedMessage

_BYTES = "\0bytes"  # the key of what stands for bytes in JSON


@dataclass(frozen=True)
class Codec:
    """Makes bytes of messages, and messages of bytes.

    Attributes:
        encode, decode: a dict to bytes and back; `decode` raises `MalformedMessage`.
        largest: bytes of a message; None: any.
    """

    encode: Callable[[dict[str, Any]], bytes]
    decode: Callable[[bytes], dict[str, Any]]
    largest: int | None


def _encode_json(message: dict[str, Any]) -> bytes:
    parts: list[bytes] = []

    def stand_in(value: Any) -> dict[str, int]:
        if not isinstance(value, bytes):
            raise TypeError(f"{type(value).__name__} is not a value of JSON, or bytes")
        parts.append(value)
        return {_BYTES: len(value)}

    text = json.dumps(message, default=stand_in).encode()
    return b"".join([HEADER.pack(len(text)), text, *parts])


def _decode_json(data: bytes) -> dict[str, Any]:
    end = HEADER.size

    def with_bytes(value: dict[str, Any]) -> Any:
        nonlocal end
        if value.keys() != {_BYTES}:
            return value
        length = int(value[_BYTES])
        begin, end = end, end + length
        if length < 0 or end > len(data):
            raise ValueError("bytes beyond the end of the message")
        return data[begin:end]

    try:
        end += HEADER.unpack_from(data)[0]
        message = json.loads(data[HEADER.size : end], object_hook=with_bytes)
    except Exception as error:  # the process may send anything
        raise MalformedMessage(f"{type(error).__name__}: {error}") from None
    if not isinstance(message, dict):
        raise MalformedMessage("a message that is not an object")
    return message


#: of a process that is not trusted: JSON, with bytes after the text; nothing of it is executed
JSON = Codec(_encode_json, _decode_json, LARGEST)
#: between processes that run nothing but the library
PICKLE = Codec(partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL), pickle.loads, None)


class Peer:
    """One of the two ends of a connection whose processes call each other's methods.

    Args:
        stream: the connection.
        codec: how messages are written.
        methods: those that the other process may call, by name. Those that it calls by `tell` run at once, in the order
            of the messages; the others are answered beside each other.
        failure: makes the exception of a call that failed in the other process, from its text.
    """

    def __init__(
        self,
        stream: FrameStream,
        codec: Codec,
        methods: Mapping[str, Callable[..., Any]],
        failure: Callable[[str], Exception],
    ) -> None:
        self._stream, self._codec, self._methods, self._failure = stream, codec, methods, failure
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the other process; returns its value.

        Raises:
            Exception: the method failed there, as `failure` makes it, or what `fail` was given.
        """
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"call": number, "method": method, "arguments": arguments})
            return await answer
        finally:
            self._calls.pop(number, None)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the other process that returns nothing, without waiting for its end."""
        self._send({"call": None, "method": method, "arguments": arguments})

    async def serve(self) -> None:
        """Answer the calls of the other process, and take its answers.

        Raises:
            EOFError: the connection is closed.
            MalformedMessage: the other process sent something else than a message.
        """
        while True:
            message = self._codec.decode(await self._stream.receive(self._codec.largest))
            try:
                if "method" in message:
                    self._called(message["call"], self._methods[message["method"]], message["arguments"])
                else:
                    self._answered(message["answer"], message["value"], message["error"])
            except Exception as error:  # of what the message holds, for example an image that is none
                raise MalformedMessage(f"{type(error).__name__}: {error}") from error

    def fail(self, error: Exception) -> None:
        """Have all calls fail, those that wait and those to come."""
        self._error = self._error or error
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._error)

    async def finish(self, seconds: float = 0.0) -> None:
        """Wait for the calls of the other process that are being answered, and cancel what is not ready in time."""
        if self._answering:
            await asyncio.wait(self._answering, timeout=seconds)
        for task in self._answering:
            task.cancel()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._stream.send(self._codec.encode(message))

    def _called(self, number: int | None, method: Callable[..., Any], arguments: Any) -> None:
        if number is None:
            method(*arguments)
            return
        task = asyncio.get_running_loop().create_task(self._answer(number, method, arguments))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, number: int, method: Callable[..., Any], arguments: Any) -> None:
        try:
            value = method(*arguments)
            value = await value if inspect.isawaitable(value) else value
            data = self._codec.encode({"answer": number, "value": value, "error": None})
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            data = self._codec.encode({"answer": number, "value": None, "error": text})
        self._stream.send(data)

    def _answered(self, number: int, value: Any, error: str | None) -> None:
        answer = self._calls.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(self._failure(error))
