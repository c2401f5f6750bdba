"""Messages between a replica and SGLang's process: pickles with their length in front."""

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
class Status:
    """State of SGLang that the replica needs at any time.

    Attributes:
        last_output: when (`time.monotonic`, one clock per machine) SGLang last sent something.
        gauges: `running`, `waiting`, `kv_cache_usage` of `InferenceEngine.stats`.
    """

    last_output: float
    gauges: dict[str, float] = field(default_factory=dict)


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Send a message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(body)) + body)


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message.

    Raises:
        asyncio.IncompleteReadError: the other process has ended.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def remove(patterns: Iterable[str]) -> None:
    """Remove the files that match; the process that ends the other does so."""
    for pattern in patterns:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                os.unlink(path)
