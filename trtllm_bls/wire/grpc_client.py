"""A gRPC client on asyncio for processes that read many streams of small messages.

It exists for its cost. With ``grpc.aio`` every message wakes a task, and the synchronous client of
grpcio wakes a thread. Here one read of a socket is parsed in one loop, each call gets all of its
messages in one function call, and no task wakes at all. CPU of the client for one streamed token,
with 128 streams from TrtllmService, parsing of the message included, on one busy 2-core machine:
about 16 microseconds (7 with ``coalesce_reads``), against 60 for ``grpc.aio`` and 100 for grpcio's
synchronous client with a thread for each stream.

It has unary and streaming calls over one HTTP/2 connection, plain or with TLS, and obeys the
server's limit on streams, its flow control and its GOAWAY. It has no load balancing, name
resolution beyond ``getaddrinfo``, proxies, compression, keepalive pings, retries of calls that the
server may have begun, or deadlines sent to the server (``unary`` has a timeout of its own).
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

How to read it: ``http2`` is HTTP/2 and gRPC's framing as a state machine without I/O, in the
manner of h11: bytes in, ``Received`` out; requests in, bytes out. Here is everything that has to do
with asyncio: ``GrpcChannel`` (one server), ``GrpcCall`` (one RPC) and the connections between them.

Engines, pipelines and port 8000 read streams of responses through ``ResponseStream`` at the end of
this file, so that all have the same bounds and the same ends. What becomes of the call at the end
is a ``Release``: it is closed or cancelled, goes back to a pool, or its request is aborted first.
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

from mypy_extensions import mypyc_attr

from trtllm_bls.errors import EngineError, Overloaded, TrtllmBlsError
from trtllm_bls.types import Backoff
from trtllm_bls.wire.http2 import GrpcError, Http2Client, Received, State, packed_headers

_CONNECT_SECONDS = 5.0
_SOCKET_CLOSE_SECONDS = 1.0  # for the server to close its side of the socket
_REFUSED_SECONDS = 10.0  # for which a call is sent again whose stream the server refuses unseen
_PAUSE_SECONDS = Backoff(0.001, 0.1)  # before it is sent again
_MOST_UNREAD = 2**22  # bytes that a server has to be told, and does not read
_TRIES = 3  # of a call that servers leave unprocessed by their GOAWAY
_COALESCE_CALLS, _COALESCE_SECONDS = 16, 0.002  # from so many calls on, reads are so far apart
MOST_WAITING = 16_384  # items of one stream; a reader that is further behind is given up
MOST_WAITING_BYTES = 8 * 2**20  # of one call's messages; from there on the server is held back

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


@mypyc_attr(allow_interpreted_subclasses=True)
class GrpcChannel:
    """Calls to one gRPC server at ``target``: ``host:port``, an IPv6 host in brackets.

    A channel connects when a call needs it, on the event loop that runs then, and again after a
    loss; the calls of a lost connection end with UNAVAILABLE. With ``tls`` the context's ALPN is
    set to h2. ``coalesce_reads``: with many calls, none of which waits for its first message, the
    socket is read every two milliseconds, so that one read brings messages of many calls, at half
    the CPU for each. Raises ``ValueError`` for a target without host or port.
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
        self._closed = False

    def open(
        self, method: str, on_messages: OnMessages, on_end: OnEnd, traceparent: str | None = None
    ) -> GrpcCall:
        """Start a call of ``method`` (``/package.Service/Method``); callbacks come later.

        ``traceparent`` is sent as metadata: the W3C trace context that the call belongs to.
        Raises ``GrpcError`` once the channel is closed.
        """
        if self._closed:
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
        """One message there, one back, within ``timeout`` seconds. Raises ``GrpcError``."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[GrpcError | None] = loop.create_future()
        messages: list[bytes] = []

        def on_end(error: GrpcError | None) -> None:
            if not ended.done():
                ended.set_result(error)

        # Not asyncio.wait_for: up to Python 3.11 it can swallow the cancellation of its caller.
        late = GrpcError("DEADLINE_EXCEEDED", f"{method} at {self.target} did not answer in time")
        timer = None if timeout is None else loop.call_later(timeout, on_end, late)
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
        self._closed = True
        connections = list(self.connections)
        for connection in connections:
            connection.end(GrpcError("CANCELLED", f"the connection to {self.target} was closed"))
        await asyncio.gather(*[connection.disconnected() for connection in connections])

    # --- used by the connections --------------------------------------------------------------

    def start(self, call: GrpcCall) -> None:
        """Put a call on the current connection, on a new one if there is none."""
        if self._current is None:
            self._current = _Http2Connection(self)
            self.connections.add(self._current)
        self._current.add(call)

    def retire(self, connection: _Http2Connection) -> None:
        """``connection`` takes no more calls."""
        if self._current is connection:
            self._current = None


class GrpcCall:
    """One RPC, made by ``GrpcChannel.open``.

    ``on_messages`` gets every message that one read of the socket completed, in order; ``on_end``
    gets ``None`` for status OK, else the error, and is the last callback. Both may be assigned anew
    while the call runs. A callback that raises has its call cancelled. ``replies`` counts messages.
    The fields from ``headers`` on are the connection's.
    """

    def __init__(self, headers: bytes, on_messages: OnMessages, on_end: OnEnd) -> None:
        self.on_messages = on_messages
        self.on_end = on_end
        self.replies = 0
        self.done = self.half_closed = False
        self.headers = headers
        self.connection: _Http2Connection  # since the channel has started the call
        self.stream_id = 0  # on `connection`; 0 until the call is sent there
        # All that was sent, until the server begins to answer: it may have to be sent again.
        self.unanswered: list[bytes] | None = []
        self.tries_left = _TRIES
        self.give_up_at: float | None = None  # the loop's time, once the server refused its stream

    def send(self, message: bytes) -> None:
        """Queue a message; it leaves when flow control admits it. Nothing happens once done."""
        if self.half_closed:
            raise RuntimeError("a message cannot follow half_close()")
        if self.done:
            return
        if self.unanswered is not None:
            self.unanswered.append(message)
        self.connection.protocol.send(self.stream_id, message)
        self.connection.flush_soon()

    def half_close(self) -> None:
        """Tell the server, after what is queued, that no more messages follow."""
        if self.done or self.half_closed:
            return
        self.half_closed = True
        self.connection.protocol.half_close(self.stream_id)
        self.connection.flush_soon()

    def hold(self) -> None:
        """The server may fill the window that it has, and send no more until ``release``."""
        self.connection.protocol.hold(self.stream_id)

    def release(self) -> None:
        """The server may send again."""
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
        """Tell the caller of the end."""
        if self.done:
            return
        on_end = self.on_end
        self.finish()
        try:
            on_end(error)
        except Exception:
            _log.exception("a callback failed on the end of its call")

    def finish(self) -> None:
        """No callback follows. The callbacks' owner refers to this call: a reference back would
        keep both alive until a garbage collection."""
        self.done = True
        self.unanswered = None
        self.on_messages = self.on_end = ignore


def ignore(event: object) -> None:
    """A callback that does nothing."""


class _Http2Connection(asyncio.Protocol):
    """One HTTP/2 connection and the calls on it.

    It connects, is ready at the server's SETTINGS, drains after the server's GOAWAY, and ends with
    its last call, by ``end`` or with the socket. A call waits here until the connection is ready
    and the server takes another stream.
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
        # Until the timer is due no stream is opened, as the server has refused some.
        self._pause: asyncio.TimerHandle | None = None
        self._pause_seconds = _PAUSE_SECONDS.first
        self._flush_scheduled = self._writing_paused = False
        self._unread = 0  # bytes that were written since writing was paused

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
        self._transport = cast(asyncio.Transport, transport)  # with TCP_NODELAY, by asyncio
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
            # A GOAWAY, where the server broke the protocol.
            self._transport.write(self.protocol.bytes_to_send(data=False))
            self._transport.close()
            # What a server does not read would keep the socket.
            self._loop.call_later(_SOCKET_CLOSE_SECONDS, self._transport.abort)
        calls = [*self.calls.values(), *self._waiting]
        self.calls.clear()
        self._waiting.clear()
        for call in calls:
            call.end(error)

    async def disconnected(self) -> None:
        """Wait until the socket is closed; not for a server that does not read."""
        await asyncio.wait({self._connecting})
        if self._transport is not None:
            await asyncio.wait({self._lost}, timeout=_SOCKET_CLOSE_SECONDS)
            self._transport.abort()
            await self._lost

    # Calls and what they send

    def add(self, call: GrpcCall) -> None:
        """Send ``call`` as soon as the server takes it."""
        call.connection, call.stream_id = self, 0
        self._waiting.append(call)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Send what is due in this turn of the event loop."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Open streams, frame what flow control admits, and write it all at once."""
        self._flush_scheduled = False
        protocol, transport = self.protocol, self._transport
        if protocol.state in (State.WAITING, State.ENDED) or transport is None:
            return
        while self._waiting and protocol.can_open and self._pause is None:
            call = self._waiting.popleft()
            if call.done:
                continue
            self._read_on(transport)  # its first message shall not wait
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
            # While writing is paused these are frames that have to be sent all the same, such as
            # the answers to PING and SETTINGS, which a server may ask for without reading any.
            self._unread += len(data) if self._writing_paused else 0
            if self._unread > _MOST_UNREAD:
                self._lose("the server does not read the answers that it asks for")
                return
        if protocol.state is State.DRAINING and not self.calls:
            transport.close()
        elif protocol.unsent and not self._writing_paused and protocol.has_more_data:
            self.flush_soon()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused, self._unread = False, 0
        self.flush_soon()

    # What the server sends

    def data_received(self, data: bytes) -> None:
        if self.protocol.state is State.ENDED:
            return
        received = self.protocol.receive(data)
        for stream_id in received.answered:
            self.calls[stream_id].unanswered = None
            self._pause_seconds = _PAUSE_SECONDS.first
        stream_ids = list(received.messages)
        if received.answered:
            # First messages go first: what waits for one has nothing yet.
            stream_ids.sort(key=set(received.answered).__contains__, reverse=True)
        for stream_id in stream_ids:
            messages = received.messages[stream_id]
            if (call := self.calls.get(stream_id)) is None:  # a callback has just cancelled it
                continue
            call.replies += len(messages)
            try:
                call.on_messages(messages)
            except Exception:
                _log.exception("a callback failed on messages; its call is cancelled")
                call.cancel()
        for stream_id, error in received.ended.items():
            if (call := self.calls.pop(stream_id, None)) is not None:
                call.end(error)
        if received.refused or received.goaway is not None:
            self._send_again(received)
        if received.failure is not None:
            self._lose(received.failure)
        # A connection that drains is closed after its last call.
        if received.ended or self.protocol.output or self.protocol.unsent or self._waiting:
            self.flush_soon()
        many = self._channel.coalesce_reads and len(self.calls) >= _COALESCE_CALLS
        if many and all([call.replies for call in self.calls.values()]):  # no first message waits
            self._pause_reading()

    def _send_again(self, received: Received) -> None:
        """Calls that the server has refused or left unprocessed wait for another stream.

        Refused streams are tried here again after a pause, for ``_REFUSED_SECONDS``: at its limit
        of streams grpcio refuses one as long as it has not cleared away another whose end it has
        sent, which takes a busy host a while. After a GOAWAY all that waits goes over the next
        connection, a call at most ``_TRIES`` times.
        """
        again, now = [], self._loop.time()
        for stream_id, refusal in received.refused.items():
            call = self.calls.pop(stream_id, None)
            if call is None:
                continue
            if call.give_up_at is None:
                call.give_up_at = now + _REFUSED_SECONDS
            if now < call.give_up_at and call.unanswered is not None:
                again.append(call)
            else:
                call.end(refusal)
        again += [call for each in received.unprocessed if (call := self.calls.pop(each, None))]
        # Those that had a stream go first, in its order: whichever was refused first.
        waiting = sorted([*again, *self._waiting], key=lambda call: call.stream_id or math.inf)
        self._waiting = deque(waiting)
        if received.goaway is not None:
            self._waiting.clear()
            self._channel.retire(self)
            reason = f"{self._channel.target} ends the connection: {received.goaway}"
            for call in waiting:
                call.tries_left -= 1
                if call.tries_left and call.unanswered is not None:
                    self._channel.start(call)
                else:
                    call.end(GrpcError("UNAVAILABLE", reason))
        elif again and self._pause is None:
            self._pause = self._loop.call_later(self._pause_seconds, self._end_pause)
            self._pause_seconds = _PAUSE_SECONDS.after(self._pause_seconds)
        self.flush_soon()

    def _end_pause(self) -> None:
        self._pause = None
        self.flush_soon()

    def _pause_reading(self) -> None:
        """Read again a little later, for all that arrives meanwhile: a read costs more CPU than
        each message in it."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.pause_reading()
            # All connections wait for the same times, so that one turn of the event loop reads them
            # all. A time that is nearly due is passed over: uvloop's timers are in whole
            # milliseconds and would not wait.
            turn = round(self._loop.time() / _COALESCE_SECONDS) + 1
            self._loop.call_at(turn * _COALESCE_SECONDS, self._read_on, transport)

    def _read_on(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.resume_reading()


# --- streams of responses --------------------------------------------------------------------


class StreamEnd(Enum):
    """How a stream has ended."""

    LAST = "its last item has arrived"
    FAILED = "an error came in place of its last item"
    LEFT = "its reader has left"


AtEnd: TypeAlias = Callable[[StreamEnd, Exception | None], None]
Release: TypeAlias = Callable[[GrpcCall, StreamEnd], None]


@mypyc_attr(allow_interpreted_subclasses=True)
class Arrivals(Generic[Item]):
    """Items that arrive on the event loop while one reader takes them; adding never waits.

    It runs until ``end``, ``fail`` or ``aclose``, or until its reader is ``MOST_WAITING`` items
    behind. Then it is over, and what is added is dropped. What has arrived before can still be
    taken.
    """

    def __init__(self) -> None:
        self._arrived: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_bytes = 0  # of a call's messages that arrived while others waited
        self._over = False
        self._error: Exception | None = None
        self._at_end: list[AtEnd] = []

    def call_at_end(self, callback: AtEnd) -> None:
        """Have ``callback`` called once, as the stream ends, with the error that ended it."""
        self._at_end.append(callback)

    def put(self, items: Iterable[Item]) -> None:
        """Add items; ignored once the stream is over."""
        if self._over:
            return
        self._arrived.extend(items)
        if len(self._arrived) > MOST_WAITING:
            self._arrived.clear()
            self.fail(Overloaded(f"its reader is more than {MOST_WAITING} responses behind"))
        elif self._arrived:
            self._wake()

    def end(self) -> None:
        """End the stream: its last item has arrived."""
        self._finish(StreamEnd.LAST)

    def fail(self, error: Exception) -> None:
        """End the stream; ``wait`` raises ``error`` once what has arrived is taken."""
        self._finish(StreamEnd.FAILED, error)

    async def aclose(self) -> None:
        """End the work at once, unless it has ended. May be called twice."""
        self._finish(StreamEnd.LEFT)

    async def wait(self) -> None:
        """Return once ``take`` has something to give, or nothing more will come.

        Raises the error that ended the stream, once. A reader that is cancelled here may still
        ``take`` what has arrived.
        """
        if not self._arrived and not self._over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not self._arrived:
            error = self._error
            self._error = None
            raise error

    def take(self) -> list[Item]:
        """Return all that has arrived since the last call; after ``wait``, nothing is the end."""
        if self._waiting_bytes > MOST_WAITING_BYTES:
            self._resume()
        arrived = self._arrived
        self._arrived = []
        self._waiting_bytes = 0
        return arrived

    def _resume(self) -> None:
        """Let a server that was held back send again."""

    def _finish(self, end: StreamEnd, error: Exception | None = None) -> None:
        if self._over:
            return
        self._over = True
        self._error = error
        # The callbacks may refer to this stream: kept, they would be a reference cycle.
        callbacks = self._at_end
        self._at_end = []
        for callback in callbacks:
            callback(end, error)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


@mypyc_attr(allow_interpreted_subclasses=True)
class ResponseStream(Arrivals[Item]):
    """The answer to one request that a server sends over a call of its own.

    It ends as soon as its last response, an error, the call's end or a message that cannot be read
    arrives, whenever its reader looks. The call is then released, once. While messages of
    ``MOST_WAITING_BYTES`` wait, the server may send no more of them: it keeps the rest until the
    reader takes these. A subclass opens ``_call`` with ``on_messages`` and ``on_end``.
    """

    _call: GrpcCall

    def __init__(self, release: Release) -> None:
        super().__init__()
        self._at_end.append(lambda end, error: release(self._call, end))

    @abstractmethod
    def _read(self, messages: list[bytes], items: list[Item]) -> bool:
        """Add what ``messages`` hold to ``items``; true if the last response is among them."""

    @abstractmethod
    def _failure(self, error: GrpcError | None) -> Exception:
        """Return the error for a call that ended early; ``None``: it had the status OK."""

    def on_messages(self, messages: list[bytes]) -> None:
        """Take messages of the call."""
        items: list[Item] = []
        try:
            last = self._read(messages, items)
        except Exception as error:
            self.put(items)
            self.fail(error if isinstance(error, TrtllmBlsError) else self._unreadable(error))
            return
        is_behind = bool(self._arrived)
        self.put(items)
        if last:
            self._finish(StreamEnd.LAST)
        elif is_behind:  # otherwise there is no more than one read of the socket
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
