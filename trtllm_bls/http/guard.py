"""What HTTP clients may send, how much of it, and how slowly: for an ASGI program under uvicorn.

``ConnectionLimits``  headers, time and number of connections, in uvicorn's protocol
``BodyReader``        one request's body: its type, size, compression and time
``BrowserGuard``      middleware against web pages that send requests to a server on this machine

Knows no API: each program says how its errors are written. A refusal is sent while the rest of the
request is still read and thrown away. Closing at once would make the kernel reset the connection,
and a client that is still writing would see the reset instead of the answer.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trtllm_bls.http import browser_problem

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

# Of a scope: writes a part of a response that has begun; false where ``send`` has to be awaited.
BODY_WRITE = "trtllm_bls.write"

RETRY = {"retry-after": "1"}
_ACCEPTED_AT_ONCE = 32  # connections in one iteration of the event loop
_KEPT_DESCRIPTORS = 256  # for connections to the engine, files, and refused connections
_DISCARD_S = 5.0  # a refused client has this long to read its answer


@dataclass
class Refused(Exception):
    """A request that must not reach the program; ``status`` and ``message`` are for its client."""

    status: int
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def header_pairs(self) -> list[tuple[bytes, bytes]]:
        """The headers as ASGI has them."""
        return [(key.encode(), value.encode()) for key, value in self.headers.items()]


class ClientGone(Exception):
    """The client has disconnected, so there is nobody to answer."""


def header(scope: Scope, name: bytes) -> bytes:
    """The header's value, empty where it was not sent; ``name`` in lower case."""
    return next((value for key, value in scope["headers"] if key == name), b"")


# --- connections --------------------------------------------------------------------------------


