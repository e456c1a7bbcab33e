"""Limits on what HTTP clients send, and how slowly, for an ASGI program under uvicorn.

``ConnectionLimits``  headers, time and number of connections, in uvicorn's protocol
``BodyReader``        one request's body: its type, size, compression and time
``BrowserGuard``      middleware against web pages that send requests to a server on this machine

Nothing here knows an API: each program says how its errors are written. After a refusal, the rest
of the request is still read and discarded. If the connection were closed at once, the kernel would
reset it, and a client that is still writing would see the reset instead of the answer.
"""

from __future__ import annotations

import asyncio
import resource
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trtllm_bls.http.browsers import browser_problem
from trtllm_bls.http.budgets import (
    BODY_BYTES,
    BODY_S,
    CONNECTION_REQUESTS,
    HEAD_BYTES,
    HEADER_S,
    HELD_BODY_BYTES,
    IDLE_S,
    LONG_JSON_BYTES,
    PARSED_AT_ONCE,
    SMALL_BODY_BYTES,
    URL_BYTES,
)
from trtllm_bls.http.shares import NoShare, Share, Shares, expire, holder_of, timeout
from trtllm_bls.text.json_values import structure_problem
from trtllm_bls.wire.traceparent import valid_traceparent

RESPONSE_WRITER = "trtllm_bls.writer"  # the key of the ``ResponseWriter`` in an ASGI scope

# Content types of bodies.
JSON = b"application/json"
OCTETS = b"application/octet-stream"
UNNAMED = b""  # the request has no Content-Type
RETRY = {"retry-after": "1"}
# Content encoding: its name in a refusal, and zlib's ``wbits`` for its format.
_ENCODINGS = {
    b"gzip": ("gzip", 31),
    b"x-gzip": ("gzip", 31),
    b"deflate": ("deflate", 15),  # with zlib's header (RFC 9110), as tritonclient sends it
}
_HEADER_BYTES = 32  # each header counts this much more than its name and value, as in HTTP/2
_Result = TypeVar("_Result")
KEPT_DESCRIPTORS = 256  # reserved for connections to the engine, files, and refused connections
DISCARD_S = 5.0  # seconds in which a refused client can read its answer


@dataclass
class Refused(Exception):
    """A request that must not reach the program; ``status`` and ``message`` are for its client."""

    status: int
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def header_pairs(self) -> list[tuple[bytes, bytes]]:
        """The headers as ASGI's pairs of bytes."""
        return [(key.encode(), value.encode()) for key, value in self.headers.items()]


class ClientGone(Exception):
    """The client has disconnected, so nobody would read an answer."""


def header(scope: Scope, name: bytes) -> bytes:
    """Return the header's value, empty if it was not sent. ``name`` is in lower case."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def traceparent(scope: Scope) -> bytes:
    """Return the caller's W3C trace context, empty if it sent none or an invalid one."""
    text = header(scope, b"traceparent").decode("latin-1")
    return (valid_traceparent(text) or "").encode()


# --- connections --------------------------------------------------------------------------------


