"""TLS in front of Triton's HTTP port, which knows none.

Bytes pass both ways unread. Each connection of a client has one to Triton, made after the
handshake: who is not let in never reaches it, and a server that was started again is found where it
is then. When a client leaves, its connection to Triton ends at once, so that Triton can cancel a
stream.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from trtllm_bls.launcher.logs import LinePace

_OWN_FILES = 256  # of this process, beside two for each connection
_PIECE = 64 * 1024
_FLUSH_S = 5.0  # for a client to take what Triton said last
_PAUSE_S = 0.1  # where there are no file descriptors

_Result = TypeVar("_Result")


class TlsForwarder:
    """Accepts from ``listening``, which it closes, until closed, on a thread.

    ``upstream``: where Triton's HTTP is; ``None`` while it is nowhere, when connections are closed
    at once, as they are beyond so many ``connections``. ``warn`` is told, on that thread, who was
    refused and why, now and then. A handshake may take ``handshake_s`` seconds.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        warn: Callable[[str], object],
        *,
        connections: int = 4096,
        handshake_s: float = 10.0,
    ) -> None:
        self.upstream: tuple[str, int] | None = None
        self.port: int = listening.getsockname()[1]
        listening.setblocking(False)
        self._listening, self._context, self._warn = listening, context, warn
        self._pace = LinePace(burst=5, per_second=0.2)
        self._open: set[asyncio.Task[None]] = set()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = connections if limit < 0 else (limit - _OWN_FILES) // 2
        self._most, self._handshake_s = min(connections, room), handshake_s
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="https", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more; what Triton has said is delivered, for a few seconds at most."""
        with suppress(RuntimeError):  # it was closed before
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._closing.wait()
        accepting.cancel()
        await asyncio.wait({accepting})
        self._listening.close()
        if self._open:
            await asyncio.wait(self._open, timeout=_FLUSH_S)
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                connection, (peer, *_) = await self._loop.sock_accept(self._listening)
            except OSError as error:
                self._refused("somebody", str(error.strerror).lower())
                await asyncio.sleep(_PAUSE_S)
                continue
            if self.upstream is None or len(self._open) >= self._most:
                full = f"{self._most} connections are open"
                self._refused(peer, "the server is not running" if not self.upstream else full)
                connection.close()
                continue
            task = asyncio.create_task(self._forward(connection, peer, self.upstream))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _forward(self, accepted: socket.socket, peer: str, upstream: tuple[str, int]) -> None:
        client = _TlsStream(*await asyncio.open_connection(sock=accepted), self._context)
        try:
            await asyncio.wait_for(client.handshake(), self._handshake_s)
            try:
                reader, writer = await asyncio.open_connection(*upstream)
            except OSError as error:
                self._refused(peer, f"Triton's HTTP port: {error.strerror}")
                return
            await _pass_both_ways(client, reader, writer)
        except asyncio.TimeoutError:
            self._refused(peer, f"no TLS handshake within {self._handshake_s:g} s")
        except ssl.SSLError as error:
            self._refused(peer, (error.reason or str(error)).replace("_", " ").lower())
        except OSError:  # it has left
            pass
        finally:
            await client.close()

    def _refused(self, peer: str, why: str) -> None:
        left_out = self._pace.admit(time.monotonic())
        if left_out is not None:
            more = f" ({left_out} more were refused before)" if left_out else ""
            self._warn(f"HTTPS: {peer} was refused: {why}{more}")


class _TlsStream:
    """The server's side of TLS over one connection. What is wrong with it raises ``OSError``.

    asyncio's own would close without the alert that tells a client why it is refused.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
    ) -> None:
        self._reader, self._writer = reader, writer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)

    async def handshake(self) -> None:
        await self._reading(self._tls.do_handshake)

    async def read(self, size: int) -> bytes:
        """Nothing once the client has said that it leaves."""
        with suppress(ssl.SSLZeroReturnError):
            return await self._reading(partial(self._tls.read, size))
        return b""

    async def write(self, data: bytes) -> None:
        """Return when there is room for more."""
        while data:
            data = data[self._tls.write(data) :]
        self._writer.write(self._out.read())
        await self._writer.drain()

    async def close(self) -> None:
        """Return when the client has what was written, or has had time for it."""
        try:
            with suppress(OSError):  # it answers nothing that would have to be read
                self._tls.unwrap()
            self._writer.write(self._out.read())
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), _FLUSH_S)
        except (OSError, asyncio.TimeoutError):
            pass
        finally:
            self._writer.transport.abort()

    async def _reading(self, step: Callable[[], _Result]) -> _Result:
        """The step's result, once enough has arrived for it."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                pass
            finally:  # also why a client is refused
                self._writer.write(self._out.read())
            data = await self._reader.read(_PIECE)
            if not data:
                raise ConnectionResetError
            self._in.write(data)


async def _pass_both_ways(
    client: _TlsStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Until either side has ended its own; what Triton said until then has been written."""

    async def send(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    ways = {
        asyncio.create_task(_pass_on(client.read, send)),
        asyncio.create_task(_pass_on(reader.read, client.write)),
    }
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.transport.abort()


async def _pass_on(
    read: Callable[[int], Awaitable[bytes]], write: Callable[[bytes], Awaitable[Any]]
) -> None:
    while data := await read(_PIECE):
        await write(data)
