"""One HTTP/2 connection and the gRPC calls on it.

``h2`` keeps the connection: preface, settings, pings. Streams are framed here, with headers by
``hpack`` (``http2_frames``): h2's streams and events would be most of the cost of a short call, and
it allows nothing after a GOAWAY, while the server still answers open calls.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections import deque
from typing import Protocol, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RemoteSettingsChanged
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from trtllm_bls.engines.grpc_call import GrpcCall, GrpcError, http_error, outcome
from trtllm_bls.engines.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    GOAWAY,
    HEADERS,
    MAX_HEADERS_BYTES,
    PADDED,
    RESET,
    SETTINGS,
    UPDATE,
    HeaderBlocks,
    frame,
    number_frame,
    number_of,
    unpadded,
)

_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.1  # before it is sent again; doubled
_CALLS_AT_ONCE = 8  # are written together at most, where flow control admits them
_GATHER_CALLS, _GATHER_SECONDS = 16, 0.002  # from so many calls on, reads are so far apart
_TURN_BYTES = 1 << 18  # of one call's data, before the other calls and the event loop have a turn
_MAX_FRAME_BYTES = 1 << 14  # HTTP/2's default, which we leave
_DEFAULT_WINDOW = (1 << 16) - 1
_LAST_STREAM_ID = (1 << 31) - 1
_WINDOW = (1 << 31) - 1  # the largest: callbacks never wait, so nothing is gained by holding back
_WINDOW_UPDATE_BYTES = 1 << 24  # received before the window is opened again by as much

_HEADER_SIZE, _unpack_header = FRAME_HEADER.size, FRAME_HEADER.unpack_from
_GOAWAY_FIELDS = struct.Struct(">II")  # last stream that the server accepts, error code

_STATUS_OF_RESET: dict[int, str] = {
    ErrorCodes.REFUSED_STREAM: "UNAVAILABLE",
    ErrorCodes.CANCEL: "CANCELLED",
    ErrorCodes.ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED",
    ErrorCodes.INADEQUATE_SECURITY: "PERMISSION_DENIED",
}


class Owner(Protocol):
    """Opens connections to one server, and has its calls on the latest."""

    target: str
    refused_seconds: float
    gathers: bool

    def start(self, call: GrpcCall) -> None:
        """Put a call on the current connection."""

    def retire(self, http2: Http2Connection) -> None:
        """``http2`` takes no more calls."""

    def gone(self, http2: Http2Connection) -> None:
        """``http2`` is closed."""


class Http2Connection(asyncio.Protocol):
    """One HTTP/2 connection and the calls on it: made, ready at the server's SETTINGS, perhaps
    draining after its GOAWAY, ended."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._h2 = H2Connection(H2Configuration(client_side=True))
        self._blocks = HeaderBlocks()
        self._next_stream_id = 1
        self._frames: list[bytes] = []  # to be written
        self._ready = self._draining = self._ended = False
        self._waiting: deque[GrpcCall] = deque()  # for the connection, or for a free stream
        self._refused: list[tuple[int, GrpcCall]] = []  # by the stream that each had; they go first
        self._pause: asyncio.TimerHandle | None = None  # until which no stream is opened
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._calls: dict[int, GrpcCall] = {}  # by stream
        self._unsent: dict[GrpcCall, None] = {}  # an ordered set: streams with data to send
        self._flush_scheduled = self._writing_paused = False
        self._received = 0  # bytes since the connection's window was last opened
        self.window = _DEFAULT_WINDOW  # bytes that the server takes, of all calls together
        self._partial_frame = b""
        # What the current read has brought: callbacks run when all of it is parsed.
        self._arrived: dict[GrpcCall, list[bytes]] = {}
        self._finished: list[tuple[GrpcCall, GrpcError | None]] = []

    # The life of the connection

    def connect(self, address: tuple[str, int], tls: ssl.SSLContext | None) -> None:
        self._connecting = self._loop.create_task(self._connect(address, tls))
        self._connect_timer = self._loop.call_later(
            _CONNECT_SECONDS, self._lose, f"no HTTP/2 server answered in {_CONNECT_SECONDS:g} s"
        )

    async def _connect(self, address: tuple[str, int], tls: ssl.SSLContext | None) -> None:
        try:
            await self._loop.create_connection(lambda: self, *address, ssl=tls)
        except (OSError, UnicodeError) as error:
            self._lose(str(error))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # with TCP_NODELAY, by asyncio
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            return self._lose("the server does not offer HTTP/2 (ALPN h2)")
        self._h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADERS_BYTES,
            },
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_WINDOW - _DEFAULT_WINDOW)
        self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc) if exc else "the server closed the connection")
        self._lost.set_result(None)
        self._owner.gone(self)

    def _lose(self, reason: str) -> None:
        self.end(GrpcError("UNAVAILABLE", f"{self._owner.target}: {reason}"))

    def end(self, error: GrpcError) -> None:
        """End every call with ``error``, and the connection."""
        if self._ended:
            return
        self._ended = True
        self._connect_timer.cancel()
        self._owner.retire(self)
        if self._transport is None:
            self._connecting.cancel()
            self._owner.gone(self)
        else:
            self._write()  # h2 says GOAWAY where the server broke the protocol
            self._transport.close()
        self._take_back_refused()
        calls = [*self._calls.values(), *self._waiting]
        self._calls.clear()
        self._waiting.clear()
        self._unsent.clear()
        for call in calls:
            call.end(error)

    async def disconnected(self) -> None:
        """Wait until the socket is closed; not for a server that does not read."""
        await asyncio.wait({self._connecting})
        if self._transport is not None:
            await asyncio.wait({self._lost}, timeout=_CLOSE_SECONDS)
            self._transport.abort()
            await self._lost

    # Calls and what they send

    def add(self, call: GrpcCall) -> None:
        call.http2 = self
        self._waiting.append(call)
        self._schedule_flush()

    def wants_to_send(self, call: GrpcCall) -> None:
        if call.stream_id in self._calls:
            self._unsent[call] = None
            self._schedule_flush()
        if len(self._unsent) + len(self._waiting) >= _CALLS_AT_ONCE:
            self._flush()  # the first need not wait until the last of many has been made

    def cancel(self, call: GrpcCall) -> None:
        if call.stream_id in self._calls:
            self._forget(call, ErrorCodes.CANCEL)

    def _forget(self, call: GrpcCall, reset: ErrorCodes | None) -> None:
        """The call's stream is over; ``reset`` says why to a server that would go on with it."""
        del self._calls[call.stream_id]
        self._unsent.pop(call, None)
        if reset is not None:
            self._frames.append(number_frame(RESET, call.stream_id, reset))
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Open streams, frame what flow control admits, and write it all at once."""
        self._flush_scheduled = False
        if self._ended or not self._ready or self._transport is None:
            return
        if not self._draining and self._pause is None:
            self._open_streams()
        more = False
        if not self._writing_paused:
            for call in list(self._unsent):
                more |= self._send_data(call)
        self._write()
        if self._draining and not self._calls:
            self._transport.close()
        elif more:
            self._schedule_flush()

    def _open_streams(self) -> None:
        while self._waiting and len(self._calls) < self._h2.remote_settings.max_concurrent_streams:
            call = self._waiting.popleft()
            if call.done:
                continue
            stream_id = call.stream_id = self._next_stream_id
            self._next_stream_id += 2
            self._frames.append(frame(HEADERS, END_HEADERS, stream_id, call.headers))
            call.window = self._h2.remote_settings.initial_window_size
            self._calls[stream_id] = call
            self._unsent[call] = None
            if self._next_stream_id > _LAST_STREAM_ID:
                return self._drain()

    def _drain(self) -> None:
        """No more streams here; who waits for one gets it on another connection."""
        self._draining = True
        self._owner.retire(self)
        self._take_back_refused()
        while self._waiting:
            self._owner.start(self._waiting.popleft())

    def _send_data(self, call: GrpcCall) -> bool:
        """Frame a turn of a call's data; whether there is more that its window admits."""
        del self._unsent[call]
        turn = _TURN_BYTES
        while call.outbox:
            window = min(self.window, call.window)
            if window <= 0 or turn <= 0:
                self._unsent[call] = None  # last now: windows and turns go around
                return window > 0
            data = call.take(min(window, turn, self._h2.max_outbound_frame_size))
            call.end_sent = call.half_closed and not call.outbox
            flags = END_STREAM if call.end_sent else 0
            self._frames.append(frame(DATA, flags, call.stream_id, data))
            self.window -= len(data)
            call.window -= len(data)
            turn -= len(data)
        if call.half_closed and not call.end_sent:
            call.end_sent = True
            self._frames.append(frame(DATA, END_STREAM, call.stream_id, b""))
        return False

    def _write(self) -> None:
        data = self._h2.data_to_send() + b"".join(self._frames)
        self._frames.clear()
        if data and self._transport is not None:
            self._transport.write(data)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._schedule_flush()

    # What the server sends

    def data_received(self, data: bytes) -> None:
        failure = None
        try:
            self._parse(self._partial_frame + data)
        except ProtocolError as error:
            failure = str(error)
        arrived, self._arrived = self._arrived, {}
        finished, self._finished = self._finished, []
        for call, messages in arrived.items():
            call.deliver(messages)
        for call, end in finished:
            call.end(end)
        if failure is not None:
            self._lose(failure)
        elif self._owner.gathers and len(self._calls) >= _GATHER_CALLS:
            self._pause_reading()

    def _pause_reading(self) -> None:
        """Let what the server is about to send gather: a read costs more than a message in it."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.pause_reading()
            # All connections at the same times: one turn of the event loop reads them all.
            # Not one that is nearly due: uvloop's timers, of whole milliseconds, would not wait.
            turn = round(self._loop.time() / _GATHER_SECONDS) + 1
            self._loop.call_at(turn * _GATHER_SECONDS, self._read_on, transport)

    def _read_on(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Take whole frames off ``data``. Raises ``ProtocolError``."""
        start, size = 0, len(data)
        while size - start >= _HEADER_SIZE:
            high, low, kind, flags, stream_id = _unpack_header(data, start)
            length = high << 8 | low
            if length > _MAX_FRAME_BYTES or not (self._ready or kind == SETTINGS):
                raise ProtocolError("this is not an HTTP/2 server")
            body = start + _HEADER_SIZE
            end = body + length
            if end > size:
                break
            if kind == DATA and self._blocks.open_on is None:
                self._received += length
                call = self._calls.get(stream_id)
                if call is not None:  # else it is cancelled, and the server did not know yet
                    self._receive_data(call, flags, data[body:end])
            else:
                self._receive_frame(kind, flags, stream_id, data[start:end])
            start = end
        self._partial_frame = data[start:]
        if self._received >= _WINDOW_UPDATE_BYTES:
            self._open_window(0, self._received)
            self._received = 0

    def _receive_frame(self, kind: int, flags: int, stream_id: int, frame: bytes) -> None:
        payload = frame[FRAME_HEADER.size :]
        if self._blocks.open_on is not None and kind != CONTINUATION:
            raise ProtocolError("headers that are not continued")
        if kind == UPDATE:
            self._receive_update(stream_id, payload)
        elif kind in (HEADERS, CONTINUATION):
            fields = self._blocks.add(kind, flags, stream_id, payload)
            if fields is not None:
                self._receive_headers(stream_id, fields, self._blocks.ended)
        elif kind == RESET:
            self._receive_reset(stream_id, number_of(payload))
        elif kind == GOAWAY:
            self._receive_goaway(payload)
        else:
            for event in self._h2.receive_data(frame):
                if isinstance(event, RemoteSettingsChanged):
                    self._receive_settings(event)
            self._schedule_flush()

    def _receive_data(self, call: GrpcCall, flags: int, payload: bytes) -> None:
        splitter = call.splitter
        splitter.received += len(payload)
        if splitter.received >= _WINDOW_UPDATE_BYTES:
            self._open_window(call.stream_id, splitter.received)
            splitter.received = 0
        try:
            messages = splitter.feed(unpadded(payload, PADDED) if flags & PADDED else payload)
        except GrpcError as error:
            return self._finish(call, error, ErrorCodes.CANCEL)
        if messages:
            if call in self._arrived:
                self._arrived[call] += messages
            else:
                self._arrived[call] = messages
        if flags & END_STREAM:
            self._finish(call, outcome({}), ErrorCodes.CANCEL)

    def _open_window(self, stream_id: int, size: int) -> None:
        if self._transport is not None:
            self._transport.write(number_frame(UPDATE, stream_id, size))

    def _receive_update(self, stream_id: int, payload: bytes) -> None:
        """The server takes more bytes: on the connection (stream 0) or on one stream."""
        increment = number_of(payload) & _WINDOW  # the highest bit is reserved
        holder = self if stream_id == 0 else self._calls.get(stream_id)
        if holder is None:  # cancelled, and the server did not know yet
            return
        holder.window += increment
        if not increment or holder.window > _WINDOW:
            raise ProtocolError(f"a WINDOW_UPDATE by {increment} to {holder.window}")
        if self._unsent:
            self._schedule_flush()

    def _receive_settings(self, event: RemoteSettingsChanged) -> None:
        self._ready = True
        self._connect_timer.cancel()
        window = event.changed_settings.get(SettingCodes.INITIAL_WINDOW_SIZE)
        if window is not None:  # it holds for streams that are open, too
            change = window.new_value - (window.original_value or 0)
            for call in self._calls.values():
                call.window += change

    def _receive_goaway(self, payload: bytes) -> None:
        """Calls that the server has accepted go on; the others do not, and no more begin."""
        if len(payload) < _GOAWAY_FIELDS.size:
            raise ProtocolError("a GOAWAY frame without its fields")
        last, code = _GOAWAY_FIELDS.unpack_from(payload)
        reason = payload[_GOAWAY_FIELDS.size :].decode("utf-8", "replace") or f"HTTP/2 error {code}"
        error = GrpcError("UNAVAILABLE", f"{self._owner.target} ends the connection: {reason}")
        self._draining = True
        self._owner.retire(self)
        for call in [call for call in self._calls.values() if call.stream_id > last]:
            self._forget(call, ErrorCodes.CANCEL)
            self._refused.append((call.stream_id, call))
        self._take_back_refused()
        for call in self._waiting:
            call.tries_left -= 1
            if call.tries_left and call.rewind():
                self._owner.start(call)
            else:
                self._finished.append((call, error))
        self._waiting.clear()
        self._schedule_flush()

    def _receive_reset(self, stream_id: int, code: int) -> None:
        call = self._calls.get(stream_id)
        if call is None:
            return
        status = _STATUS_OF_RESET.get(code, "INTERNAL")
        error = GrpcError(status, f"the server reset the stream: HTTP/2 error {code}")
        self._forget(call, None)
        if code != ErrorCodes.REFUSED_STREAM or not self._try_again(call, stream_id):
            self._finished.append((call, error))

    def _try_again(self, call: GrpcCall, stream_id: int) -> bool:
        """Send a call again that the server has refused without a look at it, after a pause.

        False once that has been done for long. At its limit of streams grpcio refuses one as long
        as it has not cleared away another whose end it has sent, which takes a busy host a while;
        so no stream is opened in the pause, and those that were refused go first, in order.
        """
        if call.give_up_at is None:
            call.give_up_at = self._loop.time() + self._owner.refused_seconds
        if self._loop.time() >= call.give_up_at or not call.rewind():
            return False
        if self._draining:
            self._owner.start(call)
            return True
        self._refused.append((stream_id, call))
        if self._pause is None:
            self._pause = self._loop.call_later(self._pause_seconds, self._end_pause)
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        return True

    def _end_pause(self) -> None:
        self._take_back_refused()
        self._schedule_flush()

    def _take_back_refused(self) -> None:
        """Have the refused calls wait again: before the others, in the order of their streams."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._refused.sort(key=lambda refused: refused[0])
        self._waiting.extendleft(call for _, call in reversed(self._refused))
        self._refused.clear()

    def _receive_headers(self, stream_id: int, fields: dict[bytes, bytes], ended: bool) -> None:
        call = self._calls.get(stream_id)
        if call is None or fields.get(b":status", b"").startswith(b"1"):
            return
        call.sent = None
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        if ended:
            error = outcome(fields)
            if error is None and call.splitter:
                error = GrpcError("INTERNAL", "the call ended within a message")
            # Without our END_STREAM the stream would stay open on this side.
            self._finish(call, error, None if call.end_sent else ErrorCodes.NO_ERROR)
        elif (error := http_error(fields)) is not None:
            self._finish(call, error, ErrorCodes.CANCEL)

    def _finish(self, call: GrpcCall, error: GrpcError | None, reset: ErrorCodes | None) -> None:
        self._forget(call, reset)
        self._finished.append((call, error))
