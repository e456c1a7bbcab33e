"""A gRPC client over one HTTP/2 connection, for processes that read many streams.

grpc.aio wakes a task for every message. Here one read of the socket hands each call all its
messages in one function call, and no task runs but the one that connects. CPU of the client for
one streamed token on one host, parsing included: grpc.aio 40 to 56 microseconds with 32 streams
and 25 to 35 with 128, this module 18 to 23 and 10 to 13.

Of gRPC there are unary and streaming calls, statuses with details, cancellation, flow control, the
server's limit on concurrent streams, GOAWAY, TLS, and a second try of calls that the server says
it has not begun. There is no load balancing, proxy, compression, metadata or keepalive.

``h2`` keeps the connection: preface, settings, pings. Streams are framed here, with headers by
``hpack`` (``http2_frames``): h2's streams and events would be most of the cost of a short call, and
it allows nothing after a GOAWAY, while the server still answers open calls.

This file is longer than others: a call, its frames and the connection are one state machine, which
two files would only spread.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import struct
from collections import deque
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote_to_bytes

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RemoteSettingsChanged
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

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
    packed_headers,
    unpadded,
)

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_TRIES = 3  # of a call that connections have refused unseen by their GOAWAY
_REFUSED_SECONDS = 10.0  # for which a call is sent again whose stream the server refuses unseen
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.1  # before it is sent again; doubled
_CALLS_AT_ONCE = 8  # are written together at most, where flow control admits them
_TURN_BYTES = 1 << 18  # of one call's data, before the other calls and the event loop have a turn
_MAX_FRAME_BYTES = 1 << 14  # HTTP/2's default, which we leave
_DEFAULT_WINDOW = (1 << 16) - 1
_LAST_STREAM_ID = (1 << 31) - 1
_WINDOW = (1 << 31) - 1  # the largest: callbacks never wait, so nothing is gained by holding back
_WINDOW_UPDATE_BYTES = 1 << 24  # received before the window is opened again by as much

_GOAWAY_FIELDS = struct.Struct(">II")  # last stream that the server accepts, error code
_MESSAGE_PREFIX = struct.Struct(">BI")  # compressed flag, length

_STATUSES = {str(code.value[0]).encode(): str(code.name) for code in grpc.StatusCode}
_STATUS_OF_RESET: dict[int, str] = {
    ErrorCodes.REFUSED_STREAM: "UNAVAILABLE",
    ErrorCodes.CANCEL: "CANCELLED",
    ErrorCodes.ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED",
    ErrorCodes.INADEQUATE_SECURITY: "PERMISSION_DENIED",
}

_OnMessages = Callable[[list[bytes]], None]


class GrpcError(Exception):
    """A call ended with a status other than OK: its name (``"UNAVAILABLE"``) and the details."""

    def __init__(self, status: str, details: str) -> None:
        super().__init__(f"{status}: {details}")
        self.status = status
        self.details = details


_OnEnd = Callable[[GrpcError | None], None]


class GrpcCall:
    """One RPC, made by ``Connection.open``.

    ``on_messages`` gets every message that one read of the socket completed, in order; ``on_end``
    gets None for status OK, else the error, and is the last callback. Both may be assigned anew
    while the call runs. A callback that raises has its call cancelled.
    """

    def __init__(self, headers: bytes, on_messages: _OnMessages, on_end: _OnEnd) -> None:
        self.on_messages = on_messages
        self.on_end = on_end
        self.replies = 0
        self.done = False
        self._headers = headers
        self._http2: _Http2 | None = None
        self._stream_id = 0  # 0 until its headers are sent
        self._window = 0  # bytes that the server takes on this stream
        self._outbox: deque[bytes] = deque()
        self._outbox_taken = 0  # bytes of the first in the outbox that are sent
        self._sent: list[bytes] | None = []  # what to send again, until the server answers
        self._tries_left = _TRIES
        self._give_up_at: float | None = None  # the loop's time, once its stream has been refused
        self._half_closed = self._end_sent = False
        self._splitter = _MessageSplitter()

    def send(self, message: bytes) -> None:
        """Queue a message; it leaves when flow control admits it. Nothing happens once done."""
        if self._half_closed:
            raise RuntimeError("a message cannot follow half_close()")
        if not self.done:
            self._outbox.append(_MESSAGE_PREFIX.pack(0, len(message)) + message)
            self._flush()

    def half_close(self) -> None:
        """Tell the server, after what is queued, that no more messages follow."""
        if not self.done and not self._half_closed:
            self._half_closed = True
            self._flush()

    def cancel(self) -> None:
        """End the call without another callback. A call not yet sent sends nothing."""
        if not self.done:
            self.done = True
            self._outbox.clear()
            self._sent = None
            if self._http2 is not None:
                self._http2.cancel(self)

    def _flush(self) -> None:
        if self._http2 is not None:
            self._http2.wants_to_send(self)

    def _take(self, limit: int) -> bytes:
        """The next bytes to send: up to ``limit`` of one message."""
        first = self._outbox[0]
        taken = first[self._outbox_taken : self._outbox_taken + limit]
        self._outbox_taken += len(taken)
        if self._outbox_taken == len(first):
            self._outbox.popleft()
            self._outbox_taken = 0
            if self._sent is not None:
                self._sent.append(first)
        return taken

    def _rewind(self) -> bool:
        """Be as if never sent; False when it was answered."""
        if self._sent is None:
            return False
        self._outbox.extendleft(reversed(self._sent))
        self._sent, self._outbox_taken, self._stream_id, self._end_sent = [], 0, 0, False
        return True

    def _deliver(self, messages: list[bytes]) -> None:
        if self.done:
            return
        self.replies += len(messages)
        try:
            self.on_messages(messages)
        except Exception:
            _log.exception("a callback failed on messages; its call is cancelled")
            self.cancel()

    def _end(self, error: GrpcError | None) -> None:
        if self.done:
            return
        self.done = True
        self._outbox.clear()
        self._sent = None
        try:
            self.on_end(error)
        except Exception:
            _log.exception("a callback failed on the end of its call")


class Connection:
    """Calls to one gRPC server at ``target``: ``host:port``, an IPv6 host in brackets.

    Connects when a call needs it, on the event loop that runs then, and again after a loss; the
    calls of a lost connection end with UNAVAILABLE. With ``tls`` the context's ALPN is set to h2.
    ``refused_seconds``: how long a call is sent again whose stream the server refuses before it
    looks at it; a call that is cancelled meanwhile is not. Raises ``ValueError`` for a target
    without host or port.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: ssl.SSLContext | None = None,
        refused_seconds: float = _REFUSED_SECONDS,
    ) -> None:
        host, _, port = target.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"target: {target!r} is not host:port")
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        self.target = target
        self.refused_seconds = refused_seconds
        self._address = (host.removeprefix("[").removesuffix("]"), int(port))
        self._tls = tls
        self._headers = [
            (b":method", b"POST"),
            (b":scheme", b"http" if tls is None else b"https"),
            (b":authority", target.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"grpc-accept-encoding", b"identity"),
            (b"user-agent", b"trtllm-bls"),
        ]
        self._packed_headers: dict[str, bytes] = {}  # by method
        self._current: _Http2 | None = None
        self._connections: set[_Http2] = set()  # the current one, and those being drained
        self._closed = False

    def open(self, method: str, on_messages: _OnMessages, on_end: _OnEnd) -> GrpcCall:
        """Start a call of ``method`` (``/package.Service/Method``); callbacks come later.

        Raises ``GrpcError`` once the connection is closed.
        """
        if self._closed:
            raise GrpcError("CANCELLED", f"the connection to {self.target} is closed")
        if method not in self._packed_headers:
            fields = [(b":path", method.encode()), *self._headers]
            self._packed_headers[method] = packed_headers(fields)
        call = GrpcCall(self._packed_headers[method], on_messages, on_end)
        self._start(call)
        return call

    async def unary(self, method: str, message: bytes, timeout: float | None = None) -> bytes:
        """One message there, one back, within ``timeout`` seconds. Raises ``GrpcError``."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        messages: list[bytes] = []

        def on_end(error: GrpcError | None) -> None:
            if error is None and len(messages) != 1:
                error = GrpcError("INTERNAL", f"{method} sent {len(messages)} messages, not one")
            if answer.done():
                return
            if error is None:
                answer.set_result(messages[0])
            else:
                answer.set_exception(error)

        # Not asyncio.wait_for: up to Python 3.11 it can swallow the cancellation of its caller.
        late = GrpcError("DEADLINE_EXCEEDED", f"{method} at {self.target} did not answer in time")
        timer = None if timeout is None else loop.call_later(timeout, on_end, late)
        call = self.open(method, messages.extend, on_end)
        call.send(message)
        call.half_close()
        try:
            return await answer
        finally:
            call.cancel()
            if timer is not None:
                timer.cancel()

    async def close(self) -> None:
        """End open calls with CANCELLED and disconnect."""
        self._closed = True
        connections = list(self._connections)
        for http2 in connections:
            http2.end(GrpcError("CANCELLED", f"the connection to {self.target} was closed"))
        await asyncio.gather(*(http2.disconnected() for http2 in connections))

    def _start(self, call: GrpcCall) -> None:
        if self._current is None:
            self._current = _Http2(self)
            self._connections.add(self._current)
            self._current.connect(self._address, self._tls)
        self._current.add(call)

    def _retire(self, http2: _Http2) -> None:
        """``http2`` takes no more calls."""
        if self._current is http2:
            self._current = None


class _MessageSplitter:
    """Cuts a call's messages out of DATA payloads, which may begin and end anywhere in them."""

    def __init__(self) -> None:
        self.received = 0  # bytes since the stream's window was last opened
        self._partial = bytearray()
        self._partial_needs = 0  # bytes before a look at the partial message is worth while

    def __bool__(self) -> bool:
        """Whether there is part of a message."""
        return bool(self._partial)

    def feed(self, payload: bytes) -> list[bytes]:
        """The messages that ``payload`` completes. Raises ``GrpcError`` for a compressed one."""
        source: bytes | memoryview = payload
        if self._partial:
            self._partial += payload
            if len(self._partial) < self._partial_needs:
                return []
            source = memoryview(self._partial)
        messages = []
        start, size = 0, len(source)
        needs = _MESSAGE_PREFIX.size
        while size - start >= _MESSAGE_PREFIX.size:
            compressed, length = _MESSAGE_PREFIX.unpack_from(source, start)
            if compressed:
                raise GrpcError("INTERNAL", "the server compressed a message without being asked")
            needs = _MESSAGE_PREFIX.size + length
            if size - start < needs:
                break
            messages.append(bytes(source[start + _MESSAGE_PREFIX.size : start + needs]))
            start += needs
            needs = _MESSAGE_PREFIX.size
        if self._partial or start < size:
            self._partial = bytearray(source[start:])
            self._partial_needs = needs
        return messages


