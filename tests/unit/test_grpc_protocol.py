"""The client's side of HTTP/2, without I/O, against another implementation of it."""

from __future__ import annotations

from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingAckReceived,
    RequestReceived,
    StreamEnded,
)
from h2.settings import SettingCodes, Settings
from hpack import Decoder, Encoder
from hyperframe.frame import ContinuationFrame, HeadersFrame

from trtllm_bls.wire.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_HEADERS_BYTES,
    PING,
    PUSH,
    RESET,
    SETTINGS,
    UPDATE,
    Http2Client,
    Received,
    State,
    frame,
    packed_headers,
)

FIELDS = [(b":status", b"200"), (b"grpc-status", b"5"), (b"grpc-message", b"there is none")]


def test_packed_headers_are_right_whatever_the_peer_has_read_before() -> None:
    """They enter no table: the same bytes can be sent for every call."""
    packed, decoder = packed_headers(FIELDS), Decoder()
    before = Encoder().encode([(b"other", b"field")])
    for _ in range(3):
        assert [(bytes(k), bytes(v)) for k, v in decoder.decode(packed, raw=True)] == FIELDS
        decoder.decode(before)


# --- a connection, without I/O --------------------------------------------------------------------


def connected(**settings: int) -> tuple[Http2Client, H2Connection]:
    """A client, and h2 as its server, which have exchanged their settings."""
    client, server = Http2Client(), H2Connection(H2Configuration(client_side=False))
    values = {getattr(SettingCodes, name): value for name, value in settings.items()}
    server.local_settings = Settings(client=False, initial_values=values)
    server.initiate_connection()
    exchange(client, server)
    assert client.state is State.OPEN
    return client, server


def exchange(client: Http2Client, server: H2Connection) -> tuple[list[Any], Received]:
    """What the server is told, and what the client is, until neither has anything to say."""
    events: list[Any] = []
    said = Received()
    while sent := client.bytes_to_send():
        events += server.receive_data(sent)
        said = client.receive(server.data_to_send())
    return events, said


def headers() -> bytes:
    fields = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/m")]
    return packed_headers([(name.encode(), value.encode()) for name, value in fields])


@pytest.mark.parametrize("flags", [[], ["PADDED"], ["PRIORITY"], ["PADDED", "PRIORITY"]])
def test_headers_are_read_padded_cut_and_after_others(flags: list[str]) -> None:
    """Padding and priority are left out, parts are joined, the table is kept between blocks."""
    client, _ = connected()
    encoder = Encoder()
    for _ in range(3):
        stream = client.open(headers())
        block = encoder.encode(FIELDS)
        first = HeadersFrame(stream, block[:3], flags=[*flags, "END_STREAM"])
        first.pad_length = 7 if "PADDED" in flags else 0
        middle = ContinuationFrame(stream, block[3:5])
        last = ContinuationFrame(stream, block[5:], flags=["END_HEADERS"])
        for part in (first, middle):
            said = client.receive(part.serialize())
            assert not said.answered and said.failure is None
        error = client.receive(last.serialize()).ended[stream]
        assert error is not None
        assert (error.status, error.details) == ("NOT_FOUND", "there is none")
        assert client.receive(frame(DATA, 0, stream, b"late")).failure is None  # nothing is open


@pytest.mark.parametrize(
    "kind, flags, payload",
    [
        (CONTINUATION, END_HEADERS, b""),  # of nothing
        (HEADERS, END_HEADERS, b"\xff\xff\xff\xff\xff\xff\xff"),  # no HPACK
        (HEADERS, END_HEADERS | 0x8, b""),  # padded, without a length
        (HEADERS, END_HEADERS | 0x8, b"\x09abc"),  # more padding than there is
        (HEADERS, END_HEADERS | 0x20, b"abc"),  # half a priority
    ],
)
def test_broken_headers_are_refused(kind: int, flags: int, payload: bytes) -> None:
    client, _ = connected()
    stream = client.open(headers())
    assert client.receive(frame(kind, flags | END_STREAM, stream, payload)).failure


