"""How answers end before the engine's own end: time is up, the caller leaves, the engine fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any, cast

import pytest

from doubles.generated import GeneratedChunks
from doubles.scripted import Fault, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.scripted_text import (
    Collected,
    asking,
    ending,
    orchestrator,
    read,
    saying,
    text_of,
    tokenizer,
)
from tests.helpers.virtual_time import Clock, run_by_the_clock, settle
from tests.helpers.waiting import run_async
from trtllm_bls.engines.base import ChunkStream
from trtllm_bls.errors import EngineUnavailable
from trtllm_bls.orchestrator.orchestrator import Defaults
from trtllm_bls.pipeline.testing import SECONDS
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.types import EngineCapacity, EngineChunk, EngineRequest, FinishReason


def test_a_stream_that_fails_has_its_ending_before_the_error() -> None:
    """With the counts of what was said; nothing is held back any more."""
    engine = saying("one two three")
    engine.fault = Fault(error=EngineUnavailable("gone"), after_tokens=2)
    for request, told in (
        (asking(stream=True, stop_words=("three",)), [(FinishReason.ERROR, None, 2)]),
        (asking(), []),  # one answer, one response: the error is it
    ):
        sink = Collected()
        with pytest.raises(EngineUnavailable):
            run_async(orchestrator(engine).run(request, sink))
        assert [ending([chunk]) for chunk in sink.chunks if chunk.ending] == told


class LostAtItsEnd:
    """An engine that is lost after its last token, before it says that it has ended."""

    name = "lost"

    def __init__(self, text: str) -> None:
        self.ids = tokenizer().encode_word(text)

    async def capacity(self) -> EngineCapacity:
        return EngineCapacity()

    def generate(self, request: EngineRequest) -> ChunkStream:
        return GeneratedChunks(self._chunks())

    async def _chunks(self) -> AsyncGenerator[EngineChunk, None]:
        for token in self.ids:
            yield EngineChunk(token_ids=(token,))
        raise EngineUnavailable("gone")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_ended_by_count_is_whole_though_the_engine_is_lost(stream: bool) -> None:
    """It had only to say that it has ended, too; the request counts as answered."""
    engine, sink = LostAtItsEnd("one two three"), Collected()
    request = asking(stream=stream, max_tokens=len(engine.ids))
    run_async(orchestrator(engine).run(request, sink))
    assert text_of(sink.chunks) == "one two three"
    assert ending(sink.chunks) == (FinishReason.LENGTH, None, len(engine.ids))


async def test_a_stream_that_is_cancelled_has_its_ending_too() -> None:
    """After the engine's work has ended; then the cancellation goes on."""
    engine = saying("one two three")
    engine.fault = Fault(after_tokens=2)
    live: list[int] = []
    sink = Collected(lambda chunk: chunk.ending and live.append(engine.live))

    task = asyncio.create_task(orchestrator(engine).run(asking(stream=True), sink))
    while len(sink.chunks) < 2:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ending(sink.chunks) == (FinishReason.CANCELLED, None, 2)
    assert live == [0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("said", [0, 2])
def test_an_answer_ends_with_what_there_is_when_its_time_is_up(stream: bool, said: int) -> None:
    """Also before the first token; text held back for a stop string is text after all."""
    engine = saying("one two three")
    limited = run_async(read(saying("one two three"), asking(max_tokens=max(1, said))))
    whole = text_of(limited) if said else ""
    engine.fault = Fault(after_tokens=said)
    request = asking(stream=stream, timeout_s=5, stop_words=(whole + "!",))

    async def scenario(clock: Clock) -> None:
        reading = asyncio.create_task(read(engine, request))
        while engine.requests == []:
            await settle()
        for now in (4.9, 5.1):
            for _ in range(20):
                await settle()
            assert not reading.done()
            clock.now = now
        chunks = await reading
        assert text_of(chunks) == whole
        assert ending(chunks) == (FinishReason.TIMEOUT, None, said)
        assert engine.live == 0 and len(engine.cancelled) == 1

    run_by_the_clock(scenario)


def test_a_deployments_time_limit_is_for_requests_that_name_none() -> None:
    """A request's own goes before it. An answer in one piece has no text by then."""

    async def scenario(clock: Clock) -> None:
        engine = saying("one two three")
        engine.fault = Fault(after_tokens=2)
        defaults = Defaults(timeout_s=1)
        own = asyncio.create_task(read(engine, asking(timeout_s=9), defaults=defaults))
        theirs = asyncio.create_task(read(engine, asking(stream=True), defaults=defaults))
        whole = asyncio.create_task(read(engine, asking(), defaults=defaults))
        while len(engine.requests) < 3:
            await settle()
        clock.now = 2
        assert ending(await theirs) == (FinishReason.TIMEOUT, None, 2)
        assert ending(await whole) == (FinishReason.TIMEOUT, None, 0)
        assert not own.done()
        clock.now = 10
        assert ending(await own)[0] is FinishReason.TIMEOUT

    run_by_the_clock(scenario)


def test_waiting_for_the_engine_counts() -> None:
    """The engine is not asked any more once the time is up; each sequence has its ending."""
    engine = saying("one two three")

    engine.fault = Fault(capacity=True)

    async def scenario(clock: Clock) -> None:
        request = asking(timeout_s=5, num_return_sequences=2)
        reading = asyncio.create_task(read(engine, request))
        await settle()
        clock.now = 5.1
        chunks = await reading
        assert [(c.sequence_index, c.text, ending([c])) for c in chunks] == [
            (index, "", (FinishReason.TIMEOUT, None, 0)) for index in (0, 1)
        ]
        assert engine.requests == []

    run_by_the_clock(scenario)


class Held:
    """A tokenizer that makes no prompt before it is let."""

    def __init__(self) -> None:
        self.begun, self.let = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(), name)

    def encode(self, *arguments: Any, **more: Any) -> Any:
        self.begun.set()
        assert self.let.wait(SECONDS)
        return tokenizer().encode(*arguments, **more)


