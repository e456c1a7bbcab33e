"""Kept ``ModelStreamInfer`` calls: each carries one request at a time, then waits for the next.

Opening a call costs more than a short request does, and speculation makes two requests a round. A
call that only ever carries one request still cancels exactly that one. Calls are never cancelled
while idle, and ended politely (our side closed, then read to the end) once they have carried many
replies, since Triton 24.10 keeps about a kilobyte per reply until a stream ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

MAX_REPLIES = 512  # half a megabyte inside Triton 24.10
MAX_IDLE = 64
_CLOSE_SECONDS = 1.0  # for the server to end what is idle


class Stream:
    """One call; ``replies`` counts what came over it."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.replies = 0

    async def read(self) -> Any:
        """The next reply, or ``None`` at the end of the call. Raises ``AioRpcError``."""
        reply = await self.call.read()
        if reply is grpc.aio.EOF:
            return None
        self.replies += 1
        return reply

    async def end(self) -> None:
        """Close our side and read what is left."""
        try:
            await self.call.done_writing()
            while await self.read() is not None:
                pass
        except (grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
            pass  # it is over either way


class Streams:
    """The kept calls of one channel; ``open_call`` begins a new one."""

    def __init__(self, open_call: Callable[[], Any]) -> None:
        self._open_call = open_call
        self._idle: list[Stream] = []
        self._ending: set[asyncio.Task[None]] = set()

    def take(self) -> Stream:
        """A call that carries nothing."""
        while self._idle:
            stream = self._idle.pop()  # the latest, so that the others may go cold
            if not stream.call.done():  # the server may have ended it meanwhile
                return stream
        return Stream(self._open_call())

    def give_back(self, stream: Stream) -> None:
        """Take back a call whose request has had its final reply."""
        if stream.replies < MAX_REPLIES and len(self._idle) < MAX_IDLE:
            self._idle.append(stream)
            return
        self._end(stream)

    async def close(self) -> None:
        """End what is idle; calls that carry a request are their requests' business."""
        while self._idle:
            self._end(self._idle.pop())
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSE_SECONDS)

    def _end(self, stream: Stream) -> None:
        task = asyncio.create_task(stream.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