def test_endless_headers_are_refused() -> None:
    """Also those that are only continued: they are kept until their end."""
    client, _ = connected()
    stream, part = client.open(headers()), bytes(1 << 14)
    frames = [frame(HEADERS, END_STREAM, stream, part)]
    frames += [frame(CONTINUATION, 0, stream, part)] * (MAX_HEADERS_BYTES // len(part))
    said = [client.receive(each).failure for each in frames]
    assert said[-1] and not any(said[:-1])


def test_a_request_is_bytes_and_its_response_is_what_the_bytes_mean() -> None:
    """Nothing leaves before the server's settings; messages of one read come in one list."""
    client = Http2Client()
    assert client.bytes_to_send().startswith(b"PRI * HTTP/2.0") and not client.can_open
    client, server = connected()
    stream = client.open(headers())
    client.send(stream, b"ask")
    client.half_close(stream)
    events, _ = exchange(client, server)
    assert [type(event) for event in events] == [RequestReceived, DataReceived, StreamEnded]
    assert events[1].data == b"\0\0\0\0\3ask"
    server.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    server.send_data(stream, b"\0\0\0\0\3one\0\0\0\0\3two\0\0")
    server.send_data(stream, b"\0\0\5three")
    said = client.receive(server.data_to_send())
    assert (said.answered, said.messages) == ([stream], {stream: [b"one", b"two", b"three"]})
    server.send_headers(stream, [("grpc-status", "0")], end_stream=True)
    assert client.receive(server.data_to_send()).ended == {stream: None}


def test_data_waits_for_the_windows_and_streams_take_turns() -> None:
    """The connection's window of 64 KB is shared; what opens it lets the rest go."""
    client, server = connected()
    first, second = client.open(headers()), client.open(headers())
    large = bytes(100_000)
    for stream in (first, second):
        client.send(stream, large)
    events = server.receive_data(client.bytes_to_send())
    received = [event for event in events if isinstance(event, DataReceived)]
    assert sum(len(event.data) for event in received) == 65_535
    assert client.unsent and not client.has_more_data
    while client.unsent:
        for event in received:
            server.acknowledge_received_data(len(event.data), event.stream_id)
        client.receive(server.data_to_send())
        news = server.receive_data(client.bytes_to_send())
        received = [event for event in news if isinstance(event, DataReceived)]
        assert received
        events += received
    for stream in (first, second):
        parts = [e.data for e in events if isinstance(e, DataReceived) and e.stream_id == stream]
        assert b"".join(parts) == b"\0" + len(large).to_bytes(4, "big") + large


def test_the_servers_settings_bound_what_is_sent() -> None:
    """Streams at a time, bytes of a stream and of a frame."""
    client, server = connected(MAX_CONCURRENT_STREAMS=1, INITIAL_WINDOW_SIZE=10)
    stream = client.open(headers())
    assert not client.can_open
    client.send(stream, bytes(100))
    events, _ = exchange(client, server)
    assert [len(e.data) for e in events if isinstance(e, DataReceived)] == [10]
    larger = {SettingCodes.INITIAL_WINDOW_SIZE: 40_000, SettingCodes.MAX_FRAME_SIZE: 20_000}
    server.update_settings(larger)
    client.receive(server.data_to_send())
    events, _ = exchange(client, server)
    assert [len(e.data) for e in events if isinstance(e, DataReceived)] == [95]
    client.send(stream, bytes(25_000))
    events, _ = exchange(client, server)
    assert [len(e.data) for e in events if isinstance(e, DataReceived)] == [20_000, 5_005]
    client.reset(stream)
    assert client.can_open


def test_after_the_last_stream_id_a_connection_takes_no_more_requests() -> None:
    """Which a busy server's connection reaches within days; the last one is still answered."""
    client, server = connected()
    client._next_id = (1 << 31) - 1
    assert client.can_open
    stream = client.open(headers())
    assert client.state is State.DRAINING and not client.can_open
    exchange(client, server)
    fields = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "0")]
    server.send_headers(stream, fields, end_stream=True)
    assert client.receive(server.data_to_send()).ended == {stream: None}


@pytest.mark.parametrize("half_closed", [False, True])
def test_a_stream_that_the_server_ends_first_is_open_on_neither_side(half_closed: bool) -> None:
    """With our side still open, the server would count the stream for ever: it is reset."""
    client, server = connected()
    stream = client.open(headers())
    if half_closed:
        client.half_close(stream)
    exchange(client, server)
    fields = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "0")]
    server.send_headers(stream, fields, end_stream=True)
    assert client.receive(server.data_to_send()).ended == {stream: None}
    assert client.bytes_to_send() == (b"" if half_closed else frame(RESET, 0, stream, bytes(4)))


