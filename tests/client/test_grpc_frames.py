"""What a peer may send that grpcio never does: frames made by hand, in any order and any pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamReset
from h2.settings import SettingCodes

from tests.helpers.grpc_calls import Caller, connected
from trtllm_bls.wire.grpc_client import GrpcChannel, ignore

# A server of h2's, which does what a gRPC server would not


class Peer:
    """One connection of a server written with h2; a script answers its requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.h2 = H2Connection(H2Configuration(client_side=False))
        self.h2.initiate_connection()
        self.write()
        self._events: list[Any] = []

    def write(self, data: bytes = b"") -> None:
        self._writer.write(data or self.h2.data_to_send())

    async def trickle(self) -> None:
        """Send what is due byte by byte, each in a packet of its own as far as that is possible."""
        for byte in self.h2.data_to_send():
            self._writer.write(bytes([byte]))
            await asyncio.sleep(0)

    async def until(self, kind: type) -> Any:
        """The next event of a kind; those before it are forgotten."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
            data = await self._reader.read(1 << 16)
            if not data:
                raise ConnectionError("the client has gone")
            self._events += self.h2.receive_data(data)
            self.write()

    async def request(self) -> int:
        """The stream of the next request, its response begun."""
        event = await self.until(RequestReceived)
        self.h2.send_headers(
            event.stream_id, [(":status", "200"), ("content-type", "application/grpc")]
        )
        return int(event.stream_id)

    def end(self, stream_id: int) -> None:
        self.h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
        self.write()


def prefixed(message: bytes, compressed: int = 0) -> bytes:
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def peers(*scripts: Script) -> AsyncIterator[str]:
    """A server whose first connection follows the first script, and so on."""
    left, running = list(scripts), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.append(asyncio.current_task())
        try:
            await left.pop(0)(Peer(reader, writer))
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*(task for task in running if task), return_exceptions=True)


@asynccontextmanager
async def against(*scripts: Script) -> AsyncIterator[GrpcChannel]:
    """A connection to such a server."""
    async with peers(*scripts) as target, connected(target) as connection:
        yield connection


async def test_messages_may_be_cut_anywhere() -> None:
    """Frames of single bytes that arrive as single bytes, padding included."""

    async def script(peer: Peer) -> None:
        stream_id = await peer.request()
        for byte in prefixed(b"hello") + prefixed(b"") + prefixed(b"world"):
            peer.h2.send_data(stream_id, bytes([byte]), pad_length=byte % 3 or None)
        await peer.trickle()
        peer.h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
        await peer.trickle()

    async with against(script) as connection:
        caller = Caller(connection, "echo", b"a")
        assert await caller.status() == "OK"
        assert caller.messages == [b"hello", b"", b"world"]


async def test_messages_that_arrive_together_are_given_together() -> None:
    """Of each call in one list, before the end of the call."""

    async def script(peer: Peer) -> None:
        first, second = await peer.request(), await peer.request()
        for k in range(3):
            peer.h2.send_data(first, prefixed(b"first %d" % k) + prefixed(b"and more"))
            peer.h2.send_data(second, prefixed(b"second %d" % k))
        peer.end(first)
        await peer.until(DataReceived)

    async with against(script) as connection:
        first, second = Caller(connection, "echo"), Caller(connection, "echo")
        assert await first.status() == "OK"
        assert [len(batch) for batch in first.batches] == [6]
        assert second.batches == [[b"second 0", b"second 1", b"second 2"]]
        second.call.send(b"enough")


async def test_first_messages_are_given_before_those_of_running_calls() -> None:
    """Whoever waits for a first token waits no longer for the next tokens of others."""

    async def script(peer: Peer) -> None:
        running = [await peer.request(), await peer.request()]
        for stream_id in running:
            peer.h2.send_data(stream_id, prefixed(b"first"))
        peer.write()
        new = await peer.until(RequestReceived)
        for stream_id in running:
            peer.h2.send_data(stream_id, prefixed(b"next"))
        headers = [(":status", "200"), ("content-type", "application/grpc")]
        peer.h2.send_headers(new.stream_id, headers)
        peer.h2.send_data(new.stream_id, prefixed(b"first of the new call"))
        peer.write()
        await peer.until(DataReceived)

    async with against(script) as connection:
        order: list[bytes] = []
        begun = [connection.open("/test.Service/echo", order.extend, ignore) for _ in range(2)]
        while len(order) < len(begun):
            await asyncio.sleep(0)
        new = connection.open("/test.Service/echo", order.extend, ignore)
        while len(order) < 5:
            await asyncio.sleep(0)
        assert order[2:] == [b"first of the new call", b"next", b"next"]
        new.send(b"enough")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCodes.CANCEL, "CANCELLED"),
        (ErrorCodes.ENHANCE_YOUR_CALM, "RESOURCE_EXHAUSTED"),
        (ErrorCodes.INADEQUATE_SECURITY, "PERMISSION_DENIED"),
        (ErrorCodes.NO_ERROR, "INTERNAL"),
        (0xBEEF, "INTERNAL"),
    ],
)
async def test_a_reset_stream_has_the_status_of_its_code(code: int, status: str) -> None:
    """gRPC's table."""

    async def script(peer: Peer) -> None:
        peer.h2.reset_stream((await peer.until(RequestReceived)).stream_id, code)
        peer.write()

    async with against(script) as connection:
        assert await Caller(connection, "echo", b"a").status() == status


