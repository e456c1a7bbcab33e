"""A gRPC client on asyncio for processes that read many streams of small messages.

It costs less CPU than grpcio. With ``grpc.aio`` every message wakes a task, and the synchronous
client of grpcio wakes a thread. This client parses one read of a socket in one loop and gives each
call all of its messages in one function call, so no task wakes at all. With 128 streams from
TrtllmService on a busy machine with two cores, one streamed token costs the client about
16 microseconds with the parsing of the message (7 with ``coalesce_reads``). ``grpc.aio`` costs 60,
and grpcio's synchronous client with a thread for each stream 100.

It has unary and streaming calls over one HTTP/2 connection, plain or with TLS, and obeys the
server's limit on streams, its flow control and its GOAWAY. It has no load balancing, name
resolution beyond ``getaddrinfo``, proxies, compression or keepalive pings. It does not retry calls
that the server may have begun, and sends no deadlines (``unary`` has a timeout of its own).
Messages go in and come out as bytes.

How to use it::

    channel = GrpcChannel("localhost:8001")
    reply = await channel.unary("/package.Service/Method", request, timeout=5)

    call = channel.open("/package.Service/StreamingMethod", on_messages, on_end)
    call.send(request)
    call.half_close()
    ...
    await channel.close()

A channel belongs to one event loop; nothing here is thread-safe. Callbacks must not block.

How to read it: ``http2`` is HTTP/2 and gRPC's framing as a state machine without I/O, like h11:
bytes in, ``Received`` out; requests in, bytes out. This module does the I/O on asyncio:
``GrpcChannel`` (one server), ``GrpcCall`` (one RPC) and the connections between them.

Engines, pipelines and port 8000 read streams of responses with ``ResponseStream`` at the end of
this file, so that all have the same bounds and the same ends. A ``Release`` decides what happens to
the call at the end of a stream: it is closed or cancelled, goes back to a pool, or its request is
aborted first.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Generic, TypeAlias, TypeVar, cast

from trtllm_bls.errors import EngineError, Overloaded, TrtllmBlsError
from trtllm_bls.types import Backoff
from trtllm_bls.wire.http2 import GrpcError, Http2Client, Received, State, packed_headers

_CONNECT_SECONDS = 5.0
_SOCKET_CLOSE_SECONDS = 1.0  # for the server to close its side of the socket
_REFUSED_SECONDS = 10.0  # how long a call is sent again whose stream the server refuses
_PAUSE_SECONDS = Backoff(0.001, 0.1)  # before it is sent again
_MAX_UNREAD_BYTES = 2**22  # answers to a server that does not read them
_ATTEMPTS = 3  # for a call that servers leave unprocessed by their GOAWAY
_COALESCE_CALLS = 16  # the least number of calls whose reads are coalesced
_COALESCE_SECONDS = 0.002  # between two reads
MOST_WAITING = 16_384  # items in one stream; a stream with more fails, since its reader is behind
MOST_WAITING_BYTES = 8 * 2**20  # in one call's messages; beyond it the server must not send

__all__ = [
    "MOST_WAITING",
    "MOST_WAITING_BYTES",
    "Arrivals",
    "GrpcCall",
    "GrpcChannel",
    "GrpcError",
    "Release",
    "ResponseStream",
    "StreamEnd",
    "close_or_cancel",
    "ignore",
]

Item = TypeVar("Item")

OnMessages = Callable[[list[bytes]], None]
OnEnd = Callable[[GrpcError | None], None]

_log = logging.getLogger(__name__)


class GrpcChannel:
    """Calls to one gRPC server at ``target``: ``host:port``, an IPv6 host in brackets.

    A channel connects when a call needs it, on the event loop that runs then, and again after a
    loss. The calls of a lost connection end with UNAVAILABLE. With ``tls`` the context's ALPN is
    set to h2. ``coalesce_reads``: read the socket only every two milliseconds while there are many
    calls, none of which waits for its first message. One read then brings messages of many calls,
    at half the CPU for each. Raises ``ValueError`` for a target without host or port.
    """

    def __init__(
        self, target: str, *, tls: ssl.SSLContext | None = None, coalesce_reads: bool = False
    ) -> None:
        host, _, port = target.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"target: {target!r} is not host:port")
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        self.target = target
        self.address = (host.removeprefix("[").removesuffix("]"), int(port))
        self.tls = tls
        self.coalesce_reads = coalesce_reads
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
        self._current: _Http2Connection | None = None
        self.connections: set[_Http2Connection] = set()  # the current one, and those being drained
        self._is_closed = False

    def open(
        self, method: str, on_messages: OnMessages, on_end: OnEnd, traceparent: str | None = None
    ) -> GrpcCall:
        """Start a call of ``method`` (``/package.Service/Method``). Callbacks come later.

        ``traceparent``: the call's trace context (W3C), which is sent as metadata. Raises
        ``GrpcError`` once the channel is closed.
        """
        if self._is_closed:
            raise GrpcError("CANCELLED", f"the connection to {self.target} is closed")
        if method not in self._packed_headers:
            fields = [(b":path", method.encode()), *self._headers]
            self._packed_headers[method] = packed_headers(fields)
        headers = self._packed_headers[method]
        if traceparent is not None:
            headers += packed_headers([(b"traceparent", traceparent.encode())])
        call = GrpcCall(headers, on_messages, on_end)
        self.start(call)
        return call

    async def unary(self, method: str, message: bytes, timeout: float | None = None) -> bytes:
        """Send a message and return the reply, within ``timeout`` seconds. Raises ``GrpcError``."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[GrpcError | None] = loop.create_future()
        messages: list[bytes] = []

        def on_end(error: GrpcError | None) -> None:
            if not ended.done():
                ended.set_result(error)

        # asyncio.wait_for can swallow the cancellation of its caller up to Python 3.11.
        timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            problem = f"{method} at {self.target} did not answer in time"
            timer = loop.call_later(timeout, on_end, GrpcError("DEADLINE_EXCEEDED", problem))
        call = self.open(method, messages.extend, on_end)
        call.send(message)
        call.half_close()
        try:
            error = await ended
        finally:
            call.cancel()
            if timer is not None:
                timer.cancel()
        if error is None and len(messages) != 1:
            error = GrpcError("INTERNAL", f"{method} sent {len(messages)} messages, not one")
        if error is not None:
            raise error
        return messages[0]

    async def close(self) -> None:
        """End open calls with CANCELLED and disconnect."""
        self._is_closed = True
        connections = list(self.connections)
        for connection in connections:
            connection.end(GrpcError("CANCELLED", f"the connection to {self.target} was closed"))
        await asyncio.gather(*[connection.disconnected() for connection in connections])

    # --- used by the connections --------------------------------------------------------------

    def start(self, call: GrpcCall) -> None:
        """Put a call on the current connection, or on a new one if there is none."""
        if self._current is None:
            self._current = _Http2Connection(self)
            self.connections.add(self._current)
        self._current.add(call)

    def retire(self, connection: _Http2Connection) -> None:
        """Put no more calls on ``connection``."""
        if self._current is connection:
            self._current = None