def json_error(status: int, message: str) -> bytes:
    """``{"error": message}``; the message needs no escape."""
    return b'{"error":"%b"}' % message.encode()


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of one process; times in seconds.

    ``connections``: further ones are answered 503; 0: as many as there are file descriptors, less
    some for other uses. ``requests``: of one connection, which is then closed. ``error_body``: the
    JSON of a refusal, by its status and message.
    """

    header_s: float = 10
    body_s: float = 30
    idle_s: float = 75  # clients and proxies close idle connections earlier, so no request is lost
    header_bytes: int = 64 * 1024
    requests: int = 1000
    connections: int = 0
    error_body: Callable[[int, str], bytes] = json_error


def accepting(listening: socket.socket) -> list[socket.socket]:
    """``listening`` and duplicates of it, all of which uvicorn is to accept connections from.

    uvloop accepts one connection of a socket in each iteration of its loop. With hundreds of
    streams an iteration takes tens of milliseconds, and of a thousand clients that come at once the
    last would wait for half a minute before they are read, even if only to be refused.
    """
    return [listening, *(listening.dup() for _ in range(_ACCEPTED_AT_ONCE - 1))]


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which by itself limits neither headers nor the time that requests take.

    It also ignores offers of another protocol (``Upgrade: h2c``), whose body uvicorn would lose.
    """

    def __init__(self, limits: ConnectionLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True  # of a request, or before the next
        self._num_requests = 0
        self._discards = False  # all that still comes
        self._closes_after_body = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        most = self._limits.connections
        if not most:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _KEPT_DESCRIPTORS
        if len(self.connections) > most + _KEPT_DESCRIPTORS // 2:
            transport.abort()
        elif len(self.connections) > most:
            self._refuse(503, "too many connections; try again", b"retry-after: 1\r\n")
        else:
            self._start_timer(self._limits.header_s, self._on_header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        if self.cycle is not None:
            # Otherwise the two refer to each other until a garbage collection.
            self.cycle.transport = self.transport

    def data_received(self, data: bytes) -> None:
        if self._discards:
            return
        self._unset_keepalive_if_required()
        if self._in_headers:
            self._header_bytes += len(data)
            if self._deadline is None:
                self._start_timer(self._limits.header_s, self._on_header_timeout)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            self._ignore_upgrade(data[error.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "this is not HTTP/1.1")
        else:
            if self._in_headers and self._header_bytes > self._limits.header_bytes:
                self._refuse(431, f"headers above {self._limits.header_bytes} bytes")

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_headers = False
        # ``BodyReader`` answers a slow client before this timer closes the connection.
        self._start_timer(self._limits.body_s + _DISCARD_S, self._on_body_timeout)
        super().on_headers_complete()
        self._num_requests += 1
        if self._num_requests >= self._limits.requests:
            self.cycle.keep_alive = False
        # As much of a transport as uvicorn uses to write one response.
        self.cycle.transport = cast(
            asyncio.Transport,
            SimpleNamespace(
                write=self.transport.write,
                is_closing=self.transport.is_closing,
                close=self._close_after_body,
            ),
        )
        scope = cast("dict[str, Any]", self.scope)
        scope[BODY_WRITE] = partial(self._write_body, self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_headers = True
        self._header_bytes = 0
        self._stop_timer()
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()

    def _close_after_body(self) -> None:
        """Close the connection once the request has been read, by then in vain."""
        if self._in_headers:
            self.transport.close()
        self._closes_after_body = True

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request as if it offered no other protocol; ``rest`` follows its headers."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "this is no proxy")
            return
        lines = [method + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:  # without ``Upgrade``, what ``Connection`` says is void
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self._header_bytes = 0
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _refuse(self, status: int, message: str, headers: bytes = b"") -> None:
        cycle = self.cycle
        running = cycle is not None and not cycle.response_complete
        if running and (cycle.response_started or self._in_headers):
            self.transport.close()  # in the middle of the answer to an earlier request
            return
        body = self._limits.error_body(status, message)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        )
        head += f"connection: close\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + headers + b"\r\n" + body)
        self._discards = True
        self._start_timer(_DISCARD_S, self.transport.close)

    def _on_header_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The client reads an earlier response and began to send the next request meanwhile.
            self._start_timer(self._limits.header_s, self._on_header_timeout)
        elif self._header_bytes:
            self._refuse(408, f"the headers did not come within {self._limits.header_s:g} s")
        else:
            self.transport.close()

    def _on_body_timeout(self) -> None:
        if self.pipeline:  # uvicorn does not read this body before it has answered earlier requests
            self._start_timer(self._limits.body_s, self._on_body_timeout)
        else:
            self.transport.close()

    def _start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self._deadline = self.loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _write_body(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """What ``cycle.send`` does with a part of a chunked body, in a third of its time."""
        if self.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


# --- bodies ---------------------------------------------------------------------------------------


class BodyReader:
    """Reads JSON bodies of up to ``max_bytes``, also when unpacked, each in ``seconds``.

    ``max_held_bytes``: of all bodies together that are being received or used.
    """

    def __init__(
        self,
        max_bytes: int = 4 * 2**20,
        max_held_bytes: int = 64 * 2**20,
        seconds: float = ConnectionLimits.body_s,
    ) -> None:
        self.max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._seconds = seconds
        self._held_bytes = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The body, without a byte order mark, while it is used.

        Raises ``Refused``, ``ClientGone``.
        """
        kind = header(scope, b"content-type").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            sent = kind[:80].decode("latin-1") or "of no type"
            problem = f"the body must be JSON, not {sent}; send Content-Type: application/json"
            raise Refused(415, problem)
        packing = header(scope, b"content-encoding").strip().lower()
        if packing not in (b"", b"identity", b"gzip", b"x-gzip"):
            problem = (
                f"Content-Encoding {packing[:40].decode('latin-1')!r} is not supported; send gzip"
            )
            raise Refused(415, problem, {"accept-encoding": "gzip"})
        parts: list[bytes] = []
        try:
            try:
                async with (
                    timeout(self._seconds),
                    aclosing(received(scope, receive, self.max_bytes)) as arriving,
                ):
                    async for part in arriving:
                        self._hold(parts, part)
            except asyncio.TimeoutError:  # TimeoutError itself from Python 3.11 on
                problem = f"the body did not come within {self._seconds:g} s"
                raise Refused(408, problem, {"connection": "close"}) from None
            body = b"".join(parts)
            if packing.endswith(b"gzip"):
                body = self._unpacked(scope, body)
                self._hold(parts, body)
            yield body.removeprefix(b"\xef\xbb\xbf")
        finally:
            self._held_bytes -= sum(map(len, parts))

    def _hold(self, parts: list[bytes], part: bytes) -> None:
        if self._held_bytes + len(part) > self._max_held_bytes:
            raise Refused(503, "too many large requests at once; try again", RETRY)
        self._held_bytes += len(part)
        parts.append(part)

    def _unpacked(self, scope: Scope, packed: bytes) -> bytes:
        unpacking = zlib.decompressobj(wbits=31)
        try:
            body = unpacking.decompress(packed, self.max_bytes + 1)
        except zlib.error as error:
            raise Refused(400, f"the body is not gzip as Content-Encoding says: {error}") from None
        if len(body) > self.max_bytes:
            raise _too_large(scope, self.max_bytes)
        if not unpacking.eof or unpacking.unused_data:
            raise Refused(400, "the body is not one whole gzip stream")
        return body


async def received(scope: Scope, receive: Receive, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The parts of a request's body as they arrive. Raises ``Refused`` and ``ClientGone``."""
    length = header(scope, b"content-length")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(scope, max_bytes)
    size, more = 0, True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientGone
        part = event.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(scope, max_bytes)
        yield part
        more = event.get("more_body", False)


def _too_large(scope: Scope, max_bytes: int) -> Refused:
    # A client that waits for 100 Continue sends nothing more, so its connection can be closed.
    waits = header(scope, b"expect").lower() == b"100-continue"
    problem = f"the body is larger than {max_bytes} bytes, which is the limit"
    return Refused(413, problem, {"connection": "close"} if waits else {})


# --- browsers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrowserGuard:
    """Middleware of a server on this machine alone; ``browser_problem`` has the rule."""

    app: ASGIApp
    hosts: tuple[str, ...]
    origins: tuple[str, ...]
    refuse: Callable[[Scope, Send, Refused], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = None
        if scope["type"] == "http":
            host, origin = (header(scope, name).decode("latin-1") for name in (b"host", b"origin"))
            problem = browser_problem(host, origin, self.hosts, self.origins)
        if problem is None:
            await self.app(scope, receive, send)
        else:
            status, message = problem
            mend = "--allowed-host adds a name" if status == 421 else "--allow-origin adds them"
            await self.refuse(scope, send, Refused(status, f"{message}; {mend}"))