async def test_refused_calls_are_sent_again_in_order_until_the_server_takes_them() -> None:
    """A refused stream was never looked at; in which order streams are refused plays no part."""
    messages = [b"first", b"second", b"third"]

    async def script(peer: Peer) -> None:
        for _ in range(5):  # an even number of turned orders would be the first order again
            streams = [(await peer.until(RequestReceived)).stream_id for _ in messages]
            for stream_id in reversed(streams):
                peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            peer.write()
        taken = [await peer.request() for _ in messages]
        for stream_id, message in zip(taken, messages, strict=True):
            received = await peer.until(DataReceived)
            assert (received.stream_id, received.data) == (stream_id, prefixed(message))
            peer.h2.send_data(stream_id, received.data)
            peer.end(stream_id)

    async with against(script) as connection:
        callers = [Caller(connection, "echo", message) for message in messages]
        assert [await caller.status() for caller in callers] == ["OK"] * 3
        assert [caller.messages for caller in callers] == [[message] for message in messages]


async def test_an_answer_ends_the_long_pauses_after_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pauses double up to 0.1 s while the server refuses, and are short again once it answers."""
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    pauses: list[float] = []

    def recording(delay: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        if callback.__name__ == "_end_pause":
            pauses.append(delay)
        return call_later(delay, callback, *arguments)

    monkeypatch.setattr(loop, "call_later", recording)

    async def script(peer: Peer) -> None:
        for refusals in (8, 1, 1, 1, 1):
            for _ in range(refusals):
                stream_id = (await peer.until(RequestReceived)).stream_id
                peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
                peer.write()
            peer.end(await peer.request())

    async with against(script) as connection:
        for _ in range(5):
            assert await Caller(connection, "echo", b"a").status() == "OK"
    doubled = [0.001 * 2**number for number in range(7)]
    assert pauses == pytest.approx([*doubled, 0.1, *[0.001] * 4])


GOAWAY_OF_ALL = bytes.fromhex("00000a 07 00 00000000 00000000 00000000") + b"no"


@pytest.mark.parametrize("goaway", [False, True])
async def test_a_call_that_the_server_has_begun_is_not_sent_again(goaway: bool) -> None:
    """Whatever the server says of it afterwards."""

    async def script(peer: Peer) -> None:
        stream_id = await peer.request()
        if goaway:
            peer.write(peer.h2.data_to_send() + GOAWAY_OF_ALL)
        else:
            peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            peer.write()
            peer.end(await peer.request())

    async def next_script(peer: Peer) -> None:
        peer.end(await peer.request())

    async with against(script, next_script) as connection:
        assert await Caller(connection, "echo", b"a").status() == "UNAVAILABLE"
        assert await Caller(connection, "echo", b"b").status() == "OK"


async def test_a_call_that_is_refused_for_long_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others go on."""
    monkeypatch.setattr("trtllm_bls.wire.grpc_client._REFUSED_SECONDS", 0)

    async def script(peer: Peer) -> None:
        stream_id = (await peer.until(RequestReceived)).stream_id
        peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        peer.write()
        peer.end(await peer.request())

    async with against(script) as connection:
        assert await Caller(connection, "echo", b"a").status() == "UNAVAILABLE"
        assert await Caller(connection, "echo", b"b").status() == "OK"


@pytest.mark.parametrize(
    ("headers", "body", "error"),
    [
        ([(":status", "503")], b"busy", "UNAVAILABLE: HTTP status 503"),
        ([(":status", "404"), ("content-type", "text/html")], b"", "UNKNOWN: HTTP status 404"),
        ([(":status", "200"), ("content-type", "text/html")], b"<html>", "UNKNOWN: not gRPC"),
        ([(":status", "200")], b"", "UNKNOWN: the call ended without a grpc-status"),
        ([(":status", "200")], prefixed(b"a"), "UNKNOWN: the call ended without a grpc-status"),
        ([(":status", "200")], prefixed(b"a", compressed=1), "INTERNAL: the server compressed"),
        ([(":status", "200"), ("grpc-status", "99")], b"", "UNKNOWN: "),
    ],
)
async def test_what_is_no_grpc_response_is_a_clear_error(
    headers: list[tuple[str, str]], body: bytes, error: str
) -> None:
    """The connection goes on."""

    async def script(peer: Peer) -> None:
        event = await peer.until(RequestReceived)
        peer.h2.send_headers(event.stream_id, headers, end_stream=not body)
        if body:
            peer.h2.send_data(event.stream_id, body, end_stream=True)
        peer.write()
        stream_id = await peer.request()
        peer.h2.send_data(stream_id, prefixed(b"next"))
        peer.end(stream_id)

    async with against(script) as connection:
        assert str(await Caller(connection, "echo", b"a").end()).startswith(error)
        assert await connection.unary("/test.Service/echo", b"") == b"next"