class GrpcCall:
    """An RPC, made by ``GrpcChannel.open``.

    ``on_messages`` gets every message that one read of the socket completed, in order. ``on_end``
    is the last callback: it gets the error, or None for status OK. Both may be assigned anew while
    the call runs. If a callback raises, its call is cancelled. ``replies`` counts messages. The
    connection owns the fields from ``headers`` on.
    """

    def __init__(self, headers: bytes, on_messages: OnMessages, on_end: OnEnd) -> None:
        self.on_messages = on_messages
        self.on_end = on_end
        self.replies = 0
        self.done = False
        self.half_closed = False
        self.headers = headers
        self.connection: _Http2Connection  # set when the channel starts the call
        self.stream_id = 0  # on `connection`; 0 until the call is sent there
        # The messages so far, until the server begins to answer: they may have to be sent again.
        self.unanswered: list[bytes] | None = []
        self.attempts_left = _ATTEMPTS
        self.give_up_at: float | None = None  # the loop's time, once the server refused its stream

    def send(self, message: bytes) -> None:
        """Queue a message, unless the call is done. It leaves when flow control admits it."""
        if self.half_closed:
            raise RuntimeError("a message cannot follow half_close()")
        if self.done:
            return
        if self.unanswered is not None:
            self.unanswered.append(message)
        self.connection.protocol.send(self.stream_id, message)
        self.connection.flush_soon()

    def half_close(self) -> None:
        """Tell the server, after the queued messages, that no more follow."""
        if self.done or self.half_closed:
            return
        self.half_closed = True
        self.connection.protocol.half_close(self.stream_id)
        self.connection.flush_soon()

    def hold(self) -> None:
        """Let the server fill its current window, and send no more until ``release``."""
        self.connection.protocol.hold(self.stream_id)

    def release(self) -> None:
        """Let the server send again."""
        self.connection.protocol.release(self.stream_id)
        self.connection.flush_soon()

    def cancel(self) -> None:
        """End the call without another callback. A call not yet sent sends nothing."""
        if not self.done:
            if self.connection.calls.pop(self.stream_id, None) is not None:
                self.connection.protocol.reset(self.stream_id)
                self.connection.flush_soon()
            self.finish()

    def end(self, error: GrpcError | None) -> None:
        """End the call with its last callback."""
        if self.done:
            return
        on_end = self.on_end
        self.finish()
        try:
            on_end(error)
        except Exception:
            _log.exception("a callback failed on the end of its call")

    def finish(self) -> None:
        """Mark the call as done, and drop its callbacks.

        The callbacks' owner refers to this call. A reference back would keep both alive until a
        garbage collection.
        """
        self.done = True
        self.unanswered = None
        self.on_messages = ignore
        self.on_end = ignore


