"""The client's side of gRPC over HTTP/2 as a state machine without I/O.

``Http2Client`` is one connection. Requests go in by ``open``, ``send``, ``half_close`` and
``reset``, and leave as the bytes of ``bytes_to_send``. Bytes from the server go into ``receive``,
which returns their meaning as one ``Received``. The class knows neither sockets nor clocks, so its
tests feed it bytes.

It implements the part of HTTP/2 that a gRPC client needs. ``hpack`` packs and reads headers. The
server may push nothing, priorities are ignored, and frames of unknown types are skipped (4.1). A
number in parentheses is a section of RFC 9113; "gRPC" is its document PROTOCOL-HTTP2.

The connection's window is as large as it can be, so that no stream waits for another one. A
stream's window is ``_STREAM_WINDOW`` and opens again as data arrives, unless its call is held.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import unquote_to_bytes

from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple

# Types of frames (6).
DATA = 0x0
HEADERS = 0x1
RESET = 0x3
SETTINGS = 0x4
PUSH = 0x5
PING = 0x6
GOAWAY = 0x7
UPDATE = 0x8
CONTINUATION = 0x9
# Flags of frames (6).
ACK = 0x1
END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20
# Codes of errors (7).
NO_ERROR = 0x0
PROTOCOL_ERROR = 0x1
REFUSED_STREAM = 0x7
CANCEL = 0x8
# Names of settings (6.5.2).
_ENABLE_PUSH = 0x2
_MAX_STREAMS = 0x3
_INITIAL_WINDOW = 0x4
_FRAME_SIZE = 0x5
_HEADER_LIST = 0x6

MAX_HEADERS_BYTES = 1 << 16  # limit of a header block, packed or not
MAX_MESSAGE_BYTES = 1 << 30  # limit of a message, which stays in memory until it is complete
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DEFAULT_FRAME_SIZE = 1 << 14  # HTTP/2's default: we do not raise the server's limit
_DEFAULT_WINDOW = (1 << 16) - 1
_MAX_31_BITS = (1 << 31) - 1  # the largest window, and the largest id of a stream
_UPDATE_BYTES = 1 << 24  # received bytes after which the connection's window is opened again
_STREAM_WINDOW = 1 << 22
_STREAM_UPDATE_BYTES = 1 << 21  # received bytes after which a stream's window is opened again
_TURN_BYTES = 1 << 18  # a stream's data before the other streams have a turn

FRAME_HEADER = struct.Struct(">HBBBI")  # length (upper 16 bits, lower 8), type, flags, stream
_MESSAGE_PREFIX = struct.Struct(">BI")  # gRPC's: compressed flag, length
_UINT32 = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_GOAWAY = struct.Struct(">II")
_HEADER_SIZE = FRAME_HEADER.size
_PREFIX_SIZE = _MESSAGE_PREFIX.size
_unpack_header = FRAME_HEADER.unpack_from
_unpack_prefix = _MESSAGE_PREFIX.unpack_from

# gRPC's statuses, in the order of their codes.
_STATUS_NAMES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
_STATUS_BY_CODE = {b"%d" % code: name for code, name in enumerate(_STATUS_NAMES)}
# gRPC's table "HTTP2 Transport Mapping"; any other code is INTERNAL.
_STATUS_OF_RESET = {
    REFUSED_STREAM: "UNAVAILABLE",
    CANCEL: "CANCELLED",
    0xB: "RESOURCE_EXHAUSTED",  # ENHANCE_YOUR_CALM
    0xC: "PERMISSION_DENIED",  # INADEQUATE_SECURITY
}


class GrpcError(Exception):
    """The end of a call with another status than OK. ``status``: its name (``"UNAVAILABLE"``).

    ``target``: the address of a connection that failed. ``details``: that address and the reason.
    """

    def __init__(self, status: str, reason: str, target: str = "") -> None:
        self.status = status
        self.reason = reason
        self.details = f"{target}: {reason}" if target else reason
        super().__init__(f"{status}: {self.details}")

    @property
    def unreachable(self) -> bool:
        """True if the server could not be reached or did not answer, whatever the request was."""
        return self.status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")


class ProtocolError(Exception):
    """A breach of HTTP/2 by the server. The connection cannot go on."""


class Received:
    """The events in the bytes of one read, by stream. All bytes are parsed before any callback.

    ``messages``: each stream's messages, in order; they precede its end. ``ended``: the
    status of each stream that has ended (None is OK). ``answered``: the streams whose response has
    begun. ``refusals``: the streams that the server reset without processing them, with the status
    for their callers. ``goaway``: the reason why the server accepts no new streams; it did not
    process the ``unprocessed`` ones. ``failure``: the server's breach of the protocol; the events
    before it still count.
    """

    __slots__ = ("answered", "ended", "failure", "goaway", "messages", "refusals", "unprocessed")

    def __init__(self) -> None:
        self.messages: dict[int, list[bytes]] = {}
        self.ended: dict[int, GrpcError | None] = {}
        self.answered: list[int] = []
        self.refusals: dict[int, GrpcError] = {}
        self.unprocessed: list[int] = []
        self.goaway: str | None = None
        self.failure: str | None = None


@dataclass(slots=True)
class _Stream:
    """The unsent part of one request, and the part of a message that has arrived."""

    id: int
    window: int = 0  # bytes that the server accepts beyond `_initial_window`; may be negative
    outbox: deque[bytes | memoryview] = field(default_factory=deque)
    half_closed: bool = False
    end_sent: bool = False
    received: int = 0  # bytes since the stream's window was last opened
    held: bool = False  # its reader is behind: the window is not opened
    partial: bytearray = field(default_factory=bytearray)
    needs: int = 0  # bytes of `partial` that complete its first prefix or message

    def split(self, payload: bytes) -> list[bytes]:
        """Return the messages that ``payload`` completes. Payloads may divide messages anywhere.

        Raises ``GrpcError`` for a message that is compressed or too long.
        """
        source: bytes | memoryview = payload
        if not self.partial and len(payload) >= _PREFIX_SIZE:  # nearly always one complete message
            compressed, length = _unpack_prefix(payload)
            if not compressed and length == len(payload) - _PREFIX_SIZE:
                return [payload[_PREFIX_SIZE:]]
        elif self.partial:
            self.partial += payload
            if len(self.partial) < self.needs:
                return []
            source = memoryview(self.partial)
        messages = []
        start = 0
        size = len(source)
        needs = _PREFIX_SIZE
        while size - start >= _PREFIX_SIZE:
            compressed, length = _unpack_prefix(source, start)
            if compressed:
                raise GrpcError("INTERNAL", "the server compressed a message without being asked")
            if length > MAX_MESSAGE_BYTES:
                problem = f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are taken"
                raise GrpcError("RESOURCE_EXHAUSTED", problem)
            needs = _PREFIX_SIZE + length
            if size - start < needs:
                break
            messages.append(bytes(source[start + _PREFIX_SIZE : start + needs]))
            start += needs
            needs = _PREFIX_SIZE
        if self.partial or start < size:
            self.partial = bytearray(source[start:])
            self.needs = needs
        return messages


class State(Enum):
    """The state of a connection. It only moves down this list, and may skip states."""

    WAITING = "waiting"  # for the server's first SETTINGS
    OPEN = "open"
    DRAINING = "draining"  # no further stream can be opened
    ENDED = "ended"  # the connection's owner has ended it


class Http2Client:
    """A connection, which is in a ``state``.

    ``output``: frames to send. ``unsent``: streams with data to send. While either has items, call
    ``bytes_to_send``.
    """

    def __init__(self) -> None:
        settings = (
            _SETTING.pack(_ENABLE_PUSH, 0),
            _SETTING.pack(_INITIAL_WINDOW, _STREAM_WINDOW),
            _SETTING.pack(_HEADER_LIST, 1 << 16),
        )
        self.output: list[bytes] = [
            _PREFACE,
            frame(SETTINGS, 0, 0, b"".join(settings)),
            number_frame(UPDATE, 0, _MAX_31_BITS - _DEFAULT_WINDOW),
        ]
        self.unsent: dict[int, _Stream] = {}  # in the order of their turns
        self._blocked: dict[int, _Stream] = {}  # with more data than their windows admit
        self.state = State.WAITING
        self._streams: dict[int, _Stream] = {}
        self._next_id = 1
        self._received = 0  # bytes since the connection's window was last opened
        self._partial_frame = b""
        self._decoder = Decoder(MAX_HEADERS_BYTES)  # all streams share its table
        # A header block that is not complete: its stream, True if it ends the stream, its bytes.
        self._block: tuple[int, bool, bytearray] | None = None
        # The server's limits.
        self._window = _DEFAULT_WINDOW  # for all streams together
        self._initial_window = _DEFAULT_WINDOW  # for each stream
        self._max_streams = _MAX_31_BITS
        self._max_frame_size = _DEFAULT_FRAME_SIZE

    # Requests

    @property
    def can_open(self) -> bool:
        """True while the server accepts another stream."""
        return self.state is State.OPEN and len(self._streams) < self._max_streams

    def open(self, headers: bytes) -> int:
        """Begin a request with a packed header block, and return the id of its stream."""
        stream = _Stream(self._next_id)
        self._streams[stream.id] = stream
        self.output.append(frame(HEADERS, END_HEADERS, stream.id, headers))
        self._next_id += 2
        if self._next_id > _MAX_31_BITS:
            self.state = State.DRAINING
        return stream.id

    def send(self, stream_id: int, message: bytes) -> None:
        """Queue a message. It leaves when flow control admits it."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.outbox.append(_MESSAGE_PREFIX.pack(0, len(message)) + message)
            self.unsent[stream_id] = stream

    def half_close(self, stream_id: int) -> None:
        """End the request after its queued messages."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.half_closed = True
            self.unsent[stream_id] = stream

    def reset(self, stream_id: int) -> None:
        """Cancel the request, unless it has ended, and ignore the rest of its response."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._close(stream, CANCEL)

    def hold(self, stream_id: int) -> None:
        """Stop opening the stream's window until ``release``. The server may still fill it."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.held = True

    def release(self, stream_id: int) -> None:
        """Open the stream's window again."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.held:
            stream.held = False
            if stream.received:
                self._open_window(stream)

    def bytes_to_send(self, *, data: bool = True) -> bytes:
        """Return all frames that are due. With ``data``, each stream also has a turn."""
        streams: list[_Stream] = []
        if data:
            streams = list(self.unsent.values())
        for stream in streams:
            if self._window <= 0 and stream.outbox:
                break
            del self.unsent[stream.id]
            turn = _TURN_BYTES
            while stream.outbox:
                stream_window = self._initial_window + stream.window
                size = min(self._window, stream_window, turn, self._max_frame_size)
                if size <= 0:
                    # The stream goes to the end of the queue, so that windows and turns go around.
                    if stream_window > 0:
                        self.unsent[stream.id] = stream
                    else:
                        self._blocked[stream.id] = stream
                    break
                part = stream.outbox.popleft()
                if len(part) > size:
                    stream.outbox.appendleft(memoryview(part)[size:])
                    part = part[:size]
                stream.end_sent = stream.half_closed and not stream.outbox
                flags = END_STREAM if stream.end_sent else 0
                self.output.append(frame(DATA, flags, stream.id, part))
                self._window -= len(part)
                stream.window -= len(part)
                turn -= len(part)
            if stream.half_closed and not stream.outbox and not stream.end_sent:
                stream.end_sent = True
                self.output.append(frame(DATA, END_STREAM, stream.id, b""))
        packed = b"".join(self.output)
        self.output.clear()
        return packed

    @property
    def has_more_data(self) -> bool:
        """True while flow control admits data that waits for another turn."""
        return self._window > 0 and bool(self.unsent)

    def _close(self, stream: _Stream, reset: int | None) -> None:
        """Forget a stream. ``reset``: the code for a server that would continue the stream."""
        del self._streams[stream.id]
        self.unsent.pop(stream.id, None)
        self._blocked.pop(stream.id, None)
        if reset is not None:
            self.output.append(number_frame(RESET, stream.id, reset))

    # Responses

    def receive(self, data: bytes) -> Received:
        """Parse the next bytes of the connection, and return their events."""
        received = Received()
        data = self._partial_frame + data
        start = 0
        size = len(data)
        initial_window = self._initial_window
        try:
            while size - start >= _HEADER_SIZE:
                high, low, kind, flags, stream_id = _unpack_header(data, start)
                length = high << 8 | low
                # A frame may not be larger than we allow (4.2), and the first is SETTINGS (3.4).
                is_first = self.state is State.WAITING
                if length > _DEFAULT_FRAME_SIZE or (is_first and kind != SETTINGS):
                    raise ProtocolError("this is not an HTTP/2 server")
                body = start + _HEADER_SIZE
                start_of_next = body + length
                if start_of_next > size:
                    break
                payload = data[body:start_of_next]
                if kind == DATA and self._block is None:
                    self._receive_data(received, stream_id, flags, payload)
                elif kind == UPDATE and self._block is None:
                    self._receive_update(stream_id, payload)
                else:
                    self._receive_other(received, kind, flags, stream_id, payload)
                start = start_of_next
            if self._initial_window != initial_window:
                self._apply_initial_window()
        except (ProtocolError, struct.error) as error:  # struct.error: a frame of a wrong length
            # GOAWAY reports an error of the connection (5.4.1).
            start = size
            received.failure = str(error)
            self.output.append(frame(GOAWAY, 0, 0, _GOAWAY.pack(0, PROTOCOL_ERROR)))
        self._partial_frame = data[start:]
        return received

    def _apply_initial_window(self) -> None:
        """Apply a new initial window, which holds for open streams, too (6.9.2)."""
        largest = self._initial_window
        for stream in self._streams.values():
            largest = max(largest, self._initial_window + stream.window)
        if largest > _MAX_31_BITS:
            raise ProtocolError(f"SETTINGS with windows of {self._initial_window} bytes")
        self.unsent |= self._blocked
        self._blocked.clear()

    def _receive_data(self, received: Received, stream_id: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size  # including padding, and the data of ended streams (6.9.1)
        if self._received >= _UPDATE_BYTES:
            self.output.append(number_frame(UPDATE, 0, self._received))
            self._received = 0
        stream = self._streams.get(stream_id)
        if stream is None:  # cancelled by us; the server did not know yet (5.1)
            return
        stream.received += size
        if stream.received >= _STREAM_UPDATE_BYTES and not stream.held:
            self._open_window(stream)
        try:
            if flags & PADDED:
                payload = unpadded(payload, PADDED)
            messages = stream.split(payload)
        except GrpcError as error:
            self._end(received, stream, error, CANCEL)
            return
        if messages:
            earlier_messages = received.messages.get(stream_id)
            if earlier_messages is None:
                received.messages[stream_id] = messages
            else:
                earlier_messages += messages
        if flags & END_STREAM:  # a gRPC response ends with trailers, not with data
            self._end(received, stream, status_of({}), CANCEL)

    def _open_window(self, stream: _Stream) -> None:
        self.output.append(number_frame(UPDATE, stream.id, stream.received))
        stream.received = 0

    def _end(
        self, received: Received, stream: _Stream, error: GrpcError | None, reset: int | None
    ) -> None:
        self._close(stream, reset)
        received.ended[stream.id] = error

    def _receive_other(
        self, received: Received, kind: int, flags: int, stream_id: int, payload: bytes
    ) -> None:
        """Receive any frame but DATA and WINDOW_UPDATE, or one of these within a header block."""
        if kind == CONTINUATION or self._block is not None:
            # Nothing may come between the frames of a header block (6.10).
            if kind != CONTINUATION or self._block is None or stream_id != self._block[0]:
                raise ProtocolError("headers that are not continued")
            _, ends_stream, block = self._block
            block += payload
            self._receive_headers(received, flags, stream_id, ends_stream, block)
        elif kind == HEADERS:
            block = bytearray(unpadded(payload, flags))
            self._receive_headers(received, flags, stream_id, bool(flags & END_STREAM), block)
        elif kind == RESET:
            (code,) = _UINT32.unpack(payload)
            details = f"the server reset the stream: HTTP/2 error {code}"
            error = GrpcError(_STATUS_OF_RESET.get(code, "INTERNAL"), details)
            stream = self._streams.get(stream_id)
            if stream is not None and code == REFUSED_STREAM:  # may be sent again (8.7)
                self._close(stream, None)
                received.refusals[stream_id] = error
            elif stream is not None:
                self._end(received, stream, error, None)
        elif kind == GOAWAY:  # the server processes the streams up to an id (6.8)
            last_id, code = _GOAWAY.unpack_from(payload)
            text = payload[_GOAWAY.size :].decode("utf-8", "replace")
            received.goaway = text or f"HTTP/2 error {code}"
            self.state = State.DRAINING
            while self._streams:
                newest_id = next(reversed(self._streams))
                if newest_id <= last_id:
                    break
                received.unprocessed.append(newest_id)
                self._close(self._streams[newest_id], CANCEL)
        # We have switched pushes off (8.4). SETTINGS (6.5) and PING (6.7) belong to the connection.
        elif kind == PUSH or (stream_id and kind in (SETTINGS, PING)):
            raise ProtocolError(f"a frame of type {kind} on stream {stream_id}")
        elif kind == SETTINGS and not flags & ACK:
            self._receive_settings(payload)
        elif kind == PING:
            if len(payload) != 8:  # (6.7)
                raise ProtocolError(f"a PING of {len(payload)} bytes")
            if not flags & ACK:
                self.output.append(frame(PING, ACK, 0, payload))

    def _receive_update(self, stream_id: int, payload: bytes) -> None:
        """Open the server's window of the connection (stream 0) or of one stream."""
        increment = _UINT32.unpack(payload)[0] & _MAX_31_BITS  # the highest bit is reserved
        stream = self._streams.get(stream_id)
        if stream_id == 0:
            self._window += increment
            window = self._window
        elif stream is not None:
            stream.window += increment
            window = self._initial_window + stream.window
            if window > 0 and stream_id in self._blocked:
                self.unsent[stream_id] = self._blocked.pop(stream_id)
        else:  # cancelled by us; the server did not know yet
            return
        if not increment or window > _MAX_31_BITS:  # (6.9, 6.9.1)
            raise ProtocolError(f"a WINDOW_UPDATE by {increment} to {window}")

    def _receive_headers(
        self, received: Received, flags: int, stream_id: int, ends_stream: bool, block: bytearray
    ) -> None:
        """Receive a header block.

        All streams share one table, so the headers of ended streams are decoded, too.
        """
        if len(block) > MAX_HEADERS_BYTES:
            raise ProtocolError(f"headers of more than {MAX_HEADERS_BYTES} bytes")
        if not flags & END_HEADERS:
            self._block = (stream_id, ends_stream, block)
            return
        self._block = None
        try:
            decoded = self._decoder.decode(bytes(block), raw=True)
        except HPACKError as error:
            raise ProtocolError(f"headers that cannot be read: {error}") from error
        fields = {bytes(name): bytes(value) for name, value in decoded}
        stream = self._streams.get(stream_id)
        # Informational headers may precede those of the response (8.1).
        if stream is None or fields.get(b":status", b"").startswith(b"1"):
            return
        received.answered.append(stream_id)
        if not ends_stream:
            problem = not_grpc(fields)
            if problem is not None:
                self._end(received, stream, problem, CANCEL)
            return
        status = status_of(fields)
        if status is None and stream.partial:
            status = GrpcError("INTERNAL", "the call ended within a message")
        # Without our END_STREAM the stream would stay open on this side (8.1).
        self._end(received, stream, status, None if stream.end_sent else NO_ERROR)

    def _receive_settings(self, payload: bytes) -> None:
        if self.state is State.WAITING:
            self.state = State.OPEN
        for name, value in _SETTING.iter_unpack(payload):
            if name == _MAX_STREAMS:
                self._max_streams = value
            elif name == _INITIAL_WINDOW:
                self._initial_window = value
            elif name == _FRAME_SIZE:
                if not _DEFAULT_FRAME_SIZE <= value < 1 << 24:  # (6.5.2)
                    raise ProtocolError(f"SETTINGS with frames of {value} bytes")
                self._max_frame_size = value
        self.output.append(frame(SETTINGS, ACK, 0, b""))  # (6.5.3)


def packed_headers(fields: list[tuple[bytes, bytes]]) -> bytes:
    """Pack a header block that can be sent at any time.

    None of its fields enters the table that the server keeps.
    """
    block: bytes = Encoder().encode([NeverIndexedHeaderTuple(*field) for field in fields])
    return block


def frame(kind: int, flags: int, stream_id: int, payload: bytes | memoryview) -> bytes:
    """Return a frame with its header."""
    size = len(payload)
    return FRAME_HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def number_frame(kind: int, stream_id: int, number: int) -> bytes:
    """Return a frame of one number: the increment of a window, or the code of a reset."""
    return frame(kind, 0, stream_id, _UINT32.pack(number))


def unpadded(payload: bytes, flags: int) -> bytes:
    """Return a frame's payload without padding and priority. Raises ``ProtocolError``."""
    begin = 0
    end = len(payload)
    if flags & PADDED:  # the first byte is the length of the padding (6.1, 6.2)
        begin = 1
        end = end - payload[0] if payload else -1
    if flags & PRIORITY:
        begin += 5
    if begin > end:
        raise ProtocolError("a frame with more padding than it has room for")
    return payload[begin:end]


def status_of(trailers: Mapping[bytes, bytes]) -> GrpcError | None:
    """Return the status in a response's last headers, or None for OK."""
    code = trailers.get(b"grpc-status")
    if code is None:
        return not_grpc(trailers) or GrpcError("UNKNOWN", "the call ended without a grpc-status")
    if code == b"0":
        return None
    # gRPC percent-encodes the text of a status. A text with a wrong encoding is used as it is.
    details = unquote_to_bytes(trailers.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return GrpcError(_STATUS_BY_CODE.get(code, "UNKNOWN"), details)


def not_grpc(headers: Mapping[bytes, bytes]) -> GrpcError | None:
    """Return the error of a response whose first headers are not gRPC's, or None."""
    http_status = headers.get(b":status", b"200")
    if http_status != b"200":
        details = f"HTTP status {http_status.decode('latin-1')}"
        # gRPC's document "HTTP to gRPC Status Code Mapping" maps these to UNAVAILABLE.
        if http_status in (b"429", b"502", b"503", b"504"):
            return GrpcError("UNAVAILABLE", details)
        return GrpcError("UNKNOWN", details)
    content_type = headers.get(b"content-type", b"application/grpc")
    if not content_type.startswith(b"application/grpc"):
        return GrpcError("UNKNOWN", f"not gRPC: content-type is {content_type.decode('latin-1')}")
    return None
