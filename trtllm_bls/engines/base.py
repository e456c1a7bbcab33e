"""The interface of an engine: all that the orchestrator and the Triton models know of one.

The package's docstring lists the engines. Beside the package, ``doubles`` has scripted ones for
tests and benchmarks.

An engine produces chunks at its own pace; a reader takes all that have arrived at once. So a reader
that a long send has held up catches up in one turn.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from trtllm_bls.errors import EngineError, EngineStalled
from trtllm_bls.types import Array, EngineCapacity, EngineChunk, EngineRequest, TopLogProbs
from trtllm_bls.wire.grpc_client import Arrivals, Release, ResponseStream

LOOKS_PER_STALL = 4  # checks for silence within the time of a stall

log = logging.getLogger(__name__)


class Engine(Protocol):
    """Runs requests concurrently; one object serves any number of streams on one event loop."""

    name: str

    async def capacity(self) -> EngineCapacity:
        """Return the engine's limits. Raises ``EngineUnavailable`` if it cannot be reached."""

    def generate(self, request: EngineRequest) -> ChunkStream:
        """Start a request; call it on the event loop, once ``capacity`` has answered.

        A request that does not stream may have one chunk per sequence or several. Raises
        ``InvalidRequest`` for a request that the engine refuses, here or in the stream before its
        first chunk; in the stream, ``EngineError`` at any time when the engine fails.
        """

    async def close(self) -> None:
        """End running requests and free all resources. The engine is not used again."""


class ChunkStream(ABC):
    """The chunks of one request, until every sequence has had its ``final`` one.

    Also an async iterator over single chunks, for readers that are never held up.
    """

    @abstractmethod
    async def wait(self) -> None:
        """Return once ``take`` has chunks, or at the end. Raises the engine's errors.

        A reader that is cancelled here may still ``take`` what has arrived.
        """

    @abstractmethod
    def take(self) -> list[EngineChunk]:
        """Return the chunks since the last call; none after ``wait`` means the end."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the engine's work at once, unless it has ended. May be called twice."""

    async def __aiter__(self) -> AsyncIterator[EngineChunk]:
        await self.wait()
        while chunks := self.take():
            for chunk in chunks:
                yield chunk
            await self.wait()


class QueuedChunks(Arrivals[EngineChunk], ChunkStream):
    """A ``ChunkStream`` that is filled on the event loop while it is read; filling never waits."""