def json_error(status: int, message: str, port: int) -> bytes:
    """Return ``{"error": message}``. The message must need no escape in JSON."""
    return b'{"error":"%b"}' % message.encode()


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of one process; times in seconds.

    ``header_bytes`` limits all of a request but its body: the URL, headers, trailers and chunk
    framing. Above ``connections``, a connection gets 503; 0 stands for the limit of open files less
    ``KEPT_DESCRIPTORS``. After ``requests`` requests, a connection is closed. A WebSocket opens at
    ``socket_path``; empty if there is none.
    ``error_body`` returns the JSON of a refusal, from its status, its message and the port.
    """

    header_s: float = HEADER_S
    body_s: float = BODY_S
    idle_s: float = IDLE_S
    url_bytes: int = URL_BYTES
    header_bytes: int = HEAD_BYTES
    requests: int = CONNECTION_REQUESTS
    connections: int = 0
    socket_path: bytes = b""
    error_body: Callable[[int, str, int], bytes] = json_error


class ResponseWriter:
    """A writer of one response, which needs no task as long as the client reads.

    While ``is_ready`` is true, ASGI's ``send`` for this response returns without suspending.
    """

    def __init__(self, flow: FlowControl, cycle: RequestResponseCycle) -> None:
        self._flow = flow
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """True while the client reads fast enough, so that uvicorn does not pause writes."""
        return not self._flow.write_paused

    def write(self, data: bytes) -> bool:
        """Write a part of a started response; return false if ``send`` has to be awaited instead.

        The bytes are those of ``cycle.send`` for a chunked body, in a third of its time.
        """
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on headers and on the time in which a request must arrive.

    uvicorn loses the body of a request that offers another protocol (``Upgrade: h2c``). This class
    ignores such offers, except for a WebSocket at ``socket_path``.
    """

    def __init__(self, limits: ConnectionLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0  # the size of the current request's parsed headers and trailers
        self._other_bytes = 0  # all received bytes of the current request but its body
        self._in_headers = True  # the parser is in a request's headers, or before the next request
        self._num_requests = 0
        self._discards = False  # True: read what the client still sends, and do not parse it
        self._unread = bytearray()  # received bytes that are not parsed yet
        self._cycles: deque[RequestResponseCycle] = deque()  # unanswered requests, the oldest first
        self._closes_after_body = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if transport.get_extra_info("sslcontext") is None:
            # The loop joins the writes of one iteration and sends them at its end. A limit of 0
            # makes it send each write at once. Over TLS, 0 would pause every write.
            transport.set_write_buffer_limits(high=0)
        limit = self._limits.connections
        if not limit:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - KEPT_DESCRIPTORS
        if len(self.connections) > limit + KEPT_DESCRIPTORS // 2:
            transport.abort()
        elif len(self.connections) > limit:
            self._refuse(503, "too many connections; try again", b"retry-after: 1\r\n")
        else:
            self._start_timer(self._limits.header_s, self._on_header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self.pipeline.clear()
        for cycle in self._cycles:
            # uvicorn reports the disconnect to the newest request alone. With pipelining, that one
            # may still wait in the queue while an older one runs.
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
            # Our substitute transport refers to this protocol. Without this line, that reference
            # cycle would last until the garbage collector runs.
            cycle.transport = self.transport
        self._cycles.clear()
        if self.cycle is not None:
            self.cycle.transport = self.transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._read_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._cycles:
            self._cycles.popleft()
        if self._unread:
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """Parse the received bytes until a request has to wait for an earlier one's response.

        One read may hold thousands of pipelined requests. Parsing all of them would stall streams.
        """
        while self._unread and not (self._discards or self.pipeline or self.parser is None):
            part = bytes(self._unread[:PARSED_AT_ONCE])
            del self._unread[:PARSED_AT_ONCE]
            self._parse(part)
        if self._discards or self.transport.is_closing():
            self._unread.clear()
        elif self._unread:
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._other_bytes += len(data)
        if self._in_headers and self._deadline is None:
            self._start_timer(self._limits.header_s, self._on_header_timeout)
        try:
            self.parser.feed_data(data)
            # No callback gets an unfinished header, chunk framing or blank lines. Count them here.
            self._check_size(self._other_bytes)
        except httptools.HttpParserUpgrade as error:
            if self._opens_socket():
                self._stop_timer()
                self._unread.clear()  # a WebSocket client sends no frames before the answer
                self.scope["method"] = "GET"
                self.handle_websocket_upgrade()
                self._discards = True
            else:
                self._ignore_upgrade(data[error.args[0] :])
        except (httptools.HttpParserError, Refused) as error:
            refusal = Refused(400, "this is not HTTP/1.1")
            # The parser raises its own error, with the callback's as the context.
            for cause in (error, error.__context__):
                if isinstance(cause, Refused):
                    refusal = cause
                    break
            self._refuse(refusal.status, refusal.message)

    def _check_size(self, header_bytes: int) -> None:
        if header_bytes > self._limits.header_bytes:
            problem = f"headers and trailers above {self._limits.header_bytes} bytes; send fewer"
            raise Refused(431, problem)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.url_bytes:
            raise Refused(414, f"a URL above {self._limits.url_bytes} bytes; send a shorter one")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + _HEADER_BYTES
        self._check_size(self._header_bytes)  # refuse before the program sees the request
        if self._in_headers:  # otherwise this is a trailer, which no program reads
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._other_bytes -= len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        # ``BodyReader`` answers a slow client before this timer closes the connection.
        self._start_timer(self._limits.body_s + DISCARD_S, self._on_body_timeout)
        super().on_headers_complete()  # raises for an invalid URL
        self._cycles.append(self.cycle)
        self._in_headers = False
        self._num_requests += 1
        if self._num_requests >= self._limits.requests:
            self.cycle.keep_alive = False
        # Give uvicorn the three methods of a transport with which it writes a response. ``close``
        # is ours, as the rest of the body must be read first.
        self.cycle.transport = cast(
            asyncio.Transport,
            SimpleNamespace(
                write=self.transport.write,
                is_closing=self.transport.is_closing,
                close=self._close_after_body,
            ),
        )
        scope = cast("dict[str, Any]", self.scope)
        scope[RESPONSE_WRITER] = ResponseWriter(self.flow, self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_headers = True
        self._header_bytes = self._other_bytes = 0
        self._stop_timer()
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()

    def _close_after_body(self) -> None:
        """Close the connection once the rest of the request's body has been read."""
        if self._in_headers:
            self.transport.close()
        self._closes_after_body = True

    def _opens_socket(self) -> bool:
        is_idle = self.cycle is None or self.cycle.response_complete
        if not is_idle or self.parser.get_method() != b"GET":
            return False
        path = self.url.partition(b"?")[0]
        return path == self._limits.socket_path and self._should_upgrade()

    def _ignore_upgrade(self, data: bytes) -> None:
        """Parse the request again without its offer; ``data`` are the bytes after its headers."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "this is no proxy")
            return
        lines = [method + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:  # without ``Upgrade``, ``Connection`` has no effect
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self._header_bytes = self._other_bytes = 0
        self._unread[:0] = b"\r\n".join(lines) + b"\r\n\r\n" + data

    def _refuse(self, status: int, message: str, headers: bytes = b"") -> None:
        """Send an error in the program's place, then close the connection."""
        cycle = self.cycle
        is_running = cycle is not None and not cycle.response_complete
        if self.pipeline or (is_running and (cycle.response_started or self._in_headers)):
            # An earlier request's response is not complete, so no other can be written.
            self.transport.close()
            return
        self._discards = True
        self._start_timer(DISCARD_S, self.transport.close)
        if not self._in_headers:  # the program already has the request
            if not is_running:  # it has answered
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = self._limits.error_body(status, message, (self.server and self.server[1]) or 0)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        )
        head += f"connection: close\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + headers + b"\r\n" + body)

    def _on_header_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The client began to send this request while it reads an earlier response.
            self._start_timer(self._limits.header_s, self._on_header_timeout)
        elif self._other_bytes:
            self._refuse(408, f"the headers did not come within {self._limits.header_s:g} s")
        else:
            self.transport.close()

    def _on_body_timeout(self) -> None:
        if self.pipeline:  # the body waits until uvicorn has answered earlier requests
            self._start_timer(self._limits.body_s, self._on_body_timeout)
        else:
            self.transport.close()

    def _start_timer(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        self._stop_timer()
        self._deadline = self.loop.call_later(seconds, on_timeout)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


# --- bodies ---------------------------------------------------------------------------------------


class BodyReader:
    """A reader of request bodies.

    A body has at most ``max_bytes``, packed and unpacked, and must arrive within ``seconds``.
    ``max_held_bytes`` limits the sum of the bodies that are being received or used; clients share
    it (see ``shares``). ``set_by`` is the option that sets ``max_bytes``, empty if there is none.
    """

    def __init__(
        self,
        max_bytes: int = BODY_BYTES,
        max_held_bytes: int = HELD_BODY_BYTES,
        seconds: float = BODY_S,
        set_by: str = "--max-body-bytes",
    ) -> None:
        self.max_bytes = max_bytes
        self.set_by = set_by
        self._held = Shares(max_held_bytes, small=min(SMALL_BODY_BYTES, max_held_bytes // 4))
        self._seconds = seconds
        self._turn = asyncio.Semaphore(1)

    async def in_turn(self, size: int, work: Callable[..., _Result], *values: Any) -> _Result:
        """Return ``work(*values)``, where ``work`` reads a body of ``size`` bytes.

        A long body is read in a thread, so that streams go on, and one at a time: reading holds the
        GIL, so two at once would save no time and take more memory.
        """
        if size <= LONG_JSON_BYTES:
            return work(*values)
        async with self._turn:
            return await asyncio.to_thread(work, *values)

    @asynccontextmanager
    async def read(
        self, scope: Scope, receive: Receive, kinds: Collection[bytes] = (JSON,)
    ) -> AsyncIterator[bytes]:
        """Receive a body, and hold its share of memory until the context ends.

        ``kinds`` are the content types allowed. If JSON is the only one, the body has passed
        ``check_json`` and has no byte order mark.
        Raises ``Refused``, ``ClientGone``.
        """
        encoding = self._checked_encoding(scope, kinds)
        length = header(scope, b"content-length")
        if length.isdigit() and int(length) > self.max_bytes:
            raise self._too_large(scope)
        share = self._held.take(holder_of(scope))
        try:
            body = await self._received(scope, receive, share)
            if encoding in _ENCODINGS:
                packed_bytes = len(body)
                body = await self.in_turn(self.max_bytes, self._unpacked, scope, body, encoding)
                _hold(share, max(0, len(body) - packed_bytes))
            if kinds == (JSON,):
                body = body.removeprefix(b"\xef\xbb\xbf")
                await self.in_turn(len(body), check_json, body)
            yield body
        finally:
            share.release()

    def _checked_encoding(self, scope: Scope, kinds: Collection[bytes]) -> bytes:
        """Return the content encoding. Raises ``Refused`` if it or the type is not allowed."""
        kind = header(scope, b"content-type").partition(b";")[0].strip().lower()
        if kind not in kinds:
            content_type = kind[:80].decode("latin-1") or "of no type"
            problem = (
                f"the body must be JSON, not {content_type}; send Content-Type: application/json"
            )
            raise Refused(415, problem)
        encoding = header(scope, b"content-encoding").strip().lower()
        if encoding not in (b"", b"identity", *_ENCODINGS):
            name = repr(encoding[:40].decode("latin-1"))
            problem = f"Content-Encoding {name} is not supported; send gzip or deflate"
            raise Refused(415, problem, {"accept-encoding": "gzip, deflate"})
        return encoding

    async def _received(self, scope: Scope, receive: Receive, share: Share) -> bytes:
        """Receive the body, still packed. Another client may take its share until it is whole."""
        parts: list[bytes] = []
        is_revoked = False

        def revoke() -> None:
            nonlocal is_revoked
            is_revoked = True
            expire(limit)

        try:
            async with timeout(self._seconds) as limit:
                share.on_revoke = revoke
                size = 0
                is_whole = False
                while not is_whole:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise ClientGone
                    part = event.get("body", b"")
                    size += len(part)
                    if size > self.max_bytes:
                        raise self._too_large(scope)
                    _hold(share, len(part))
                    parts.append(part)
                    is_whole = not event.get("more_body", False)
                share.on_revoke = None
        except asyncio.TimeoutError:  # TimeoutError itself from Python 3.11 on
            if is_revoked:
                raise _too_many_bytes() from None
            problem = f"the body did not come within {self._seconds:g} s"
            raise Refused(408, problem, {"connection": "close"}) from None
        return b"".join(parts)

    def _unpacked(self, scope: Scope, packed: bytes, encoding: bytes) -> bytes:
        name, window_bits = _ENCODINGS[encoding]
        decompressor = zlib.decompressobj(window_bits)
        try:
            body = decompressor.decompress(packed, self.max_bytes + 1)
        except zlib.error as error:
            problem = f"the body is not {name} as Content-Encoding says: {error}"
            raise Refused(400, problem) from None
        if len(body) > self.max_bytes:
            raise self._too_large(scope)
        if not decompressor.eof or decompressor.unused_data:
            raise Refused(400, f"the body is not one whole {name} stream")
        return body

    def _too_large(self, scope: Scope) -> Refused:
        # A client that waits for 100 Continue sends nothing more, so its connection can be closed.
        headers: dict[str, str] = {}
        if header(scope, b"expect").lower() == b"100-continue":
            headers["connection"] = "close"
        problem = f"the body is larger than {self.max_bytes} bytes, which is the limit"
        if self.set_by:
            problem += f" ({self.set_by})"
        return Refused(413, problem, headers)


def _hold(share: Share, num_bytes: int) -> None:
    try:
        share.grow(num_bytes)
    except NoShare:
        raise _too_many_bytes() from None


def _too_many_bytes() -> Refused:
    return Refused(503, "too many large requests at once; try again", RETRY)


def check_json(text: bytes) -> None:
    """Raise ``Refused`` for JSON that is not UTF-8, or whose structure is too costly to parse."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is not UTF-8 at byte {error.start}") from None
    if problem := structure_problem(text):
        raise Refused(400, f"the body has {problem}")


# --- browsers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrowserGuard:
    """Middleware against requests that web pages send to a server on their user's machine.

    ``browser_problem`` decides which requests are refused.
    """

    app: ASGIApp
    hosts: tuple[str, ...]
    origins: tuple[str, ...]
    refuse: Callable[[Scope, Send, Refused], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = None
        if scope["type"] == "http":
            host = header(scope, b"host").decode("latin-1")
            origin = header(scope, b"origin").decode("latin-1")
            problem = browser_problem(host, origin, self.hosts, self.origins)
        if problem is None:
            await self.app(scope, receive, send)
        else:
            status, message = problem
            remedy = "--allow-origin adds them"
            if status == 421:
                remedy = "--allowed-host adds a name"
            await self.refuse(scope, send, Refused(status, f"{message}; {remedy}"))
