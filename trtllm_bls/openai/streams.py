"""Runs text requests for one HTTP client: its events are written while it reads, and when it leaves
or fails to read, the engine's work ends or merges.

No thread, no queue of tokens: what a slow reader has not taken waits in the engine's stream, and
comes as one event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from trtllm_bls.messages import FinishReason, TextChunk, TextRequest
from trtllm_bls.orchestrator import Orchestrator
from trtllm_bls.request_stats import CancelCause
from trtllm_bls.services.batch import run_rows

_UNFINISHED = (FinishReason.CANCELLED, FinishReason.ERROR)


def is_end(chunk: TextChunk) -> bool:
    """Whether its sequence has ended well; after any other end an error follows."""
    return chunk.ending is not None and chunk.ending.finish_reason not in _UNFINISHED


class Outbox:
    """What is to be written to one client; whoever fills it waits until the last is on its way."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._writing = False
        self._filled: asyncio.Future[None] | None = None
        self._written: asyncio.Future[None] | None = None
        self._closed = False

    async def ready(self) -> None:
        """Return once all that was put has been written."""
        while self._writing or self._parts:
            if self._written is None:
                self._written = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._written)

    def put(self, part: bytes) -> None:
        """More to write; never waits."""
        self._parts.append(part)
        self._wake()

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._wake()

    async def take(self) -> bytes:
        """All that waits, once something does; nothing at the end. What was taken before is now
        written."""
        self._writing = False
        if not self._parts:
            if self._written is not None:
                self._written.set_result(None)
                self._written = None
            if self._closed:
                return b""
            self._filled = asyncio.get_running_loop().create_future()
            await self._filled
            self._filled = None
        taken = b"".join(self._parts)
        self._parts.clear()
        self._writing = bool(taken)
        return taken

    def _wake(self) -> None:
        if self._filled is not None and not self._filled.done():
            self._filled.set_result(None)


@dataclass
class PromptSink:
    """A ``TextSink`` for one prompt of a request: ``on_chunk`` gets its chunks with the number of
    their choice, of which the prompt's first is ``first_choice``."""

    first_choice: int
    on_chunk: Callable[[int, TextChunk], None]
    ready: Callable[[], Coroutine[Any, Any, None]]

    def send(self, chunk: TextChunk) -> None:
        self.on_chunk(self.first_choice + chunk.sequence_index, chunk)


async def _always() -> None:
    pass


async def run_all(
    orchestrator: Orchestrator,
    requests: Sequence[TextRequest],
    on_chunk: Callable[[int, TextChunk], None],
    ready: Callable[[], Coroutine[Any, Any, None]] = _always,
) -> None:
    """Run the prompts of one request side by side. Where one fails, all end."""
    sinks = [
        PromptSink(place * request.num_return_sequences, on_chunk, ready)
        for place, request in enumerate(requests)
    ]
    if len(requests) == 1:
        await orchestrator.run(requests[0], sinks[0])
        return
    runs = [orchestrator.run(*pair) for pair in zip(requests, sinks, strict=True)]
    await run_rows([asyncio.create_task(run) for run in runs])


@asynccontextmanager
async def while_connected(receive: Receive, work: asyncio.Task[None]) -> AsyncIterator[None]:
    """Cancel ``work`` when the client leaves, or the body ends; then it has ended too."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        work.cancel(CancelCause.CALLER_LEFT.value)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        work.cancel(CancelCause.SHUTDOWN.value)
        await asyncio.wait({watcher, work})
