"""The BLS engine against a child model behind fake utilities, with Triton 24.10's rules in mind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.fake_python_backend import (
    SECONDS,
    Child,
    FakeTriton,
    InferenceResponse,
    Tensor,
    TritonError,
)
from tests.helpers.virtual_time import Clock, run_by_the_clock, settle
from tests.helpers.waiting import eventually
from trtllm_bls.engines.triton.bls import BlsEngine
from trtllm_bls.errors import EngineError, EngineStalled, InvalidRequest
from trtllm_bls.types import EngineChunk, EngineRequest, Wants
from trtllm_bls.wire.engine_client import DeployedModel

ASK = EngineRequest(request_id="mine", input_ids=(7, 8), max_tokens=9)


def say(*tokens: int, **more: int) -> InferenceResponse:
    arrays = {
        "output_ids": np.array([[tokens]], np.int32),
        "sequence_length": np.array([[len(tokens)]], np.int32),
        **{name: np.array([[value]], np.int32) for name, value in more.items()},
    }
    return InferenceResponse([Tensor(name, array) for name, array in arrays.items()])


def fail(message: str) -> InferenceResponse:
    return InferenceResponse([], error=TritonError(message))


EMPTY = InferenceResponse([])


def engine(child: Child, stall: float = 0, model: DeployedModel | None = None) -> BlsEngine:
    made = BlsEngine(FakeTriton(child), "tensorrt_llm", None, 50, threads=8, stall_seconds=stall)
    made._model = model or DeployedModel()
    return made


async def read(engine: BlsEngine, request: EngineRequest = ASK) -> list[EngineChunk]:
    async with aclosing(engine.generate(request)) as chunks:
        return [chunk async for chunk in chunks]


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, SECONDS))


async def drained(child: Child, count: int = 1) -> None:
    """Until so many more requests have been read to their end."""
    for _ in range(count):
        assert await asyncio.to_thread(child.drained.acquire, timeout=SECONDS)


async def ended(made: BlsEngine) -> None:
    """Until every thread of the engine has."""
    for pool in (made._readers, made._stoppers):
        await asyncio.to_thread(pool.shutdown)


def told(*steps: Any, request: EngineRequest = ASK, **more: Any) -> tuple[list[EngineChunk], Child]:
    """What the engine makes of a child that says ``steps``."""
    child = Child(*steps)

    async def scenario() -> list[EngineChunk]:
        made = engine(child, **more)
        chunks = await read(made, request)
        await made.close()
        return chunks

    return run(scenario()), child


def test_the_trace_of_a_caller_goes_along() -> None:
    """As a request parameter; else there are no parameters, which old releases do not know."""
    _, child = told(say(1), EMPTY, request=replace(ASK, traceparent="00-4bf9-00f0-01"))
    assert child.asked[0].parameters == {"traceparent": "00-4bf9-00f0-01"}
    _, child = told(say(1), EMPTY)
    assert child.asked[0].parameters == {}


# --- chunks ---------------------------------------------------------------------------------


def test_a_stream_is_told_in_order_and_ends_once() -> None:
    """The API does not pass Triton's final flag on, so an empty chunk marks the end."""
    chunks, child = told(say(3), say(4, 5), EMPTY)
    assert [(c.token_ids, c.final) for c in chunks] == [((3,), False), ((4, 5), False), ((), True)]
    (asked,) = child.asked
    assert (asked.name, asked.model_name) == ("mine", "tensorrt_llm")
    assert asked.inputs["input_ids"].tolist() == [[7, 8]]


def test_only_outputs_that_are_read_are_asked_for() -> None:
    """The stub of Triton 24.10 crashes over others."""
    plain = ["output_ids", "sequence_length", "cached_tokens"]
    assert told(say(3))[1].asked[0].outputs == plain
    request = replace(ASK, wants=Wants(perf_metrics=True), num_return_sequences=2)
    outputs = told(say(3, total_draft_tokens=1), request=request)[1].asked[0].outputs
    assert {"sequence_index", "total_draft_tokens"} < set(outputs)
    assert not {"num_input_tokens", "context_logits"} & set(outputs)


def test_a_whole_answer_is_final_by_itself() -> None:
    """One response, nothing after it; an empty final response changes nothing."""
    for steps in ((say(3, 4),), (say(3, 4), EMPTY)):
        (chunk,) = told(*steps, request=replace(ASK, streaming=False))[0]
        assert (chunk.token_ids, chunk.final) == ((3, 4), True)


