"""Messages between the run and its server process: JSON with its length in front, because clients' data is in them."""

import asyncio
import json
import struct
from dataclasses import asdict
from typing import Any

from hybridrl.rollout.request import GUEST_PRIORITY, Completion, Request
from hybridrl.rollout.sampling import SamplingParams

_LENGTH = struct.Struct("<Q")
_LIMIT = 2**30


def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message."""
    body = json.dumps(message).encode()
    writer.write(_LENGTH.pack(len(body)) + body)


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message.

    Raises:
        asyncio.IncompleteReadError: the other process has ended.
        ValueError: it is no message.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _LIMIT:
        raise ValueError(f"a message of {length} bytes; the limit is {_LIMIT}")
    message = json.loads(await reader.readexactly(length))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def request_to_plain(request: Request) -> dict[str, Any]:
    """A request as JSON can hold it."""
    return {
        "id": request.id,
        "prompt_ids": request.prompt_ids,
        "sampling": asdict(request.sampling),
        "session": request.session,
    }


def request_from_plain(data: dict[str, Any]) -> Request:
    """A request of a client; whatever the server process says, training comes first.

    Raises:
        ValueError, TypeError, KeyError: it is no request.
    """
    sampling = SamplingParams(**{**data["sampling"], "stop": tuple(map(str, data["sampling"]["stop"]))})
    prompt_ids = [int(token) for token in data["prompt_ids"]]
    return Request(str(data["id"]), prompt_ids, sampling, str(data["session"]), GUEST_PRIORITY)


def completion_from_plain(data: dict[str, Any]) -> Completion:
    """The completion that `dataclasses.asdict` made plain."""
    return Completion(**{**data, "versions": [(version, tokens) for version, tokens in data["versions"]]})
