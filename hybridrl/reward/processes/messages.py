"""What the pool and its processes send each other.

Samples go to a process pickled. What comes back is JSON of a fixed form, checked on arrival
(`hybridrl.utils.plain_results`): a reward function cannot have the run execute anything.

Imported by the pool's processes, so it must stay light: no torch, no numpy.
"""

import dataclasses
import json
import math
import pickle
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.signature import RewardCall
from hybridrl.utils.plain_results import HEADER, LARGEST, MalformedMessage, Result, is_number

_READ = 1 << 20


@dataclass(frozen=True)
class Ready:
    """The function has been loaded.

    Attributes:
        how: how it is called.
        is_async: it takes any number of samples at once.
        label: its name and file.
        pid: the process that it runs in.
    """

    how: RewardCall
    is_async: bool
    label: str
    pid: int


@dataclass(frozen=True)
class Failed:
    """The function cannot be loaded, and why."""

    message: str


@dataclass(frozen=True)
class JobResults:
    """The results of one job: one per sample; a job that failed as a whole has a single one.

    Attributes:
        number: the job's.
        results: its results.
        seconds: how long the call took.
    """

    number: int
    results: list[Result]
    seconds: float


Message = Ready | Failed | list[JobResults]


def encode(message: Message) -> bytes:
    """Return a message to the pool as bytes."""
    if isinstance(message, Ready):
        return json.dumps({"ready": dataclasses.asdict(message)}).encode()
    if isinstance(message, Failed):
        return json.dumps({"failed": message.message}).encode()
    answers = [[one.number, one.seconds, [result.plain() for result in one.results]] for one in message]
    return json.dumps({"answers": answers}).encode()


def decode(data: bytes) -> Message:
    """Return the message that a process sent.

    Raises:
        MalformedMessage: it is none.
    """
    try:
        fields = json.loads(data)
        if "ready" in fields:
            return _ready(fields["ready"])
        if "failed" in fields:
            return Failed(str(fields["failed"]))
        return [_answer(*fields["answers"][number]) for number in range(len(fields["answers"]))]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MalformedMessage(f"{type(error).__name__}: {error}") from None


def _ready(fields: dict[str, Any]) -> Ready:
    how = fields["how"]
    if how["form"] not in ("sample", "batch"):
        raise ValueError(f"form {how['form']!r}")
    names = ("arguments", "columns", "optional", "positional", "guessed", "truths")
    lists: dict[str, Any] = {name: tuple(map(str, how[name])) for name in names}
    lists["renamed"] = tuple((str(argument), str(parameter)) for argument, parameter in how["renamed"])
    flags = {name: bool(how[name]) for name in ("all_columns", "may_abstain")}
    call = RewardCall(how["form"], **(lists | flags))
    return Ready(call, bool(fields["is_async"]), str(fields["label"]), int(fields["pid"]))


def _answer(number: Any, seconds: Any, results: Any) -> JobResults:
    if not isinstance(number, int) or not is_number(seconds) or not isinstance(results, list) or not results:
        raise ValueError("an answer without number, seconds or results")
    return JobResults(number, [Result.of_plain(*one) for one in results], float(seconds))


def pickled(value: Any, label: str) -> bytes:
    """Return a value as it is sent to a process.

    Args:
        value: what to send.
        label: the reward function, for the message.

    Raises:
        RewardError: it cannot be pickled.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # a user's object may raise anything
        raise RewardError(
            f"{label} runs in a process of its own, and its arguments cannot be sent there ({error}). Data sources, "
            "ground truths, extra_info, columns and reward_kwargs must be plain values: numbers, text, lists, dicts."
        ) from error


class Channel:
    """The pool's end of a socket. Nothing here waits for the process, which may have been stopped.

    Attributes:
        closed: the other end is closed.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._out = bytearray()
        self._in = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def waits_to_write(self) -> bool:
        """Whether something is left to write."""
        return bool(self._out) and not self.closed

    def send(self, data: bytes) -> None:
        """Queue a message, and write as much as the process takes."""
        self._out += HEADER.pack(len(data)) + data
        self.write()

    def write(self) -> None:
        """Write what is queued, as far as possible."""
        try:
            while self._out and not self.closed:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError:  # `read` finds the end, after what arrived before it
            self._out.clear()

    def read(self) -> list[bytes]:
        """Return the messages that have arrived completely.

        Raises:
            MalformedMessage: a message is longer than any of ours.
        """
        try:
            while not self.closed and len(self._in) <= HEADER.size + LARGEST:  # however fast the process writes
                data = self._socket.recv(_READ)
                self._in += data
                self.closed = not data
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        messages = []
        while len(self._in) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._in)
            if length > LARGEST:
                raise MalformedMessage(f"a message of {length} bytes")
            end = HEADER.size + length
            if len(self._in) < end:
                break
            messages.append(bytes(self._in[HEADER.size : end]))
            del self._in[:end]
        return messages

    def close(self) -> None:
        self.closed = True
        self._socket.close()


def ready_channels(channels: Sequence[Channel], wake: int, seconds: float) -> tuple[list[Channel], bool]:
    """Wait until something arrives, and write what is queued meanwhile.

    Args:
        channels: the processes'.
        wake: a file descriptor that ends the wait.
        seconds: the longest wait.

    Returns:
        The channels to read, and whether `wake` is readable.
    """
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    by_descriptor = {channel.fileno(): channel for channel in channels}
    for descriptor, channel in by_descriptor.items():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if channel.waits_to_write else 0))
    events = dict(poll.poll(math.ceil(1000 * seconds)))
    for descriptor, event in events.items():
        if event & select.POLLOUT and descriptor in by_descriptor:
            by_descriptor[descriptor].write()
    told = [channel for descriptor, channel in by_descriptor.items() if events.get(descriptor, 0) & ~select.POLLOUT]
    return told, wake in events


class PoolConnection:
    """A process's end of the socket, which waits."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end, where it belongs to the process from which this one was forked."""
        self._socket.close()

    def send(self, message: Message) -> None:
        data = encode(message)
        self._socket.sendall(HEADER.pack(len(data)) + data)

    def receive(self) -> Any:
        """Return the next object that the pool sent.

        Raises:
            EOFError: the pool is gone.
        """
        (length,) = HEADER.unpack(self._exactly(HEADER.size))
        return pickle.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, found = memoryview(data), 0
        while found < count:
            try:
                more = self._socket.recv_into(view[found:])
            except ConnectionResetError:
                raise EOFError from None
            if not more:
                raise EOFError
            found += more
        return data
