"""The end of a connection for an event loop: it never waits inside a message, whatever the other process does."""

import asyncio
import socket

from hybridrl.processes.frames import HEADER, framed, length_in


class FrameStream:
    """Sends and receives messages on the running event loop.

    Args:
        reader, writer: of the connection; see `open`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, connection: socket.socket) -> "FrameStream":
        """Return the stream of a socket that is connected."""
        return cls(*await asyncio.open_unix_connection(sock=connection))

    def send(self, data: bytes) -> None:
        """Send a message, or keep what the process does not take yet. Its end is noticed on receiving."""
        if not self._writer.is_closing():
            self._writer.write(framed(data))

    async def receive(self, largest: int | None = None) -> bytes:
        """Return the next message.

        Args:
            largest: bytes of the largest message; None: any, from a process that is trusted.

        Raises:
            EOFError: the other end is closed.
            MalformedMessage: the message is longer.
        """
        try:
            header = await self._reader.readexactly(HEADER.size)
            return await self._reader.readexactly(length_in(header, largest))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def close(self) -> None:
        """Close this end at once; what the process has not taken yet is dropped."""
        self._writer.transport.abort()
