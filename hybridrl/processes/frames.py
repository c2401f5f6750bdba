"""Frames: bytes with their length in front, the messages between the run and all of its child processes.

The run never waits inside a message of a process, which may have been stopped: its ends are `streams.FrameStream`.
"""

import select
import socket
import struct

HEADER = struct.Struct("!Q")
LARGEST = 1 << 30  # bytes of a message of a process that is not trusted


class MalformedMessage(Exception):
    """A process sent something that is not a message of the run's."""


def framed(data: bytes) -> bytes:
    """Return a message with its length in front."""
    return HEADER.pack(len(data)) + data


def length_in(header: bytes | bytearray, largest: int | None) -> int:
    """Return the length that a header announces.

    Args:
        header: the first `HEADER.size` bytes of a frame.
        largest: bytes of the largest message; None: any, from a process that is trusted.

    Raises:
        MalformedMessage: the message is longer.
    """
    length: int = HEADER.unpack(header)[0]
    if largest is not None and length > largest:
        raise MalformedMessage(f"a message of {length} bytes; the limit is {largest}")
    return length


class FrameConnection:
    """An end of a connection for code that blocks, as in a process without an event loop.

    Args:
        connection: a socket, or the descriptor of one. Programs that this process starts do not inherit it.
    """

    def __init__(self, connection: socket.socket | int) -> None:
        self.socket = socket.socket(fileno=connection) if isinstance(connection, int) else connection
        self.socket.setblocking(True)
        self.socket.set_inheritable(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        """Close this end. A process that was forked from this one closes only its own copy."""
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send a message, and wait until all of it is on its way.

        Raises:
            OSError: the other end is closed.
        """
        self.socket.sendall(framed(data))

    def receive(self, largest: int | None = None) -> bytearray:
        """Wait for the next message.

        Args:
            largest: bytes of the largest message; None: any.

        Raises:
            EOFError: the other end is closed.
            MalformedMessage: the message is longer.
        """
        return self._exactly(length_in(self._exactly(HEADER.size), largest))

    def arrives_within(self, seconds: float) -> bool:
        """Whether a message, or the end of the connection, arrives within this time."""
        poll = select.poll()  # select() refuses descriptors above 1023
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, end = memoryview(data), 0
        while end < count:
            try:
                size = self.socket.recv_into(view[end:])
            except ConnectionResetError:
                raise EOFError from None
            if not size:
                raise EOFError
            end += size
        return data