@pytest.mark.parametrize(("size", "error"), [(30_000, None), (70_000, "UNAVAILABLE")])
async def test_headers_may_come_in_several_frames_up_to_a_limit(
    size: int, error: str | None
) -> None:
    """Of 64 KB, which a server is told; one that sends more loses its calls."""

    async def script(peer: Peer) -> None:
        stream_id = await peer.request()
        assert peer.h2.remote_settings[SettingCodes.MAX_HEADER_LIST_SIZE] == 1 << 16
        peer.h2.send_data(stream_id, prefixed(b"said"))
        trailers = [("grpc-status", "0"), ("padding", "x~" * (size // 2))]
        peer.h2.send_headers(stream_id, trailers, end_stream=True)
        peer.write()
        with suppress(ConnectionError):
            await peer.until(RequestReceived)

    async with against(script) as connection:
        caller = Caller(connection, "echo", b"a")
        assert await caller.status() == (error or "OK")
        assert caller.messages == [b"said"]


async def test_an_end_within_a_message_is_an_error() -> None:
    """Though the status says OK."""

    async def script(peer: Peer) -> None:
        stream_id = await peer.request()
        peer.h2.send_data(stream_id, prefixed(b"whole") + prefixed(b"cut")[:-1])
        peer.end(stream_id)

    async with against(script) as connection:
        caller = Caller(connection, "echo", b"a")
        assert await caller.status() == "INTERNAL"
        assert caller.messages == [b"whole"]


async def test_goaway_ends_the_calls_beyond_its_last_stream_alone() -> None:
    """Those go over the next connection, with all that they had sent."""

    async def script(peer: Peer) -> None:
        first = await peer.request()
        await peer.until(RequestReceived)
        peer.write()
        await peer.until(DataReceived)
        peer.write(bytes.fromhex("00000a 07 00 00000000") + first.to_bytes(4, "big") + bytes(4))
        peer.write(b"ok")
        peer.h2.send_data(first, prefixed(b"still here"))
        peer.end(first)

    async def next_script(peer: Peer) -> None:
        stream_id = await peer.request()
        again = await peer.until(DataReceived)
        assert again.stream_id == stream_id
        peer.h2.send_data(stream_id, again.data)
        peer.end(stream_id)

    async with against(script, next_script) as connection:
        first, second = Caller(connection, "echo"), Caller(connection, "echo", b"a")
        assert await second.status() == "OK" and second.messages == [b"a"]
        assert await first.status() == "OK" and first.messages == [b"still here"]


async def test_a_server_that_never_takes_a_call_is_unavailable() -> None:
    """A GOAWAY on each connection: a call is not moved for ever."""

    async def script(peer: Peer) -> None:
        peer.write(GOAWAY_OF_ALL)
        await peer.until(RequestReceived)

    async with against(script, script, script) as connection:
        error = await Caller(connection, "echo", b"a").end()
        assert error and error.status == "UNAVAILABLE" and error.details.endswith(": no")


async def test_what_the_window_held_back_leaves_once_it_is_opened() -> None:
    """The server says nothing else meanwhile."""

    async def script(peer: Peer) -> None:
        stream_id, left = await peer.request(), len(prefixed(bytes(200_000)))
        while left:
            event = await peer.until(DataReceived)
            left -= len(event.data)
            peer.h2.acknowledge_received_data(event.flow_controlled_length, stream_id)
            peer.write()
        peer.end(stream_id)

    async with against(script) as connection:
        caller = Caller(connection, "echo", bytes(200_000))
        assert await asyncio.wait_for(caller.status(), 20) == "OK"


async def test_a_server_that_breaks_the_protocol_loses_its_calls() -> None:
    """What had arrived before is delivered."""

    async def script(peer: Peer) -> None:
        stream_id = await peer.request()
        peer.h2.send_data(stream_id, prefixed(b"before"))
        peer.write(peer.h2.data_to_send() + bytes.fromhex("000000 08 00 00000000"))

    async with against(script) as connection:
        caller = Caller(connection, "echo", b"a")
        assert await caller.status() == "UNAVAILABLE"
        assert caller.messages == [b"before"]


async def test_a_cancelled_stream_is_reset_and_its_late_messages_are_dropped() -> None:
    """The server may send until it has read the reset."""

    async def script(peer: Peer) -> None:
        stream_id = await peer.request()
        peer.h2.send_data(stream_id, prefixed(b"early"))
        peer.write()
        data = b"\0\0\x06\0\0" + stream_id.to_bytes(4, "big") + prefixed(b"x")
        event = await peer.until(StreamReset)
        assert event.error_code == ErrorCodes.CANCEL
        peer.write(data)
        stream_id = await peer.request()
        peer.h2.send_data(stream_id, prefixed(b"next"))
        peer.end(stream_id)

    async with against(script) as connection:
        caller = Caller(connection, "echo", b"a")
        await caller.until(1)
        caller.call.cancel()
        assert await connection.unary("/test.Service/echo", b"") == b"next"
        assert caller.messages == [b"early"] and not caller.over
