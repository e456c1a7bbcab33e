"""Runs text requests for one HTTP client: its events are written while it reads, and when it leaves
or fails to read, the engine's work ends or merges.

No thread, no queue of tokens: what a slow reader has not taken waits in the engine's stream, and
comes as one event.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from trtllm_bls.openai.replies import ClientGone
from trtllm_bls.orchestrator import Orchestrator
from trtllm_bls.request_stats import CancelCause
from trtllm_bls.services.batch import run_rows
from trtllm_bls.types import TextChunk, TextRequest


class Outbox:
    """Writes to one client, at once where the connection takes it: with ``write``, where that says
    false with ``send``.

    A write that has to wait goes on in a task of its own; whoever fills the outbox then waits too.
    A task that wrote everything would have to be woken for every token.
    """

    def __init__(
        self,
        send: Callable[[bytes], Coroutine[Any, Any, None]],
        write: Callable[[bytes], bool] = lambda part: False,
    ) -> None:
        self._send = send
        self._write = write
        self._waiting: list[bytes] = []
        self._blocked: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Return once all that was put has been written."""
        while self._blocked is not None:
            await asyncio.wait({self._blocked})

    def put(self, part: bytes) -> None:
        """More to write; never waits."""
        if self._blocked is not None:
            self._waiting.append(part)
            return
        if self._write(part):
            return
        writing = self._send(part)
        try:
            waits_for = writing.send(None)
        except StopIteration:
            return
        self._blocked = asyncio.create_task(self._go_on(writing, waits_for))

    async def close(self) -> None:
        """End a write that waits, if one does."""
        if self._blocked is not None:
            self._blocked.cancel()
            await self.ready()

    async def _go_on(self, writing: Coroutine[Any, Any, None], waits_for: object) -> None:
        try:
            await _rest(writing, waits_for)
            while self._waiting:
                part = b"".join(self._waiting)
                self._waiting.clear()
                await self._send(part)
        finally:
            self._blocked = None


@types.coroutine
def _rest(begun: Coroutine[Any, Any, None], waits_for: object) -> Generator[object, Any, None]:
    """Await what is left of a coroutine that was begun by hand and waits for something."""
    while True:
        try:
            try:
                value = yield waits_for
            except BaseException as error:
                waits_for = begun.throw(error)
            else:
                waits_for = begun.send(value)
        except StopIteration:
            return


@dataclass
class PromptSink:
    """A ``TextSink`` for one prompt of a request: ``on_chunk`` gets its chunks with the number of
    their choice, of which the prompt's first is ``first_choice``."""

    first_choice: int
    on_chunk: Callable[[int, TextChunk], None]
    ready: Callable[[], Coroutine[Any, Any, None]]

    def send(self, chunk: TextChunk) -> None:
        self.on_chunk(self.first_choice + chunk.sequence_index, chunk)


async def run_all(
    orchestrator: Orchestrator,
    requests: Sequence[TextRequest],
    on_chunk: Callable[[int, TextChunk], None],
    outbox: Outbox,
    receive: Receive,
) -> None:
    """Run the prompts of one request side by side until all are answered and written. Where one
    fails, all end; also where the client leaves, which is told by ``receive``.

    Raises ``ClientGone``.
    """

    def run(place: int, request: TextRequest) -> Coroutine[Any, Any, None]:
        sink = PromptSink(place * request.num_return_sequences, on_chunk, outbox.ready)
        return orchestrator.run(request, sink)

    async def run_several() -> None:
        await run_rows([asyncio.create_task(run(*each)) for each in enumerate(requests)])

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        work.cancel(CancelCause.CALLER_LEFT.value)

    work = asyncio.create_task(run(0, requests[0]) if len(requests) == 1 else run_several())
    watcher = asyncio.create_task(watch())
    try:
        await asyncio.wait({work})
        await outbox.ready()
    finally:
        watcher.cancel()
        work.cancel(CancelCause.SHUTDOWN.value)
        await asyncio.wait({watcher, work})
        await outbox.close()
    if work.cancelled():
        raise ClientGone
    work.result()