class _Http2(asyncio.Protocol):
    """One HTTP/2 connection and the calls on it: made, ready at the server's SETTINGS, perhaps
    draining after its GOAWAY, ended."""

    def __init__(self, owner: Connection) -> None:
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
        self._window = _DEFAULT_WINDOW  # bytes that the server takes, of all calls together
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
        self._owner._connections.discard(self)

    def _lose(self, reason: str) -> None:
        self.end(GrpcError("UNAVAILABLE", f"{self._owner.target}: {reason}"))

    def end(self, error: GrpcError) -> None:
        """End every call with ``error``, and the connection."""
        if self._ended:
            return
        self._ended = True
        self._connect_timer.cancel()
        self._owner._retire(self)
        if self._transport is None:
            self._connecting.cancel()
            self._owner._connections.discard(self)
        else:
            self._write()  # h2 says GOAWAY where the server broke the protocol
            self._transport.close()
        self._take_back_refused()
        calls = [*self._calls.values(), *self._waiting]
        self._calls.clear()
        self._waiting.clear()
        self._unsent.clear()
        for call in calls:
            call._end(error)

    async def disconnected(self) -> None:
        """Wait until the socket is closed; not for a server that does not read."""
        await asyncio.wait({self._connecting})
        if self._transport is not None:
            await asyncio.wait({self._lost}, timeout=_CLOSE_SECONDS)
            self._transport.abort()
            await self._lost

    # Calls and what they send

    def add(self, call: GrpcCall) -> None:
        call._http2 = self
        self._waiting.append(call)
        self._schedule_flush()

    def wants_to_send(self, call: GrpcCall) -> None:
        if call._stream_id in self._calls:
            self._unsent[call] = None
            self._schedule_flush()
        if len(self._unsent) + len(self._waiting) >= _CALLS_AT_ONCE:
            self._flush()  # the first need not wait until the last of many has been made

    def cancel(self, call: GrpcCall) -> None:
        if call._stream_id in self._calls:
            self._forget(call, ErrorCodes.CANCEL)

    def _forget(self, call: GrpcCall, reset: ErrorCodes | None) -> None:
        """The call's stream is over; ``reset`` says why to a server that would go on with it."""
        del self._calls[call._stream_id]
        self._unsent.pop(call, None)
        if reset is not None:
            self._frames.append(number_frame(RESET, call._stream_id, reset))
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
            stream_id = call._stream_id = self._next_stream_id
            self._next_stream_id += 2
            self._frames.append(frame(HEADERS, END_HEADERS, stream_id, call._headers))
            call._window = self._h2.remote_settings.initial_window_size
            self._calls[stream_id] = call
            self._unsent[call] = None
            if self._next_stream_id > _LAST_STREAM_ID:
                return self._drain()

    def _drain(self) -> None:
        """No more streams here; who waits for one gets it on another connection."""
        self._draining = True
        self._owner._retire(self)
        self._take_back_refused()
        while self._waiting:
            self._owner._start(self._waiting.popleft())

    def _send_data(self, call: GrpcCall) -> bool:
        """Frame a turn of a call's data; whether there is more that its window admits."""
        del self._unsent[call]
        turn = _TURN_BYTES
        while call._outbox:
            window = min(self._window, call._window)
            if window <= 0 or turn <= 0:
                self._unsent[call] = None  # last now: windows and turns go around
                return window > 0
            data = call._take(min(window, turn, self._h2.max_outbound_frame_size))
            call._end_sent = call._half_closed and not call._outbox
            flags = END_STREAM if call._end_sent else 0
            self._frames.append(frame(DATA, flags, call._stream_id, data))
            self._window -= len(data)
            call._window -= len(data)
            turn -= len(data)
        if call._half_closed and not call._end_sent:
            call._end_sent = True
            self._frames.append(frame(DATA, END_STREAM, call._stream_id, b""))
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
            call._deliver(messages)
        for call, end in finished:
            call._end(end)
        if failure is not None:
            self._lose(failure)

    def _parse(self, data: bytes) -> None:
        """Take whole frames off ``data``. Raises ``ProtocolError``."""
        start, size = 0, len(data)
        while size - start >= FRAME_HEADER.size:
            high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(data, start)
            length = high << 8 | low
            if length > _MAX_FRAME_BYTES or not (self._ready or kind == SETTINGS):
                raise ProtocolError("this is not an HTTP/2 server")
            body = start + FRAME_HEADER.size
            end = body + length
            if end > size:
                break
            if kind == DATA and self._blocks.open_on is None:
                self._receive_data(stream_id, flags, data[body:end])
            else:
                self._receive_frame(kind, flags, stream_id, data[start:end])
            start = end
        self._partial_frame = data[start:]

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

    def _receive_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._received += len(payload)
        if self._received >= _WINDOW_UPDATE_BYTES:
            self._open_window(0, self._received)
            self._received = 0
        call = self._calls.get(stream_id)
        if call is None:  # cancelled, and the server did not know yet
            return
        splitter = call._splitter
        splitter.received += len(payload)
        if splitter.received >= _WINDOW_UPDATE_BYTES:
            self._open_window(stream_id, splitter.received)
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
            self._finish(call, _outcome({}), ErrorCodes.CANCEL)

    def _open_window(self, stream_id: int, size: int) -> None:
        if self._transport is not None:
            self._transport.write(number_frame(UPDATE, stream_id, size))

    def _receive_update(self, stream_id: int, payload: bytes) -> None:
        """The server takes more bytes: on the connection (stream 0) or on one stream."""
        increment = number_of(payload) & _WINDOW  # the highest bit is reserved
        holder = self if stream_id == 0 else self._calls.get(stream_id)
        if holder is None:  # cancelled, and the server did not know yet
            return
        holder._window += increment
        if not increment or holder._window > _WINDOW:
            raise ProtocolError(f"a WINDOW_UPDATE by {increment} to {holder._window}")
        if self._unsent:
            self._schedule_flush()

    def _receive_settings(self, event: RemoteSettingsChanged) -> None:
        self._ready = True
        self._connect_timer.cancel()
        window = event.changed_settings.get(SettingCodes.INITIAL_WINDOW_SIZE)
        if window is not None:  # it holds for streams that are open, too
            change = window.new_value - (window.original_value or 0)
            for call in self._calls.values():
                call._window += change

    def _receive_goaway(self, payload: bytes) -> None:
        """Calls that the server has accepted go on; the others do not, and no more begin."""
        if len(payload) < _GOAWAY_FIELDS.size:
            raise ProtocolError("a GOAWAY frame without its fields")
        last, code = _GOAWAY_FIELDS.unpack_from(payload)
        reason = payload[_GOAWAY_FIELDS.size :].decode("utf-8", "replace") or f"HTTP/2 error {code}"
        error = GrpcError("UNAVAILABLE", f"{self._owner.target} ends the connection: {reason}")
        self._draining = True
        self._owner._retire(self)
        for call in [call for call in self._calls.values() if call._stream_id > last]:
            self._forget(call, ErrorCodes.CANCEL)
            self._refused.append((call._stream_id, call))
        self._take_back_refused()
        for call in self._waiting:
            call._tries_left -= 1
            if call._tries_left and call._rewind():
                self._owner._start(call)
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
        if call._give_up_at is None:
            call._give_up_at = self._loop.time() + self._owner.refused_seconds
        if self._loop.time() >= call._give_up_at or not call._rewind():
            return False
        if self._draining:
            self._owner._start(call)
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
        call._sent = None
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        if ended:
            outcome = _outcome(fields)
            if outcome is None and call._splitter:
                outcome = GrpcError("INTERNAL", "the call ended within a message")
            # Without our END_STREAM the stream would stay open on this side.
            self._finish(call, outcome, None if call._end_sent else ErrorCodes.NO_ERROR)
        elif (error := _http_error(fields)) is not None:
            self._finish(call, error, ErrorCodes.CANCEL)

    def _finish(self, call: GrpcCall, error: GrpcError | None, reset: ErrorCodes | None) -> None:
        self._forget(call, reset)
        self._finished.append((call, error))


def _outcome(fields: dict[bytes, bytes]) -> GrpcError | None:
    """What the last headers of a response say: None for OK."""
    code = fields.get(b"grpc-status")
    if code is None:
        return _http_error(fields) or GrpcError("UNKNOWN", "the call ended without a grpc-status")
    details = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return None if code == b"0" else GrpcError(_STATUSES.get(code, "UNKNOWN"), details)


def _http_error(fields: dict[bytes, bytes]) -> GrpcError | None:
    """Why this is not the beginning of a gRPC response; None if it is one."""
    status = fields.get(b":status", b"200")
    kind = fields.get(b"content-type", b"application/grpc")
    if status != b"200":
        passing = status in (b"429", b"502", b"503", b"504")
        details = f"HTTP status {status.decode('latin-1')}"
        return GrpcError("UNAVAILABLE" if passing else "UNKNOWN", details)
    if not kind.startswith(b"application/grpc"):
        return GrpcError("UNKNOWN", f"not gRPC: content-type is {kind.decode('latin-1')}")
    return None