def ignore(event: object) -> None:
    """Do nothing, as a callback."""


class _Http2Connection(asyncio.Protocol):
    """An HTTP/2 connection and the calls on it.

    It connects, is ready at the server's SETTINGS, drains after the server's GOAWAY, and ends with
    its last call, by ``end`` or with the socket. A call waits here until the connection is ready
    and the server accepts another stream.
    """

    def __init__(self, channel: GrpcChannel) -> None:
        self.protocol = Http2Client()
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._connecting = self._loop.create_task(self._connect())
        self._connect_timer = self._loop.call_later(_CONNECT_SECONDS, self._end_unless_ready)
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._waiting: deque[GrpcCall] = deque()
        self.calls: dict[int, GrpcCall] = {}  # by stream
        # The server has refused streams: none is opened until this timer is due.
        self._pause: asyncio.TimerHandle | None = None
        self._pause_seconds = _PAUSE_SECONDS.shortest
        self._flush_scheduled = False
        self._writing_paused = False
        self._unread_bytes = 0  # written since writing was paused

    # The life of the connection

    async def _connect(self) -> None:
        channel = self._channel
        try:
            await self._loop.create_connection(lambda: self, *channel.address, ssl=channel.tls)
        except (OSError, UnicodeError) as error:
            self._lose(str(error))

    def _end_unless_ready(self) -> None:
        if self.protocol.state is State.WAITING:
            self._lose(f"no HTTP/2 server answered in {_CONNECT_SECONDS:g} s")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # asyncio sets TCP_NODELAY
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            return self._lose("the server does not offer HTTP/2 (ALPN h2)")
        self._transport.write(self.protocol.bytes_to_send())

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc) if exc else "the server closed the connection")
        self._lost.set_result(None)
        self._channel.connections.discard(self)

    def _lose(self, reason: str) -> None:
        self.end(GrpcError("UNAVAILABLE", reason, self._channel.target))

    def end(self, error: GrpcError) -> None:
        """End every call with ``error``, and the connection."""
        if self.protocol.state is State.ENDED:
            return
        self.protocol.state = State.ENDED
        self._connect_timer.cancel()
        self._channel.retire(self)
        if self._transport is None:
            self._connecting.cancel()
            self._channel.connections.discard(self)
        else:
            # If the server broke the protocol, these bytes are a GOAWAY.
            self._transport.write(self.protocol.bytes_to_send(data=False))
            self._transport.close()
            # Bytes that the server does not read would keep the socket open.
            self._loop.call_later(_SOCKET_CLOSE_SECONDS, self._transport.abort)
        calls = [*self.calls.values(), *self._waiting]
        self.calls.clear()
        self._waiting.clear()
        for call in calls:
            call.end(error)

    async def disconnected(self) -> None:
        """Wait until the socket is closed, for a limited time if the server does not read."""
        await asyncio.wait({self._connecting})
        if self._transport is not None:
            await asyncio.wait({self._lost}, timeout=_SOCKET_CLOSE_SECONDS)
            self._transport.abort()
            await self._lost

    # Sending

    def add(self, call: GrpcCall) -> None:
        """Send ``call`` as soon as the server accepts another stream."""
        call.connection = self
        call.stream_id = 0
        self._waiting.append(call)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Send the due frames once in this turn of the event loop."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Open streams, frame the data that flow control admits, and write all of it at once."""
        self._flush_scheduled = False
        protocol = self.protocol
        transport = self._transport
        if protocol.state in (State.WAITING, State.ENDED) or transport is None:
            return
        while self._waiting and protocol.can_open and self._pause is None:
            call = self._waiting.popleft()
            if call.done:
                continue
            self._resume_reading(transport)  # the call's first message must not wait
            call.stream_id = protocol.open(call.headers)
            self.calls[call.stream_id] = call
            for message in call.unanswered or ():
                protocol.send(call.stream_id, message)
            if call.half_closed:
                protocol.half_close(call.stream_id)
        if protocol.state is State.DRAINING:
            self._channel.retire(self)
            while self._waiting:
                self._channel.start(self._waiting.popleft())
        data = protocol.bytes_to_send(data=not self._writing_paused)
        if data:
            transport.write(data)
            if self._writing_paused:
                # Answers to PING and SETTINGS must be sent also now. A server may ask for them
                # without end and read none.
                self._unread_bytes += len(data)
                if self._unread_bytes > _MAX_UNREAD_BYTES:
                    self._lose("the server does not read the answers that it asks for")
                    return
        if protocol.state is State.DRAINING and not self.calls:
            transport.close()
        elif protocol.unsent and not self._writing_paused and protocol.has_more_data:
            self.flush_soon()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._unread_bytes = 0
        self.flush_soon()

    # Receiving

    def data_received(self, data: bytes) -> None:
        if self.protocol.state is State.ENDED:
            return
        received = self.protocol.receive(data)
        for stream_id in received.answered:
            self.calls[stream_id].unanswered = None
            self._pause_seconds = _PAUSE_SECONDS.shortest
        stream_ids = list(received.messages)
        if received.answered:
            # A call's first message goes before other calls' later ones.
            stream_ids.sort(key=set(received.answered).__contains__, reverse=True)
        for stream_id in stream_ids:
            messages = received.messages[stream_id]
            call = self.calls.get(stream_id)
            if call is None:  # a callback has just cancelled it
                continue
            call.replies += len(messages)
            try:
                call.on_messages(messages)
            except Exception:
                _log.exception("a callback failed on messages; its call is cancelled")
                call.cancel()
        for stream_id, error in received.ended.items():
            call = self.calls.pop(stream_id, None)
            if call is not None:
                call.end(error)
        if received.refusals or received.goaway is not None:
            self._send_again(received)
        if received.failure is not None:
            self._lose(received.failure)
        # ``_flush`` also closes a draining connection after its last call.
        if received.ended or self.protocol.output or self.protocol.unsent or self._waiting:
            self.flush_soon()
        has_many_calls = self._channel.coalesce_reads and len(self.calls) >= _COALESCE_CALLS
        # Pause only if no call waits for its first message.
        if has_many_calls and all([call.replies for call in self.calls.values()]):
            self._pause_reading()

    def _send_again(self, received: Received) -> None:
        """Queue the calls that the server has refused or left unprocessed for another stream.

        Refused calls are sent again on this connection after a pause, for ``_REFUSED_SECONDS``.
        At its limit of streams, grpcio refuses a stream until it has cleared away another one whose
        end it has sent, which takes a while on a busy host. After a GOAWAY all waiting calls go
        over the next connection, each at most ``_ATTEMPTS`` times.
        """
        now = self._loop.time()
        calls = []
        for stream_id, refusal in received.refusals.items():
            call = self.calls.pop(stream_id, None)
            if call is None:
                continue
            if call.give_up_at is None:
                call.give_up_at = now + _REFUSED_SECONDS
            if now < call.give_up_at and call.unanswered is not None:
                calls.append(call)
            else:
                call.end(refusal)
        for stream_id in received.unprocessed:
            call = self.calls.pop(stream_id, None)
            if call is not None:
                calls.append(call)
        # Calls that had a stream go first, in the order of their streams.
        waiting = sorted([*calls, *self._waiting], key=lambda call: call.stream_id or math.inf)
        self._waiting = deque(waiting)
        if received.goaway is not None:
            self._waiting.clear()
            self._channel.retire(self)
            reason = f"{self._channel.target} ends the connection: {received.goaway}"
            for call in waiting:
                call.attempts_left -= 1
                if call.attempts_left and call.unanswered is not None:
                    self._channel.start(call)
                else:
                    call.end(GrpcError("UNAVAILABLE", reason))
        elif calls and self._pause is None:
            self._pause = self._loop.call_later(self._pause_seconds, self._end_pause)
            self._pause_seconds = _PAUSE_SECONDS.after(self._pause_seconds)
        self.flush_soon()

    def _end_pause(self) -> None:
        self._pause = None
        self.flush_soon()

    def _pause_reading(self) -> None:
        """Pause reading for about two milliseconds. A read costs more CPU than a message in it, so
        few reads with many messages are cheaper."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.pause_reading()
            # All connections resume at the same times, so that one turn of the event loop reads
            # them all. A time that is nearly due is skipped, because uvloop's timers have whole
            # milliseconds and would not wait.
            turn = round(self._loop.time() / _COALESCE_SECONDS) + 1
            self._loop.call_at(turn * _COALESCE_SECONDS, self._resume_reading, transport)

    def _resume_reading(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.resume_reading()


# --- streams of responses --------------------------------------------------------------------


class StreamEnd(Enum):
    """The end of a stream."""

    LAST = "its last item has arrived"
    FAILED = "an error came in place of its last item"
    LEFT = "its reader has left"


AtEnd: TypeAlias = Callable[[StreamEnd, Exception | None], None]
Release: TypeAlias = Callable[[GrpcCall, StreamEnd], None]


class Arrivals(Generic[Item]):
    """A queue of items from the event loop to one reader. Adding never waits.

    The stream runs until ``end``, ``fail`` or ``aclose``, or until its reader is ``MOST_WAITING``
    items behind. Later items are dropped. The reader may still take the earlier ones.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_bytes = 0  # in messages that arrived while others waited
        self._over = False
        self._error: Exception | None = None
        self._at_end: list[AtEnd] = []

    def call_at_end(self, callback: AtEnd) -> None:
        """Register a callback that gets the stream's end and its error, once."""
        self._at_end.append(callback)

    def put(self, items: Iterable[Item]) -> None:
        """Add items, unless the stream has ended."""
        if self._over:
            return
        self._items.extend(items)
        if len(self._items) > MOST_WAITING:
            self._items.clear()
            self.fail(Overloaded(f"its reader is more than {MOST_WAITING} responses behind"))
        elif self._items:
            self._wake()

    def end(self) -> None:
        """End the stream after its last item."""
        self._finish(StreamEnd.LAST)

    def fail(self, error: Exception) -> None:
        """End the stream. ``wait`` raises ``error`` once all items are taken."""
        self._finish(StreamEnd.FAILED, error)

    async def aclose(self) -> None:
        """End the work at once, unless it has ended. May be called twice."""
        self._finish(StreamEnd.LEFT)

    async def wait(self) -> None:
        """Return once there are items to ``take``, or once the stream has ended.

        Raises the error that ended the stream, once. A reader that is cancelled here may still
        ``take`` items.
        """
        if not self._items and not self._over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not self._items:
            error = self._error
            self._error = None
            raise error

    def take(self) -> list[Item]:
        """Return all items since the last call. An empty list after ``wait`` is the end."""
        if self._waiting_bytes > MOST_WAITING_BYTES:
            self._resume()
        items = self._items
        self._items = []
        self._waiting_bytes = 0
        return items

    def _resume(self) -> None:
        """Let a server that was held back send again."""

    def _finish(self, end: StreamEnd, error: Exception | None = None) -> None:
        if self._over:
            return
        self._over = True
        self._error = error
        # A callback may refer to this stream, which would be a reference cycle, so drop it.
        callbacks = self._at_end
        self._at_end = []
        for callback in callbacks:
            callback(end, error)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class ResponseStream(Arrivals[Item]):
    """The responses to one request, over a call of its own.

    It ends when its last response, an error, the call's end or an unreadable message arrives, even
    if its reader has not taken the items before. The call is then released, once. While messages of
    ``MOST_WAITING_BYTES`` wait for the reader, the server must not send more. A subclass opens
    ``_call`` with ``on_messages`` and ``on_end``.
    """

    _call: GrpcCall

    def __init__(self, release: Release) -> None:
        super().__init__()
        self._at_end.append(lambda end, error: release(self._call, end))

    @abstractmethod
    def _read(self, messages: list[bytes], items: list[Item]) -> bool:
        """Read messages into ``items``. Returns True if the last response is among them."""

    @abstractmethod
    def _failure(self, error: GrpcError | None) -> Exception:
        """Return the error for a call that ended early, with an error or (None) with status OK."""

    def on_messages(self, messages: list[bytes]) -> None:
        """Take messages of the call."""
        items: list[Item] = []
        try:
            has_ended = self._read(messages, items)
        except Exception as error:
            self.put(items)
            self.fail(error if isinstance(error, TrtllmBlsError) else self._unreadable(error))
            return
        is_behind = bool(self._items)
        self.put(items)
        if has_ended:
            self._finish(StreamEnd.LAST)
        elif is_behind:  # messages of one read of the socket need not be counted
            self._waiting_bytes += sum(map(len, messages))
            if self._waiting_bytes > MOST_WAITING_BYTES:
                self._call.hold()

    def on_end(self, error: GrpcError | None) -> None:
        """Take the end of the call."""
        self.fail(self._failure(error))

    def _resume(self) -> None:
        self._call.release()

    def _unreadable(self, error: Exception) -> Exception:
        return EngineError(f"a response cannot be read: {error}")


def close_or_cancel(call: GrpcCall, end: StreamEnd) -> None:
    """Release a call: close it in order after the last response, else cancel it.

    Triton 24.10 keeps a request for ever whose cancel meets its last response.
    """
    call.on_messages = ignore
    call.on_end = ignore
    if end is StreamEnd.LAST:
        call.half_close()
    else:
        call.cancel()