class TaskChunks(QueuedChunks):
    """Chunks of a coroutine of its own: ``work`` is called with the stream, and fills it."""

    def __init__(self, work: Callable[[QueuedChunks], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._task = asyncio.create_task(self._run(work))

    async def _run(self, work: Callable[[QueuedChunks], Coroutine[Any, Any, None]]) -> None:
        try:
            await work(self)
        except Exception as error:
            self.fail(error)
        else:
            self.end()

    async def aclose(self) -> None:
        await super().aclose()
        self._task.cancel()
        await asyncio.wait({self._task})


class CallChunks(ResponseStream[EngineChunk], ChunkStream):
    """The answer of one request that a server sends over a call: one of its ``RunningCalls``."""

    def __init__(self, calls: RunningCalls, release: Release) -> None:
        super().__init__(release)
        self._calls = calls
        self._at_end.append(
            lambda end, error: calls.fail(self, error) if error else calls.running.discard(self)
        )
        calls.add(self)

    def on_messages(self, messages: list[bytes]) -> None:
        """Take messages as ``ResponseStream`` does, and note that the server is not silent."""
        self._calls.silent_looks = 0
        super().on_messages(messages)

    def _unreadable(self, error: Exception) -> EngineError:
        return EngineError(f"{self._calls.name}: its message cannot be read: {error}")


class RunningCalls:
    """The requests that run on one server, which is probed when it is silent.

    Once nothing has arrived for ``stall_seconds`` (0 = never) although requests run, ``probe`` is
    called, at most a quarter of that time later. It returns the server's problem, with which all
    requests then fail, or ``None``. So no answer ends for being long or queued. ``doubt`` is called
    when a request fails by the server's fault. ``name`` is the engine's, for messages.
    """

    def __init__(
        self,
        name: str,
        stall_seconds: float,
        probe: Callable[[], Coroutine[Any, Any, str | None]],
        doubt: Callable[[], None],
    ) -> None:
        self.name = name
        self.doubt = doubt
        self.running: set[CallChunks] = set()
        # Checks since the last arrival, which resets them: that costs less than reading a clock.
        self.silent_looks = 0
        self._stall_seconds = stall_seconds
        self._probe = probe
        self._watching: asyncio.Task[None] | None = None

    def add(self, chunks: CallChunks) -> None:
        """Watch over a request that has begun, until its stream ends."""
        self.running.add(chunks)
        if self._watching is None and self._stall_seconds:
            self.silent_looks = 0
            self._watching = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Watch no longer."""
        if self._watching is not None:
            self._watching.cancel()

    def fail(self, chunks: CallChunks, error: Exception) -> None:
        """Watch no longer over a request whose stream ended with an error."""
        self.running.discard(chunks)
        # An engine's error puts its state in doubt, so that the next request asks for it.
        if isinstance(error, EngineError):
            self.doubt()

    async def _watch(self) -> None:
        while self.running:
            await asyncio.sleep(self._stall_seconds / LOOKS_PER_STALL)
            self.silent_looks += 1
            if self.silent_looks <= LOOKS_PER_STALL:  # the first may come right after an arrival
                continue
            problem = await self._probe()
            if problem is not None and self.silent_looks:  # nothing has arrived meanwhile
                log.error("%s; %d requests fail", problem, len(self.running))
                for chunks in list(self.running):
                    chunks.fail(EngineStalled(problem))
            self.silent_looks = 0
        self._watching = None


class RenewedCapacity:
    """A server's capacity, as ``ask`` returned it last: ``latest``.

    A capacity that is ``seconds`` old is renewed in the background. A request waits for another
    only if the last one is in doubt, as it is at first.
    """

    def __init__(
        self, ask: Callable[[], Coroutine[Any, Any, EngineCapacity]], seconds: float
    ) -> None:
        self.latest: EngineCapacity | None = None
        self._ask = ask
        self._seconds = seconds
        self._old_at = 0.0
        self._in_doubt = True
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> EngineCapacity:
        """Return the capacity. Raises the errors of ``ask``."""
        if self._in_doubt or asyncio.get_running_loop().time() > self._old_at:
            if self._asking is None:  # requests that come at once ask once
                self._asking = asyncio.create_task(self._renew())
                # If nobody waits for the task, the doubt tells of its failure.
                self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
            if self._in_doubt:
                await asyncio.shield(self._asking)
        assert self.latest is not None
        return self.latest

    def doubt(self) -> None:
        """Have the next request ask.

        A request that has asked already goes on with the capacity that it has: another request's
        failure must not be its own.
        """
        self._in_doubt = True

    async def close(self) -> None:
        """Wait until nothing is being asked."""
        if self._asking is not None:
            await asyncio.wait({self._asking})

    async def _renew(self) -> None:
        # All is set before the task has ended: a request in that moment needs no callbacks.
        try:
            self.latest = await self._ask()
            self._in_doubt = False
            self._old_at = asyncio.get_running_loop().time() + self._seconds
        except BaseException:
            self._in_doubt = True
            raise
        finally:
            self._asking = None


def join_chunks(chunks: Sequence[EngineChunk]) -> EngineChunk:
    """Join one sequence's chunks to a single one: all tokens, scores and logits in order.

    The ending and the figures are the last chunk's. Raises ``EngineError`` without a chunk.
    """
    if not chunks:
        raise EngineError("the engine ended without a chunk")
    if len(chunks) == 1:
        return chunks[0]
    token_ids: list[int] = []
    log_probs: list[float] = []
    top_log_probs: list[TopLogProbs] = []
    logits: list[Array] = []
    joined = replace(chunks[-1], cached_tokens=chunks[0].cached_tokens)
    joined.context_logits = None
    for chunk in chunks:
        token_ids += chunk.token_ids
        if chunk.log_probs is not None:
            log_probs += chunk.log_probs
            joined.log_probs = ()
        if chunk.top_log_probs is not None:
            top_log_probs += chunk.top_log_probs
            joined.top_log_probs = ()
        if chunk.generation_logits is not None:
            logits.append(chunk.generation_logits)
        if chunk.cum_log_prob is not None:
            joined.cum_log_prob = chunk.cum_log_prob
        if joined.context_logits is None:
            joined.context_logits = chunk.context_logits
    joined.token_ids = tuple(token_ids)
    if joined.log_probs is not None:
        joined.log_probs = tuple(log_probs)
    if joined.top_log_probs is not None:
        joined.top_log_probs = tuple(top_log_probs)
    joined.generation_logits = None
    if logits:
        joined.generation_logits = np.concatenate(logits)
    return joined


def wire_id(request: EngineRequest) -> str:
    """Return a request's id for the engine: a number, a slash, and its own id for the logs.

    TensorRT-LLM 0.9 takes the number at an id's beginning for the whole id, and ids must differ
    among all processes that share the engine, also among those forked from one.
    """
    return f"{secrets.randbits(63)}/{request.request_id}"