def test_every_sequence_of_a_whole_answer_is_final() -> None:
    """One response each, told apart by index."""
    request = replace(ASK, streaming=False, num_return_sequences=2)
    chunks = told(say(3, sequence_index=1), say(4, sequence_index=0), request=request)[0]
    assert [(c.sequence_index, c.token_ids, c.final) for c in chunks] == [
        (1, (3,), True),
        (0, (4,), True),
    ]


def test_metrics_come_with_the_end() -> None:
    """Although nobody knew that the response which brought them was the last."""
    request = replace(ASK, wants=Wants(perf_metrics=True))
    chunks = told(say(3), say(4, total_draft_tokens=6), request=request)[0]
    assert chunks[-1].final and chunks[-1].metrics is not None
    assert chunks[-1].metrics.total_draft_tokens == 6


def test_the_deployed_model_decides_what_is_sent() -> None:
    """And what its parameters tell of limits is the engine's answer."""
    inputs = {name: kind for name, kind in DeployedModel().inputs.items() if name != "pad_id"}
    model = DeployedModel(inputs, parameters={"max_draft_len": "4"})
    with pytest.raises(InvalidRequest, match="pad_id"):
        told(say(3), request=replace(ASK, pad_id=1), model=model)
    assert run(engine(Child(), model=model).capacity()).max_draft_tokens == 4


async def test_responses_that_arrive_while_the_reader_is_busy_are_all_kept() -> None:
    """A stream is taken in turns: wait, then all that is there, until a turn gives nothing."""
    child = Child(say(3), say(4, 5), say(6))
    stream = engine(child).generate(ASK)
    await stream.wait()
    await drained(child)
    tokens: list[int] = []
    while chunks := stream.take():
        tokens += [token for chunk in chunks for token in chunk.token_ids]
        await stream.wait()
    await stream.aclose()
    await stream.aclose()
    assert tokens == [3, 4, 5, 6]
    assert child.stops == []


async def test_a_child_that_has_ended_is_not_stopped() -> None:
    """A stop for an id that is gone costs a request, and might meet another's."""
    child = Child(say(3), say(4))
    made = engine(child)
    for _ in range(60):
        await read(made)
    await ended(made)
    assert (len(child.asked), child.stops) == (60, [])


async def test_streams_do_not_wait_for_each_other() -> None:
    """One that is silent has a thread of its own."""
    child = Child(say(3), silent=[Child.STOPPED, say(9)])
    made = engine(child)
    waiting = asyncio.create_task(read(made, replace(ASK, request_id="silent")))
    await eventually(lambda: child.asked)
    assert [c.token_ids for c in await read(made)] == [(3,), ()]
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    await ended(made)


# --- failing --------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [(), (say(3),)])
async def test_an_error_is_the_engines(said: Any) -> None:
    """As the first response or in the middle; its first line is what counts."""
    child = Child(*said, fail("out of blocks\n\nAt:\n  /models/x/1/model.py(48): execute"))
    received: list[EngineChunk] = []
    with pytest.raises(EngineError) as caught:
        async for chunk in engine(child).generate(ASK):
            received.append(chunk)
    assert type(caught.value) is EngineError and str(caught.value) == "out of blocks"
    assert len(received) == len(said) and child.stops == []


def test_a_refusal_of_our_own_engine_comes_back_as_what_it_was() -> None:
    """The field is named again."""
    with pytest.raises(InvalidRequest) as caught:
        told(fail("INVALID_ARG: top_p: 2 is too much"))
    assert caught.value.field == "top_p"


def test_what_triton_itself_raises_is_an_engine_error() -> None:
    """From the call or from the iterator, after tokens or before."""
    for steps in ((RuntimeError("boost lock"),), (say(3), RuntimeError("boost lock"))):
        with pytest.raises(EngineError, match="tensorrt_llm: boost lock"):
            told(*steps)


def test_no_response_at_all_is_an_error() -> None:
    """An empty answer would look like a whole one."""
    with pytest.raises(EngineError, match="without any response"):
        told()


async def test_silence_is_a_stall_and_the_child_is_stopped() -> None:
    """Triton 24.10 loses a mid-stream error; the timer is what notices."""
    child = Child(say(3), Child.STOPPED, say(4))
    made = engine(child, stall=0.03)
    with pytest.raises(EngineStalled, match=r"nothing for 0\.03 s"):
        await read(made)
    await drained(child)
    assert [stop.name for stop in child.stops] == ["mine"]


