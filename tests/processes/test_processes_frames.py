"""Messages between processes: whatever the pieces in which they arrive, and whatever the other end sends."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import struct
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.processes.frame_stream import FrameStream
from hybridrl.processes.frames import FrameConnection, MalformedMessage
from hybridrl.processes.peer import JSON, PICKLE, Codec, Peer

MESSAGES = st.lists(st.binary(max_size=200), max_size=8)


def bytes_of(messages: list[bytes]) -> bytes:
    return b"".join(struct.pack(">Q", len(message)) + message for message in messages)


async def received_by_stream(reading: socket.socket, largest: int | None = None) -> list[bytes]:
    stream, messages = await FrameStream.open(reading), []
    try:
        while True:
            messages.append(await stream.receive(largest))
    except EOFError:
        return messages
    finally:
        stream.close()


def received_by_connection(reading: socket.socket, largest: int | None = None) -> list[bytes]:
    connection, messages = FrameConnection(reading), []
    try:
        while True:
            messages.append(bytes(connection.receive(largest)))
    except EOFError:
        return messages


@given(MESSAGES, st.integers(0, 100), st.lists(st.integers(1, 9), max_size=5))
def test_messages_arrive_in_whatever_pieces_they_are_sent(messages, dropped, sizes) -> None:
    """The last one may be cut off by the end of the process: it is not taken for a message."""
    whole = bytes_of(messages)
    data = whole[: max(0, len(whole) - dropped)]
    complete: list[bytes] = []
    for message in messages:
        if len(bytes_of([*complete, message])) > len(data):
            break
        complete.append(message)
    for receive in (received_by_connection, lambda end: asyncio.run(received_by_stream(end))):
        reading, writing = socket.socketpair()

        def write(writing: socket.socket = writing) -> None:
            with writing:
                rest = data
                for size in sizes:
                    writing.sendall(rest[:size])
                    rest = rest[size:]
                writing.sendall(rest)

        thread = threading.Thread(target=write)
        thread.start()
        with reading:
            assert receive(reading) == complete
        thread.join()


def test_a_process_with_more_than_1024_open_files_waits_for_messages() -> None:
    """select() would refuse such a descriptor."""
    reading, writing = socket.socketpair()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1100)
    with reading, writing:
        connection = FrameConnection(high)
        assert connection.fileno() >= 1100 and not connection.arrives_within(0.01)
        writing.sendall(bytes_of([b"message"]))
        assert connection.arrives_within(60) and bytes(connection.receive()) == b"message"
        writing.close()
        assert connection.arrives_within(60)  # the end, too
        connection.close()


@pytest.mark.parametrize("length", [101, 2**40, 2**64 - 1])
def test_a_message_that_announces_too_much_is_refused_before_it_is_read(length: int) -> None:
    for receive in (received_by_connection, lambda end, largest: asyncio.run(received_by_stream(end, largest))):
        reading, writing = socket.socketpair()
        with reading, writing:
            writing.sendall(struct.pack(">Q", length) + b"x")
            with raises_with(MalformedMessage, f"{length} bytes", 100):
                receive(reading, 100)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8) | st.binary(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), PLAIN, max_size=4), st.sampled_from([JSON, PICKLE]))
def test_values_and_bytes_come_back_as_they_were(message: dict[str, Any], codec: Codec) -> None:
    assert codec.decode(codec.encode(message)) == message


@given(st.binary(max_size=60))
def test_other_bytes_are_no_message_of_json(data: bytes) -> None:
    try:
        message = JSON.decode(data)
    except MalformedMessage:
        return
    assert isinstance(message, dict)


@pytest.mark.parametrize("length", [-1, 5, 2**70])
def test_bytes_beyond_the_message_are_refused(length: int) -> None:
    text = json.dumps({"value": {"\0bytes": length}}).encode()
    with pytest.raises(MalformedMessage):
        JSON.decode(struct.pack(">Q", len(text)) + text + b"1234")


class Failure(Exception):
    pass


async def peers(codec: Codec, ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Peer, Peer, list[Any]]:
    first, second = socket.socketpair()
    one = Peer(await FrameStream.open(first), codec, ours, Failure)
    other = Peer(await FrameStream.open(second), codec, theirs, Failure)
    return one, other, [asyncio.ensure_future(peer.serve()) for peer in (one, other)]


@pytest.mark.parametrize("codec", [JSON, PICKLE])
def test_calls_are_answered_beside_each_other_and_errors_are_those_of_their_call(codec: Codec) -> None:
    async def play() -> None:
        told: list[int] = []
        late = asyncio.Event()

        async def slow(value: int) -> int:
            await late.wait()
            return value

        async def fails() -> None:
            raise ValueError("wrong")

        methods = {"slow": slow, "fails": fails, "note": told.append, "double": lambda data: data * 2}
        one, other, tasks = await peers(codec, {"release": late.set}, methods)
        waiting = asyncio.ensure_future(one.call("slow", 7))
        for number in range(5):
            one.tell("note", number)
        assert await one.call("double", b"ab") == b"abab"
        assert told == list(range(5)), "what is told is done before what is asked after it"
        with pytest.raises(Failure, match="ValueError: wrong"):
            await one.call("fails")
        assert not waiting.done()
        other.tell("release")
        await other.call("release")
        assert await waiting == 7
        one.close()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in ended] == [EOFError, EOFError]

    asyncio.run(play())


def test_calls_that_wait_fail_with_the_process(codec: Codec = PICKLE) -> None:
    async def play() -> None:
        one, other, tasks = await peers(codec, {}, {"never": asyncio.Event().wait})
        waiting = [asyncio.ensure_future(one.call("never")) for _ in range(3)]
        await asyncio.sleep(0)
        one.fail(Failure("it died"))
        for call in waiting:
            with pytest.raises(Failure, match="it died"):
                await call
        with pytest.raises(Failure, match="it died"):
            await one.call("never")
        await other.finish()
        for peer in (one, other):
            peer.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(play())


@pytest.mark.parametrize("message", [{"method": "unknown", "call": 1, "arguments": []}, {"method": "note"}, {}])
def test_a_message_of_another_form_ends_the_conversation(message: dict[str, Any]) -> None:
    async def play() -> None:
        first, second = socket.socketpair()
        peer = Peer(await FrameStream.open(first), JSON, {"note": int}, Failure)
        FrameConnection(second).send(JSON.encode(message))
        with pytest.raises(MalformedMessage):
            await peer.serve()
        peer.close()
        second.close()

    asyncio.run(play())


def test_programs_that_are_started_do_not_inherit_a_connection() -> None:
    first, second = socket.socketpair()
    os.set_inheritable(second.fileno(), True)
    with first, second:
        FrameConnection(second)
        assert not os.get_inheritable(second.fileno())
