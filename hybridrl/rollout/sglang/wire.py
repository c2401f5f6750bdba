"""What a replica and the process that SGLang has for itself share: messages, pickles with their length before them."""

import asyncio
import contextlib
import glob
import os
import pickle
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_LENGTH = struct.Struct("<Q")


@dataclass
class News:
    """What the replica wants to know at any time.

    Attributes:
        heard: when (`time.monotonic`, one clock for a machine) SGLang last said something.
        gauges: `running`, `waiting`, `kv_cache_usage` of `InferenceEngine.stats`.
    """

    heard: float
    gauges: dict[str, float] = field(default_factory=dict)


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Put a message on its way."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(body)) + body)


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message.

    Raises:
        asyncio.IncompleteReadError: the other side is gone.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def remove(patterns: Iterable[str]) -> None:
    """Remove the files that fit; whichever side ends the other does so."""
    for pattern in patterns:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                os.unlink(path)