def test_a_large_message_leaves_room_for_other_streams() -> None:
    """Where the windows would admit all of it at once."""
    client, server = connected(INITIAL_WINDOW_SIZE=1 << 24)
    server.increment_flow_control_window(1 << 24)
    client.receive(server.data_to_send())
    streams, size = [client.open(headers()), client.open(headers())], 1 << 20
    for stream in streams:
        client.send(stream, bytes(size))
    events = server.receive_data(client.bytes_to_send())
    sent = {stream: 0 for stream in streams}
    for event in events:
        if isinstance(event, DataReceived):
            sent[event.stream_id] += len(event.data)
    assert 0 < sent[streams[0]] == sent[streams[1]] < size and client.has_more_data


def test_a_response_may_have_informational_headers_first() -> None:
    """They are no answer: a call that has only had these may be sent again."""
    client, server = connected()
    stream = client.open(headers())
    exchange(client, server)
    server.send_headers(stream, [(":status", "103"), ("link", "</a>")])
    said = client.receive(server.data_to_send())
    assert not said.answered and not said.ended
    server.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    assert client.receive(server.data_to_send()).answered == [stream]


def test_a_ping_is_answered_with_its_bytes() -> None:
    client, server = connected()
    server.ping(b"12345678")
    client.receive(server.data_to_send())
    (event,), _ = exchange(client, server)
    assert isinstance(event, PingAckReceived) and event.ping_data == b"12345678"


@pytest.mark.parametrize(
    "broken",
    [
        frame(RESET, 0, 1, b"abc"),
        frame(UPDATE, 0, 0, b"abc"),
        frame(UPDATE, 0, 0, bytes(4)),
        frame(UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
        frame(SETTINGS, 0, 0, b"abc"),
        frame(SETTINGS, 0, 1, b""),
        frame(SETTINGS, 0, 0, b"\0\4\x80\0\0\0"),  # a window of 2 GB
        # The open stream's window of 2 GB, made larger yet.
        frame(UPDATE, 0, 1, b"\x7f\xff\0\0") + frame(SETTINGS, 0, 0, b"\0\4\0\1\0\0"),
        frame(SETTINGS, 0, 0, b"\0\5\0\0\0\1"),  # frames of a byte
        frame(
            SETTINGS, 0, 0, b"\0\5\1\0\0\0"
        ),  # frames of 16 MiB, one byte more than a frame can have
        frame(PING, 0, 0, b"abc"),
        frame(PING, 0, 1, bytes(8)),
        frame(PUSH, 0, 1, bytes(4)),
        frame(GOAWAY, 0, 0, b"abc"),
        frame(DATA, 0x8, 1, b"\x09abc"),  # more padding than there is
        frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, bytes(8)),  # headers that do not go on
        frame(DATA, 0, 1, bytes(1 << 15)),  # a larger frame than was allowed
    ],
)
def test_a_server_that_breaks_the_protocol_is_told_so(broken: bytes) -> None:
    """What came before it counts; a GOAWAY is the last that is sent."""
    client, server = connected()
    stream = client.open(headers())
    exchange(client, server)
    server.send_headers(stream, [(":status", "200")])
    said = client.receive(server.data_to_send() + broken)
    assert said.failure and said.answered == [stream]
    assert any(isinstance(e, ConnectionTerminated) for e in exchange(client, server)[0])


def test_frames_of_unknown_types_are_skipped() -> None:
    client, _ = connected()
    assert client.receive(frame(0xEE, 0xFF, 3, b"anything")).failure is None
    assert not client.output


def test_a_held_stream_keeps_its_window_and_others_go_on() -> None:
    """The server may fill the window that it has; after the release it may send as much again."""
    client, server = connected()
    held, other = client.open(headers()), client.open(headers())
    exchange(client, server)
    for stream in (held, other):
        server.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    client.hold(held)
    window = server.local_flow_control_window(held)

    def send(stream: int, size: int) -> None:
        for _ in range(size // 2**14):
            server.send_data(stream, bytes(2**14))
            client.receive(server.data_to_send())
            server.receive_data(client.bytes_to_send() or b"")

    send(held, window)
    assert server.local_flow_control_window(held) < 2**14
    send(other, 4 * window)
    assert server.local_flow_control_window(other) >= window // 2
    client.release(held)
    server.receive_data(client.bytes_to_send())
    assert server.local_flow_control_window(held) >= window - 2**14
    client.release(held)
    assert client.bytes_to_send() == b""