def test_a_stream_that_speaks_in_time_never_stalls() -> None:
    """The limit counts from the last word, not from the first."""
    child = Child(say(3), Child.SILENCE, say(4), Child.SILENCE, say(5))

    async def scenario(clock: Clock) -> None:
        chunks = aiter(engine(child, stall=10).generate(ASK))
        for now, token in ((9, 3), (18, 4), (27, 5)):
            assert (await anext(chunks)).token_ids == (token,)
            clock.now = now
            await settle()
            child.released.release()
        assert [chunk.final async for chunk in chunks] == [True]

    run_by_the_clock(scenario)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_request_that_waits_for_its_first_response_never_stalls(streaming: bool) -> None:
    """It may be queued, or be answered whole after a long time; both are silent."""
    child = Child(Child.SILENCE, say(3), Child.SILENCE)

    async def scenario(clock: Clock) -> None:
        request = replace(ASK, streaming=streaming)
        reading = asyncio.create_task(read(engine(child, stall=10), request))
        for now in (9, 19, 10_000):
            await settle()
            clock.now = now
            await settle()
            assert not reading.done()
        child.released.release(2)
        assert next(iter(await reading)).token_ids == (3,)

    run_by_the_clock(scenario)
    assert child.stops == []


# --- leaving --------------------------------------------------------------------------------


async def test_leaving_early_stops_the_child_and_reads_it_to_its_end() -> None:
    """By a stop request of its id, which needs no outputs; an iterator left behind would leak."""
    child = Child(say(3), Child.STOPPED, say(4), say(5))
    made = engine(child)
    async with aclosing(made.generate(ASK)) as stream:
        assert (await anext(aiter(stream))).token_ids == (3,)
    await drained(child)
    assert [stop.name for stop in child.stops] == ["mine"]
    assert child.stops[0].inputs["stop"].all() and child.stops[0].outputs == []
    assert {"input_ids", "input_lengths", "request_output_len"} <= child.stops[0].inputs.keys()


async def test_a_reader_cancelled_while_waiting_stops_the_child() -> None:
    """Also before the first response."""
    child = Child(Child.STOPPED, say(4))
    reader = asyncio.create_task(read(engine(child)))
    await eventually(lambda: child.asked)
    reader.cancel()
    await asyncio.wait({reader})
    assert reader.cancelled()
    await drained(child)
    assert [stop.name for stop in child.stops] == ["mine"]


async def test_a_child_deaf_to_stops_is_stopped_again_and_then_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first stop may have come before the child knew its request; no thread waits for ever."""
    monkeypatch.setattr("trtllm_bls.engines.triton.bls._STOP_WAIT_SECONDS", 0.001)
    child = Child(say(3), Child.SILENCE)
    made = engine(child)
    async with aclosing(made.generate(ASK)) as stream:
        await stream.wait()
    await asyncio.to_thread(made._stoppers.shutdown)
    child.released.release()
    await ended(made)
    assert [stop.name for stop in child.stops] == ["mine"] * 5
    assert "mine: tensorrt_llm did not end after 5 stops" in caplog.text


@pytest.mark.parametrize("steps", [(say(3),), (say(3), fail("no")), (say(3), RuntimeError("no"))])
async def test_an_iterator_outlives_its_end(steps: Any) -> None:
    """Dropped at once, it would crash the stub of Triton 24.10; so after a failure, too."""
    child = Child(*steps)
    made = engine(child)
    await asyncio.gather(read(made), return_exceptions=True)
    await ended(made)
    gc.collect()
    assert [iterator() is not None for iterator in child.iterators] == [True]
    del made


async def test_many_streams_some_of_them_left() -> None:
    """Every child is read to its end, and each stop names the child that was left."""
    child = Child(say(3), say(4), Child.STOPPED, say(5))

    async def one_request(made: BlsEngine, number: int) -> None:
        async with aclosing(made.generate(replace(ASK, request_id=f"r{number}"))) as stream:
            chunks = aiter(stream)
            for _ in range(number % 3):
                await anext(chunks)

    made = engine(child)
    await asyncio.gather(*(one_request(made, number) for number in range(40)))
    await drained(child, len(child.asked))
    await ended(made)
    assert {stop.name for stop in child.stops} == {asked.name for asked in child.asked}
