"""What a caller holds of a running request: its chunks, read once, and the means to cancel it.

Joins the engine's thread to a reader on another thread or on an event loop; knows neither.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from typing import TypeAlias

from trtllm_bls.errors import EngineError
from trtllm_bls.messages import EngineChunk

Event: TypeAlias = EngineChunk | EngineError


class Submission:
    """The chunks of one request; iterate over them once, with ``for`` or ``async for``.

    Iterating waits for the next chunk and raises ``EngineError`` where the engine failed.
    ``loop``: the event loop of an asynchronous reader.
    """

    def __init__(self, sequences: int, loop: asyncio.AbstractEventLoop | None) -> None:
        self.cancelled = False
        self.loop = loop
        self._unfinished = sequences
        self._here: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._there: asyncio.Queue[Event] = asyncio.Queue()

    def cancel(self) -> None:
        """End the request within a step; its last chunks say so. Harmless when it has ended."""
        self.cancelled = True  # the engine looks before every step

    def deliver(self, event: Event) -> None:
        """Called by the engine, on the reader's loop if there is one."""
        (self._here if self.loop is None else self._there).put_nowait(event)

    def __iter__(self) -> Iterator[EngineChunk]:
        while self._unfinished:
            yield self._opened(self._here.get())

    async def __aiter__(self) -> AsyncIterator[EngineChunk]:
        while self._unfinished:
            yield self._opened(await self._there.get())

    def _opened(self, event: Event) -> EngineChunk:
        if isinstance(event, EngineError):
            self._unfinished = 0
            raise event
        self._unfinished -= event.final
        return event
