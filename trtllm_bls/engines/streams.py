"""Kept ``ModelStreamInfer`` calls: each carries one request at a time, then waits for the next.

Opening a call costs more than a short request does, and speculation makes two requests a round. A
call that only ever carries one request still cancels exactly that one. Calls are never cancelled
while idle but ended politely, our side closed and theirs read to its end: soon, since Triton does
not shut down while any call is open, and after many replies, since Triton 24.10 keeps about a
kilobyte for each until the call ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

IDLE_SECONDS = 1.0  # rounds of speculation come back within milliseconds
MAX_IDLE = 64
MAX_REPLIES = 512  # half a megabyte inside Triton 24.10
_CLOSE_SECONDS = 1.0  # for the server to end what is idle


class Stream:
    """One call; ``replies`` counts what came over it."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.replies = 0
        self.expiry: asyncio.TimerHandle | None = None  # while it is idle

    async def ask(self, message: Any) -> Any:
        """Send a request; its first reply, or ``None`` if the call ended instead."""
        await self.call.write(message)
        return await self.read()

    async def read(self) -> Any:
        """The next reply, or ``None`` at the end of the call. Raises ``AioRpcError``."""
        reply = await self.call.read()
        if reply is grpc.aio.EOF:
            return None
        self.replies += 1
        return reply


class Streams:
    """The kept calls of one channel; ``open_call`` begins a new one."""

    def __init__(self, open_call: Callable[[], Any]) -> None:
        self._open_call = open_call
        self._idle: list[Stream] = []
        self._ending: set[asyncio.Task[None]] = set()

    def take(self) -> Stream:
        """A call that carries nothing. A kept one may have ended unheard: see ``Carried``."""
        while self._idle:
            stream = self._idle.pop()  # the latest, so that the others may go cold
            assert stream.expiry is not None
            stream.expiry.cancel()
            if not stream.call.done():
                return stream
        return self.open()

    def open(self) -> Stream:
        """A new call."""
        return Stream(self._open_call())

    def give_back(self, stream: Stream) -> None:
        """Take back a call whose request has had its final reply."""
        if stream.replies >= MAX_REPLIES or len(self._idle) >= MAX_IDLE:
            self.end(stream)
            return
        loop = asyncio.get_running_loop()
        stream.expiry = loop.call_later(IDLE_SECONDS, self._expire, stream)
        self._idle.append(stream)

    def end(self, stream: Stream) -> None:
        """Close our side of a call and read what is left, in the background."""
        task = asyncio.create_task(_end(stream))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End what is idle; calls that carry a request are their requests' business."""
        while self._idle:
            self._expire(self._idle[-1])
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSE_SECONDS)

    def _expire(self, stream: Stream) -> None:
        assert stream.expiry is not None
        stream.expiry.cancel()
        self._idle.remove(stream)
        self.end(stream)


class Carried:
    """One request on its way over a call; ``over`` once the call is no longer the request's."""

    def __init__(self, streams: Streams) -> None:
        self.over = False
        self._streams = streams
        self._stream = streams.take()

    async def ask(self, message: Any) -> Any:
        """The first reply, or ``None`` if the call ended instead. Raises ``AioRpcError``.

        A kept call may have ended unheard. Then the request was never taken, and is sent again
        over a new one.
        """
        if self._stream.replies:
            try:
                reply = await self._stream.ask(message)
            except grpc.aio.AioRpcError:
                reply = None
            if reply is not None:
                return reply
            self._stream = self._streams.open()
        return await self._stream.ask(message)

    async def read(self) -> Any:
        """As ``Stream.read``."""
        return await self._stream.read()

    def finish(self) -> None:
        """The final reply has come; the call waits for another request."""
        self.over = True
        self._streams.give_back(self._stream)

    def fail(self) -> None:
        """An error has come, which does not say whether more is to come."""
        self.over = True
        self._streams.end(self._stream)

    def cancel(self) -> None:
        """End the request's work, unless it is over."""
        if not self.over:
            self._stream.call.cancel()


async def _end(stream: Stream) -> None:
    try:
        await stream.call.done_writing()
        while await stream.read() is not None:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
        pass  # it is over either way