def test_tokenising_a_long_prompt_counts() -> None:
    """The request ends although its thread still works; the engine never hears of it."""
    engine, held = saying("one two three"), Held()
    sink, tokenising = Collected(), cast(Tokenizer, held)

    async def scenario(clock: Clock) -> None:
        request = asking("a long story " * 1000, timeout_s=5)
        running = orchestrator(engine, other=tokenising).run(request, sink)
        reading = asyncio.create_task(running)
        while not held.begun.is_set():
            await settle()
        clock.now = 4.9
        await settle()
        assert not reading.done()
        clock.now = 5.1
        await reading
        held.let.set()
        await asyncio.get_running_loop().shutdown_default_executor()

    run_by_the_clock(scenario)
    assert [(c.text, ending([c])) for c in sink.chunks] == [("", (FinishReason.TIMEOUT, None, 0))]
    assert engine.requests == []


def test_waiting_for_a_slow_reader_counts() -> None:
    """The engine's work ends in time; what has arrived by then is not lost."""
    engine = saying("one two three")
    engine.fault = Fault(after_tokens=3)

    class Full(Collected):
        async def ready(self) -> None:
            await asyncio.get_running_loop().create_future()

    async def scenario(clock: Clock) -> None:
        sink = Full()
        request = asking(stream=True, timeout_s=5)
        reading = asyncio.create_task(orchestrator(engine).run(request, sink))
        while engine.requests == []:
            await settle()
        clock.now = 4.9
        await settle()
        assert (sink.chunks, reading.done(), engine.live) == ([], False, 1)
        clock.now = 5.1
        await reading
        assert ending(sink.chunks)[0] is FinishReason.TIMEOUT
        assert (said := text_of(sink.chunks)) and "one two three".startswith(said)
        assert (engine.live, len(engine.cancelled)) == (0, 1)

    run_by_the_clock(scenario)


@pytest.mark.parametrize("timeout_s", [None, 1000.0])
def test_a_timeout_that_is_not_the_requests_own_is_an_error(timeout_s: float | None) -> None:
    """A socket's, say."""
    engine = saying("one two three")
    engine.fault = Fault(error=TimeoutError("the socket's"), after_tokens=2)
    with pytest.raises(TimeoutError, match="the socket's"):
        run_async(read(engine, asking(timeout_s=timeout_s)))


def test_a_timer_that_fires_early_ends_by_the_timeout() -> None:
    """uvloop rounds delays to milliseconds, so the clock may still be before the deadline."""

    class Early(asyncio.SelectorEventLoop):
        def call_at(self, when: float, *args: Any, **more: Any) -> asyncio.TimerHandle:
            return super().call_at(when - 0.01, *args, **more)

    with closing(Early()) as loop:
        engine = saying("one two three" * 50, step_seconds=0.05)
        limited = asyncio.wait_for(read(engine, asking(timeout_s=0.1)), 240)
        chunks = loop.run_until_complete(limited)
    assert ending(chunks)[0] is FinishReason.TIMEOUT


def test_an_engine_that_fails_when_the_time_is_up_has_failed() -> None:
    """What went wrong is told, also where the event loop was late."""

    async def scenario(clock: Clock) -> None:
        class Late(ScriptedEngine):
            async def capacity(self) -> EngineCapacity:
                clock.now = 6
                raise EngineUnavailable("gone")

        with pytest.raises(EngineUnavailable):
            await read(Late(hashed(1)), asking(timeout_s=5))

    run_by_the_clock(scenario)
